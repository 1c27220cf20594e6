"""From settings to a loaded target."""

import torch

from adaptivespec.config import EagleSettings, Settings
from adaptivespec.engine.engine import TargetEngine
from adaptivespec.models.decoder import Decoder
from adaptivespec.models.eagle3 import load_projector
from adaptivespec.models.loading import load_model


def make_target(settings: Settings, device: torch.device | str = "cpu") -> TargetEngine:
    """The target's engine, with an EAGLE-3 drafter's `fc` on its side. Raises ConfigError."""
    return make_engine(load_decoder(settings, device), settings)


def load_decoder(settings: Settings, device: torch.device | str = "cpu") -> Decoder:
    """The target's weights, which several engines may share. Raises ConfigError."""
    dtype = getattr(torch, settings.model.dtype)
    config, weights = load_model(settings.model.path, dtype, device)
    return Decoder(config, weights, dtype, device)


def make_engine(decoder: Decoder, settings: Settings) -> TargetEngine:
    """An engine with a cache of its own, and what the settings' drafter needs of the target."""
    kv_tokens, drafter = settings.target.kv_tokens, settings.drafter
    if not isinstance(drafter, EagleSettings):
        return TargetEngine(decoder, kv_tokens)
    projector = load_projector(drafter.path, decoder.config, decoder.dtype, decoder.device)
    return TargetEngine(decoder, kv_tokens, projector, projector.layers)
