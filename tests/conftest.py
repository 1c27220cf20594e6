"""Settings of every test run."""

from hypothesis import settings

# A busy machine is no failure: examples have no deadline.
settings.register_profile("default", deadline=None)
settings.load_profile("default")
