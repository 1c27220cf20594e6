"""Reading GGUF files: metadata, tensors, and their translation to Hugging Face's terms.

The layout is the one of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf`
package supplies its constants and the dequantisation; its own reader builds an array object per
string, which takes two seconds for a vocabulary of 49,000 and is why the header is parsed here.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from adaptivespec.errors import ConfigError

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}

_LENGTH = struct.Struct("<Q")

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_STOP_TOKENS = ("eos", "eot", "eom")  # the metadata's tokens that end a turn
_EPSILON = "attention.layer_norm_rms_epsilon"
_EMBEDDING = "token_embd.weight"
_ROPE_FACTORS = "rope_freqs.weight"  # derived from the config; no Hugging Face tensor


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies: its shape (row-major), encoding and offset in the file in bytes."""

    shape: tuple[int, ...]
    encoding: GGMLQuantizationType
    offset: int


class GGUF:
    """An open GGUF file: `metadata` by its key, and tensors by their Hugging Face name.

    Raises ConfigError, naming the file, when it is damaged or holds what we cannot compute.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        with file.open("rb") as opened:
            try:
                self._data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
                self.metadata, self._stored = _Header(self._data).read()
            except (struct.error, ValueError, KeyError, OverflowError) as error:
                raise ConfigError(f"{file}: not a readable GGUF file: {error}") from error
        self.architecture = self.metadata.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise self._unusable("general.architecture", self.architecture, list(ARCHITECTURES))
        if self.metadata.get("split.count", 1) > 1:
            raise self._unusable("split.count", self.metadata["split.count"], "1, a merged file")
        if self._get("expert_count", 0):
            raise self._unusable("expert_count", self._get("expert_count"), "0, a dense model")
        if _EMBEDDING not in self._stored:
            raise ConfigError(f"{file}: has no tensor {_EMBEDDING}")

    def require(self, key: str) -> Any:
        """Metadata that must be there; ConfigError naming the file and the key otherwise."""
        if key not in self.metadata:
            raise ConfigError(f"{self.file}: lacks the metadata {key}")
        return self.metadata[key]

    def _get(self, key: str, default: Any = None) -> Any:
        """Metadata of this architecture."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def _unusable(self, key: str, value: object, allowed: object) -> ConfigError:
        return ConfigError(f"{self.file}: {key} {value!r} is not supported; allowed: {allowed}")

    def hf_config(self) -> dict[str, Any]:
        """The config.json that this file's metadata stands for."""
        heads, kv_heads = self._heads()
        hidden = self.require(f"{self.architecture}.embedding_length")
        head_dim = self._get("attention.key_length", hidden // heads)
        rotary = self._get("rope.dimension_count", head_dim)
        if rotary != head_dim:
            raise self._unusable("rope.dimension_count", rotary, f"the head size {head_dim}")
        stops = (self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _STOP_TOKENS)
        return {
            "model_type": self.architecture,
            "vocab_size": self._stored[_EMBEDDING].shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._get("feed_forward_length"),
            "num_hidden_layers": self._get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": _decimal(self.require(f"{self.architecture}.{_EPSILON}")),
            "max_position_embeddings": self._get("context_length"),
            "rope_theta": _decimal(self._get("rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(head_dim),
            "tie_word_embeddings": "output.weight" not in self._stored,
            "attention_bias": "blk.0.attn_output.bias" in self._stored,
            "mlp_bias": "blk.0.ffn_down.bias" in self._stored,
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": sorted({stop for stop in stops if stop is not None}),
        }

    def _heads(self) -> tuple[int, int]:
        """Attention heads of q, and of k and v."""
        heads = self.require(f"{self.architecture}.attention.head_count")
        kv_heads = self._get("attention.head_count_kv", heads)
        if not isinstance(heads, int) or not isinstance(kv_heads, int):
            raise self._unusable("attention.head_count(_kv)", (heads, kv_heads), "one per model")
        return heads, kv_heads

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        if _ROPE_FACTORS in self._stored:
            return self._llama3_scaling(head_dim)
        kind = self._get("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": _decimal(self._get("rope.scaling.factor", 1.0))}
        original = self._get("rope.scaling.original_context_length")
        return scaling | ({"original_max_position_embeddings": original} if original else {})

    def _llama3_scaling(self, head_dim: int) -> dict[str, Any]:
        """Llama 3's RoPE scaling, which GGUF stores as the divisors that it results in.

        All published Llama 3 models share its other three parameters; the divisors that follow from
        them (transformers, `_compute_llama3_parameters`) are compared with the stored ones.
        """
        divisors = self.array(_ROPE_FACTORS)
        factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
        theta = self._get("rope.freq_base", 10000.0)
        wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
            raise ConfigError(
                f"{self.file}: {_ROPE_FACTORS} does not follow from Llama 3's scaling"
            )
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }

    def names(self) -> dict[str, str]:
        """Hugging Face name -> GGUF name of every tensor."""
        return {self._hf_name(name): name for name in self._stored if name != _ROPE_FACTORS}

    def _hf_name(self, name: str) -> str:
        """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"."""
        prefix = ""
        module = name
        if name.startswith("blk."):
            _, layer, module = name.split(".", 2)
            prefix = f"model.layers.{layer}."
        module, _, kind = module.rpartition(".")
        if module not in _MODULES:
            raise ConfigError(f"{self.file}: tensor {name!r} is no part of {self.architecture}")
        return f"{prefix}{_MODULES[module]}.{kind}"

    def array(self, name: str) -> np.ndarray:
        """The tensor with GGUF name `name`, dequantised, as a writable float32 array in the row
        order of Hugging Face's models."""
        stored = self._stored[name]
        byte_shape = gguf.quant_shape_to_byte_shape(stored.shape, stored.encoding)
        size = math.prod(byte_shape)
        if stored.offset + size > len(self._data):
            raise ConfigError(f"{self.file}: ends before tensor {name!r} does")
        raw = np.frombuffer(self._data, np.uint8, size, stored.offset).reshape(byte_shape)
        try:
            values = gguf.dequantize(raw, stored.encoding)
        except NotImplementedError as error:
            raise ConfigError(f"{self.file}: tensor {name!r}: {error}") from error
        if self.architecture == "llama" and ".attn_q." in name:
            values = _halves(values, self._heads()[0])
        elif self.architecture == "llama" and ".attn_k." in name:
            values = _halves(values, self._heads()[1])
        return np.require(values, requirements=["C", "W"])


class _Header:
    """A cursor over the part of a GGUF file before the tensors' data."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, _Stored]]:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not start with 'GGUF'")
        self._at = 4
        version, tensors, entries = self._unpack("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported; allowed: 2, 3, little-endian")
        metadata = {}
        for _ in range(entries):
            key = self._string()
            metadata[key] = self._value(*self._unpack("I"))
        found = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        return metadata, {name: _Stored(s, e, start + offset) for name, s, e, offset in found}

    def _unpack(self, codes: str) -> tuple[Any, ...]:
        layout = f"<{codes}"
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        start = self._at + _LENGTH.size
        end = start + _LENGTH.unpack_from(self._data, self._at)[0]
        if end > len(self._data):
            raise ValueError("it ends within a string")
        self._at = end
        return self._data[start:end].decode()

    def _value(self, code: int) -> Any:
        kind = GGUFValueType(code)
        if kind is GGUFValueType.STRING:
            return self._string()
        if kind is GGUFValueType.ARRAY:
            element, count = self._unpack("IQ")
            if element == GGUFValueType.STRING:
                return [self._string() for _ in range(count)]
            return list(self._unpack(f"{count}{_SCALARS[GGUFValueType(element)]}"))
        return self._unpack(_SCALARS[kind])[0]

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        (dimensions,) = self._unpack("I")
        shape = self._unpack(f"{dimensions}Q")[::-1]
        encoding, offset = self._unpack("IQ")
        return name, shape, GGMLQuantizationType(encoding), offset


def _decimal(value: float) -> float:
    """A stored float32 as the decimal it was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of q and k rows: its RoPE rotates neighbours, Hugging Face's rotates
    rows half a head apart."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
