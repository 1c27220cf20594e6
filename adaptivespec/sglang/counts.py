"""What a worker has done so far: plain numbers, written by the scheduler's thread and read by its
owner's."""

import statistics
import time
from collections import deque

from adaptivespec.acceptance import Acceptance
from adaptivespec.request import StepSeconds


class Counts:
    """Totals over all requests. `steps` count verified trees, `passes` verifications of a batch."""

    def __init__(self) -> None:
        self.steps = self.drafted = self.accepted = self.promoted = 0
        self.passes = self.graph_passes = 0
        self.drafter_s = self.verify_s = 0.0
        self._overheads: deque[float] = deque(maxlen=1024)
        self._active_at = time.monotonic()

    def tree(self, outcome: Acceptance) -> None:
        """Account for one verified tree."""
        self.steps += 1
        self.drafted += outcome.drafted
        self.accepted += len(outcome.tokens)
        self.promoted += sum(outcome.promoted)

    def step(self, seconds: StepSeconds, graph: bool) -> None:
        """Account for one step of a batch; `graph`: a captured CUDA graph verified it."""
        self.passes += 1
        self.graph_passes += graph
        self.drafter_s += seconds.draft
        self.verify_s += seconds.verify
        self._overheads.append(seconds.overhead)

    def active(self) -> None:
        """A pass of any kind begins or ends."""
        self._active_at = time.monotonic()

    @property
    def quiet_s(self) -> float:
        """Seconds since a pass last began or ended."""
        return time.monotonic() - self._active_at

    @property
    def overhead_s(self) -> float | None:
        """Median over recent steps of what is neither drafting nor verifying; None before any."""
        return statistics.median(self._overheads) if self._overheads else None
