"""From settings to a drafter."""

from pathlib import Path

import pytest

from adaptivespec.config import load_settings
from adaptivespec.drafters.base import Extension
from adaptivespec.drafters.build import make_drafter
from adaptivespec.drafters.eagle3 import Eagle3Drafter
from adaptivespec.drafters.lm import LMDrafter
from adaptivespec.drafters.lookup import LookupDrafter
from adaptivespec.errors import ConfigError
from adaptivespec.shape import Shape
from tests.adaptivespec.drafters.heads import tiny_head
from tests.factories import write_hf_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_folder(tmp_path_factory.mktemp("target"), num_hidden_layers=6))


def test_lookup(target: str) -> None:
    settings = load_settings({"model": {"path": target}, "drafter": {"kind": "lookup"}})
    drafter = make_drafter(settings)
    assert isinstance(drafter, LookupDrafter)
    assert drafter.state_size == 0


def test_eagle3(tmp_path: Path, target: str) -> None:
    path = tiny_head().write(tmp_path)
    settings = load_settings(
        {"model": {"path": target}, "drafter": {"kind": "eagle3", "path": path}}
    )
    drafter = make_drafter(settings)
    assert isinstance(drafter, Eagle3Drafter)
    assert drafter.state_size == 32


def test_lm(tmp_path: Path, target: str) -> None:
    path = str(write_hf_folder(tmp_path, "qwen3", seed=1))
    settings = load_settings({"model": {"path": target}, "drafter": {"kind": "lm", "path": path}})
    drafter = make_drafter(settings)
    assert isinstance(drafter, LMDrafter)
    drafter.open(0, 1, 16)
    assert 0 < drafter.commit([Extension(0, [2, 3])], None).item() <= 1
    assert drafter.draft([0], [Shape(3, 4, 4)]).sizes.tolist() == [4]


def test_an_lm_of_another_vocabulary_is_refused_with_both_sizes(
    tmp_path: Path, target: str
) -> None:
    path = str(write_hf_folder(tmp_path, vocab_size=400))
    settings = load_settings({"model": {"path": target}, "drafter": {"kind": "lm", "path": path}})
    with pytest.raises(ConfigError, match=r"400 tokens, the target .* 384") as caught:
        make_drafter(settings)
    assert path in str(caught.value)
    assert target in str(caught.value)
