"""`python -m deployments.check serve_config.yaml`: find mistakes before Ray is started.

Serve builds the application in a worker, again and again, and buries what it raises in tracebacks.
"""

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any

import yaml

from adaptivespec.config import load_settings
from adaptivespec.errors import ConfigError
from adaptivespec.sglang.launch import check_options
from adaptivespec.sglang.plugin import check_registration

HAPROXY_PORTS = {
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
}
"""What Ray's HAProxy takes beside the port of http_options: its switch in the environment, and
Ray's default for it."""


def check(file: Path) -> str:
    """What the file will serve, and where, in one line. Raises ConfigError for settings that are
    not allowed, for an SGLang that is not the one needed, and for a port that is taken."""
    try:
        config: dict[str, Any] = yaml.safe_load(file.read_text())
        args = [application.get("args", {}) for application in config["applications"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"not a Serve configuration: {error!r}") from error
    served = []
    for settings in map(load_settings, args):
        if settings.engine == "sglang":
            check_registration()
            check_options(settings)
        served.append(
            f"{settings.model.name} (drafter {settings.drafter_kind}, policy "
            f"{settings.policy_kind}, kappa {settings.kappa})"
        )
    http = config.get("http_options", {})
    host, port = http.get("host", "0.0.0.0"), http.get("port", 8000)
    _check_port("http_options.port", host, port)
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        for switch, default in HAPROXY_PORTS.items():
            _check_port(switch, "0.0.0.0", int(os.environ.get(switch, default)))
    return f"{', '.join(served)}; soon at http://{host}:{port}/v1"


def _check_port(name: str, host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{name}: {port} on {host} is not to be had ({error.strerror}); "
                "another one is allowed"
            ) from error


def main() -> int:
    """Returns the exit status: 2 for a mistake, told in one line."""
    parser = argparse.ArgumentParser(prog="python -m deployments.check")
    parser.add_argument("file", type=Path, help="as for serve run")
    file: Path = parser.parse_args().file
    try:
        print(f"{file}: {check(file)}")
    except ConfigError as error:
        print(f"{file}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
