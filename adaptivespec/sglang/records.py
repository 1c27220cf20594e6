"""Where every token of an answer came from, beside the token itself on SGLang's way to the caller.

SGLang streams a request's `customized_info` in step with its tokens, one entry each. Ours is an
integer: the token's origin, and at the first token of a step how many nodes its tree had below the
root. From these the caller counts steps, drafted, accepted and promoted tokens, of the delivered
tokens only, as every engine here does.
"""

from typing import TYPE_CHECKING, NamedTuple

from adaptivespec.acceptance import Acceptance
from adaptivespec.request import Origin

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

KEY = "adaptivespec"

_ORIGINS = 2  # bits


class Record(NamedTuple):
    """`drafted` is None but at the first token of a step: one that followed a verification."""

    origin: Origin
    drafted: int | None


def record_prefill(req: "Req") -> None:
    """The token after a prompt: no step of decoding."""
    _append(req, [int(Origin.TARGET)])


def record_step(req: "Req", outcome: Acceptance) -> None:
    """The tokens that a step accepted, and its bonus token."""
    origins = [Origin.PROMOTED if jump else Origin.DRAFTED for jump in outcome.promoted]
    entries = [int(origin) for origin in [*origins, Origin.TARGET]]
    entries[0] |= (outcome.drafted + 1) << _ORIGINS
    _append(req, entries)


def read(entry: int) -> Record:
    """An entry as it came through SGLang."""
    drafted = entry >> _ORIGINS
    return Record(Origin(entry & (2**_ORIGINS - 1)), drafted - 1 if drafted else None)


def _append(req: "Req", entries: list[int]) -> None:
    if req.customized_info is None:
        req.customized_info = {}
    req.customized_info.setdefault(KEY, []).extend(entries)
