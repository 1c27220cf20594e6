"""Threads that share the work of one kernel.

A kernel is a sequence of *phases*, each a number of chunks. Every thread has a contiguous part of
them, so that it reads memory in order, and claims chunks of the others' when its own are gone. A
phase is over when all its chunks are done, whoever did them: nobody waits for a thread that has not
started, or that another process keeps from running, unless it holds a chunk.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import numpy as np
from numba import njit
from numba.core import types
from numpy.typing import NDArray

from adaptivespec.kernels.atomics import fetch_add, load_acquire

_LINE = 64
"""Bytes of a cache line: counters of different threads are kept apart."""

_SPINS = 2000
"""Looks at a counter before the processor is offered to others."""

_yield = types.ExternalFunction("sched_yield", types.int32())

Counters = NDArray[np.int64]
"""[phases, 1 + threads, a line]: chunks done; then those claimed of each thread's part."""


@njit(nogil=True)
def claim(counters: Counters, phase: int, chunks: int, rank: int) -> int:
    """A chunk of a phase for this thread; `chunks` when none is left."""
    threads = counters.shape[1] - 1
    line = counters.ctypes.data + phase * (threads + 1) * _LINE
    for i in range(threads):
        owner = (rank + i) % threads
        first = chunks * owner // threads
        chunk = first + fetch_add(line + (owner + 1) * _LINE, 1)
        if chunk < chunks * (owner + 1) // threads:
            return chunk
    return chunks


@njit(nogil=True)
def finish(counters: Counters, phase: int, done: int, chunks: int) -> int:
    """Say that this thread did `done` chunks, wait until all are, and return the next phase."""
    line = counters.ctypes.data + phase * counters.shape[1] * _LINE
    if done:
        fetch_add(line, done)
    spins = 0
    while load_acquire(line) < chunks:
        spins += 1
        if spins > _SPINS:
            _yield()
    return phase + 1


class Team:
    """`threads` threads, the caller's among them; the others wait in between."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._lock = threading.Lock()
        self._inboxes = [SimpleQueue[Any]() for _ in range(threads - 1)]
        self._left = SimpleQueue[None]()
        for rank, inbox in enumerate(self._inboxes, start=1):
            threading.Thread(
                target=self._work, args=(rank, inbox), daemon=True, name=f"kernel-{rank}"
            ).start()

    def counters(self, phases: int) -> Counters:
        """What a kernel of so many phases counts in."""
        return np.zeros((phases, 1 + self.threads, _LINE // 8), np.int64)

    def run(self, kernel: Callable[..., None], counters: Counters, *args: Any) -> None:
        """kernel(counters, *args, rank) in every thread; returns when all that began have left."""
        with self._lock:
            counters[:] = 0
            jobs = [threading.Lock() for _ in self._inboxes]  # taken by whoever decides first
            for inbox, job in zip(self._inboxes, jobs, strict=True):
                inbox.put((job, kernel, counters, args))
            try:
                kernel(counters, *args, 0)
            finally:
                for job in jobs:
                    if not job.acquire(blocking=False):
                        self._left.get()

    def _work(self, rank: int, inbox: "SimpleQueue[Any]") -> None:
        while True:
            job, kernel, counters, args = inbox.get()
            if job.acquire(blocking=False):
                with suppress(Exception):  # the compiler's, which the caller's thread meets too
                    kernel(counters, *args, rank)
                self._left.put(None)
            del job, kernel, counters, args  # what they hold is not kept alive by whoever waits
