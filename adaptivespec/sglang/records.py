"""Where every token of an answer came from, beside the token itself on SGLang's way to the caller.

SGLang streams a request's `customized_info` in step with its tokens, one entry each, of any type.
Ours has the token's origin, and at the first token of a step how many nodes its tree had below the
root, and where the step's time went. From these the caller makes the usage, of the delivered tokens
only, as every engine here does.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import astuple

from adaptivespec.acceptance import Acceptance
from adaptivespec.request import Origin, StepSeconds

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

KEY = "adaptivespec"


class Step(NamedTuple):
    """A verification: nodes of the tree below its root, and the time of the whole step, which all
    requests in it share."""

    drafted: int
    seconds: StepSeconds


class Record(NamedTuple):
    """`step` is None but at the first token of a step: one that followed a verification."""

    origin: Origin
    step: Step | None


def record_prefill(req: "Req") -> None:
    """The token after a prompt: no step of decoding."""
    _append(req, [(int(Origin.TARGET),)])


def record_step(req: "Req", outcome: Acceptance, seconds: StepSeconds) -> None:
    """The tokens that a step accepted, and its bonus token."""
    origins = [Origin.PROMOTED if jump else Origin.DRAFTED for jump in outcome.promoted]
    first, *others = [(int(origin),) for origin in [*origins, Origin.TARGET]]
    _append(req, [(*first, outcome.drafted, *astuple(seconds)), *others])


def read(entry: tuple[Any, ...]) -> Record:
    """An entry as it came through SGLang."""
    origin, *step = entry
    if not step:
        return Record(Origin(origin), None)
    drafted, *seconds = step
    parts = dict(zip(StepSeconds.__struct_fields__, seconds, strict=True))
    return Record(Origin(origin), Step(drafted, StepSeconds(**parts)))


def _append(req: "Req", entries: list[tuple[Any, ...]]) -> None:
    if req.customized_info is None:
        req.customized_info = {}
    req.customized_info.setdefault(KEY, []).extend(entries)
