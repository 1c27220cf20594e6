"""The head as a module to train, unrolled as it will be used: training-time test.

Trained on the target's states alone, a head meets states of its own making only when it drafts.
EAGLE-3 (arXiv 2503.01840, section 3.2) therefore feeds it its own states during training too. Every
answer position starts a chain; its first step reads the target's states of the whole text before,
each further step the chain's own state and the next token of the text. Chains do not see each
other, so after the first step only a part of them, evenly spaced, has to go on.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adaptivespec.models.eagle3_config import HeadConfig
from adaptivespec.models.layers import Weights
from adaptivespec.models.rope import Rope
from adaptivespec.training.batches import Batch
from adaptivespec.training.loss import SoftCrossEntropy, SoftTargets


@dataclass(frozen=True, slots=True)
class Unrolled:
    """loss: weighted mean over the rows that count. rows int64 [steps]: how many count, by step;
    hits int64 [steps]: of how many of them the highest logit is the text's token."""

    loss: Tensor
    hits: Tensor
    rows: Tensor


class TrainableHead(nn.Module):
    """Parameters by their names in the standard layout; the embedding is the target's, fixed."""

    embedding: Tensor
    target_ids: Tensor
    draft_ids: Tensor

    def __init__(
        self, config: HeadConfig, weights: Weights, embedding: Tensor, target_ids: Tensor
    ) -> None:
        """`weights` as `warm_start` or a checkpoint gives them; `target_ids` int64 [draft
        vocabulary], ascending."""
        super().__init__()
        self.config = config
        # a parameter's name in a module has no dots
        self.weights = nn.ParameterDict(
            {
                name.replace(".", "/"): nn.Parameter(w.to(torch.float32, copy=True))
                for name, w in weights.items()
            }
        )
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("target_ids", target_ids)
        draft_ids = torch.full((config.layer.vocab_size,), -1, device=target_ids.device)
        draft_ids[target_ids] = torch.arange(len(target_ids), device=target_ids.device)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        layer = config.layer
        self._rope = Rope(
            layer.head_dim, layer.rope_theta, layer.rope_scaling, torch.float32, embedding.device
        )

    def weight(self, name: str) -> Tensor:
        """A parameter by its name in the standard layout."""
        return self.weights[f"{name}.weight".replace(".", "/")]

    def standard(self) -> Weights:
        """All parameters by their names in the standard layout."""
        return {name.replace("/", "."): w.detach() for name, w in self.weights.items()}

    def unroll(
        self, batch: Batch, scratch: SoftTargets, steps: int, stride: int, decay: float
    ) -> Unrolled:
        """Run `steps` steps: the first for all answer positions, the others for every `stride`-th.
        Step j's loss counts decay^j, each chain that went on also for those that did not; tokens
        that the draft vocabulary lacks, and all behind them in a chain, do not count: no draft gets
        past them."""
        context = _Context(self, batch)
        drafted = self.draft_ids[batch.answers]  # [B, A], of the token after each answer row
        known = (drafted >= 0) & batch.answer_mask
        index = batch.answer_mask.flatten().cumsum(0).view_as(drafted) - 1
        targets = scratch.set(batch.final)

        chains = _Chains(context, batch, every=1)
        outputs, picked, weights, tokens = [], [], [], []
        sizes = []
        alive = known
        for step in range(steps):
            if step == 1:
                chains = chains.thinned(stride)
                alive = alive[:, chains.first :: stride]
            chains.advance(step)
            # chain a at step j stands where answer row a + j predicts
            place = chains.anchors + step
            inside = place < drafted.shape[1]
            place = place.clamp_max(drafted.shape[1] - 1)
            alive = alive & inside & known.gather(1, place)
            chosen = alive.nonzero(as_tuple=True)
            outputs.append(chains.state[chosen])
            spots = (chosen[0], place[chosen])
            picked.append(index[spots])
            tokens.append(drafted[spots])
            counted = decay**step * (stride if step else 1)  # for those that did not go on too
            weights.append(torch.full((len(chosen[0]),), counted, device=drafted.device))
            sizes.append(len(chosen[0]))
        rows = context.norm("norm", torch.cat(outputs))
        weight = torch.cat(weights)
        total, best = SoftCrossEntropy.apply(
            rows, self.weight("lm_head"), targets, torch.cat(picked), weight, scratch
        )
        right = (best == torch.cat(tokens)).split(sizes)
        hits = torch.stack([part.sum() for part in right])
        return Unrolled(
            total / weight.sum().clamp_min(1), hits, torch.tensor(sizes, device=hits.device)
        )


class _Context:
    """What all chains see: keys and values of every text position, from the target's states."""

    def __init__(self, head: TrainableHead, batch: Batch) -> None:
        self.head = head
        states = F.linear(batch.aux, head.weight("fc"))
        self.states = states
        self.inputs = self.combine(batch.tokens, states)
        self.keys, self.values = self.project(self.inputs, batch.positions)

    def combine(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Tokens [...] and the states [..., H] before them -> the layer's input [..., 2 H]."""
        head = self.head
        embedded = F.embedding(tokens, head.embedding).to(states.dtype)
        normed = self.norm("midlayer.input_layernorm", embedded)
        return torch.cat((normed, self.norm("midlayer.hidden_norm", states)), -1)

    def norm(self, name: str, x: Tensor) -> Tensor:
        layer = self.head.config.layer
        return F.rms_norm(x, (x.shape[-1],), self.head.weight(name).to(x.dtype), layer.rms_norm_eps)

    def project(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values [B, kv_heads, n, head_dim] of inputs [B, n, 2 H]."""
        key = self._heads(F.linear(inputs, self.head.weight("midlayer.self_attn.k_proj")))
        value = self._heads(F.linear(inputs, self.head.weight("midlayer.self_attn.v_proj")))
        return self._rotated(key, positions), value

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Rotated, scaled queries [B, heads, n, head_dim]."""
        query = self._heads(F.linear(inputs, self.head.weight("midlayer.self_attn.q_proj")))
        return self._rotated(query, positions) * self.head.config.layer.head_dim**-0.5

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """attended [B, heads, n, head_dim] -> states [B, n, H] after the layer."""
        joined = attended.transpose(1, 2).flatten(2)
        h = residual + F.linear(joined, self.head.weight("midlayer.self_attn.o_proj"))
        x = self.norm("midlayer.post_attention_layernorm", h)
        gate = F.silu(F.linear(x, self.head.weight("midlayer.mlp.gate_proj")))
        up = F.linear(x, self.head.weight("midlayer.mlp.up_proj"))
        return h + F.linear(gate * up, self.head.weight("midlayer.mlp.down_proj"))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head.config.layer.head_dim)).transpose(1, 2)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.head._rope.angles(positions.flatten())
        cos = cos.view(*positions.shape, -1)[:, None].to(x.dtype)
        sin = sin.view(*positions.shape, -1)[:, None].to(x.dtype)
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class _Chains:
    """Chains of drafts, each rooted at an answer row (`anchors` int64 [B, C])."""

    def __init__(self, context: _Context, batch: Batch, every: int, first: int = 0) -> None:
        self._context, self._batch = context, batch
        self.first = first
        width = batch.answers.shape[1]
        self.anchors = torch.arange(first, width, every, device=batch.answers.device)
        self.anchors = self.anchors.expand(len(batch.answers), -1)
        self._rows = batch.answer_rows[:, first::every]  # text position of every anchor
        positions = torch.arange(batch.tokens.shape[1], device=self._rows.device)
        hidden = positions > self._rows[..., None]  # [B, C, L]
        self._bias = torch.zeros(hidden.shape, device=hidden.device)
        self._bias.masked_fill_(hidden, float("-inf"))
        self._own: list[tuple[Tensor, Tensor]] = []  # keys, values of the chains' own steps
        self.state = context.states.new_empty(0)
        """[B, C, H] after the last step."""

    def thinned(self, stride: int) -> "_Chains":
        """Every `stride`-th chain, after the first step."""
        first = int(torch.randint(stride, ())) if self.anchors.shape[1] > stride else 0
        chains = _Chains(self._context, self._batch, stride, first)
        chains.state = self.state[:, first::stride]
        return chains

    def advance(self, step: int) -> None:
        """One step: at the first, the anchors read the target's states, later their own."""
        context, batch = self._context, self._batch
        positions = self._rows + step
        if step == 0:
            index = self._rows[..., None]
            inputs = context.inputs.gather(1, index.expand(-1, -1, context.inputs.shape[-1]))
            residual = context.states.gather(1, index.expand(-1, -1, context.states.shape[-1]))
        else:
            residual = self.state
            last = batch.tokens.shape[1] - 1
            tokens = batch.tokens.gather(1, positions.clamp_max(last))
            inputs = context.combine(tokens, residual)
            self._own.append(context.project(inputs, positions))
        queries = context.queries(inputs, positions)
        self.state = context.finish(self._attend(queries), residual)

    def _attend(self, queries: Tensor) -> Tensor:
        """queries [B, heads, C, head_dim] over the text up to the anchor and the chain's own steps.
        The query heads that share a kv head are rows of one product."""
        batch, heads, chains, dim = queries.shape
        keys, values = self._context.keys, self._context.values
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        stacked = queries.reshape(batch, kv_heads, group * chains, dim)
        bias = self._bias[:, None, None].to(queries.dtype)
        scores = (stacked @ keys.transpose(-1, -2)).unflatten(2, (group, chains)) + bias
        grouped = queries.view(batch, kv_heads, group, chains, dim)
        own = [(grouped * key[:, :, None]).sum(-1, keepdim=True) for key, _ in self._own]
        weights = torch.cat([scores, *own], -1).float().softmax(-1).to(queries.dtype)
        length = keys.shape[2]
        text = weights[..., :length].flatten(2, 3) @ values
        out = text.unflatten(2, (group, chains))
        for i, (_, value) in enumerate(self._own):
            out = out + weights[..., length + i : length + i + 1] * value[:, :, None]
        return out.reshape(batch, heads, chains, dim)
