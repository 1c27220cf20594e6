"""A minute of many clients, some of whom leave: nothing lost, nothing mixed up, nothing left."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.answers import Streamed, chat_reference
from tests.e2e.server import Server
from tests.smollm2 import PROMPTS, chat

CLIENTS = 32
SECONDS = 60
TOKENS = 48


class Tally:
    """What became of the requests; shared by all clients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.finished = 0
        self.left = 0

    def add(self, *, finished: int = 0, left: int = 0) -> None:
        with self._lock:
            self.finished += finished
            self.left += left


@pytest.mark.slow
def test_a_minute_of_clients_that_come_and_go(server: Server) -> None:
    expected = {message: chat_reference(message, TOKENS) for message in PROMPTS[:6]}
    tally, until = Tally(), time.monotonic() + SECONDS

    def client(seed: int) -> None:
        choices, api = random.Random(seed), server.client("lookup")
        while time.monotonic() < until:
            message = choices.choice(list(expected))
            stream = Streamed(api, chat(message), TOKENS)
            if choices.random() < 0.3:
                time.sleep(choices.uniform(0, 3))
                stream.leave()
                tally.add(left=1)
                assert expected[message].text.startswith(stream.text)
            else:
                answer = stream.answer()
                tally.add(finished=1)
                assert answer.text == expected[message].text
                assert answer.completion_tokens == len(expected[message].tokens)

    with ThreadPoolExecutor(CLIENTS) as pool:
        for ended in [pool.submit(client, seed) for seed in range(CLIENTS)]:
            ended.result()
    assert tally.finished > CLIENTS
    assert tally.left > CLIENTS / 4
    server.wait_until_idle("lookup")
    assert server.health("lookup")["drafter"] == "ready"
