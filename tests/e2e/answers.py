"""Asking the server, through OpenAI's client, for what the tests compare."""

import threading
import time
from functools import cache
from typing import Any, NamedTuple

import httpx
from openai import OpenAI, OpenAIError

from tests.e2e.server import MODEL, eventually
from tests.smollm2 import chat, greedy, tokenizer

COUNTING = "1, 2, 3, 4,"
"""Goes on without an end, and repeats itself enough for drafters without a model of the world."""


class Answer(NamedTuple):
    """What must not depend on speculation, and what tells that there was some."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    accepted_tokens: int

    @property
    def content(self) -> tuple[str, str, int, int]:
        """All that a client may rely on."""
        return self[:4]


def complete(
    client: OpenAI, prompt: str | list[int], max_tokens: int, *, mode: str = "adaptive", **body: Any
) -> Answer:
    """A whole answer to a raw prompt, at temperature 0 unless said otherwise."""
    answer = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=max_tokens,
        extra_body={"speculation": {"mode": mode}},
        **{"temperature": 0, **body},
    )
    [choice] = answer.choices
    return _answer(choice.text, choice.finish_reason, answer.usage)


def _answer(text: str, finish_reason: Any, usage: Any) -> Answer:
    return Answer(
        text,
        finish_reason,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.speculation["accepted_tokens"],
    )


class Streamed:
    """A greedy answer that arrives in the background."""

    def __init__(
        self,
        client: OpenAI,
        prompt: str | list[int],
        max_tokens: int,
        *,
        mode: str = "adaptive",
        **body: Any,
    ) -> None:
        self.chunks: list[str] = []
        self.times: list[float] = []  # seconds, of each chunk
        self._answer: Answer | None = None
        self._error: Exception | None = None
        self._ended = threading.Event()
        self._left = False
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "extra_body": {"speculation": {"mode": mode}},
            "temperature": 0,
            **body,
        }
        threading.Thread(target=self._run, args=(client, body), daemon=True).start()

    def _run(self, client: OpenAI, body: dict[str, Any]) -> None:
        try:
            reason = None
            with client.completions.create(
                stream=True, stream_options={"include_usage": True}, **body
            ) as stream:
                for chunk in stream:
                    for choice in chunk.choices:
                        self.chunks.append(choice.text)
                        self.times.append(time.monotonic())
                        reason = choice.finish_reason or reason
                    if chunk.usage:
                        self._answer = _answer(self.text, reason, chunk.usage)
                    if self._left:
                        return
        except (OpenAIError, httpx.TransportError) as error:
            self._error = error
        finally:
            self._ended.set()

    @property
    def text(self) -> str:
        """What has arrived so far."""
        return "".join(self.chunks)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def longest_gap(self) -> float:
        """The longest time between two chunks, in seconds."""
        return max(b - a for a, b in zip(self.times, self.times[1:], strict=False))

    def wait_for(self, chunks: int) -> None:
        """Wait for so many more chunks, while the answer goes on."""
        wanted = len(self.chunks) + chunks
        eventually(lambda: self.ended or len(self.chunks) >= wanted)
        assert not self.ended, f"the answer ended early: {self._error or self._answer}"

    def leave(self) -> None:
        """Close the connection at the next chunk, and wait until that has happened."""
        self._left = True
        eventually(lambda: self.ended)

    def answer(self) -> Answer:
        """Wait for the end. Raises what the client raised."""
        eventually(lambda: self.ended)
        if self._error is not None:
            raise self._error
        assert self._answer is not None, "the stream ended without usage"
        return self._answer


class Reference(NamedTuple):
    """transformers' greedy answer."""

    tokens: tuple[int, ...]

    @property
    def text(self) -> str:
        return tokenizer().decode([t for t in self.tokens if t not in tokenizer().eos_ids])


@cache
def reference(prompt: str, max_tokens: int) -> Reference:
    """transformers' greedy answer to a raw prompt."""
    return Reference(tuple(greedy(tokenizer().encode(prompt), max_tokens)))


@cache
def chat_reference(message: str, max_tokens: int) -> Reference:
    """transformers' greedy answer to a user's message."""
    return Reference(tuple(greedy(chat(message), max_tokens)))
