"""From settings to a drafter, loaded and checked against its target."""

import torch

from adaptivespec.config import EagleSettings, LMSettings, LookupSettings, Settings
from adaptivespec.drafters.base import Drafter
from adaptivespec.drafters.eagle3 import Eagle3Drafter
from adaptivespec.drafters.lm import LMDrafter
from adaptivespec.drafters.lookup import LookupDrafter
from adaptivespec.errors import ConfigError
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.decoder import Decoder
from adaptivespec.models.eagle3 import load_head
from adaptivespec.models.loading import load_model
from adaptivespec.models.sources import read_config, resolve


def make_drafter(settings: Settings, device: torch.device | str = "cpu") -> Drafter:
    """The drafter that `settings` names, which must not be null. Raises ConfigError saying where it
    and the target do not fit."""
    target = settings.target
    room = (target.kv_tokens, target.max_running, settings.max_shape)
    match settings.drafter:
        case LookupSettings(max_ngram=longest, min_ngram=shortest):
            return LookupDrafter(longest, shortest)
        case EagleSettings(path=path, dtype=dtype):
            head = load_head(path, settings.model.path, getattr(torch, dtype), device)
            return Eagle3Drafter(head, *room)
        case LMSettings(path=path, dtype=dtype):
            return LMDrafter(_load_lm(path, settings, getattr(torch, dtype), device), *room)
        case None:
            raise ValueError("the settings name no drafter")


def _load_lm(
    path: str, settings: Settings, dtype: torch.dtype, device: torch.device | str
) -> Decoder:
    location = resolve(settings.model.path, weights=False)
    target = DecoderConfig.from_hf(read_config(location))
    config, weights = load_model(path, dtype, device)
    if config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"drafter.path: {path!r} has a vocabulary of {config.vocab_size} tokens, the target "
            f"{settings.model.path!r} one of {target.vocab_size}; they must be the same"
        )
    return Decoder(config, weights, dtype, device)
