"""Cross-entropy with soft targets over a draft vocabulary, without keeping any logits."""

from typing import Any

import torch
from torch import Tensor

_CHUNK = 2048
"""Rows of logits that exist at one time."""


class SoftTargets:
    """Target distributions of many positions, restricted to the draft vocabulary, in one buffer.

    The buffers are reused from batch to batch: fresh ones of this size are page faults, which on a
    CPU take as long as the products.
    """

    def __init__(self, head: Tensor) -> None:
        """`head` [draft vocabulary, H]: the target's own rows of those tokens."""
        self._head = head
        self.vocabulary = len(head)
        self._buffers: dict[str, Tensor] = {}

    def set(self, final: Tensor) -> Tensor:
        """The distributions [N, draft vocabulary] that the target has after its final states
        [N, H]; valid until the next call."""
        logits = self.buffer("targets", len(final))
        torch.mm(final.to(self._head.dtype), self._head.T, out=logits)
        return torch.softmax(logits, -1, out=logits)

    def buffer(self, name: str, rows: int) -> Tensor:
        """A buffer [rows, draft vocabulary] of undefined content, the same memory at every call."""
        held = self._buffers.get(name)
        if held is None or len(held) < rows:
            shape = (rows + rows // 4, self.vocabulary)
            held = self._buffers[name] = self._head.new_empty(shape)
        return held[:rows]


class SoftCrossEntropy(torch.autograd.Function):
    """sum over rows r of weight[r] * CE(targets[index[r]], softmax(hidden[r] @ head.T)).

    Gradients are computed in the forward pass, chunk by chunk (as in Liger Kernel's fused linear
    cross-entropy): d CE / d logits = softmax - target.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        index: Tensor,
        weight: Tensor,
        scratch: SoftTargets,
    ) -> tuple[Tensor, Tensor]:
        """hidden [R, H]; head [V, H] in full precision; targets [N, V]; index int64 [R]; weight
        float [R]. Returns the sum, and per row the token int64 [R] of the highest logit."""
        low = head.to(targets.dtype)
        rows = hidden.to(targets.dtype)
        grad_hidden = torch.empty_like(rows)
        grad_head = torch.zeros_like(head)
        total = hidden.new_zeros(())
        best = torch.empty_like(index)
        for start in range(0, len(rows), _CHUNK):
            part = slice(start, start + _CHUNK)
            size = len(rows[part])
            logits = torch.mm(rows[part], low.T, out=scratch.buffer("logits", size))
            top, best[part] = logits.max(-1)
            wanted = torch.index_select(targets, 0, index[part], out=scratch.buffer("wanted", size))
            expected = torch.linalg.vecdot(wanted, logits).float()  # sum of target * logit
            probabilities = torch.softmax(logits, -1, out=logits)
            normaliser = top.float() - probabilities.amax(-1).float().log()  # log sum exp logits
            total += (weight[part] * (normaliser - expected)).sum()
            grad = probabilities.sub_(wanted).mul_(weight[part, None].to(targets.dtype))
            torch.mm(grad, low, out=grad_hidden[part])
            grad_head += grad.T @ rows[part]
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> Any:
        grad_hidden, grad_head = ctx.saved_tensors
        scaled = (grad_hidden * grad_total).to(ctx.dtype)
        return scaled, grad_head * grad_total, None, None, None, None
