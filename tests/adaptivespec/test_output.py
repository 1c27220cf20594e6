"""What counts, what is released and why an answer ends, however its tokens arrive."""

import codecs
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.output import OutputStream, Pushed
from adaptivespec.tokenizer import Tokenizer, load_tokenizer
from tests.factories import EOS, VOCAB_SIZE, write_hf_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(write_hf_folder(tmp_path_factory.mktemp("tiny"))))


def tokens_of(tokenizer: Tokenizer, text: str | bytes) -> list[int]:
    """One token per byte: any text can be cut anywhere."""
    single = {tokenizer.token_bytes(token): token for token in reversed(range(VOCAB_SIZE))}
    encoded = text.encode() if isinstance(text, str) else text
    return [single[bytes([byte])] for byte in encoded]


def run(stream: OutputStream, *runs: list[int]) -> tuple[int, str, str | None]:
    """(tokens counted, text, finish reason) after pushing the runs one after the other."""
    pushed = [stream.push(tokens) for tokens in runs]
    assert all(len(one.pieces) == one.counted for one in pushed)
    text = "".join(piece for one in pushed for piece in one.pieces)
    return sum(one.counted for one in pushed), text, pushed[-1].finish_reason


# -- where an answer ends -------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["eos", "stop string"])
def test_a_stop_inside_the_budget_beats_the_cap(tokenizer: Tokenizer, ending: str) -> None:
    """Case 1: [10, 11, STOP, 20, 21, 22] with max_tokens 5."""
    stop = [EOS] if ending == "eos" else tokens_of(tokenizer, "!")
    tokens = tokens_of(tokenizer, "ab") + stop + tokens_of(tokenizer, "xyz")
    stream = OutputStream(tokenizer, stop=("!",), eos=frozenset([EOS]), max_tokens=5)
    assert stream.push(tokens) == Pushed(3, ["a", "b", ""], "stop")
    assert stream.count == 3


def test_a_stop_beyond_the_budget_comes_too_late(tokenizer: Tokenizer) -> None:
    """Case 2: STOP in seventh place, max_tokens 5."""
    tokens = [*tokens_of(tokenizer, "abcdef"), EOS]
    stream = OutputStream(tokenizer, eos=frozenset([EOS]), max_tokens=5)
    assert run(stream, tokens) == (5, "abcde", "length")


@pytest.mark.parametrize(
    ("tokens", "counted", "text", "reason"),
    [("abcd!", 5, "abcd", "stop"), ("abcde!", 5, "abcde", "length")],
)
def test_a_stop_at_the_last_token_of_the_budget(
    tokenizer: Tokenizer, tokens: str, counted: int, text: str, reason: str
) -> None:
    stream = OutputStream(tokenizer, stop=("!",), max_tokens=5)
    assert run(stream, tokens_of(tokenizer, tokens)) == (counted, text, reason)


def test_a_stop_string_may_be_complete_at_the_first_token_of_a_long_run(
    tokenizer: Tokenizer,
) -> None:
    """Case 3, first half: everything after the first of eight tokens is dropped."""
    stream = OutputStream(tokenizer, stop=("END",), max_tokens=100)
    tokens = tokens_of(tokenizer, "the END and on")
    assert run(stream, tokens[:6], tokens[6:14]) == (7, "the ", "stop")


@pytest.mark.parametrize("border", range(1, 14))
def test_a_stop_string_may_span_steps(tokenizer: Tokenizer, border: int) -> None:
    """Case 3, second half: at any border, and a long one over many steps."""
    tokens = tokens_of(tokenizer, "the END and on")
    stream = OutputStream(tokenizer, stop=("END",), max_tokens=100)
    assert run(stream, tokens[:border], tokens[border:]) == (7, "the ", "stop")


def test_a_long_stop_string_arrives_token_by_token(tokenizer: Tokenizer) -> None:
    stop = "x" + 50 * "ab" + "y"
    stream = OutputStream(tokenizer, stop=(stop,), max_tokens=1000)
    tokens = tokens_of(tokenizer, "go " + stop + "rest")
    assert run(stream, *([token] for token in tokens)) == (3 + len(stop), "go ", "stop")


def test_a_stop_string_may_end_in_the_middle_of_a_token(tokenizer: Tokenizer) -> None:
    (the,) = tokenizer.encode("the")
    stream = OutputStream(tokenizer, stop=("h",), max_tokens=10)
    assert stream.push([*tokens_of(tokenizer, "a"), the, the]) == Pushed(2, ["a", "t"], "stop")


def test_nothing_follows_an_accepted_eos(tokenizer: Tokenizer) -> None:
    """Case 4: a drafted EOS is accepted, the step's bonus token is not part of the answer."""
    bonus = tokens_of(tokenizer, "b")
    stream = OutputStream(tokenizer, eos=frozenset([0, EOS]), max_tokens=100)
    assert run(stream, tokens_of(tokenizer, "a"), [EOS, *bonus], bonus) == (2, "a", "stop")


@pytest.mark.parametrize("cap", range(1, 9))
def test_the_budget_may_end_inside_a_run(tokenizer: Tokenizer, cap: int) -> None:
    """Case 5: exactly max_tokens tokens, not fewer."""
    stream = OutputStream(tokenizer, stop=("z",), max_tokens=cap)
    tokens = tokens_of(tokenizer, "abcdefgh")
    assert run(stream, tokens[:2], tokens[2:]) == (cap, "abcdefgh"[:cap], "length")


def test_the_count_is_that_of_the_tokens_behind_the_text(tokenizer: Tokenizer) -> None:
    """Case 8: text and count tell of the same tokens, with runs of any length."""
    tokens = tokenizer.encode("the quick brown fox, 世界 🙂, jumps over 1234567890 lazy dogs " * 3)
    for length in range(1, 9):
        stream = OutputStream(tokenizer, max_tokens=64)
        runs = (tokens[i : i + length] for i in range(0, len(tokens), length))
        counted, text, reason = run(stream, *runs)
        assert (counted, stream.count, reason) == (64, 64, "length")
        assert text == tokenizer.decode(tokens[:64])


# -- what is released, and when -------------------------------------------------------------------


def test_text_that_may_become_a_stop_string_waits_and_no_more(tokenizer: Tokenizer) -> None:
    stream = OutputStream(tokenizer, stop=("aab",), max_tokens=100)
    pushed = stream.push(tokens_of(tokenizer, "xaaaac"))
    assert pushed.pieces == ["x", "", "", "a", "a", "aac"]


@pytest.mark.parametrize(
    ("ending", "reason"), [([EOS], "stop"), ([], "length")], ids=["eos", "length"]
)
def test_what_was_held_back_is_flushed_at_the_end(
    tokenizer: Tokenizer, ending: list[int], reason: str
) -> None:
    tokens = tokens_of(tokenizer, "so EN") + ending
    stream = OutputStream(tokenizer, stop=("END",), eos=frozenset([EOS]), max_tokens=len(tokens))
    assert run(stream, tokens) == (len(tokens), "so EN", reason)


def test_of_overlapping_stop_strings_the_first_to_be_complete_wins(tokenizer: Tokenizer) -> None:
    def ended(*stop: str) -> tuple[int, str, str | None]:
        stream = OutputStream(tokenizer, stop=stop, max_tokens=100)
        return run(stream, tokens_of(tokenizer, "one two three"))

    assert ended("two three", "w") == (6, "one t", "stop")
    assert ended("w", "two three") == (6, "one t", "stop")
    assert ended("o", "two") == (1, "", "stop")
    assert ended("o three", "two t") == (9, "one ", "stop")
    assert ended("wo", "two", "o t") == (7, "one ", "stop")
    assert ended("hree", "three", "ee") == (13, "one two ", "stop")


def test_special_tokens_have_no_text_and_count(tokenizer: Tokenizer) -> None:
    (start,) = tokenizer.encode("<|im_start|>")
    stream = OutputStream(tokenizer, stop=("ab", "<|im_start|>"), max_tokens=100)
    tokens = [*tokens_of(tokenizer, "xa"), start, *tokens_of(tokenizer, "b")]
    assert run(stream, tokens) == (4, "x", "stop")


def test_incomplete_characters_wait_until_they_resolve(tokenizer: Tokenizer) -> None:
    """Case 6: no U+FFFD is sent early, no character twice."""
    stream = OutputStream(tokenizer, max_tokens=100)
    world = tokens_of(tokenizer, "世")
    assert "".join(stream.push(tokens_of(tokenizer, "A ") + world[:2]).pieces) == "A "
    assert stream.push(world[2:]).pieces == ["世"]
    assert stream.push(tokens_of(tokenizer, "a")).pieces == ["a"]
    assert stream.push(tokens_of(tokenizer, "b")).pieces == ["b"]


def test_a_character_that_never_resolves_is_sent_when_that_is_certain(
    tokenizer: Tokenizer,
) -> None:
    stream = OutputStream(tokenizer, max_tokens=100)
    assert stream.push(tokens_of(tokenizer, b"\xe4\xb8x")).pieces == ["", "", "\ufffdx"]


@pytest.mark.parametrize("ending", ["eos", "length"])
def test_an_answer_may_end_inside_a_character(tokenizer: Tokenizer, ending: str) -> None:
    tokens = tokens_of(tokenizer, b"a\xe4\xb8") + ([EOS] if ending == "eos" else [])
    stream = OutputStream(tokenizer, eos=frozenset([EOS]), max_tokens=len(tokens))
    assert run(stream, tokens)[1] == "a\ufffd"


def test_a_genuine_run_of_replacement_characters_gets_through(tokenizer: Tokenizer) -> None:
    """Case 7: bytes that are no UTF-8, and the character U+FFFD itself; at once, not at the end."""
    stream = OutputStream(tokenizer, max_tokens=10_000)
    pieces = stream.push(tokens_of(tokenizer, 2000 * b"\xff")).pieces
    assert pieces == 2000 * ["\ufffd"]
    spelled = stream.push(tokens_of(tokenizer, 1000 * "\ufffd")).pieces
    assert spelled == 1000 * ["", "", "\ufffd"]


def test_the_work_per_token_does_not_grow(tokenizer: Tokenizer) -> None:
    """Case 7, cost: what is held back stays bounded by the longest stop string, whatever comes."""
    stop = "aaaab"
    stream = OutputStream(tokenizer, stop=(stop,), max_tokens=100_000)
    (a,) = tokens_of(tokenizer, "a")
    released = itertools.accumulate(len(piece) for piece in stream.push([a] * 2000).pieces)
    assert all(n - done < len(stop) for n, done in enumerate(released, 1))


@pytest.mark.parametrize("bad", [{"stop": ("",), "max_tokens": 1}, {"max_tokens": 0}])
def test_impossible_requests_are_refused(tokenizer: Tokenizer, bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must (not )?be"):
        OutputStream(tokenizer, **bad)  # type: ignore[arg-type]


# -- the whole kind -------------------------------------------------------------------------------


def expected(
    tokenizer: Tokenizer, tokens: list[int], stop: list[str], max_tokens: int
) -> tuple[int, str, str | None]:
    """The same by definition: after every token, decode everything and look everywhere."""
    for count in range(1, len(tokens) + 1):
        eos = tokens[count - 1] == EOS
        over = eos or count == max_tokens
        raw = b"".join(map(tokenizer.token_bytes, tokens[:count]))
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(raw, final=over)
        for end in range(1, len(text) + 1):
            if ends := [s for s in stop if text[:end].endswith(s)]:
                return count, text[: end - max(map(len, ends))], "stop"
        if over:
            assert text == tokenizer.decode(tokens[:count])
            return count, text, "stop" if eos else "length"
    return len(tokens), "", None


ALPHABET = ["a", "b", "é", "世", "🙂", "\ufffd", " ", "1"]
WORDS = ["the ", "aab", "ab", "éa", "世🙂", "<|im_end|>", "<|im_start|>", "\ufffd"]
BYTES = [b"\xc3", b"\xa9", b"\xf0", b"\x9f\x99", b"\x82", b"\xff", b"\xe4", b"\xb8\x96"]


@given(
    parts=st.lists(st.sampled_from([*ALPHABET, *WORDS, *BYTES, VOCAB_SIZE - 1]), max_size=25),
    stop=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    max_tokens=st.integers(1, 60),
    cuts=st.sets(st.integers(0, 60)),
)
def test_any_split_into_runs_gives_the_same_answer(
    tokenizer: Tokenizer,
    parts: list[str | bytes | int],
    stop: list[str],
    max_tokens: int,
    cuts: set[int],
) -> None:
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        elif isinstance(part, str):
            tokens += tokenizer.encode(part)
        else:
            tokens += tokens_of(tokenizer, part)
    borders = sorted({0, len(tokens)} | {cut for cut in cuts if cut < len(tokens)})
    runs = [tokens[a:b] for a, b in itertools.pairwise(borders)] or [[]]

    def stream() -> OutputStream:
        return OutputStream(tokenizer, stop=stop, eos=frozenset([EOS]), max_tokens=max_tokens)

    in_runs = run(stream(), *runs)
    one_by_one = run(stream(), *([token] for token in tokens), [])
    assert in_runs == one_by_one
    by_definition = expected(tokenizer, tokens, stop, max_tokens)
    if by_definition[2] is None:
        assert (in_runs[0], in_runs[2]) == (len(tokens), None)
        assert tokenizer.decode(tokens).startswith(in_runs[1])
    else:
        assert in_runs == by_definition
