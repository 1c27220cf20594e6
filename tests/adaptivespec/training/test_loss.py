"""The cross-entropy that keeps no logits has the value and the gradients of the plain one."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from adaptivespec.training import loss
from adaptivespec.training.loss import SoftCrossEntropy, SoftTargets

HIDDEN, VOCAB, POSITIONS, ROWS = 8, 13, 5, 11


@dataclass
class Case:
    """Rows of hidden states [R, H], a head [V, H], and which target each row has."""

    hidden: Tensor
    head: Tensor
    final: Tensor
    index: Tensor
    weight: Tensor
    target_head: Tensor


@pytest.fixture
def case() -> Case:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weight = torch.rand(ROWS, generator=generator)
    weight[[2, 7]] = 0.0
    return Case(
        hidden=normal(ROWS, HIDDEN).requires_grad_(),
        head=normal(VOCAB, HIDDEN).requires_grad_(),
        final=normal(POSITIONS, HIDDEN),
        index=torch.randint(POSITIONS, (ROWS,), generator=generator),
        weight=weight,
        target_head=normal(VOCAB, HIDDEN),
    )


def plain(case: Case) -> tuple[Tensor, Tensor]:
    targets = (case.final @ case.target_head.T).softmax(-1)[case.index]
    logits = case.hidden @ case.head.T
    entropy = -(targets * logits.log_softmax(-1)).sum(-1)
    return (entropy * case.weight).sum(), logits.argmax(-1)


def fused(case: Case, scratch: SoftTargets) -> tuple[Tensor, Tensor]:
    targets = scratch.set(case.final)
    total, best = SoftCrossEntropy.apply(
        case.hidden, case.head, targets, case.index, case.weight, scratch
    )
    return total, best


def gradients(total: Tensor, case: Case) -> tuple[Tensor, ...]:
    return torch.autograd.grad(3.0 * total, (case.hidden, case.head))


@pytest.mark.parametrize("chunk", [1, 4, ROWS, 2048])
def test_value_and_gradients(case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "_CHUNK", chunk)
    total, best = fused(case, SoftTargets(case.target_head))
    expected, expected_best = plain(case)
    torch.testing.assert_close(total, expected)
    assert torch.equal(best, expected_best)
    ours, theirs = gradients(total, case), gradients(expected, case)
    torch.testing.assert_close(ours, theirs)
    assert not ours[0][[2, 7]].any()  # rows that do not count


def test_rows_that_all_do_not_count(case: Case) -> None:
    case.weight = torch.zeros(ROWS)
    total, _ = fused(case, SoftTargets(case.target_head))
    assert total == 0
    assert not any(gradient.any() for gradient in gradients(total, case))


def test_no_rows(case: Case) -> None:
    case.index, case.weight = case.index[:0], case.weight[:0]
    case.hidden = case.hidden[:0]
    total, best = fused(case, SoftTargets(case.target_head))
    assert total == 0
    assert best.shape == (0,)
    assert not gradients(total, case)[1].any()


def test_extreme_logits_stay_finite(case: Case) -> None:
    case.hidden = (case.hidden.detach() * 1e3).requires_grad_()
    total, _ = fused(case, SoftTargets(case.target_head))
    torch.testing.assert_close(total, plain(case)[0])
    assert all(gradient.isfinite().all() for gradient in gradients(total, case))


def test_in_bf16_it_is_the_plain_one_up_to_rounding(case: Case) -> None:
    total, _ = fused(case, SoftTargets(case.target_head.bfloat16()))
    expected, _ = plain(case)
    torch.testing.assert_close(total, expected, rtol=2e-2, atol=2e-2)
    ours, theirs = gradients(total, case), gradients(expected, case)
    assert [g.dtype for g in ours] == [torch.float32, torch.float32]
    torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)


def test_buffers_are_reused_from_batch_to_batch(case: Case) -> None:
    scratch = SoftTargets(case.target_head)
    first, second = case.final[:4], case.final[1:]
    targets = scratch.set(first)
    expected = (second @ case.target_head.T).softmax(-1)
    again = scratch.set(second)
    assert again.data_ptr() == targets.data_ptr()
    torch.testing.assert_close(again, expected)
    more = torch.cat([case.final] * 3)
    torch.testing.assert_close(scratch.set(more), (more @ case.target_head.T).softmax(-1))
