"""Decoder passes on CPUs, compiled by numba when they are first needed and then kept on disk."""

import hashlib
from pathlib import Path

import numba

# numba keeps what it compiled for as long as the file of the outermost function stays the same.
# What that calls lies in the other files here, so they all name the place.
if not numba.config.CACHE_DIR:
    _here = Path(__file__).parent
    _sources = b"".join(file.read_bytes() for file in sorted(_here.glob("*.py")))
    numba.config.CACHE_DIR = str(_here / "__pycache__" / hashlib.sha256(_sources).hexdigest()[:16])
