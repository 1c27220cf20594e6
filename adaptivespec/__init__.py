"""AdaptiveSpec: speculative decoding whose acceptance rule and tree follow the text."""

import os

__version__ = "0.1.0"

# libgomp reads this when torch loads it. Its threads otherwise spin at barriers, and two fall
# from tens of tokens per second to one as soon as anything else runs on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
