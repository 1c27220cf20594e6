"""Tiny random models on disk, in the formats that users have: Hugging Face folders and GGUF files.

Every model is made by transformers' own classes, so that they are the reference for our loaders and
decoders. All are deterministic in their arguments.
"""

import json
import math
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

Architecture = Literal["llama", "qwen2", "qwen3"]
ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3")

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
EOS = 2
VOCAB_SIZE = 384

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other dog too",
    "def add(left, right):\n    return left + right\n\n\nfor i in range(10):\n    print(i)\n",
    "In the beginning there was the word; the word was 1234567890, and it was good.",
]

_CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens at most, able to spell any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def tiny_model(
    architecture: Architecture = "llama", *, tied: bool = True, seed: int = 0, **config: Any
) -> Any:
    """A float32 transformers model in eval mode; `config` overrides fields of its HF config.

    Weights are larger than at a usual start, so that logits differ clearly between tokens.
    """
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "initializer_range": 0.2,
        "attn_implementation": "eager",
    }
    torch.manual_seed(seed)
    hf_config = _CONFIGS[architecture](**(fields | config))
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model


def write_hf_folder(
    folder: Path,
    architecture: Architecture = "llama",
    *,
    tied: bool = True,
    sharded: bool = False,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write `tiny_model` and `tiny_tokenizer` as a Hugging Face folder; returns `folder`.

    `sharded` splits the weights over several safetensors files with an index.
    """
    model = tiny_model(architecture, tied=tied, seed=seed, **config)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[EOS, 0])
    model.save_pretrained(folder, max_shard_size="20KB" if sharded else "1GB")
    PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def write_gguf(
    file: Path,
    architecture: Architecture = "llama",
    *,
    tied: bool = True,
    seed: int = 0,
    quantization: gguf.GGMLQuantizationType | None = None,
    pre: str = "smollm",
    add_bos: bool | None = False,
    **config: Any,
) -> Path:
    """Write the model of `write_hf_folder` as a GGUF file, as llama.cpp's converter does; returns
    `file`. Matrices are float32 unless `quantization` is given (hidden sizes must then be multiples
    of its block). `pre` names the pre-tokenizer in the metadata; `add_bos` None leaves it out.
    """
    model = tiny_model(architecture, tied=tied, seed=seed, **config)
    hf = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(hf.max_position_embeddings)
    writer.add_embedding_length(hf.hidden_size)
    writer.add_block_count(hf.num_hidden_layers)
    writer.add_feed_forward_length(hf.intermediate_size)
    writer.add_head_count(hf.num_attention_heads)
    writer.add_head_count_kv(hf.num_key_value_heads)
    writer.add_key_length(hf.head_dim)
    writer.add_value_length(hf.head_dim)
    writer.add_rope_dimension_count(hf.head_dim)
    _add_rope(writer, hf)
    writer.add_layer_norm_rms_eps(hf.rms_norm_eps)
    writer.add_vocab_size(hf.vocab_size)
    _add_tokenizer(writer, hf.vocab_size, pre)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], hf.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array = tensor.numpy()
        if architecture == "llama" and "q_proj" in name:
            array = _interleave(array, hf.num_attention_heads)
        if architecture == "llama" and "k_proj" in name:
            array = _interleave(array, hf.num_key_value_heads)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if quantization is not None and array.ndim == 2:
            quantized = gguf.quants.quantize(array, quantization)
            writer.add_tensor(gguf_name, quantized, raw_dtype=quantization)
        else:
            writer.add_tensor(gguf_name, np.ascontiguousarray(array))
    _close(writer)
    return file


def write_header(file: Path, architecture: str, **metadata: int | str) -> Path:
    """Write a GGUF file with this metadata and a lone embedding; returns `file`."""
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in metadata.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), dtype=np.float32))
    _close(writer)
    return file


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: rotated pairs are neighbours, not half a head apart."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _add_rope(writer: gguf.GGUFWriter, hf: Any) -> None:
    """RoPE's settings: as metadata, but those of Llama 3 as the divisors that follow from them."""
    rope = hf.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        original = rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        divisors = []
        for i in range(0, hf.head_dim, 2):
            wavelength = 2 * math.pi * rope["rope_theta"] ** (i / hf.head_dim)
            if wavelength < original / high:
                divisors.append(1.0)
            elif wavelength > original / low:
                divisors.append(rope["factor"])
            else:
                smooth = (original / wavelength - low) / (high - low)
                divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int, pre: str) -> None:
    tokenizer = tiny_tokenizer()
    vocab = {index: token for token, index in tokenizer.get_vocab().items()}
    tokens = [vocab.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    types = [
        gguf.TokenType.CONTROL
        if token in SPECIAL_TOKENS
        else gguf.TokenType.NORMAL
        if i in vocab
        else gguf.TokenType.UNUSED
        for i, token in enumerate(tokens)
    ]
    merges = [f"{left} {right}" for left, right in _merges(tokenizer)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(0)
    writer.add_pad_token_id(EOS)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def _merges(tokenizer: Tokenizer) -> list[list[str]]:
    """The merge rules in order; only the serialised form has them."""
    return json.loads(tokenizer.to_str())["model"]["merges"]
