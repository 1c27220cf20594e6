"""Decoder passes on CPUs, and what is done node by node, compiled by numba when it is first needed
and then kept on disk."""

import hashlib
from pathlib import Path

import numba

_here = Path(__file__).parent
SOURCES = hashlib.sha256(b"".join(f.read_bytes() for f in sorted(_here.glob("*.py")))).hexdigest()
"""Stands for the kernels as they are now."""

# numba keeps what it compiled for as long as the file of the outermost function stays the same.
# What that calls lies in the other files here, so they all name the place.
if not numba.config.CACHE_DIR:
    numba.config.CACHE_DIR = str(_here / "__pycache__" / SOURCES[:16])
