"""AdaptiveSpec: speculative decoding whose acceptance rule and tree follow the text."""

__version__ = "0.1.0"
