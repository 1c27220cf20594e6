"""Which of SGLang's requests the drafter holds, while SGLang starts, retracts and ends them."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from adaptivespec.config import load_settings
from adaptivespec.policy import make_policy
from adaptivespec.request import GenerationRequest
from adaptivespec.sampling import SamplingParams
from adaptivespec.sglang.requests import Requests, Speculation
from adaptivespec.shape import Shape

PROMPT = [5, 6, 7]
MAX_TOKENS = 10
NODES = 8
CAPACITY = len(PROMPT) + MAX_TOKENS + NODES


USUAL = GenerationRequest(prompt=PROMPT, max_tokens=MAX_TOKENS)


@dataclass
class Req:
    """What is read of SGLang's own request."""

    rid: str
    request: GenerationRequest = USUAL
    output_ids: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def origin_input_ids(self) -> list[int]:
        return self.request.prompt

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(
            max_new_tokens=self.request.max_tokens, custom_params=Speculation.params(self.request)
        )

    def finished(self) -> bool:
        return self.ended


@pytest.fixture
def requests() -> Requests:
    """With room for two at the drafter."""
    settings = load_settings(
        {
            "model": {"path": "a/model"},
            "engine": "sglang",
            "target": {"kv_tokens": 2 * CAPACITY + 1, "max_running": 4},
            "max_shape": [7, 4, NODES],
        }
    )
    return Requests(settings, make_policy(settings.policy))


def test_a_request_says_how_it_is_served(requests: Requests) -> None:
    asked = GenerationRequest(
        prompt=PROMPT,
        max_tokens=MAX_TOKENS,
        mode="static",
        shape=Shape(2, 2, 4),
        kappa=0.3,
        traceparent="00-1-2-01",
    )
    (sequence,) = requests.of([Req("a", asked)])
    assert (sequence.mode, sequence.shape, sequence.kappa) == ("static", Shape(2, 2, 4), 0.3)
    assert (sequence.tokens, sequence.tokens_left) == (PROMPT, MAX_TOKENS)
    assert sequence.traceparent == "00-1-2-01"


def test_the_margin_rule_is_for_temperature_0_alone(requests: Requests) -> None:
    """SGLang itself makes top_k 1 of a temperature of 0; a request's own top_k of 1 is no such."""
    sampling = SamplingParams(temperature=0.7, top_k=1, seed=3)
    asked = GenerationRequest(prompt=PROMPT, max_tokens=MAX_TOKENS, kappa=0.3, sampling=sampling)
    (sequence,) = requests.of([Req("a", asked)])
    assert sequence.sampling == sampling
    assert sequence.kappa == 1.0


def test_a_sequence_follows_what_sglang_emits(requests: Requests) -> None:
    req = Req("a")
    requests.of([req])
    req.output_ids += [8, 9]
    (sequence,) = requests.of([req])
    assert sequence.tokens == [*PROMPT, 8, 9]
    assert sequence.tokens_left == MAX_TOKENS - 2


def test_the_drafter_holds_what_has_room_there(requests: Requests) -> None:
    reqs = [Req("a"), Req("b"), Req("c")]
    sequences = requests.of(reqs)
    assert requests.hold(sequences) == sequences[:2]
    requests.forget("a")
    assert requests.take_closed() == [sequences[0].id]
    assert requests.hold(sequences[1:]) == sequences[1:]


def test_a_request_without_drafts_takes_no_room(requests: Requests) -> None:
    off = GenerationRequest(prompt=PROMPT, max_tokens=MAX_TOKENS, mode="off")
    sequences = requests.of([Req("a", off), Req("b"), Req("c")])
    assert requests.hold(sequences) == sequences[1:]


def test_a_request_for_one_token_is_not_worth_feeding(requests: Requests) -> None:
    single = GenerationRequest(prompt=PROMPT, max_tokens=1)
    assert requests.hold(requests.of([Req("a", single)])) == []


def test_a_request_that_is_not_in_the_decode_batch_has_left(requests: Requests) -> None:
    sequences = requests.of([Req("decoding"), Req("retracted"), Req("chunked")])
    requests.hold(sequences)
    for sequence in sequences[:2]:
        sequence.prefilling = False
    requests.keep(sequences[:1])
    assert requests.take_closed() == [sequences[1].id]
    assert len(requests) == 2


def test_a_request_may_end_with_its_prompt(requests: Requests) -> None:
    """Its only token came from there, or it was aborted: SGLang says so nowhere but in the request,
    and there may be no decoding step to miss it in."""
    req = Req("a")
    (sequence,) = requests.of([req])
    requests.hold([sequence])
    sequence.fed = 3
    assert (len(requests), requests.held) == (1, 1)
    req.ended = True
    assert (len(requests), requests.held) == (0, 0)
    (other,) = requests.of([Req("b")])
    assert requests.hold([other]) == [other]
    assert requests.take_closed() == [sequence.id]


def test_a_retracted_request_comes_back_as_a_new_one(requests: Requests) -> None:
    """The drafter was told to forget it, and is fed all of it again."""
    req = Req("a")
    (before,) = requests.of([req])
    before.fed, before.prefilling = 3, False
    req.output_ids += [8]
    requests.keep([])
    (after,) = requests.of([req])
    assert after.id != before.id
    assert (after.tokens, after.fed) == ([*PROMPT, 8], 0)


def test_another_drafter_knows_nothing(requests: Requests) -> None:
    sequences = requests.of([Req("a"), Req("b")])
    requests.hold(sequences)
    sequences[0].fed = 3
    requests.forget("b")
    requests.unfed()
    assert sequences[0].fed == 0
    assert requests.take_closed() == []
