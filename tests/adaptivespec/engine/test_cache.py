"""The KV cache against a plain model of it: a dict of lists."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adaptivespec.engine.cache import KVCache
from adaptivespec.errors import CacheFull

LAYERS, KV_HEADS, HEAD_DIM, STATE = 2, 2, 4, 3
TOKENS = 24


def new_cache(tokens: int = TOKENS) -> KVCache:
    return KVCache(LAYERS, KV_HEADS, HEAD_DIM, tokens, torch.float32, state_size=STATE)


def write(cache: KVCache, request: int, values: Sequence[float]) -> None:
    """Append pending rows that can be told apart by layer, and by key, value and state."""
    _, end = cache.extend(request, len(values))
    slots = torch.arange(end - len(values), end)
    column = torch.tensor(values, dtype=torch.float32)[:, None]
    for layer in range(LAYERS):
        key = column[:, :, None].expand(-1, KV_HEADS, HEAD_DIM) + 1000 * layer
        cache.write(layer, slots, torch.cat((key, key + 0.5), 1))
    cache.write_states(slots, column.expand(-1, STATE) + 0.25)


def read(cache: KVCache, request: int) -> list[float]:
    """The values of all rows, committed and pending; checks that every part agrees on them."""
    start, end = cache.extend(request, 0)
    values = cache.read(0, slice(start, end))[0][0, 0, :, 0]
    for layer in range(LAYERS):
        expected = values[:, None].expand(KV_HEADS, 1, -1, HEAD_DIM) + 1000 * layer
        for rows in slice(start, end), torch.arange(start, end)[None]:
            keys, read = cache.read(layer, rows)
            assert torch.equal(keys, expected)
            assert torch.equal(read, expected + 0.5)
    committed = cache.length(request)
    states = cache.states(request, 0, committed)
    assert torch.equal(states, values[:committed, None].expand(-1, STATE) + 0.25)
    return values.tolist()


class CacheMachine(RuleBasedStateMachine):
    """Any order of opening, writing, committing and closing, in an arena that is soon full."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = new_cache()
        self.capacity: dict[int, int] = {}
        self.committed: dict[int, list[float]] = {}
        self.pending: dict[int, list[float]] = {}
        self.next = 0

    @rule(capacity=st.integers(1, 12))
    def open(self, capacity: int) -> None:
        request, self.next = self.next, self.next + 1
        if sum(self.capacity.values()) + capacity > TOKENS:
            with pytest.raises(CacheFull, match=str(capacity)):
                self.cache.open(request, capacity)
            return
        self.cache.open(request, capacity)
        self.capacity[request] = capacity
        self.committed[request], self.pending[request] = [], []

    @precondition(lambda self: self.capacity)
    @rule(data=st.data(), rows=st.integers(1, 6))
    def write(self, data: st.DataObject, rows: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.capacity)))
        room = self.capacity[request] - len(self.committed[request]) - len(self.pending[request])
        if rows > room:
            with pytest.raises(ValueError, match="capacity"):
                self.cache.extend(request, rows)
            return
        values = [float(self.next + i) for i in range(rows)]
        self.next += rows
        write(self.cache, request, values)
        self.pending[request] += values

    @precondition(lambda self: self.capacity)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.capacity)))
        pending = self.pending[request]
        rows = data.draw(st.permutations(range(len(pending))))
        path = sorted(rows[: data.draw(st.integers(0, len(rows)))])
        left = [row for row in range(len(pending)) if row not in path]
        keep = [row for row in left if data.draw(st.booleans())]
        self.cache.commit(request, path, keep)
        self.committed[request] += [pending[row] for row in path]
        self.pending[request] = [pending[row] for row in keep]

    @precondition(lambda self: self.capacity)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.capacity)))
        self.cache.close(request)
        for held in (self.capacity, self.committed, self.pending):
            del held[request]

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        assert self.cache.used == sum(self.capacity.values())
        for request, committed in self.committed.items():
            assert self.cache.length(request) == len(committed)
            assert self.cache.pending(request) == len(self.pending[request])
            assert read(self.cache, request) == committed + self.pending[request]


TestAnyHistory = CacheMachine.TestCase


@given(st.permutations([0, 1, 2, 3]))
def test_a_full_arena_takes_a_new_request_in_any_gaps(closed: list[int]) -> None:
    cache = new_cache(tokens=20)
    for request in range(5):
        cache.open(request, 4)
        write(cache, request, [10.0 * request + i for i in range(4)])
        cache.commit(request, range(4))
    for request in closed[:2]:
        cache.close(request)
    cache.open(9, 8)
    for request in {0, 1, 2, 3, 4} - set(closed[:2]):
        assert read(cache, request) == [10.0 * request + i for i in range(4)]
    assert cache.used == 20


def test_a_request_is_opened_once() -> None:
    cache = new_cache()
    cache.open(1, 4)
    with pytest.raises(ValueError, match="1 is already open"):
        cache.open(1, 4)


def test_only_pending_rows_can_be_committed() -> None:
    cache = new_cache()
    cache.open(1, 8)
    write(cache, 1, [1.0, 2.0])
    with pytest.raises(ValueError, match="2 pending"):
        cache.commit(1, [0, 2])


def test_only_states_of_committed_positions_can_be_read() -> None:
    cache = new_cache()
    cache.open(1, 8)
    write(cache, 1, [1.0, 2.0])
    cache.commit(1, [0])
    with pytest.raises(ValueError, match="0:2 of 1"):
        cache.states(1, 0, 2)


def test_closing_twice_or_an_unknown_request_is_harmless() -> None:
    cache = new_cache()
    cache.open(1, 8)
    cache.close(1)
    cache.close(1)
    assert cache.used == 0
