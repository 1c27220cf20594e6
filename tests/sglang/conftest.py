"""Fixtures of the tests that run the real SGLang. See `make test-sglang`."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.engine import running_engine  # isort: skip  before transformers
from tests.smollm2 import save_shallow_lm, tokenizer

LAYERS = 30

# pytest-timeout's exception would be lost in the engine's event loop. Its thread ends the whole
# run, and shows where everything was.
TIMEOUT = pytest.mark.timeout(600, method="thread")

StartEngine = Callable[..., AbstractContextManager[Any]]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(TIMEOUT)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The packaged model as a Hugging Face folder: transformers' own weights of it, in fp32."""
    folder = save_shallow_lm(tmp_path_factory.mktemp("smollm2"), layers=LAYERS)
    tokenizer().save(folder)
    yield folder
    shutil.rmtree(folder)  # half a gigabyte, and pytest keeps the folders of three runs


@pytest.fixture
def engine(smollm2: Path) -> StartEngine:
    """`with engine(**options) as running:` starts an `sglang.Engine` on the packaged model."""
    return partial(running_engine, smollm2)
