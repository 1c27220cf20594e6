"""What the options name as prompts, and which messages are kept from training."""

import gzip
import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.errors import ConfigError
from adaptivespec.training.prompts import (
    _OPENING,
    Excluded,
    SelfWritten,
    read_prompts,
    read_self_written,
)


def jsonl(file: Path, rows: list[Any]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """Messages 0 to 9."""
    return jsonl(tmp_path / "ten.jsonl", [{"question": str(i)} for i in range(10)])


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "chosen"),
    [
        ("", "0123456789"),
        (":4", "0123"),
        (":99", "0123456789"),
        (":4:2", "0246"),
        (":99:3", "0369"),
    ],
)
def test_every_step_th_row_and_count_at_most(ten: Path, suffix: str, chosen: str) -> None:
    prompts = read_prompts(f"{ten}:question{suffix}")
    assert prompts.messages == list(chosen)
    assert prompts.name == "ten"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_fields_are_texts_or_lists_whose_first_element_counts(tmp_path: Path, name: str) -> None:
    rows = [{"turns": ["first", "second"]}, {"turns": "naïve, 日本語"}]
    file = jsonl(tmp_path / name, rows)
    prompts = read_prompts(f"{file}:turns")
    assert prompts.messages == ["first", "naïve, 日本語"]
    assert prompts.name == "rows"


def test_empty_lines_are_no_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('\n{"p": "a"}\n  \n{"p": "b"}')
    assert read_prompts(f"{file}:p:2:1").messages == ["a", "b"]


@pytest.mark.parametrize(
    "suffix",
    ["", ":", ":question:", ":question:0", ":question:-1", ":question:²", ":q:1:x", ":q:1:1:1"],
)
def test_what_is_no_description_of_prompts_is_refused(ten: Path, suffix: str) -> None:
    text = f"{ten}{suffix}"
    with pytest.raises(ConfigError, match=r"not FILE:FIELD\[:COUNT\[:STEP\]\]") as caught:
        read_prompts(text)
    assert repr(text) in str(caught.value)


BROKEN: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"question", "a row without 'question': 'question'"),
    "another field": (b'{"prompt": "x"}', "a row without 'question': .*prompt"),
    "no object": (b'["question"]', "a row without 'question'"),
    "a number": (b'{"question": 5}', "'question' is no text"),
    "an empty list": (b'{"question": []}', "'question' is no text"),
    "a list of lists": (b'{"question": [["x"]]}', "'question' is no text"),
    "no UTF-8": (b'{"question": "\xff"}', "utf-8"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_row_without_a_message_is_named(tmp_path: Path, fault: str) -> None:
    content, message = BROKEN[fault]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_prompts(f"{file}:question")
    assert str(file) in str(caught.value)


def test_rows_that_are_not_chosen_may_be_anything(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", [{"q": "a"}, {"other": 1}, {"q": "b"}, None])
    assert read_prompts(f"{file}:q:2:2").messages == ["a", "b"]


@pytest.mark.parametrize(
    "content",
    [b"plain text", gzip.compress(b'{"q": "a"}\n' * 99)[:-9], b"\x1f\x8b\x08" + bytes(40)],
    ids=["not compressed", "cut off", "damaged"],
)
def test_unreadable_archives_are_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"rows\.jsonl\.gz"):
        read_prompts(f"{file}:q")


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl"):
        read_prompts(f"{tmp_path}/nowhere.jsonl:q")
    with pytest.raises(ConfigError, match="directory"):
        read_prompts(f"{tmp_path}:q")


# -- messages that the target writes --------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("40", SelfWritten(40, "")),
        ("40:", SelfWritten(40, "")),
        ("1:Write", SelfWritten(1, "Write")),
        ("3:from x: y\\ndef ", SelfWritten(3, "from x: y\ndef ")),
    ],
)
def test_self_written(text: str, wanted: SelfWritten) -> None:
    assert read_self_written(text) == wanted


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "²", "Write", ":Write"])
def test_what_is_no_count_of_messages_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not COUNT\[:START\]") as caught:
        read_self_written(text)
    assert repr(text) in str(caught.value)


# -- messages never to train on -------------------------------------------------------------------

letters = string.ascii_letters + string.digits
words = st.lists(st.text(letters, min_size=1, max_size=12), min_size=1, max_size=30)
gaps = st.text(string.whitespace + string.punctuation, min_size=1, max_size=3)


@st.composite
def spellings(draw: st.DrawFn, texts: st.SearchStrategy[list[str]] = words) -> tuple[str, str]:
    """The same words twice, with case, spacing and punctuation of their own."""

    def spelling(text: list[str]) -> str:
        cased = [draw(st.sampled_from([str.upper, str.lower, str.title]))(word) for word in text]
        return draw(gaps) + "".join(word + draw(gaps) for word in cased)

    text = draw(texts)
    return spelling(text), spelling(text)


long_words = words.filter(lambda text: len("".join(text)) >= _OPENING)


@given(spellings())
def test_the_same_words_are_recognised(pair: tuple[str, str]) -> None:
    message, respelled = pair
    assert respelled in Excluded([message])


@given(spellings(long_words), st.text(), st.text())
def test_a_message_around_a_long_one_is_recognised(
    pair: tuple[str, str], before: str, after: str
) -> None:
    message, respelled = pair
    assert f"{before} {respelled} {after}" in Excluded(["Another.", message])


def test_the_opening_of_a_long_message_is_enough() -> None:
    message = (
        "Natalia sold clips to 48 of her friends in April, and then she sold half as many in May."
    )
    opening, short = message[:80], message[:40]
    assert f"Solve: {opening}?" in Excluded([message])
    assert f"Solve: {short}?" not in Excluded([message])


@given(words, words)
def test_other_words_are_not_recognised(excluded: list[str], message: list[str]) -> None:
    """Digits and letters alone tell the two apart: none of the message's words is in the other."""
    marked = " ".join("x" + word for word in message)
    others = " ".join(word.lower().replace("x", "y") for word in excluded)
    assert marked not in Excluded([others])


def test_a_short_message_is_recognised_by_all_of_its_words_only() -> None:
    excluded = Excluded(["Count to 10."])
    assert "count to 10" in excluded
    assert "Count to 100." not in excluded
    assert "Please count to 10." not in excluded


@given(st.text())
def test_nothing_excludes_nothing(message: str) -> None:
    assert message not in Excluded()
    assert message not in Excluded(["", " ?! "])
