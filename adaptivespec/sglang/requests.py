"""The requests of SGLang's scheduler, as the method sees them."""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from adaptivespec.config import GuardSettings, Settings
from adaptivespec.drafting import DraftedSequence
from adaptivespec.policy import Policy
from adaptivespec.request import GenerationRequest, Mode
from adaptivespec.sampling import SamplingParams
from adaptivespec.shape import Shape
from adaptivespec.signals import Rule

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_KEY = "adaptivespec"  # in a request's custom parameters


class Speculation(msgspec.Struct, frozen=True):
    """What of a `GenerationRequest` SGLang's own parameters have no place for. Every request has
    it, for they all come through `SGLangTarget`."""

    mode: Mode
    kappa: float
    shape: Shape | None
    guards: GuardSettings
    sampling: SamplingParams  # SGLang's own keep neither the seed nor what a temperature of 0 was
    traceparent: str | None

    @classmethod
    def params(cls, request: GenerationRequest) -> dict[str, Any]:
        """SGLang's `custom_params` for a request."""
        asked = cls(
            mode=request.mode,
            kappa=request.kappa,
            shape=request.shape,
            guards=request.guards,
            sampling=request.sampling,
            traceparent=request.traceparent,
        )
        return {_KEY: msgspec.to_builtins(asked)}


class ServedSequence(DraftedSequence):
    """One of SGLang's requests.

    held      the drafter has room for it
    prefilling  its prompt, or all of it after a retraction, is not cached yet
    """

    def __init__(self, id: int, req: "Req", settings: Settings, policy: Policy) -> None:
        params = req.sampling_params
        asked = msgspec.convert(params.custom_params[_KEY], Speculation)
        rule = Rule.of(asked.kappa, asked.sampling)
        self.prompt = len(req.origin_input_ids)
        super().__init__(
            id,
            list(req.origin_input_ids),
            params.max_new_tokens,
            self.prompt + params.max_new_tokens + settings.max_shape.nodes,
            policy.signals(rule),
            asked.mode,
            asked.shape,
            asked.guards,
            asked.traceparent,
        )
        self.req = req
        self.prefilling = True
        self.held = False
        self.sampling = asked.sampling
        self.kappa = rule.kappa

    def follow(self) -> None:
        """Take up what SGLang has emitted since the last step."""
        known = len(self.tokens) - self.prompt
        new = list(self.req.output_ids[known:])
        self.tokens += new
        self.tokens_left -= len(new)


class Requests:
    """The running requests by SGLang's ids, and what the drafter may hold of them.

    SGLang reserves no cache for what a request may still emit; the drafter does. So a request is
    fed to the drafter when its whole length has room there, and decodes plainly until then.
    """

    def __init__(self, settings: Settings, policy: Policy) -> None:
        self._settings = settings
        self._policy = policy
        self._ids = count()
        self._known: dict[str, ServedSequence] = {}
        self._closed: list[int] = []

    def __len__(self) -> int:
        """Those that have not ended."""
        return sum(not s.req.finished() for s in list(self._known.values()))

    @property
    def held(self) -> int:
        """Of these, the ones that the drafter knows."""
        return sum(s.fed > 0 and not s.req.finished() for s in list(self._known.values()))

    def of(self, reqs: Iterable["Req"]) -> list[ServedSequence]:
        """The sequences of a batch, up to date."""
        self._forget_ended()
        sequences = []
        for req in reqs:
            sequence = self._known.get(req.rid)
            if sequence is None or sequence.req is not req:
                self.forget(req.rid)
                sequence = ServedSequence(next(self._ids), req, self._settings, self._policy)
                self._known[req.rid] = sequence
            sequence.follow()
            sequences.append(sequence)
        return sequences

    def hold(self, sequences: Sequence[ServedSequence]) -> list[ServedSequence]:
        """Those of the sequences that the drafter has, or now gets, room for."""
        held = [s for s in self._known.values() if s.held]
        tokens, slots = sum(s.capacity for s in held), len(held)
        target = self._settings.target
        for sequence in sequences:
            if sequence.held or not sequence.drafts or sequence.tokens_left < 2:
                continue
            if slots < target.max_running and tokens + sequence.capacity <= target.kv_tokens:
                sequence.held = True
                tokens += sequence.capacity
                slots += 1
        return [s for s in sequences if s.held]

    def keep(self, decoding: Sequence[ServedSequence]) -> None:
        """A decode batch has every decoding request: whoever decoded and is not in it has left, or
        was retracted and comes back with a prefill."""
        present = {s.req.rid for s in decoding}
        for rid, sequence in list(self._known.items()):
            if rid not in present and not sequence.prefilling:
                self.forget(rid)

    def forget(self, rid: str) -> None:
        """A request has left; unknown ones are ignored."""
        sequence = self._known.pop(rid, None)
        if sequence is not None and sequence.held:
            self._closed.append(sequence.id)

    def _forget_ended(self) -> None:
        """SGLang tells of an end by a decoding step, and not of one with, or within, the prompt."""
        for rid, sequence in list(self._known.items()):
            if sequence.req.finished():
                self.forget(rid)

    def take_closed(self) -> list[int]:
        """Ids that the drafter has to forget."""
        self._forget_ended()
        closed, self._closed = self._closed, []
        return closed

    def unfed(self) -> None:
        """Another drafter, or none, is in use: it knows nothing."""
        self._closed.clear()
        for sequence in self._known.values():
            sequence.fed = 0
