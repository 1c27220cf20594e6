"""The real application on the real SGLang: `serve run`, its cell, and SGLang's processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from tests.sglang.engine import OPTIONS  # isort: skip  before transformers

import psutil

from tests.e2e.answers import COUNTING, complete, reference
from tests.e2e.server import Server, application, eventually
from tests.smollm2 import tokenizer

APP = "sglang"
RUNNING, QUEUED = 2, 1

# What an application says in other places than `sglang`, and what cannot be said in YAML.
_ELSEWHERE = {"device", "dtype", "max_total_tokens", "max_running_requests"}
_ELSEWHERE |= {"disable_overlap_schedule", "custom_sigquit_handler"}


@contextmanager
def serving(model: Path, env: dict[str, str]) -> Iterator[Server]:
    """`serve run` with SGLang on the model in a folder, and the packaged EAGLE-3 head: fp32 and
    lossless, so that every answer is transformers' own."""
    options = {key: value for key, value in OPTIONS.items() if key not in _ELSEWHERE}
    app = application(
        APP,
        model=str(model),
        engine="sglang",
        drafter={"kind": "eagle3", "dtype": "float32"},
        target={"max_running": RUNNING, "max_queued": QUEUED, "kv_tokens": 4096},
        max_shape=[7, 4, 16],
        link_timeout_s=5,  # a busy machine is no lost drafter
        sglang=options | {"context_length": 1024},
    )
    with Server([app], env) as server:
        server.wait_until_ready()
        yield server


def engine_processes(server: Server) -> list[psutil.Process]:
    """The actor that owns the engine, and SGLang's own processes below it."""
    actor = psutil.Process(server.cell(APP).target)
    return [actor, *actor.children(recursive=True)]


def scheduler(server: Server) -> psutil.Process:
    """SGLang's scheduler, which runs the steps."""
    [found] = [p for p in engine_processes(server) if "sglang::scheduler" in p.cmdline()[0]]
    return found


def wait_until_gone(processes: list[psutil.Process]) -> None:
    """Until none of them runs; whoever inherited a dead one need not have taken note of it."""

    def alive() -> list[psutil.Process]:
        return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    eventually(alive, lambda found: not found)


def counting(tokens: int) -> str:
    """The first tokens, at most 120, of transformers' answer to COUNTING."""
    return tokenizer().decode(list(reference(COUNTING, 120).tokens[:tokens]))


def assert_serves(server: Server) -> None:
    """Requests are answered, with the drafter's help."""
    eventually(lambda: server.health(APP)["http"] == HTTPStatus.OK)
    eventually(lambda: server.health(APP)["drafter"] == "ready")
    answer = complete(server.client(APP), COUNTING, 40)
    assert answer.text == counting(40)
    assert answer.accepted_tokens > 0
    server.wait_until_idle(APP)


def kill_drafter(server: Server) -> int:
    """Returns its process id."""
    pid = server.cell(APP).draft
    assert pid is not None
    psutil.Process(pid).kill()
    return pid


def wait_for_successor(server: Server, old: int) -> None:
    """Until another drafter has taken the place of process `old`."""
    eventually(lambda: server.cell(APP).draft not in (None, old))
    eventually(lambda: server.health(APP)["drafter"] == "ready")
