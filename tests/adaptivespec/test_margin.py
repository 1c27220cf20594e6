"""The margin rule and what it accepts, against a slow version that thinks in probabilities."""

from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adaptivespec.acceptance import Verdict, accept
from adaptivespec.guards import StepGuards
from adaptivespec.margin import promote, promotions
from adaptivespec.messages import Verified
from tests.adaptivespec.trees import VOCABULARY, Tree, batch, trees

# Probabilities are weights / their sum, and kappa is a fraction of 97: no ratio of two weights
# equals it, so that rounding decides nothing. Equal weights, ties, are common.
weights = st.lists(st.integers(0, 12), min_size=VOCABULARY, max_size=VOCABULARY).filter(any)
kappas = st.integers(1, 97).map(lambda n: Fraction(n, 97))


@dataclass
class Case:
    """A tree, the target's weights at every node, and a request's settings."""

    tree: Tree
    weights: list[list[int]]
    kappa: Fraction
    cap: int

    def target(self, node: int) -> int:
        return self.weights[node].index(max(self.weights[node]))

    def ratio(self, node: int) -> Fraction:
        """p_target(node) / p_target(top-1), both given the node's parent."""
        above = self.weights[self.tree.parents[node]]
        return Fraction(above[self.tree.tokens[node]], max(above))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tree = draw(trees())
    size = len(tree.tokens)
    every = draw(st.lists(weights, min_size=size, max_size=size))
    return Case(tree, every, draw(kappas), draw(st.integers(0, 4)))


def promoted_children(case: Case, node: int = 0, spent: int = 0) -> dict[int, int]:
    """The promoted child of every node that has one."""
    children = case.tree.children(node)
    drafted = [case.tree.tokens[c] for c in children]
    found: dict[int, int] = {}
    if case.target(node) not in drafted and case.kappa < 1 and spent < case.cap:
        passing = [c for c in children if case.ratio(c) >= case.kappa]
        if passing:
            found[node] = max(passing, key=lambda c: (case.ratio(c), -c))
    for child in children:
        promoted = found.get(node) == child
        found |= promoted_children(case, child, spent + promoted)
    return found


def walked(case: Case) -> tuple[list[int], int]:
    """Accepted nodes, the root first, and the bonus token."""
    promoted = promoted_children(case)
    path = [0]
    while True:
        node = path[-1]
        exact = [c for c in case.tree.children(node) if case.tree.tokens[c] == case.target(node)]
        if exact:
            path.append(exact[0])
        elif node in promoted:
            path.append(promoted[node])
        else:
            return path, case.target(node)


def tensors(cases: list[Case]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tokens, parents, target, gap, kappa of a padded batch, as an engine would give them."""
    forest = batch([case.tree for case in cases])
    target = torch.full_like(forest.tokens, 0)
    gap = torch.full(forest.tokens.shape, -torch.inf)
    for b, case in enumerate(cases):
        logits = torch.tensor(case.weights, dtype=torch.float32).log()
        for node in range(len(case.tree.tokens)):
            target[b, node] = case.target(node)
            if node:
                above = logits[case.tree.parents[node]]
                gap[b, node] = above[case.tree.tokens[node]] - above.max()
    return forest.tokens, forest.parents, target, gap, torch.tensor([float(c.kappa) for c in cases])


def accepted(cases: list[Case]) -> Verdict:
    tokens, parents, target, gap, kappa = tensors(cases)
    logprobs = torch.zeros_like(gap)
    verified = Verified(
        nodes=tokens.shape[1],
        tokens=raw(tokens),
        parents=raw(parents),
        logprobs=raw(logprobs),
        target=raw(target),
        gap=raw(gap),
        first_tokens=[],
        wait_s=0.0,
        forward_s=0.0,
    )
    caps = torch.tensor([case.cap for case in cases])
    return accept(verified, kappa.tolist(), StepGuards(caps))


def raw(tensor: Tensor) -> bytearray:
    return bytearray(tensor.numpy().tobytes())


batches = st.lists(cases(), min_size=1, max_size=4)


@given(batches)
def test_what_is_accepted_is_the_rule_in_probabilities(batch_of: list[Case]) -> None:
    verdict = accepted(batch_of)
    for b, (case, outcome) in enumerate(zip(batch_of, verdict.outcomes, strict=True)):
        path, bonus = walked(case)
        assert verdict.path[b].tolist() == path + [-1] * (verdict.path.shape[1] - len(path))
        assert (outcome.path, outcome.bonus) == (path, bonus)
        assert outcome.tokens == [case.tree.tokens[node] for node in path[1:]]
        jumps = [node in promoted_children(case).values() for node in path[1:]]
        assert outcome.promoted == jumps
        assert sum(jumps) <= case.cap
        ratios = [float(case.ratio(n)) for n, jump in zip(path[1:], jumps, strict=True) if jump]
        assert outcome.margin == pytest.approx(min(ratios, default=1.0), rel=1e-5)
        assert outcome.drafted == len(case.tree.tokens) - 1
        assert outcome.depth == max(len(case.tree.path(n)) for n in range(outcome.drafted + 1)) - 1


@given(batches)
def test_on_a_device_the_rule_is_the_same(batch_of: list[Case]) -> None:
    tokens, parents, target, gap, kappa = tensors(batch_of)
    caps = torch.tensor([case.cap for case in batch_of])
    predict, promoted = promote(tokens, parents, target, gap, kappa, caps)
    path = accepted(batch_of).path
    along = promotions(path, promoted, gap)
    for b, case in enumerate(batch_of):
        tree, size = case.tree, len(case.tree.tokens)
        expected = promoted_children(case)
        assert promoted[b].nonzero()[:, 0].tolist() == sorted(expected)
        assert predict[b, :size].tolist() == [
            tree.tokens[expected[i]] if i in expected else case.target(i) for i in range(size)
        ]
        jumps = [node for node in path[b].tolist() if node in expected.values()]
        assert path[b][along.nodes[b]].tolist() == jumps
        assert along.total[b] == len(jumps) <= case.cap
        smallest = min((float(case.ratio(node)) for node in jumps), default=1.0)
        torch.testing.assert_close(along.smallest[b], torch.tensor(smallest))


@given(cases())
def test_kappa_one_is_the_strict_rule_even_at_ties(case: Case) -> None:
    case.kappa = Fraction(1)
    tokens, parents, target, gap, kappa = tensors([case])
    predict, promoted = promote(tokens, parents, target, gap, kappa)
    assert not promoted.any()
    assert torch.equal(predict, target)


def test_a_tie_with_the_top_1_is_promoted_below_kappa_one() -> None:
    case = Case(Tree([0, 2], [-1, 0], [0.0, -1.0]), [[6, 0, 6, 0, 0]] * 2, Fraction(96, 97), 1)
    assert accepted([case]).outcomes[0].promoted == [True]
    case.kappa = Fraction(1)
    assert accepted([case]).outcomes[0].promoted == []


@given(cases(), kappas)
def test_a_laxer_kappa_never_shortens_a_chain(case: Case, other: Fraction) -> None:
    size = len(case.tree.tokens)
    case.tree = case.tree._replace(parents=list(range(-1, size - 1)))
    case.cap = size

    def length(kappa: Fraction) -> int:
        return len(accepted([replace(case, kappa=kappa)]).outcomes[0].path)

    assert length(min(case.kappa, other)) >= length(max(case.kappa, other))


@given(cases())
def test_one_cap_for_all_means_the_same_as_one_each(case: Case) -> None:
    tokens, parents, target, gap, kappa = tensors([case])
    each = promote(tokens, parents, target, gap, kappa, torch.tensor([case.cap]))
    shared = promote(tokens, parents, target, gap, kappa, case.cap)
    assert all(torch.equal(a, b) for a, b in zip(each, shared, strict=True))


def test_minus_infinity_forbids_a_node_whatever_kappa() -> None:
    tokens = torch.tensor([[0, 2, 3]], dtype=torch.int32)
    parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
    target = torch.tensor([[1, 1, 1]])
    gap = torch.tensor([[-torch.inf, -torch.inf, -2.0]])
    predict, promoted = promote(tokens, parents, target, gap, torch.tensor([1e-3]))
    assert promoted.tolist() == [[True, False, False]]
    assert predict[0, 0] == 3
    predict, promoted = promote(
        tokens[:, :2], parents[:, :2], target[:, :2], gap[:, :2], torch.tensor([1e-3])
    )
    assert not promoted.any()
