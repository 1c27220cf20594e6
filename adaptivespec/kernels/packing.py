"""Draft trees as the rows of one pass, compiled."""

from typing import Any

from numba import njit


@njit(nogil=True, cache=True)
def pack(tokens: Any, parents: Any, starts: Any, rows: Any, sizes: Any, visible: Any) -> int:
    """The real nodes of trees [B, N], whose roots are at positions starts [B], one behind the
    other, and their number, T.

    rows int64 [3, B * N]: their tokens, positions, and the rows of their parents, -1 at roots.
    sizes int64 [B]: nodes of each tree. visible bool [B, N, N]: [.., i, j], node j is i or one of
    its ancestors.
    """
    total = 0
    for b in range(len(tokens)):
        first = total
        for n in range(tokens.shape[1]):
            if tokens[b, n] < 0:
                break
            parent = parents[b, n]
            rows[0, total] = tokens[b, n]
            if parent < 0:
                visible[b, n] = False
                rows[1, total], rows[2, total] = starts[b], -1
            else:
                visible[b, n] = visible[b, parent]
                rows[1, total], rows[2, total] = rows[1, first + parent] + 1, first + parent
            visible[b, n, n] = True
            total += 1
        sizes[b] = total - first
    return total
