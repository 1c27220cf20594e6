"""Text to tokens and back, for every source of models."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from adaptivespec.errors import ConfigError, RequestError
from adaptivespec.models.gguf import GGUF
from adaptivespec.models.sources import is_gguf, read_config, resolve

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

_CONTROL, _USER_DEFINED = 3, 4  # token types in GGUF metadata


class Tokenizer:
    """A model's tokenizer and chat template.

    vocab_size: tokens that have a text; the model's own vocabulary may be padded beyond it.
    eos_ids: the tokens that end a turn. special_ids: tokens without a text of their own.
    """

    def __init__(self, hf: PreTrainedTokenizerFast, eos_ids: Iterable[int]) -> None:
        """`eos_ids` are added to the one that `hf` names. Raises ConfigError for a kind of decoding
        other than byte-level BPE and SentencePiece with byte fallback."""
        self._hf = hf
        self._backend: tokenizers.Tokenizer = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        named = set() if hf.eos_token_id is None else {hf.eos_token_id}
        self.eos_ids = frozenset(eos_ids) | named
        self.vocab_size = self._backend.get_vocab_size()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        self._bytes: dict[int, bytes] = dict.fromkeys(self.special_ids, b"")
        self._byte_level, self._leading = _decoding(self._backend)

    def encode(self, text: str) -> list[int]:
        """Tokens of a raw prompt, with the BOS token where the model wants one. Special tokens
        spelled out in `text` become special tokens, as in transformers and vLLM."""
        return self._backend.encode(text).ids

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **variables: Any
    ) -> list[int]:
        """Tokens of a chat up to where the assistant's answer begins. `variables` are the
        template's own (`enable_thinking=False`, say). Raises RequestError when the model has no
        template or the template refuses the messages."""
        text = self._render(messages, **variables)
        return self._backend.encode(text, add_special_tokens=False).ids

    def user_turn(self, start: str = "") -> list[int]:
        """Tokens of a chat up to where its first user's message begins, and of the message's own
        `start`: what a model continues to write a message itself. Raises RequestError like
        `apply_chat_template`."""
        before, _ = self._around_user_message()
        return self._backend.encode(before + start, add_special_tokens=False).ids

    def end_of_user_turn(self) -> int | None:
        """The token that a chat puts behind a user's message. None where that is plain text, whose
        tokens the message's own could be too. Raises RequestError like `apply_chat_template`."""
        _, after = self._around_user_message()
        first = self._backend.encode(after, add_special_tokens=False).ids[:1]
        return next((token for token in first if token in self._added_ids), None)

    def _around_user_message(self) -> tuple[str, str]:
        mark = "\ufdd0"  # a noncharacter, which no template contains
        before, _, after = self._render([{"role": "user", "content": mark}]).partition(mark)
        return before, after

    def _render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        try:
            text: str = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=False,
                **variables,
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise RequestError(f"the chat template refuses this: {error}", "messages") from error
        return text

    def save(self, folder: Path) -> None:
        """Write it as transformers reads it, chat template and all."""
        self._hf.save_pretrained(folder)

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text, as UTF-8 that may begin or end inside a character. Empty for
        special tokens and for ids beyond the vocabulary."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTES[character] for character in text)
            except KeyError:  # an added token, spelled as it is
                return text.encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()

    def decode(self, ids: Iterable[int], *, continued: bool = False) -> str:
        """The text of whole sequences of tokens, without special tokens; bytes that are no UTF-8
        become U+FFFD. `continued`: what they add to a text before them, the space between
        included."""
        text = b"".join(map(self.token_bytes, ids)).decode(errors="replace")
        return text if continued else text.removeprefix(self._leading)


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a folder, hub id, GGUF file or "smollm2". Raises ConfigError naming what is
    missing or unsupported."""
    location = resolve(path, weights=False)
    if is_gguf(location):
        return _from_gguf(GGUF(location))
    # AutoTokenizer costs a second and imports torch, which GGUF files do not need.
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(location, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{location}: has no usable tokenizer: {error}") from error
    if not isinstance(hf, PreTrainedTokenizerFast):
        raise ConfigError(f"{location}: {type(hf).__name__} is not based on the tokenizers library")
    return Tokenizer(hf, read_config(location)["eos_token_id"])


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)}
    printable |= set(range(ord("®"), ord("ÿ") + 1))
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _decoding(backend: tokenizers.Tokenizer) -> tuple[bool, str]:
    """(whether tokens are byte-level, the text that decoding drops at the start of a text)."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
    steps = {step["type"]: step for step in state.get("decoders", [state])}
    if "ByteLevel" in steps:
        return True, ""
    if "ByteFallback" in steps:
        return False, steps["Strip"]["content"] if "Strip" in steps else ""
    raise ConfigError(
        f"tokenizer decoder {state['type']!r} is not supported; byte-level BPE and SentencePiece "
        "with byte fallback are"
    )


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_PRE_TOKENIZERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "deepseek-r1-qwen": _split(_QWEN2),
}
"""By `tokenizer.ggml.pre`: how text is cut before the merges, as in the models' tokenizer.json."""


def _from_gguf(model: GGUF) -> Tokenizer:
    """Rebuild the tokenizer from the metadata under `tokenizer.`."""
    kind = model.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(
            f"{model.file}: tokenizer.ggml.model {kind!r} is not supported; allowed: 'gpt2' "
            "(byte-level BPE); a Hugging Face folder of the same model may work"
        )
    pre = model.metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"{model.file}: tokenizer.ggml.pre {pre!r} is not supported; "
            f"allowed: {', '.join(_PRE_TOKENIZERS)}"
        )
    tokens: list[str] = model.require("tokenizer.ggml.tokens")
    types: list[int] = model.require("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in model.require("tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre == "llama-bpe",
        )
    )
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    names = {
        f"{role}_token": tokens[model.metadata[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in model.metadata
    }
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=model.metadata.get("tokenizer.chat_template"),
        # llama.cpp adds Llama 3's BOS token unless the file says otherwise
        add_bos_token=model.metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"),
        **names,
    )
    return Tokenizer(hf, model.hf_config()["eos_token_id"])
