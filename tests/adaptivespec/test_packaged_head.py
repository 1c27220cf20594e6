"""The EAGLE-3 head that comes with the package: what it promises to whoever installs it."""

import json

import pytest
import torch
from safetensors import safe_open

from adaptivespec.config import PACKAGED, PACKAGED_HEAD, load_settings
from adaptivespec.local import LocalSystem
from adaptivespec.models.eagle3 import load_head
from adaptivespec.models.sources import resolve
from adaptivespec.shape import Shape
from adaptivespec.training.evaluate import measure
from tests.smollm2 import PROMPTS, chat

MEGABYTE = 10**6


def test_it_is_small_and_in_the_public_layout() -> None:
    folder = resolve(PACKAGED_HEAD)
    file = folder / "model.safetensors"
    assert file.stat().st_size <= 40 * MEGABYTE
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    with safe_open(file, "pt") as tensors:
        weights = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    assert {w.dtype for name, w in weights.items() if name not in ("d2t", "t2d")} == {
        torch.bfloat16
    }
    draft_ids = torch.arange(config["draft_vocab_size"]) + weights["d2t"]
    assert weights["t2d"].nonzero()[:, 0].tolist() == draft_ids.tolist()
    assert (folder / "README.md").exists()


def test_it_is_made_for_the_packaged_model() -> None:
    head = load_head(PACKAGED_HEAD, PACKAGED)
    assert head.config.aux_layers == (2, 15, 27)


@pytest.mark.parametrize(
    ("shape", "least"),
    [(Shape(3, 4, 4), 1.75), (Shape(7, 1, 8), 1.75), (Shape(5, 4, 16), 2.3)],
)
def test_its_drafts_are_accepted(system: LocalSystem, shape: Shape, least: float) -> None:
    """Less than what the model card says: these prompts are few, and have short answers."""
    measured = measure(system, [chat(prompt) for prompt in PROMPTS], shape, max_tokens=64)
    assert measured.usage.mean_acceptance_length >= least


@pytest.fixture(scope="module")
def system() -> LocalSystem:
    """With every default: bf16, the packaged model and head."""
    return LocalSystem.load(load_settings({}))
