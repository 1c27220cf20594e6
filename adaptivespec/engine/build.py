"""From settings to a loaded target."""

import torch

from adaptivespec.config import EagleSettings, Settings
from adaptivespec.engine.engine import TargetEngine
from adaptivespec.models.decoder import Decoder
from adaptivespec.models.eagle3 import load_projector
from adaptivespec.models.loading import load_model


def make_target(settings: Settings, device: torch.device | str = "cpu") -> TargetEngine:
    """The target's engine, with an EAGLE-3 drafter's `fc` on its side. Raises ConfigError."""
    dtype = getattr(torch, settings.model.dtype)
    config, weights = load_model(settings.model.path, dtype, device)
    decoder = Decoder(config, weights, dtype, device)
    kv_tokens, drafter = settings.target.kv_tokens, settings.drafter
    if not isinstance(drafter, EagleSettings):
        return TargetEngine(decoder, kv_tokens)
    projector = load_projector(drafter.path, config, dtype, device)
    return TargetEngine(decoder, kv_tokens, projector, projector.layers)
