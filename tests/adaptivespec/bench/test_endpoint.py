"""Arms on a server, over the real HTTP application and a real, if tiny, model."""

from collections.abc import Iterator

import pytest

from adaptivespec.bench.arms import Arm, Rule, adaptive_arm, static_arm
from adaptivespec.bench.endpoint import Endpoint, EndpointError
from adaptivespec.bench.in_process import InProcess
from adaptivespec.bench.runner import Options
from adaptivespec.bench.sets import Item
from adaptivespec.config import Settings
from adaptivespec.shape import Shape
from tests.smollm2 import PROMPTS

ITEMS = [Item(i, text) for i, text in enumerate(PROMPTS[:4])]
OPTIONS = Options(max_tokens=24, ignore_eos=True)
PLAIN, PEER = Arm(name="plain"), Arm(name="other", peer="http://other/v1")
ARMS = [PLAIN, static_arm(Shape(3, 1, 4)), adaptive_arm("adaptive", None, Rule(0.05))]


@pytest.fixture
def endpoint(url: str) -> Iterator[Endpoint]:
    endpoint = Endpoint(url)
    endpoint.status()
    yield endpoint
    endpoint.close()


def test_answers_are_those_of_the_same_arm_in_process(
    endpoint: Endpoint, settings: Settings
) -> None:
    here = InProcess({None: settings}, ITEMS, 24, 4)
    for arm in ARMS:
        for concurrency in (1, 3):
            served = endpoint.run(arm, ITEMS, concurrency, OPTIONS)
            local = here.run(arm, ITEMS, concurrency, OPTIONS)
            for a, b in zip(served.answers, local.answers, strict=True):
                assert (a.row, a.seed, a.text, a.tokens) == (b.row, b.seed, b.text, b.tokens)
                assert (a.prompt_tokens, a.finish_reason) == (b.prompt_tokens, b.finish_reason)
                assert a.counts is not None
                assert b.counts is not None
                assert a.counts.accepted_per_position == b.counts.accepted_per_position
                assert sum(a.counts.accepted_per_position) == a.counts.accepted_tokens


def test_times_are_the_clients_and_the_split_the_servers(endpoint: Endpoint) -> None:
    outcome = endpoint.run(ARMS[1], ITEMS[:1], 1, OPTIONS)
    (answer,) = outcome.answers
    assert 0 < answer.first_token_s < answer.seconds <= outcome.seconds
    assert answer.counts is not None
    assert 0 < answer.counts.step_seconds.total < answer.seconds


def test_a_peer_is_not_told_of_speculation(endpoint: Endpoint) -> None:
    """The server then decodes as its own settings say, at kappa 0.2."""
    answer = endpoint.run(PEER, ITEMS[:1], 1, OPTIONS).answers[0]
    assert answer.tokens == 24
    assert answer.counts is not None
    assert answer.counts.drafted_tokens > 0


def test_the_servers_name_and_state_are_kept(endpoint: Endpoint, url: str) -> None:
    assert endpoint.identity() == {"url": url, "model": "tiny"}
    status = endpoint.status()
    assert status is not None
    assert status["policy"] == "dcs"


def test_a_refusal_says_what_the_server_said(endpoint: Endpoint) -> None:
    with pytest.raises(EndpointError, match="maximum context length is 512"):
        endpoint.run(PLAIN, ITEMS, 2, Options(max_tokens=10_000))
    assert endpoint.run(PLAIN, ITEMS[:1], 1, OPTIONS).answers[0].tokens == 24


def test_no_server_is_one_error() -> None:
    pytest.importorskip("openai")
    with pytest.raises(EndpointError, match=r"http://127\.0\.0\.1:9/v1"):
        Endpoint("http://127.0.0.1:9/v1")
