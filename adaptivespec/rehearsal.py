"""A step of nobody's, so that no request waits for the compiler."""

import numpy as np

from adaptivespec.acceptance import accept
from adaptivespec.cost import StepWork
from adaptivespec.goodput import CHECK_EVERY
from adaptivespec.messages import Verified
from adaptivespec.policy import Policy
from adaptivespec.signals import STRICT


def rehearse(policy: Policy) -> None:
    """Run what every step runs beside the two models, on a tree of two nodes. `policy` is not to be
    used afterwards: it has learned from this."""
    verified = Verified(
        nodes=2,
        tokens=_bytes([1, 2], np.int32),
        parents=_bytes([-1, 0], np.int32),
        logprobs=_bytes([0.0, -0.5], np.float32),
        target=_bytes([2, 3], np.int32),
        gap=_bytes([0.0, 0.0], np.float32),
        first_tokens=[],
        wait_s=0.0,
        forward_s=1.0,
    )
    signals = policy.signals()
    signals.confidence = 0.5
    policy.stepped(StepWork(1, 1, 1, 1, 0.1, None, 0.0, 1.0, 1.2))
    for _ in range(CHECK_EVERY):
        verdict = accept(verified, [signals.rule.kappa])
        policy.verified(verdict.trees, verdict.path, [STRICT])
    policy.shapes([signals], 1)
    policy.prices([signals], 1)


def _bytes(values: list[float], dtype: type) -> bytearray:
    return bytearray(np.array(values, dtype).tobytes())
