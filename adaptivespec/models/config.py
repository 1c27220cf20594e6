"""What a decoder checkpoint is: sizes and switches read from Hugging Face's config.json."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from adaptivespec.errors import ConfigError

Family = Literal["llama", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = get_args(Family)

ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The supported kinds of RoPE scaling, and the keys that each needs."""

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Architecture of a decoder of the Llama, Qwen2 or Qwen3 family.

    `rope_scaling` is None for plain RoPE, else a dict with `rope_type` and the keys in `ROPE_KEYS`.
    `attention_bias` is the bias of q, k and v; `qk_norm` an RMSNorm per head of q and k.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is not positive")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads: {self.kv_heads} does not divide heads {self.heads}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(f"head_dim: {self.head_dim} is not even")

    @property
    def context_length(self) -> int:
        """Positions that the RoPE scaling is made for: yarn stretches the original context."""
        scaling = self.rope_scaling
        if scaling is None or scaling["rope_type"] != "yarn":
            return self.max_position_embeddings
        stretched = scaling["factor"] * scaling["original_max_position_embeddings"]
        return max(self.max_position_embeddings, int(stretched))

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "DecoderConfig":
        """Read the dict of a config.json (transformers 4's or 5's spelling of the RoPE settings).
        Raises ConfigError naming the key, the value and what is allowed."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(f"model_type: {family!r} is not supported; one of {list(FAMILIES)}")
        missing = [key for key in _REQUIRED if config.get(key) is None]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")
        _refuse_unsupported(config, family)
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        default_head_dim = 128 if family == "qwen3" else hidden // heads
        bias = bool(config.get("attention_bias", False))
        theta, scaling = _rope(config)
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or default_head_dim,
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=config["max_position_embeddings"],
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=True if family == "qwen2" else bias,
            o_bias=False if family == "qwen2" else bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            eos=_eos(config.get("eos_token_id")),
        )


def _refuse_unsupported(config: dict[str, Any], family: Family) -> None:
    """ConfigError for settings that would make the decoder compute something else."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act: {activation!r} is not supported; only 'silu'")
    if config.get("quantization_config") is not None:
        raise ConfigError("quantization_config: quantised weights are not supported")
    kinds = config.get("layer_types") or []
    layers = config["num_hidden_layers"]
    if family == "llama":
        sliding = config.get("sliding_window") is not None
    elif kinds:
        sliding = False  # the list is the final word
    else:
        sliding = (
            bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
        )
        sliding = sliding and config.get("max_window_layers", 28) < layers
    if sliding or any(kind != "full_attention" for kind in kinds):
        raise ConfigError("sliding_window: sliding window attention is not supported")


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from transformers 5's `rope_parameters` or the older two keys."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(given.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    rotary = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    if rotary not in (None, 1, 1.0):
        raise ConfigError(f"partial_rotary_factor: {rotary} is not supported; only 1")
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    if kind not in ROPE_KEYS:
        raise ConfigError(f"rope_type: {kind!r} is not supported; one of {list(ROPE_KEYS)}")
    if kind == "default":
        return theta, None
    if kind in ("llama3", "yarn"):
        given.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    missing = [key for key in ROPE_KEYS[kind] if given.get(key) is None]
    if missing:
        raise ConfigError(f"RoPE scaling {kind!r} lacks {', '.join(missing)}")
    return theta, {"rope_type": kind, **given}


def _eos(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
