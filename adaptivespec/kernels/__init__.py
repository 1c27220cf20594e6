"""Decoder passes on CPUs, compiled by numba when they are first needed and then kept on disk."""
