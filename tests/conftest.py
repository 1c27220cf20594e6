"""Settings of every test run."""

from importlib.util import find_spec

from hypothesis import settings

# A busy machine is no failure: examples have no deadline.
settings.register_profile("default", deadline=None)
settings.load_profile("default")

# These run in an environment of their own (make test-sglang), the only one that has SGLang.
collect_ignore = [] if find_spec("sglang") else ["sglang"]
