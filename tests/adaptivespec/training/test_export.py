"""A head begins as the target's last layer, and is written as every reader of heads expects it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from adaptivespec.errors import ConfigError
from adaptivespec.models.attention import Segment
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.decoder import Decoder
from adaptivespec.models.eagle3 import load_head, load_projector
from adaptivespec.models.layers import Weights
from adaptivespec.models.loading import load_model
from adaptivespec.training.export import export
from adaptivespec.training.warm_start import (
    count_tokens,
    draft_vocabulary,
    head_config,
    warm_start,
)
from tests.decoders import states
from tests.factories import ARCHITECTURES, VOCAB_SIZE, Architecture, write_hf_folder

DRAFT_VOCAB = 50
TEXT = [5, 99, 7, 300, 41, 12, 8]

Target = tuple[str, DecoderConfig, Weights]


def write_target(folder: Path, architecture: Architecture, **config: Any) -> Target:
    path = str(write_hf_folder(folder, architecture, num_hidden_layers=6, **config))
    return path, *load_model(path, torch.float32)


@pytest.fixture(params=ARCHITECTURES)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """Untied, so that the output layer is not the embedding."""
    return write_target(tmp_path / "target", request.param, tied=False)


@pytest.fixture
def ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_VOCAB].sort().values


def write_head(target: Target, ids: torch.Tensor, folder: Path) -> Weights:
    _, config, weights = target
    made = head_config(config, len(ids))
    started = warm_start(config, weights, ids, seed=0)
    export(folder, made, started, ids)
    return started


# -- the folder -----------------------------------------------------------------------------------


def test_loads_beside_its_target(target: Target, ids: torch.Tensor, tmp_path: Path) -> None:
    path, config, _ = target
    write_head(target, ids, tmp_path / "head")
    head = load_head(str(tmp_path / "head"), path, torch.float32)
    projector = load_projector(str(tmp_path / "head"), config, torch.float32)
    # which tokens end a turn is the target's affair
    expected = head_config(replace(config, eos=head.config.layer.eos), DRAFT_VOCAB)
    assert head.config == expected
    assert projector.layers == (2, 3, 3)
    assert torch.equal(head.target_ids, ids)


def test_weights_survive_but_for_their_rounding(
    target: Target, ids: torch.Tensor, tmp_path: Path
) -> None:
    started = write_head(target, ids, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == started.keys() | {"d2t", "t2d"}
    for name, weight in started.items():
        assert torch.equal(stored[name], weight.bfloat16())


def test_the_draft_vocabulary_is_written_in_both_directions(
    target: Target, ids: torch.Tensor, tmp_path: Path
) -> None:
    write_head(target, ids, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    offsets, known = stored["d2t"].tolist(), stored["t2d"].tolist()
    assert [draft + offset for draft, offset in enumerate(offsets)] == ids.tolist()
    assert [token for token, drafted in enumerate(known) if drafted] == ids.tolist()
    assert len(known) == VOCAB_SIZE


def test_a_stretched_context_is_the_heads_too(ids: torch.Tensor, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    target = write_target(tmp_path / "target", "llama", rope_parameters=rope)
    write_head(target, ids, tmp_path / "head")
    layer = load_head(str(tmp_path / "head"), target[0]).config.layer
    assert layer.rope_theta == 5e5
    assert layer.rope_scaling == target[1].rope_scaling
    assert layer.rope_scaling is not None


def test_other_readers_find_what_they_look_for(
    target: Target, ids: torch.Tensor, tmp_path: Path
) -> None:
    """SGLang and vLLM: the class by its name, auxiliary layers by their outputs, no biases."""
    write_head(target, ids, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB_SIZE, DRAFT_VOCAB)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 2]
    assert not any(name.endswith("bias") for name in load_file(tmp_path / "model.safetensors"))


def test_an_older_head_is_replaced(target: Target, ids: torch.Tensor, tmp_path: Path) -> None:
    write_head(target, ids, tmp_path)
    write_head(target, ids[:20], tmp_path)
    assert load_head(str(tmp_path), target[0]).target_ids.tolist() == ids[:20].tolist()
    assert {file.name for file in tmp_path.iterdir()} == {
        "target",
        "config.json",
        "model.safetensors",
    }


# -- where training begins ------------------------------------------------------------------------


def test_the_projector_passes_on_the_last_auxiliary_state(
    target: Target, ids: torch.Tensor, tmp_path: Path
) -> None:
    _, config, weights = target
    write_head(target, ids, tmp_path)
    projector = load_projector(str(tmp_path), config, torch.float32)
    aux = states(Decoder(config, weights, torch.float32), TEXT, projector.layers).aux
    assert aux is not None
    last = aux[:, -config.hidden_size :]
    assert F.cosine_similarity(projector(aux), last).min() > 0.95
    assert (projector(aux) - last).norm() < 0.3 * last.norm()


def test_begins_as_the_targets_last_layer(ids: torch.Tensor, tmp_path: Path) -> None:
    """Of a Llama target: fed the input of its last layer, the head gives the target's own logits of
    the draft vocabulary, but for the noise with which it reads the tokens."""
    target = write_target(tmp_path / "target", "llama", tied=False)
    path, config, weights = target
    write_head(target, ids, tmp_path / "head")
    head = load_head(str(tmp_path / "head"), path, torch.float32)
    decoder = Decoder(config, weights, torch.float32)
    hidden = states(decoder, TEXT, [config.layers - 1])
    assert hidden.aux is not None
    cache = head.new_cache(len(TEXT))
    cache.open(0, len(TEXT))
    positions, segments = torch.arange(len(TEXT)), [Segment(0, 0, len(TEXT))]
    _, ours = head.forward(
        torch.tensor(TEXT), hidden.aux, positions, cache, segments, range(len(TEXT))
    )
    theirs = decoder.logits(hidden.final)[:, ids]
    assert F.cosine_similarity(ours, theirs).min() > 0.9


def test_the_start_is_fixed_by_the_seed(target: Target, ids: torch.Tensor) -> None:
    _, config, weights = target
    first, second, other = (warm_start(config, weights, ids, seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert all(weight.dtype == torch.float32 for weight in first.values())


def test_tied_embeddings_are_the_output_layer(ids: torch.Tensor, tmp_path: Path) -> None:
    _, config, weights = write_target(tmp_path, "llama", tied=True)
    stray = {"lm_head.weight": torch.zeros_like(weights["model.embed_tokens.weight"])}
    for stored in (weights, weights | stray):
        started = warm_start(config, stored, ids, seed=0)
        assert torch.equal(started["lm_head.weight"], weights["model.embed_tokens.weight"][ids])


def test_a_target_of_one_layer_has_none_for_a_head_to_read(target: Target) -> None:
    with pytest.raises(ConfigError, match="two layers or more"):
        head_config(replace(target[1], layers=1), DRAFT_VOCAB)


# -- the draft vocabulary -------------------------------------------------------------------------


def test_the_most_frequent_tokens_of_equals_the_lower() -> None:
    answers = [torch.tensor(tokens, dtype=torch.int32) for tokens in ([9, 9, 4], [9, 7, 4, 2])]
    counts = count_tokens(answers, 10)
    assert draft_vocabulary(counts, 1).tolist() == [9]
    assert draft_vocabulary(counts, 3).tolist() == [2, 4, 9]
    assert draft_vocabulary(counts, 6).tolist() == [0, 1, 2, 4, 7, 9]
    assert draft_vocabulary(count_tokens([], 10), 2).tolist() == [0, 1]
