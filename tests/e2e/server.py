"""The real application: `serve run` on a config, in a Ray cluster of its own."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import httpx
import psutil
import yaml
from openai import OpenAI

from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
MODEL = "SmolLM2-135M-Instruct"
PATIENCE_S = 240.0
"""How long a noisy machine may take for anything at all."""

HELD = (
    "running",
    "queued",
    "kv_tokens_used",
    "target_requests",
    "target_kv_tokens",
    "drafter_requests",
)
"""What /health counts, by both sides' own word; zero when nothing runs."""

Value = TypeVar("Value")


def eventually(
    probe: Callable[[], Value], enough: Callable[[Value], bool] = bool, within: float = PATIENCE_S
) -> Value:
    """The first value of `probe` that is `enough`. Raises AssertionError with the last one."""
    deadline = time.monotonic() + within
    while not enough(value := probe()):
        assert time.monotonic() < deadline, f"still {value} after {within} s"
        time.sleep(0.1)
    return value


def application(name: str, *, model: str = "smollm2", **args: Any) -> dict[str, Any]:
    """An application under /`name`: float32 and kappa 1 make its output the target's own. The
    reservations are tiny, for several applications share a small machine."""
    target = {"compute": {"num_cpus": 0.05, "threads": 1}} | args.pop("target", {})
    drafter = args.pop("drafter", {"kind": "lookup"})
    if drafter is not None:
        drafter = {"compute": {"num_cpus": 0.05, "threads": 1}} | drafter
    return {
        "name": name,
        "route_prefix": f"/{name}",
        "import_path": "deployments.app:build",
        "args": {
            "model": {"path": model, "name": MODEL, "dtype": "float32"},
            "target": target,
            "drafter": drafter,
            "kappa": 1,
            "orchestrator_cpus": 0.05,
            "ingress_cpus": 0.05,
            **args,
        },
    }


class Cell(NamedTuple):
    """Process ids of one application's orchestrator and actors; None for what is not running."""

    orchestrator: int | None
    target: int | None
    draft: int | None


class Server:
    """`with Server(applications) as server:` starts them all, and leaves nothing behind."""

    def __init__(
        self, applications: list[dict[str, Any]], env: Mapping[str, str] | None = None
    ) -> None:
        self._applications = applications
        self._folder = Path(tempfile.mkdtemp(prefix="serve-"))  # short: Ray puts sockets below it
        self._log = self._folder / "output"
        self._token = secrets.token_hex(32)
        self.port, fallback, statistics, metrics = free_ports(4)
        self.url = f"http://127.0.0.1:{self.port}"
        programs = Path(sys.executable).parent
        config = self._folder / "config.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "proxy_location": "HeadOnly",
                    "http_options": {"host": "127.0.0.1", "port": self.port},
                    "applications": applications,
                }
            )
        )
        own = {
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": str(self._folder),
            "RAY_SERVE_ENABLE_HA_PROXY": str(int(sys.platform == "linux")),  # as `make serve` does
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(programs / "adaptivespec-haproxy"),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(statistics),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "OTEL_"))}
        with self._log.open("wb") as output:
            self._process = psutil.Popen(
                [programs / "serve", "run", config],
                cwd=ROOT,
                env=inherited | own | dict(env or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Whoever runs the tests in the background ignores Ctrl-C, and that is inherited.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if family := self.processes():
            self._process.terminate()
        for process in psutil.wait_procs(family, timeout=30)[1]:
            process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def output(self) -> str:
        """Everything that `serve run` has printed."""
        return self._log.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        """Wait until Serve has started every application. Raises AssertionError with the output of
        a server that does not get there."""
        names = [app["name"] for app in self._applications]

        def started() -> bool:
            assert self._process.is_running(), "`serve run` has ended"
            statuses = self.statuses()
            found = [statuses[name]["status"] if name in statuses else None for name in names]
            assert "DEPLOY_FAILED" not in found, statuses
            return found == ["RUNNING"] * len(names)

        try:
            eventually(started)
        except AssertionError as error:
            raise AssertionError(self.output) from error

    # -- HTTP -------------------------------------------------------------------------------------

    def client(self, name: str) -> OpenAI:
        """OpenAI's client of an application; it does not try again by itself."""
        return OpenAI(
            base_url=f"{self.url}/{name}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )

    def health(self, name: str) -> dict[str, Any]:
        """The application's status, with the HTTP status as "http"."""
        response = httpx.get(f"{self.url}/{name}/health", timeout=30)
        return {"http": response.status_code, **response.json()}

    def wait_until_idle(self, name: str) -> None:
        """Wait until neither the controller, nor the target, nor the drafter holds anything."""

        def held() -> dict[str, int]:
            status = self.health(name)
            return {key: status[key] for key in HELD}

        eventually(held, lambda counts: not any(counts.values()))

    # -- Ray --------------------------------------------------------------------------------------

    def statuses(self) -> dict[str, dict[str, Any]]:
        """What Serve says of every application: "status" and "message" among others."""
        applications: dict[str, dict[str, Any]] = self._ask("/api/serve/applications/")[
            "applications"
        ]
        return applications

    def cell(self, name: str) -> Cell:
        """The processes of an application that Ray considers alive: its orchestrator's replica, and
        the actors in the same placement group."""
        actors = self.actors()
        replica = f"ServeReplica:{name}:Orchestrator"
        [*_, group] = [None] + [
            a["placement_group_id"] for a in actors if a["class_name"] == replica
        ]

        def pid(kind: str) -> int | None:
            pids = [
                a["pid"]
                for a in actors
                if a["class_name"] == kind and a["placement_group_id"] == group is not None
            ]
            return pids[0] if pids else None

        target = pid("TargetActor") or pid("SGLangActor")
        return Cell(pid(replica), target, pid("DraftActor"))

    def actors(self) -> list[dict[str, Any]]:
        """Live actors, by Ray's state API."""
        return [a for a in self._list("actors") if a["state"] == "ALIVE"]

    def placement_groups(self) -> list[str]:
        """Ids of the placement groups that hold, or wait for, resources."""
        groups = self._list("placement_groups")
        return [g["placement_group_id"] for g in groups if g["state"] != "REMOVED"]

    def _list(self, what: str) -> list[dict[str, Any]]:
        answer = self._ask(f"/api/v0/{what}?detail=1&limit=1000")
        rows: list[dict[str, Any]] = answer["data"]["result"]["result"]
        return rows

    def _ask(self, path: str) -> Any:
        dashboard = eventually(
            lambda: re.search(r"View the dashboard at .*?(http://[\d.]+:\d+)", self.output)
        )
        assert dashboard is not None
        url, headers = dashboard[1] + path, {"Authorization": f"Bearer {self._token}"}

        def asked() -> httpx.Response | None:
            try:
                return httpx.get(url, headers=headers, timeout=60)
            except httpx.TransportError:  # it says where it is before it is there
                return None

        answer = eventually(asked, lambda answer: answer is not None)
        assert answer is not None
        answer.raise_for_status()
        return answer.json()

    # -- processes --------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """`serve run` and everything below it."""
        try:
            return [self._process, *self._process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """What the kernel does to `serve run` when memory runs out; Ray ends with it."""
        self._process.kill()
        self._process.wait()

    def interrupt(self) -> list[psutil.Process]:
        """Press Ctrl-C: every process in the foreground gets SIGINT. Returns what is left of them
        after a while."""
        family = self.processes()
        os.killpg(self._process.pid, signal.SIGINT)
        _, alive = psutil.wait_procs(family, timeout=120)
        return alive
