"""The target's projected hidden states, one row per KV slot: what an EAGLE-3 drafter reads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adaptivespec.config import EagleSettings, Settings
from adaptivespec.drafting import Feed
from adaptivespec.errors import ConfigError
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.eagle3 import StateProjector, load_projector
from adaptivespec.models.sources import read_config, resolve
from adaptivespec.sglang.requests import ServedSequence


def head_projector(settings: Settings, device: torch.device) -> StateProjector | None:
    """The target's side of the EAGLE-3 head that drafts, None for another drafter. Raises
    ConfigError if it does not fit the target."""
    if not isinstance(settings.drafter, EagleSettings):
        return None
    target = DecoderConfig.from_hf(read_config(resolve(settings.model.path, weights=False)))
    dtype = getattr(torch, settings.model.dtype)
    return load_projector(settings.drafter.path, target, dtype, device)


def capture(model: Any, projector: StateProjector) -> None:
    """Have SGLang's model hand out the inputs of the layers that the head reads. Raises ConfigError
    for an architecture that cannot."""
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        raise ConfigError(f"SGLang's {type(model).__name__} hands out no hidden states for EAGLE-3")
    # SGLang names layers by their outputs: the input of a layer is the output of the one before.
    model.set_eagle3_layers_to_capture([layer - 1 for layer in projector.layers])


class StatePool:
    """States live and die with the KV slots of their positions, whoever owns these: what the radix
    cache keeps of a prompt, it keeps with its states."""

    def __init__(
        self, projector: StateProjector, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._projector = projector
        self._rows = torch.zeros((slots, projector.state_size), dtype=dtype, device=device)

    def write(self, slots: Tensor, layers: Tensor) -> None:
        """Keep the states of the positions in `slots` [T], from the layers' inputs side by side
        [T, layers * H]."""
        self._rows[slots] = self._projector(layers)

    def write_accepted(self, slots: Tensor, layers: Tensor, accept_index: Tensor) -> None:
        """Keep the states of verified trees' accepted nodes, where SGLang moves their KV: to the
        first of each tree's slots [B * N]. layers [B * N, ..]; accept_index int [B, N] as in
        `verify.Walked`."""
        accepted = accept_index >= 0
        states = self._projector(layers)[accept_index.clamp_min(0).long()]
        into = torch.where(accepted, slots.view_as(accept_index), 0)  # slot 0 is SGLang's dummy
        self._rows[into] = states

    def read(self, feeds: Sequence[Feed[ServedSequence]], slots: Tensor) -> Tensor:
        """The rows [T, state_size] of all feeds, in their order; `slots` is SGLang's table from
        (request, position) to slot."""
        wanted = [slots[s.req.kv.req_pool_idx, rows.start : rows.stop] for s, rows in feeds]
        return self._rows[torch.cat(wanted).long()]
