"""Arms: the ways of answering that a benchmark holds against each other."""

from collections.abc import Sequence

import msgspec

from adaptivespec.config import PolicySettings
from adaptivespec.request import Mode
from adaptivespec.shape import Shape

PLAIN = "plain"


class Arm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How requests are answered. In process, `drafter` (as on the command line; None: the one of
    the settings) and, in mode adaptive, `policy` are the arm's own; on a server they are the
    server's. `peer` is the base URL of another endpoint, which knows nothing of speculation
    settings."""

    name: str
    mode: Mode = "off"
    shape: Shape | None = None
    kappa: float = 1.0
    policy: PolicySettings | None = None
    drafter: str | None = None
    peer: str | None = None

    @property
    def strict(self) -> bool:
        """Whether the answer is the target's own."""
        return self.kappa == 1

    @property
    def static(self) -> bool:
        """Whether every step drafts the same shape."""
        return self.mode == "static"


def rule_name(kappa: float) -> str:
    """What the margin rule is called in an arm's name."""
    return "strict" if kappa == 1 else f"kappa {kappa:g}"


def static_arm(shape: Shape, kappa: float, drafter: str | None = None) -> Arm:
    """The same shape at every step."""
    name = f"static {','.join(map(str, shape))} {rule_name(kappa)}"
    return Arm(name=_with(drafter, name), mode="static", shape=shape, kappa=kappa, drafter=drafter)


def adaptive_arm(
    label: str, policy: PolicySettings | None, kappa: float, drafter: str | None = None
) -> Arm:
    """A policy of this program's (`policy`), or the server's own (None)."""
    name = f"{label} {rule_name(kappa)}"
    return Arm(
        name=_with(drafter, name), mode="adaptive", policy=policy, kappa=kappa, drafter=drafter
    )


def _with(drafter: str | None, name: str) -> str:
    return f"{drafter}: {name}" if drafter else name


def grid(
    shapes: Sequence[Shape],
    policies: Sequence[tuple[str, PolicySettings | None]],
    kappas: Sequence[float],
    drafters: Sequence[str | None],
) -> list[Arm]:
    """Plain decoding, and every tree under every rule with every drafter; labelled policies."""
    arms = [Arm(name=PLAIN)]
    for drafter in drafters:
        for kappa in sorted(set(kappas), reverse=True):
            arms += [static_arm(shape, kappa, drafter) for shape in shapes]
            arms += [adaptive_arm(label, policy, kappa, drafter) for label, policy in policies]
    return arms
