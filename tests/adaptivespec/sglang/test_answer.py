"""What a client receives of SGLang's chunks: as of the embedded engine, whatever runs they make."""

from types import SimpleNamespace
from typing import Any

import pytest

from adaptivespec.acceptance import Acceptance
from adaptivespec.errors import RequestError, TargetLost
from adaptivespec.request import Delta, GenerationRequest, Origin, StepSeconds
from adaptivespec.sglang import records
from adaptivespec.sglang.target import Answer
from adaptivespec.tokenizer import Tokenizer, load_tokenizer
from tests.factories import EOS, write_hf_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(write_hf_folder(tmp_path_factory.mktemp("tiny"))))


SECONDS = StepSeconds(draft=0.25, transfer=0.125, verify=2.0, other=0.5)  # of every step


def step(tokens: list[int], promoted: list[bool], drafted: int) -> Acceptance:
    """A step that accepted all but the last of `tokens`, its bonus token."""
    path = list(range(len(tokens)))
    return Acceptance(path, tokens[:-1], promoted, tokens[-1], 1.0, drafted, len(tokens) - 1)


def chunk(*steps: Acceptance, prefill: int | None = None, finish: Any = None) -> dict[str, Any]:
    """What SGLang hands on after the worker recorded these steps."""
    req: Any = SimpleNamespace(customized_info=None)
    tokens = []
    if prefill is not None:
        records.record_prefill(req)
        tokens.append(prefill)
    for outcome in steps:
        records.record_step(req, outcome, SECONDS)
        tokens += [*outcome.tokens, outcome.bonus]
    info = {"finish_reason": finish, records.KEY: req.customized_info[records.KEY]}
    return {"output_ids": tokens, "meta_info": info}


def answer(tokenizer: Tokenizer, max_tokens: int = 20) -> Answer:
    return Answer(GenerationRequest(prompt=[1], max_tokens=max_tokens), tokenizer)


def test_origins_and_counts_come_with_the_tokens(tokenizer: Tokenizer) -> None:
    given = answer(tokenizer, max_tokens=6)
    first = given.extend(chunk(prefill=40))
    assert first.origins == [Origin.TARGET]
    rest = given.extend(chunk(step([41, 42, 43], [False, True], 7), step([44, 45], [False], 3)))
    assert rest.tokens == [41, 42, 43, 44, 45]
    assert rest.origins == [
        Origin.DRAFTED,
        Origin.PROMOTED,
        Origin.TARGET,
        Origin.DRAFTED,
        Origin.TARGET,
    ]
    usage = rest.usage
    assert rest.finish_reason == "length"
    assert usage is not None
    assert (usage.completion_tokens, usage.steps, usage.drafted_tokens) == (6, 2, 10)
    assert (usage.accepted_tokens, usage.promoted_tokens) == (3, 1)
    assert usage.accepted_per_position == [2, 1]
    assert usage.step_seconds == SECONDS + SECONDS


def test_a_step_may_come_in_pieces(tokenizer: Tokenizer) -> None:
    given = answer(tokenizer, max_tokens=5)
    given.extend(chunk(prefill=40))
    whole = chunk(step([41, 42, 43, 44], [False] * 3, 7))
    for start, stop in ((0, 2), (2, 4)):
        info = whole["meta_info"] | {records.KEY: whole["meta_info"][records.KEY][start:stop]}
        last = given.extend({"output_ids": whole["output_ids"][start:stop], "meta_info": info})
    assert last.usage is not None
    assert last.usage.steps == 1
    assert last.usage.accepted_per_position == [1, 1, 1]
    assert last.usage.step_seconds == SECONDS


def test_nothing_after_a_stop_inside_a_run_counts(tokenizer: Tokenizer) -> None:
    given = answer(tokenizer)
    given.extend(chunk(prefill=40))
    delta = given.extend(chunk(step([41, EOS, 43, 44], [False, False, True], 8)))
    assert delta.tokens == [41, EOS]
    assert delta.finish_reason == "stop"
    assert delta.usage is not None
    assert delta.usage.completion_tokens == 3
    assert (delta.usage.accepted_tokens, delta.usage.promoted_tokens) == (2, 0)
    assert delta.usage.accepted_per_position == [1, 1]


def test_a_step_without_drafts_is_a_step(tokenizer: Tokenizer) -> None:
    given = answer(tokenizer, max_tokens=2)
    given.extend(chunk(prefill=40))
    delta: Delta = given.extend(chunk(step([41], [], 0)))
    assert delta.usage is not None
    assert (delta.usage.steps, delta.usage.drafted_tokens) == (1, 0)
    assert delta.usage.mean_acceptance_length == 1.0


@pytest.mark.parametrize(("status", "error"), [(400, RequestError), (503, TargetLost)])
def test_a_request_that_sglang_gives_up_says_why(
    tokenizer: Tokenizer, status: int, error: type[Exception]
) -> None:
    ended = {"type": "abort", "message": "out of slots", "status_code": status}
    with pytest.raises(error, match="SGLang: out of slots"):
        answer(tokenizer).extend(chunk(prefill=40, finish=ended))


def test_an_answer_that_sglang_ends_and_we_do_not_is_an_error(tokenizer: Tokenizer) -> None:
    """Where it saw no numbers in the logits, for one: nothing must pass for a whole answer."""
    ended = {"type": "stop", "matched": "NaN happened"}
    with pytest.raises(TargetLost, match="NaN happened"):
        answer(tokenizer).extend(chunk(prefill=40, finish=ended))
