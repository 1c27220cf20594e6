"""Text to tokens and back, against the libraries that define it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from adaptivespec.config import PACKAGED
from adaptivespec.errors import ConfigError, RequestError
from adaptivespec.tokenizer import Tokenizer, load_tokenizer
from tests.factories import (
    EOS,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    tiny_tokenizer,
    write_gguf,
    write_header,
    write_hf_folder,
)

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  multiple   spaces  \n\n\n\tand\ttabs\r\n",
    "def f(x: int) -> int:\n    return x**2  # 1234567890 and 3.14e-10\n",
    "don't I'LL WE'VE they're",
    "naïve café, Füße, Ελληνικά, русский, עברית, العربية, हिन्दी, 日本語, 世界",
    "🙂 👨‍👩‍👧‍👦 🇩🇪 e\u0301 \u200d \ufffd \x00 \x7f",
    "½ ² ٣٤ १२ Ⅷ",
    "a\u00a0b\u3000c\u2028d",
]

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 12 + 34?"},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(write_hf_folder(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture(scope="module")
def packaged() -> Tokenizer:
    return load_tokenizer(PACKAGED)


# -- the packaged model ---------------------------------------------------------------------------


def test_the_packaged_tokenizer_is_described(packaged: Tokenizer) -> None:
    assert packaged.vocab_size == 49152
    assert packaged.eos_ids == {2}
    assert packaged.special_ids == set(range(17))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("Hello world 123 <|im_start|>", [19556, 905, 216, 33, 34, 35, 216, 1]),
    ],
)
def test_the_packaged_tokenizer_gives_known_tokens(
    packaged: Tokenizer, text: str, ids: list[int]
) -> None:
    assert packaged.encode(text) == ids


def test_digits_are_single_tokens(packaged: Tokenizer) -> None:
    """Also those that a merge would join with what stands before them."""
    assert len(packaged.encode("1234567890")) == 10
    assert packaged.encode(" ²") == packaged.encode(" ") + packaged.encode("²")


def test_the_packaged_chat_template(packaged: Tokenizer) -> None:
    ids = packaged.apply_chat_template(CHAT)
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 12 + 34?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids == packaged.encode(text)
    assert ids[0] == 1
    assert packaged.decode(ids) == "system\nBe brief.\nuser\nWhat is 12 + 34?\nassistant\n"


# -- both ways ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_texts_survive_the_round_trip(packaged: Tokenizer, tiny: Tokenizer, text: str) -> None:
    assert packaged.decode(packaged.encode(text)) == text
    assert tiny.decode(tiny.encode(text)) == text


@given(st.text())
def test_any_text_survives_the_round_trip(tiny: Tokenizer, text: str) -> None:
    assert tiny.decode(tiny.encode(text)) == text


@given(st.lists(st.integers(0, VOCAB_SIZE + 100), max_size=30))
def test_any_tokens_decode_as_the_tokenizers_library_does(tiny: Tokenizer, ids: list[int]) -> None:
    """Broken characters, special tokens and ids beyond the vocabulary included."""
    assert tiny.decode(ids) == tiny_tokenizer().decode(ids)


def test_special_tokens_typed_by_a_user_become_special_tokens(tiny: Tokenizer) -> None:
    """As in transformers and vLLM, in prompts and in chats."""
    unsaid = tiny.apply_chat_template([{"role": "user", "content": ""}])
    for index, token in enumerate(SPECIAL_TOKENS):
        assert tiny.encode(f"a{token}b") == [*tiny.encode("a"), index, *tiny.encode("b")]
        chat = tiny.apply_chat_template([{"role": "user", "content": token}])
        assert chat.count(index) == unsaid.count(index) + 1
        assert tiny.decode([index]) == ""


# -- Hugging Face folders -------------------------------------------------------------------------


def test_a_folder_encodes_as_transformers_does(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path)
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.apply_chat_template(CHAT) == theirs.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False
    )


def test_a_folder_names_every_token_that_ends_a_turn(tiny: Tokenizer) -> None:
    assert tiny.eos_ids == {EOS, 0}
    assert tiny.special_ids == {0, 1, 2}


def test_the_bos_token_opens_raw_prompts_only(tmp_path: Path) -> None:
    """A chat template writes it itself where the model wants it."""
    folder = write_hf_folder(tmp_path)
    hf = AutoTokenizer.from_pretrained(folder, add_bos_token=True)
    hf.save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode("<|im_end|>") == [1, 2]
    assert tokenizer.apply_chat_template(CHAT).count(1) == 3


def test_variables_reach_the_template(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ 'ab' if enable_thinking else 'a' }}")
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode(tokenizer.apply_chat_template(CHAT)) == "a"
    thinking = tokenizer.apply_chat_template(CHAT, enable_thinking=True)
    assert tokenizer.decode(thinking) == "ab"


def test_chats_that_the_template_refuses_are_the_clients_error(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path)
    template = folder / "chat_template.jinja"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate") as refused:
        load_tokenizer(str(folder)).apply_chat_template(CHAT)
    assert refused.value.param == "messages"
    template.unlink()
    with pytest.raises(RequestError, match="template"):
        load_tokenizer(str(folder)).apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("<|im_start|>user\n{{ content }}<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
        ("<|im_start|>{{ content }}<|assistant|>", "<|assistant|>"),  # no special token, but one
        ("<|im_start|>[INST] {{ content }} [/INST]", None),
        ("<|im_start|>{{ content }}", None),
    ],
)
def test_what_a_chat_puts_behind_a_users_message(
    tmp_path: Path, template: str, end: str | None
) -> None:
    folder = write_hf_folder(tmp_path)
    hf = AutoTokenizer.from_pretrained(folder)
    hf.add_tokens(["<|assistant|>"])
    hf.chat_template = template.replace("content", "messages[0]['content']")
    hf.save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.end_of_user_turn() == (hf.convert_tokens_to_ids(end) if end else None)
    before = template.partition("{{")[0]
    assert tokenizer.user_turn("Do") == tokenizer.encode(f"{before}Do")


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_tokenizer(str(folder))


# -- SentencePiece with byte fallback -------------------------------------------------------------


def sentencepiece(*pieces: str) -> Backend:
    """Built as Llama 2's tokenizer is."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    backend = Backend(
        models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def test_sentencepiece_texts_survive_the_round_trip() -> None:
    backend = sentencepiece("▁", "a", "b", "世")
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), [])
    for text in ("a b", " a  b", "a世界🙂", "<0x41>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text == backend.decode(ids)


def test_what_continues_a_text_keeps_the_space_between() -> None:
    backend = sentencepiece("▁", "a", "b")
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), [])
    _, _, *behind = tokenizer.encode("a ba")
    assert tokenizer.decode(behind) == "ba"
    assert "a" + tokenizer.decode(behind, continued=True) == "a ba"


def test_other_kinds_of_decoding_are_refused() -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="'WordPiece' is not supported"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), [])


# -- GGUF -----------------------------------------------------------------------------------------


def test_a_gguf_file_encodes_as_the_folder_of_the_same_model(
    tmp_path: Path, tiny: Tokenizer
) -> None:
    tokenizer = load_tokenizer(str(write_gguf(tmp_path / "model.gguf")))
    for text in [*TEXTS, "".join(SPECIAL_TOKENS)]:
        assert tokenizer.encode(text) == tiny.encode(text)
    assert tokenizer.apply_chat_template(CHAT) == tiny.apply_chat_template(CHAT)
    assert tokenizer.eos_ids == tiny.eos_ids
    assert tokenizer.special_ids == tiny.special_ids


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "deepseek-r1-qwen", "gpt-2"])
def test_text_is_cut_as_the_file_says(tmp_path: Path, pre: str) -> None:
    """Transformers' own reader is the reference; it does not compose characters, as Qwen's
    tokenizer.json does, so that text is left to the next test."""
    file = write_gguf(tmp_path / "model.gguf", pre=pre)
    ours = load_tokenizer(str(file))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        if "e\u0301" not in text:
            assert ours.encode(text) == theirs.encode(text)


def test_qwen_composes_characters(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_gguf(tmp_path / "model.gguf", pre="qwen2")))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"


@pytest.mark.parametrize(
    ("pre", "add_bos", "opening"),
    [("llama-bpe", None, [1]), ("llama-bpe", False, []), ("qwen2", None, []), ("qwen2", True, [1])],
)
def test_llama_3_takes_a_bos_token_unless_the_file_says_otherwise(
    tmp_path: Path, pre: str, add_bos: bool | None, opening: list[int]
) -> None:
    tokenizer = load_tokenizer(str(write_gguf(tmp_path / "m.gguf", pre=pre, add_bos=add_bos)))
    assert tokenizer.encode("<|im_end|>") == [*opening, EOS]


def test_unknown_tokenizers_in_gguf_files_are_named(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", pre="tekken")
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre 'tekken'.*smollm"):
        load_tokenizer(str(file))
    write_header(file, "llama", **{"tokenizer.ggml.model": "llama"})
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.model 'llama'.*byte-level BPE"):
        load_tokenizer(str(file))
