"""Decoders, the EAGLE-3 head, and the loading of weights and tokenizers."""
