"""The decoder computes what Hugging Face transformers computes, packed and cached or not."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from adaptivespec.errors import ConfigError
from adaptivespec.models.attention import Segment
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.decoder import Decoder
from adaptivespec.models.loading import load_model
from adaptivespec.models.sources import read_config, resolve
from tests.decoders import as_decoder, prefill, tiny_decoder
from tests.factories import ARCHITECTURES, Architecture, tiny_model

TOKENS = [1, 17, 300, 45, 8, 8, 211, 90, 3, 64, 127, 5]


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    base = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    return base | settings


ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 5e4},
    "linear": rope("linear"),
    "llama3": rope(
        "llama3",
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "yarn": rope("yarn", original_max_position_embeddings=64),
    "yarn with mscale": rope(
        "yarn",
        original_max_position_embeddings=64,
        mscale=0.7,
        mscale_all_dim=1.3,
        beta_fast=16.0,
        beta_slow=2.0,
        truncate=False,
    ),
}


def reference(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_those_of_transformers(architecture: Architecture, tied: bool) -> None:
    model = tiny_model(architecture, tied=tied)
    decoder = as_decoder(model)
    cache = decoder.new_cache(64)
    cache.open(0, 64)
    same(prefill(decoder, cache, 0, TOKENS), reference(model, TOKENS))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"head_dim": 32}),
        ("qwen3", {"attention_bias": True, "head_dim": 32}),
        ("qwen3", {"intermediate_size": 80, "hidden_size": 48}),
        ("qwen3", {"head_dim": 8}),  # for which there are no kernels
    ],
)
def test_variants_of_a_family(architecture: Architecture, changes: dict[str, Any]) -> None:
    model = tiny_model(architecture, **changes)
    decoder = as_decoder(model)
    cache = decoder.new_cache(64)
    cache.open(0, 64)
    same(prefill(decoder, cache, 0, TOKENS), reference(model, TOKENS))


@pytest.mark.parametrize("settings", ROPES.values(), ids=ROPES.keys())
def test_rope_scaling(settings: dict[str, Any]) -> None:
    model = tiny_model(rope_parameters=settings, max_position_embeddings=256, head_dim=32)
    decoder = as_decoder(model)
    cache = decoder.new_cache(256)
    cache.open(0, 256)
    tokens = TOKENS * 16
    same(prefill(decoder, cache, 0, tokens), reference(model, tokens))


@pytest.mark.parametrize("cut", [1, 5, len(TOKENS) - 1])
def test_chunks_give_the_logits_of_one_pass(cut: int) -> None:
    decoder = tiny_decoder("qwen3")
    cache = decoder.new_cache(64)
    cache.open(0, 32)
    cache.open(1, 32)
    whole = prefill(decoder, cache, 0, TOKENS)
    parts = [prefill(decoder, cache, 1, part) for part in (TOKENS[:cut], TOKENS[cut:])]
    same(torch.cat(parts), whole)


def test_a_long_prompt_in_chunks() -> None:
    model = tiny_model(max_position_embeddings=4096)
    decoder = as_decoder(model)
    tokens = (TOKENS * 250)[:2900]
    cache = decoder.new_cache(len(tokens))
    cache.open(0, len(tokens))
    for start in range(0, len(tokens), 256):
        logits = prefill(decoder, cache, 0, tokens[start : start + 256])
    same(logits[-1], reference(model, tokens)[-1])


def test_a_packed_batch_gives_each_request_its_own_logits() -> None:
    decoder = tiny_decoder()
    cache = decoder.new_cache(256)
    prompts = {0: TOKENS[:3], 1: TOKENS, 2: TOKENS[5:]}
    alone = {}
    for request, prompt in prompts.items():
        cache.open(request, 32)
        cache.open(request + 10, 32)
        prefill(decoder, cache, request, prompt)
        prefill(decoder, cache, request + 10, prompt)
        alone[request] = prefill(decoder, cache, request + 10, [7, 9][: request + 1])
    rows: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    for request, prompt in prompts.items():
        new = [7, 9][: request + 1]
        segments.append(Segment(request, len(rows), len(rows) + len(new)))
        positions += [len(prompt) + i for i in range(len(new))]
        rows += new
    hidden = decoder.forward(torch.tensor(rows), torch.tensor(positions), cache, segments)
    logits = decoder.logits(hidden.final)
    for segment in segments:
        same(logits[segment.start : segment.stop], alone[segment.request])


def test_auxiliary_states_are_the_inputs_of_the_asked_layers() -> None:
    model = tiny_model(num_hidden_layers=6)
    decoder = as_decoder(model)
    cache = decoder.new_cache(32)
    cache.open(0, 32)
    hidden = decoder.forward(
        torch.tensor(TOKENS),
        torch.arange(len(TOKENS)),
        cache,
        [Segment(0, 0, len(TOKENS))],
        aux_layers=(2, 3, 2, 5),  # the three that a head reads may be the same
    )
    with torch.inference_mode():
        states = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    assert hidden.aux is not None
    same(hidden.aux, torch.cat([states[i][0] for i in (2, 3, 2, 5)], -1))
    same(hidden.final, states[-1][0])


def test_bfloat16_stays_near_float32() -> None:
    model = tiny_model("qwen2")
    exact, rounded = as_decoder(model), as_decoder(model, torch.bfloat16)
    logits = []
    for decoder in (exact, rounded):
        cache = decoder.new_cache(32)
        cache.open(0, 32)
        logits.append(prefill(decoder, cache, 0, TOKENS).float())
    spread = logits[0].std().item()
    assert (logits[0] - logits[1]).abs().mean().item() < 0.03 * spread


def test_the_packaged_model_equals_transformers() -> None:
    config, weights = load_model("smollm2", torch.float32)
    decoder = Decoder(config, weights, torch.float32)
    cache = decoder.new_cache(64)
    cache.open(0, 64)
    tokens = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    ours = prefill(decoder, cache, 0, tokens)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**read_config(resolve("smollm2"))), dtype=torch.float32
    )
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    same(ours, reference(model.eval(), tokens))


def test_every_unfitting_weight_is_named() -> None:
    model = tiny_model("llama")
    weights = {k: v.detach() for k, v in model.state_dict().items()}
    config = DecoderConfig.from_hf(model.config.to_dict())
    weights["model.layers.9.mlp.up_proj.weight"] = weights.pop("model.norm.weight")
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 32)
    with pytest.raises(ConfigError) as caught:
        Decoder(config, weights)
    for part in (
        "missing: model.norm.weight",
        "surplus: model.layers.9.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.weight [3, 32] instead of [64, 32]",
    ):
        assert part in str(caught.value)


def test_a_long_list_of_unfitting_weights_is_cut() -> None:
    model = tiny_model("qwen2")
    config = DecoderConfig.from_hf(model.config.to_dict())
    with pytest.raises(ConfigError, match=r"and \d+ more"):
        Decoder(config, {})


def test_a_redundant_head_beside_tied_embeddings_is_accepted() -> None:
    model = tiny_model(tied=True)
    weights = {k: v.detach() for k, v in model.state_dict().items()}
    assert "lm_head.weight" in weights
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    Decoder(DecoderConfig.from_hf(model.config.to_dict()), weights)
