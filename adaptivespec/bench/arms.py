"""Arms: the ways of answering that a benchmark holds against each other."""

from collections.abc import Mapping, Sequence

import msgspec

from adaptivespec.config import UNGUARDED, GuardSettings, PolicySettings
from adaptivespec.request import Mode
from adaptivespec.shape import Shape

PLAIN = "plain"


class Rule(msgspec.Struct, frozen=True):
    """The margin rule's threshold, and its guards; None: those of the settings, or the server."""

    kappa: float = 1.0
    guards: GuardSettings | None = None

    @property
    def name(self) -> str:
        """What it is called in an arm's name."""
        threshold = "strict" if self.kappa == 1 else f"kappa {self.kappa:g}"
        return threshold if self.guards is None else f"{threshold} {guards_name(self.guards)}"


STRICT = Rule()


def rules(kappas: Sequence[float], guards: Sequence[GuardSettings]) -> list[Rule]:
    """Every kappa, from the strictest on, with every guard, if any are given; but the strict rule,
    which promotes nothing, once."""
    return [
        Rule(kappa, guard)
        for kappa in sorted(set(kappas), reverse=True)
        for guard in (guards if guards and kappa < 1 else [None])
    ]


def guards_name(guards: GuardSettings) -> str:
    """In short: what they allow."""
    parts = []
    if guards.max_promotions is not None:
        parts.append(f"{guards.max_promotions} a step")
    if guards.max_promotions_per_window is not None:
        parts.append(f"{guards.max_promotions_per_window} in {guards.promotion_window}")
    if guards.never_promote:
        parts.append(f"no {' or '.join(guards.never_promote)}")
    return ", ".join(parts) or "unguarded"


class Arm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How requests are answered. In process, `drafter` (as on the command line), `guards` and, in
    mode adaptive, `policy` are the arm's own, or, None, those of the settings. A server's drafter
    and policy are its own, and `guards` hold beside those that it has. `peer` is the base URL of
    another endpoint, which knows nothing of speculation settings."""

    name: str
    mode: Mode = "off"
    shape: Shape | None = None
    kappa: float = 1.0
    guards: GuardSettings | None = None
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


def static_arm(shape: Shape, rule: Rule = STRICT, drafter: str | None = None) -> Arm:
    """The same shape at every step."""
    return Arm(
        name=_name(drafter, f"static {','.join(map(str, shape))}", rule),
        mode="static",
        shape=shape,
        kappa=rule.kappa,
        guards=rule.guards,
        drafter=drafter,
    )


def adaptive_arm(
    label: str, policy: PolicySettings | None, rule: Rule = STRICT, drafter: str | None = None
) -> Arm:
    """A policy of this program's (`policy`), or the server's own (None)."""
    return Arm(
        name=_name(drafter, label, rule),
        mode="adaptive",
        policy=policy,
        kappa=rule.kappa,
        guards=rule.guards,
        drafter=drafter,
    )


def _name(drafter: str | None, tree: str, rule: Rule) -> str:
    return f"{drafter}: {tree} {rule.name}" if drafter else f"{tree} {rule.name}"


def grid(
    shapes: Sequence[Shape],
    policies: Sequence[tuple[str, PolicySettings | None]],
    rules: Sequence[Rule],
    drafters: Sequence[str | None],
) -> list[Arm]:
    """Plain decoding, and every tree under every rule with every drafter; labelled policies."""
    arms = [Arm(name=PLAIN)]
    for drafter in drafters:
        for rule in rules:
            arms += [static_arm(shape, rule, drafter) for shape in shapes]
            arms += [adaptive_arm(label, policy, rule, drafter) for label, policy in policies]
    return arms


def without_guards(arms: Sequence[Arm]) -> Mapping[str, str | None]:
    """By the name of each arm that has guards of its own, or none at all: the name of the arm that
    differs from it in nothing but that it has none; None where there is no such arm."""

    def free(arm: Arm) -> Arm:
        return msgspec.structs.replace(arm, name="", guards=UNGUARDED)

    names = {free(arm): arm.name for arm in arms if arm.guards == UNGUARDED}
    return {arm.name: names.get(free(arm)) for arm in arms if arm.guards is not None}
