"""Mistakes in serve_config.yaml are one line, before anything starts."""

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from adaptivespec.errors import ConfigError
from deployments.check import HAPROXY_PORTS, check
from tests.ports import free_ports

SHIPPED = Path(__file__).parents[2] / "serve_config.yaml"


def write(folder: Path, args: dict[str, object], port: int) -> Path:
    config = yaml.safe_load(SHIPPED.read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"] |= args
    file = folder / "serve_config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def test_what_will_be_served_and_where(tmp_path: Path) -> None:
    [port] = free_ports(1)
    told = check(write(tmp_path, {}, port))
    assert "SmolLM2-135M-Instruct (drafter eagle3, policy goodput, kappa 0.2)" in told
    assert f"http://127.0.0.1:{port}/v1" in told


def test_a_setting_that_is_not_allowed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kappa: 5 is not allowed"):
        check(write(tmp_path, {"kappa": 5}, free_ports(1)[0]))


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed")
def test_an_engine_that_is_not_installed(tmp_path: Path) -> None:
    other: dict[str, object] = {"model": {"path": str(tmp_path)}, "engine": "sglang"}
    with pytest.raises(ConfigError, match="SGLang, which is not installed: pip install sglang=="):
        check(write(tmp_path, other, free_ports(1)[0]))


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"http_options.port: {port}"):
            check(write(tmp_path, {}, port))


@pytest.mark.parametrize("switch", HAPROXY_PORTS)
def test_a_port_of_haproxy_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    port, *others = free_ports(1 + len(HAPROXY_PORTS))
    for each, other in zip(HAPROXY_PORTS, others, strict=True):
        monkeypatch.setenv(each, str(other))
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setenv(switch, str(taken))
        monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
        check(write(tmp_path, {}, port))
        monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
        with pytest.raises(ConfigError, match=f"{switch}: {taken}"):
            check(write(tmp_path, {}, port))


@pytest.mark.parametrize("text", ["", "a: b", "applications: 3", "{"])
def test_a_file_of_another_kind(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="not a Serve configuration"):
        check(file)
