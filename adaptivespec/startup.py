"""What passes cost on this machine, measured when a target or a drafter is loaded, for a policy
that weighs costs; kept per model, dtype, device and threads, so that the next start has it at once.
"""

import hashlib
import logging
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import llvmlite.binding as llvm
import msgspec
import torch

from adaptivespec.config import Compute, GoodputPolicy, Settings
from adaptivespec.cost import ROWS, DraftCosts, VerifyCosts
from adaptivespec.drafters.base import Drafter, Extension
from adaptivespec.engine.engine import TargetEngine
from adaptivespec.kernels import SOURCES
from adaptivespec.messages import Chunk
from adaptivespec.models.sources import resolve
from adaptivespec.sampling import SamplingParams
from adaptivespec.shape import Shape
from adaptivespec.tree import DraftTrees, roots

log = logging.getLogger(__name__)

REPEATS = 3
BUDGET_S = 3.0
"""Sizes from which on measuring would take longer are left to be learned."""
CACHED = 128
"""Tokens before the root."""
_REQUEST = -2  # of whoever asks: neither a client's nor a warm-up's

Costs = TypeVar("Costs", VerifyCosts, DraftCosts)


def verify_costs(settings: Settings, engine: TargetEngine) -> VerifyCosts | None:
    """What verifying costs the target of these settings; None where no policy asks."""
    if not isinstance(settings.policy, GoodputPolicy):
        return None
    most = min(2 * settings.max_shape.nodes, settings.target.kv_tokens - CACHED)
    sizes = [rows for rows in ROWS if rows <= most]
    compute = settings.target.compute
    file = _file(compute, "verify", settings.model.path, settings.model.dtype, sizes)
    return _kept(file, VerifyCosts, lambda: measure_target(engine, sizes))


def draft_costs(settings: Settings, drafter: Drafter) -> DraftCosts | None:
    """What drafting costs the drafter of these settings; None where no policy asks."""
    if not isinstance(settings.policy, GoodputPolicy) or settings.drafter is None:
        return None
    width = min(settings.policy.largest.width, 4)
    # by value, whatever the drafter: its path, dtype, orders
    described = msgspec.json.encode(settings.drafter).decode()
    file = _file(settings.drafter.compute, "draft", settings.model.path, described, width)
    return _kept(file, DraftCosts, lambda: measure_drafter(drafter, width))


def measure_target(engine: TargetEngine, sizes: list[int]) -> VerifyCosts:
    """Medians of passes over so many nodes of one request."""
    rows, seconds, spent = [], [], 0.0
    engine.open(_REQUEST, CACHED + max(sizes), SamplingParams())
    engine.forward([Chunk(_REQUEST, [0] * CACHED, False)], [], roots([]))
    for size in sizes:
        tree = DraftTrees(
            torch.arange(size, dtype=torch.int32)[None] % engine.config.vocab_size,
            torch.tensor([[-1] + [0] * (size - 1)], dtype=torch.int32),
            torch.zeros(1, size),
        )
        took = _seconds(partial(engine.forward, [], [_REQUEST], tree))
        rows.append(size)
        seconds.append(took)
        spent += took * (REPEATS + 1)
        if spent + 2 * took * (REPEATS + 1) > BUDGET_S:
            break
    engine.close(_REQUEST)
    return VerifyCosts(rows, seconds)


def measure_drafter(drafter: Drafter, width: int) -> DraftCosts:
    """From trees of one level, and of one more with one node expanded, and with `width`."""
    states = torch.zeros(CACHED, drafter.state_size) if drafter.state_size else None
    drafter.open(_REQUEST, 0, CACHED + 4 * (REPEATS + 1) * 8)

    def commit(tokens: int) -> None:
        given = None if states is None else states[:tokens]
        drafter.commit([Extension(_REQUEST, [0] * tokens)], given)

    commit(CACHED)

    def drafts(shape: Shape) -> float:
        return _seconds(lambda: drafter.draft([_REQUEST], [shape]), lambda: commit(1))

    one, four = _seconds(lambda: commit(1)), _seconds(lambda: commit(4))
    once = drafts(Shape(1, width, width + 1))
    narrow = drafts(Shape(2, 1, 3))
    wide = drafts(Shape(2, width, width + 1)) if width > 1 else narrow
    drafter.close(_REQUEST)
    expansion = max(wide - narrow, 0.0) / max(width - 1, 1)
    level = max(narrow - once - expansion, 0.0)
    token = max(four - one, 0.0) / 3
    return DraftCosts(once, level, expansion, max(one - token, 0.0), token)


def _seconds(call: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    """The median of some calls, after one that warms up."""
    taken = []
    for _ in range(REPEATS + 1):
        prepare()
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _file(compute: Compute, what: str, model: str, *of: object) -> Path:
    """Where the costs of something of a model are kept."""
    device = torch.device(compute.device)
    name = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device), ""
    machine = (*name, os.cpu_count(), compute.threads)
    versions = (torch.__version__, SOURCES)
    key = repr((machine, versions, what, str(resolve(model)), of))
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "adaptivespec" / "costs" / f"{digest}.json"


def _kept(file: Path, kind: type[Costs], measure: Callable[[], Costs]) -> Costs:
    """What the file has, or what is measured now and put there."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        costs = measure()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_bytes(msgspec.json.encode(costs))
        partial.replace(file)
    except OSError as error:
        log.warning("what passes cost could not be kept: %s", error)
    return costs
