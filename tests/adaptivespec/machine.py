"""Machines that take exactly what their parts say, for policies that learn what steps cost."""

from typing import NamedTuple

from adaptivespec.cost import StepWork
from adaptivespec.pricing import Growth


class Machine(NamedTuple):
    """Seconds: of a verification and of each of its nodes, of a draft and of each of its passes and
    nodes, of feeding the drafter and of each token, of whatever else a step does."""

    base: float = 20.0
    node: float = 0.6
    draft: float = 0.6
    level: float = 2.0
    expansion: float = 0.1
    feed: float = 1.6
    token: float = 0.06
    rest: float = 0.4

    def step(
        self,
        requests: int,
        nodes: int,
        tokens: int,
        fed: int,
        growth: Growth | None,
        slowness: float = 1.0,
    ) -> StepWork:
        """What such a step is and takes."""
        verify_s = slowness * (self.base + self.node * nodes)
        feed_s = slowness * (self.feed + self.token * fed) if fed else 0.0
        draft_s = 0.0
        if growth is not None:
            parts = (self.draft, self.level * growth.passes, self.expansion * growth.expanded)
            draft_s = slowness * sum(parts)
        total_s = verify_s + feed_s + draft_s + slowness * self.rest
        return StepWork(requests, nodes, tokens, fed, feed_s, growth, draft_s, verify_s, total_s)


CPU = Machine()
GPU = Machine(base=20.0, node=0.02, draft=0.5, level=0.8, expansion=0.005, feed=0.8, token=0.01)
LOADED = Machine(base=1.0, node=5.0, draft=0.6, level=2.0, expansion=0.5, feed=1.6, token=0.2)
"""Arithmetic is the limit: a node costs what a request costs."""
