"""The size of a draft tree."""

from typing import NamedTuple


class Shape(NamedTuple):
    """Size of a draft tree. SGLang's names: num_steps, topk, num_draft_tokens.

    depth: levels below the root; width: children considered per expanded node, and nodes expanded
    per level; nodes: nodes kept, root included. (0, 0, 1) is "no draft": plain decoding.
    """

    depth: int
    width: int
    nodes: int


NO_DRAFT = Shape(0, 0, 1)
