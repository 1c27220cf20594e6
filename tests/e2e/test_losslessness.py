"""Through HTTP, Serve, the actors and the link, at kappa 1, the text is the target's own."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.answers import COUNTING, chat_reference, complete, reference
from tests.e2e.conftest import LM_QUEUED, LM_RUNNING
from tests.e2e.server import Server
from tests.smollm2 import PROMPTS, chat

APPS = ["lookup", "lm", "eagle3"]
TOKENS = 48


@pytest.mark.parametrize("app", APPS)
def test_concurrent_answers_are_transformers_own(server: Server, app: str) -> None:
    prompts = PROMPTS[: LM_RUNNING + LM_QUEUED if app == "lm" else 6]
    client = server.client(app)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: complete(client, chat(p), TOKENS), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = chat_reference(prompt, TOKENS)
        assert answer.text == expected.text
        assert answer.completion_tokens == len(expected.tokens)


@pytest.mark.parametrize("app", APPS)
def test_a_lone_answer_with_accepted_drafts_is_transformers_own(server: Server, app: str) -> None:
    answer = complete(server.client(app), COUNTING, TOKENS)
    assert answer.text == reference(COUNTING, TOKENS).text
    assert answer.completion_tokens == TOKENS
    assert answer.accepted_tokens > 0


@pytest.mark.parametrize("app", APPS)
def test_seeded_sampling_does_not_depend_on_speculation(server: Server, app: str) -> None:
    """Of a text of low entropy: where many tokens are equally likely, float32's rounding, which
    depends on what is computed together, may decide between two of them."""
    client = server.client(app)
    for seed in range(2):
        with_drafts, without = (
            complete(client, COUNTING, 32, mode=mode, temperature=1, seed=seed)
            for mode in ("adaptive", "off")
        )
        assert with_drafts.content == without.content
        assert without.accepted_tokens == 0


def test_seeds_matter(server: Server) -> None:
    client = server.client("lookup")
    texts = {complete(client, "Once", 16, temperature=1, seed=seed).text for seed in range(4)}
    assert len(texts) > 1
