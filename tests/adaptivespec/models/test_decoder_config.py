"""DecoderConfig.from_hf: what is read, and what is refused by name."""

from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from adaptivespec.errors import ConfigError
from adaptivespec.models.config import DecoderConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama(**changes: Any) -> dict[str, Any]:
    sizes = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 5e5,
    }
    return {key: value for key, value in (sizes | changes).items() if value is not ...}


def test_both_spellings_of_the_rope_settings_mean_the_same() -> None:
    old = DecoderConfig.from_hf(llama(rope_scaling=LLAMA3))
    new = DecoderConfig.from_hf(llama(rope_theta=..., rope_parameters=LLAMA3 | {"rope_theta": 5e5}))
    older = LLAMA3 | {"type": "llama3"}
    older.pop("rope_type")
    assert old == new == DecoderConfig.from_hf(llama(rope_scaling=older))
    assert (new.rope_theta, new.rope_scaling) == (5e5, LLAMA3)


def test_families_differ_in_biases_norms_and_head_size() -> None:
    base = llama(num_attention_heads=4)
    qwen2 = DecoderConfig.from_hf(base | {"model_type": "qwen2"})
    qwen3 = DecoderConfig.from_hf(base | {"model_type": "qwen3", "attention_bias": True})
    plain = DecoderConfig.from_hf(base | {"mlp_bias": True})
    assert (qwen2.attention_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.attention_bias, qwen3.o_bias, qwen3.qk_norm) == (True, True, True)
    assert (plain.attention_bias, plain.mlp_bias, plain.qk_norm) == (False, True, False)
    assert (qwen2.head_dim, qwen3.head_dim) == (8, 128)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_reads_what_transformers_writes(kind: type) -> None:
    written = kind(eos_token_id=[7, 9]).to_dict()
    config = DecoderConfig.from_hf(written)
    assert config.family == written["model_type"]
    assert config.eos == (7, 9)
    assert config.rope_scaling is None


def test_yarn_stretches_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert DecoderConfig.from_hf(llama(rope_scaling=scaling)).context_length == 2048
    assert DecoderConfig.from_hf(llama()).context_length == 512


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9,
          "max_window_layers": 1}, "sliding_window"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
         "sliding_window"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": ..., "vocab_size": ...}, "vocab_size, hidden_size"),
        ({"num_key_value_heads": 3}, "kv_heads"),
    ],
)  # fmt: skip
def test_what_it_cannot_compute_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DecoderConfig.from_hf(llama(**changes))


def test_an_unused_sliding_window_is_no_obstacle() -> None:
    settings = {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}
    assert DecoderConfig.from_hf(llama(**settings)).family == "qwen2"
