"""What needs more than the development environment is skipped where it is not there."""

import pytest

from adaptivespec.bench import sandbox
from adaptivespec.errors import ConfigError


@pytest.fixture(scope="session")
def _sandbox() -> None:
    try:
        sandbox.check()
    except ConfigError as error:
        pytest.skip(str(error))
