"""Other ends that run in processes of their own, and the means to stop or kill them."""

import multiprocessing as mp
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

FRESH = mp.get_context("forkserver")  # a clean process each, forked from one with torch loaded
FRESH.set_forkserver_preload(["torch.distributed"])


@contextmanager
def peer_process(run: Callable[..., None], *args: Any) -> Iterator[BaseProcess]:
    """Run `run(*args)` in a process of its own; whatever is left of it at the end is killed."""
    process = FRESH.Process(target=run, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()  # works on a stopped process, too
        process.join()
        process.close()


def freeze(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))
