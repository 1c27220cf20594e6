"""EAGLE-3 heads: both public layouts load to the head that the paper and its training code compute;
what does not fit is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adaptivespec.errors import ConfigError
from adaptivespec.models.attention import Segment
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.eagle3 import Eagle3Head, load_head, load_projector
from adaptivespec.models.eagle3_config import read_head_config
from adaptivespec.models.eagle3_weights import EMBEDDING
from adaptivespec.models.loading import load_model
from tests.adaptivespec.drafters.heads import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    Flags,
    Layout,
    Reference,
    TinyHead,
    tiny_head,
)
from tests.factories import write_hf_folder

LAYERS = 6
FLAGS = [
    Flags(),
    Flags(norm_before_residual=True),
    Flags(norm_before_fc=True),
    Flags(fc_norm=True, norm_output=True),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target whose RoPE base is not the heads'."""
    folder = tmp_path_factory.mktemp("target")
    rope = {"rope_type": "default", "rope_theta": 5e5}
    return str(write_hf_folder(folder, num_hidden_layers=LAYERS, rope_parameters=rope))


@pytest.fixture(scope="module")
def target_config(target: str) -> DecoderConfig:
    return load_model(target, torch.float32, only=[])[0]


@pytest.fixture(scope="module")
def embedding(target: str) -> Tensor:
    return load_model(target, torch.float32, only=[EMBEDDING])[1][EMBEDDING]


def pairs(count: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Tokens, and the states before them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (count,), generator=generator)
    return tokens, torch.randn(count, HIDDEN, generator=generator)


def run(head: Eagle3Head, tokens: Tensor, states: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """A chain at positions start, ...: the states after the tokens, and log-probabilities."""
    cache = head.new_cache(len(tokens))
    cache.open(0, len(tokens))
    positions = torch.arange(start, start + len(tokens))
    count = len(tokens)
    segments = [Segment(0, 0, count)]
    after, logits = head.forward(tokens, states, positions, cache, segments, range(count))
    return after, logits.log_softmax(-1)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["standard", "speculators"])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_computes_what_the_training_code_computes(
    tmp_path: Path,
    target: str,
    target_config: DecoderConfig,
    embedding: Tensor,
    family: str,
    flags: Flags,
    layout: Layout,
) -> None:
    tiny = tiny_head(family, flags)
    path = tiny.write(tmp_path, layout)
    reference = Reference(tiny, embedding)
    head = load_head(path, target, torch.float32)
    tokens, states = pairs(9)
    for ours, theirs in zip(
        run(head, tokens, states), reference.forward(tokens, states), strict=True
    ):
        close(ours, theirs)
    projector = load_projector(path, target_config, torch.float32)
    wide = torch.randn(5, 3 * HIDDEN)
    close(projector(wide), reference.project(wide))
    assert projector.state_size == HIDDEN
    assert torch.equal(head.target_ids, tiny.target_ids)


def test_rope_base_is_the_heads_own(tmp_path: Path, target: str, embedding: Tensor) -> None:
    tiny = replace(tiny_head(), layer_fields={"rope_theta": 1e6})
    head = load_head(tiny.write(tmp_path), target, torch.float32)
    tokens, states = pairs(9)
    close(run(head, tokens, states)[0], Reference(tiny, embedding, 1e6).forward(tokens, states)[0])


def test_positions_beyond_the_heads_own_context(
    tmp_path: Path, target: str, embedding: Tensor
) -> None:
    tiny = replace(tiny_head(), layer_fields={"max_position_embeddings": 2048})
    head = load_head(tiny.write(tmp_path), target, torch.float32)
    tokens, states = pairs(9)
    far = run(head, tokens, states, start=5000)[0]
    torch.testing.assert_close(far, run(head, tokens, states)[0], rtol=1e-2, atol=1e-2)


def test_the_layers_own_defaults_fill_what_a_speculators_config_leaves_out(
    tmp_path: Path, target_config: DecoderConfig
) -> None:
    tiny_head().write(tmp_path, "speculators")
    config = read_head_config(tmp_path, target_config)
    assert config.layer.rope_theta == 10000.0
    assert not config.layer.attention_bias


@pytest.mark.parametrize(
    ("top_fields", "layers"),
    [
        ({}, (2, 3, 3)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, (1, 3, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}, (1, 3, 5)),
    ],
    ids=["default", "inputs, as in vLLM", "outputs, as in SGLang"],
)
def test_auxiliary_layers(
    tmp_path: Path,
    target_config: DecoderConfig,
    top_fields: dict[str, Any],
    layers: tuple[int, ...],
) -> None:
    path = replace(tiny_head(), top_fields=top_fields).write(tmp_path)
    assert load_projector(path, target_config, torch.float32).layers == layers


def test_an_embedding_of_its_own_wins(tmp_path: Path, target: str) -> None:
    tiny, own = tiny_head(), torch.randn(VOCAB, HIDDEN)
    path = tiny.having(tiny.weights | {"embed_tokens.weight": own}).write(tmp_path)
    tokens, states = pairs(4)
    expected = Reference(tiny, own).forward(tokens, states)[0]
    close(run(load_head(path, target, torch.float32), tokens, states)[0], expected)


def test_a_head_over_the_whole_vocabulary_needs_no_mapping(tmp_path: Path, target: str) -> None:
    tiny = tiny_head().without("d2t", "t2d")
    whole = tiny.weights | {"lm_head.weight": torch.randn(VOCAB, HIDDEN)}
    path = replace(tiny.having(whole), top_fields={"draft_vocab_size": None}).write(tmp_path)
    assert load_head(path, target).target_ids.tolist() == list(range(VOCAB))


def with_weights(**changes: Tensor) -> TinyHead:
    tiny = tiny_head()
    return tiny.having(tiny.weights | changes)


BEYOND = tiny_head().weights["d2t"].clone()
BEYOND[-1] = VOCAB
TWICE = tiny_head().weights["d2t"].clone()
TWICE[1] = TWICE[0] - 1

BROKEN = {
    "missing weight": (tiny_head().without("norm.weight"), "missing: norm.weight"),
    "missing mapping": (tiny_head().without("d2t"), "missing: d2t"),
    "surplus weight": (with_weights(extra=torch.zeros(1)), "surplus: extra"),
    "misshapen weight": (
        with_weights(**{"lm_head.weight": torch.zeros(DRAFT_VOCAB, 7)}),
        rf"lm_head.weight \[{DRAFT_VOCAB}, 7\] instead of \[{DRAFT_VOCAB}, {HIDDEN}\]",
    ),
    "mask of another vocabulary": (
        with_weights(t2d=torch.zeros(VOCAB + 1, dtype=torch.bool)),
        rf"t2d \[{VOCAB + 1}\] instead of \[{VOCAB}\]",
    ),
    "mapping beyond the vocabulary": (with_weights(d2t=BEYOND), f"d2t: .* the target has {VOCAB}"),
    "two draft tokens of one id": (with_weights(d2t=TWICE), "d2t: two draft tokens"),
    "another vocabulary": (
        replace(tiny_head(), layer_fields={"vocab_size": 500}),
        f"vocab_size: 500 for a target with {VOCAB} tokens",
    ),
    "another hidden size": (
        replace(tiny_head(), top_fields={"target_hidden_size": 64}),
        f"hidden size 64, not {HIDDEN}",
    ),
    "two layers": (
        replace(tiny_head(), layer_fields={"num_hidden_layers": 2}),
        "num_hidden_layers: 2 is not supported",
    ),
    "another family": (
        replace(tiny_head(), layer_fields={"model_type": "gpt2"}),
        "model_type: 'gpt2' is not supported",
    ),
    "no such layer": (
        replace(tiny_head(), top_fields={"eagle_aux_hidden_state_layer_ids": [1, 2, LAYERS]}),
        f"of {LAYERS} layers",
    ),
    "no value of its type": (
        replace(tiny_head(), layer_fields={"intermediate_size": "large"}),
        "intermediate_size",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, target: str, fault: str) -> None:
    tiny, message = BROKEN[fault]
    path = tiny.write(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        load_head(path, target, torch.float32)
    assert str(tmp_path) in str(caught.value)


def test_a_projector_without_its_weight(tmp_path: Path, target_config: DecoderConfig) -> None:
    path = tiny_head().without("fc.weight").write(tmp_path)
    with pytest.raises(ConfigError, match=r"fc\.weight"):
        load_projector(path, target_config)
