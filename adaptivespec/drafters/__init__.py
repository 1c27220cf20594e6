"""Drafters: the models, or rules, that propose trees."""

from adaptivespec.drafters.base import Drafter

__all__ = ["Drafter"]
