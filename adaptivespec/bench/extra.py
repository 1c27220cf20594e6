"""The packages of the extra `bench`, which nothing but what needs one of them imports."""

import importlib
from typing import Any

from adaptivespec.errors import ConfigError


def load(module: str, purpose: str) -> Any:
    """The module. Raises ConfigError naming the purpose where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"{purpose}: {error}; pip install 'adaptivespec[bench]' brings what it needs"
        ) from error
