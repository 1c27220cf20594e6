"""What a client receives of a request: tokens counted, text released, the reason it ended."""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from adaptivespec.request import FinishReason
from adaptivespec.tokenizer import Tokenizer


class Pushed(NamedTuple):
    """What came of a run of tokens: the first `counted` of them belong to the answer, and pieces[i]
    is the text that the i-th of these released."""

    counted: int
    pieces: list[str]
    finish_reason: FinishReason | None


class OutputStream:
    """The answer of one request, token by token, whatever runs the tokens arrive in.

    Text is released once it is certain: bytes of an unfinished UTF-8 character wait, and so does
    text that may be the beginning of a stop string. The answer ends with the first of: an `eos`
    token, which counts but has no text; the token that completes a stop string, which counts, with
    the text cut where the stop string begins; the token that makes `max_tokens`. Of stop strings
    that overlap, the one that is complete first wins, then the longest. Cost is linear in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        eos: frozenset[int] = frozenset(),
        max_tokens: int,
    ) -> None:
        """Raises ValueError for an empty stop string or max_tokens < 1."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        self.count = 0
        self.finish_reason: FinishReason | None = None
        self._token_bytes = tokenizer.token_bytes
        self._stops = [_StopString(text) for text in stop]
        self._eos = eos
        self._max_tokens = max_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, tokens: Sequence[int]) -> Pushed:
        """Append a run of committed tokens; what follows the end of the answer is ignored."""
        pieces = []
        for token in tokens:
            if self.finish_reason:
                break
            pieces.append(self._append(token))
        return Pushed(len(pieces), pieces, self.finish_reason)

    def _append(self, token: int) -> str:
        self.count += 1
        if token in self._eos:
            self.finish_reason = "stop"
            return self._flush()
        piece = self._release(self._utf8.decode(self._token_bytes(token)))
        if self.finish_reason is None and self.count == self._max_tokens:
            self.finish_reason = "length"
            piece += self._flush()
        return piece

    def _flush(self) -> str:
        """Release everything that was held back, at the end of the answer."""
        text = self._release(self._utf8.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        """Add `text` and return what became certain; sets `finish_reason` at a stop string."""
        if not self._stops:
            return text
        pending = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            matched = 0
            for stop in self._stops:
                if stop.advance(character):
                    matched = max(matched, len(stop.text))
            if matched:
                self.finish_reason = "stop"
                self._held = ""
                return pending[: end - matched]
        certain = len(pending) - max(stop.matched for stop in self._stops)
        self._held = pending[certain:]
        return pending[:certain]


class _StopString:
    """Knuth, Morris and Pratt's search: `matched` characters of `text` end at the current one."""

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("a stop string must not be empty")
        self.text = text
        self.matched = 0
        self._shorter = [0] * (len(text) + 1)  # [n]: next longest match once n characters match
        for n in range(2, len(text) + 1):
            self.matched = self._shorter[n - 1]
            self.advance(text[n - 1])
            self._shorter[n] = self.matched
        self.matched = 0

    def advance(self, character: str) -> bool:
        """Take one more character of the output; true when it completes the stop string."""
        while self.matched and (
            self.matched == len(self.text) or self.text[self.matched] != character
        ):
            self.matched = self._shorter[self.matched]
        if self.text[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.text)
