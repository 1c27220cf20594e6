"""Mistakes in settings for SGLang are told by name, before Ray or an engine starts."""

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from adaptivespec.config import load_settings
from adaptivespec.errors import ConfigError
from adaptivespec.sglang.target import SGLangTarget
from adaptivespec.tokenizer import load_tokenizer
from deployments.check import check
from tests.adaptivespec.drafters.heads import tiny_head
from tests.factories import VOCAB_SIZE


def args(model: Path, **other: Any) -> dict[str, Any]:
    return {"model": {"path": str(model), "name": "m"}, "engine": "sglang", **other}


def check_args(folder: Path, args: dict[str, Any]) -> str:
    """`python -m deployments.check` on an application with these settings."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    file = folder / "serve_config.yaml"
    file.write_text(
        yaml.safe_dump(
            {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [{"args": args}]}
        )
    )
    return check(file)


def test_options_of_sglang_are_its_server_arguments(tmp_path: Path) -> None:
    options = {"mem_fraction_static": 0.5, "page_size": 1}
    assert "m (drafter lookup" in check_args(tmp_path, args(tmp_path, sglang=options))


def test_an_option_that_sglang_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'mem_fraction'; it has 'mem_fraction_static'"):
        check_args(tmp_path, args(tmp_path, sglang={"mem_fraction": 0.5}))


@pytest.mark.parametrize("name", ["model_path", "max_running_requests", "speculative_algorithm"])
def test_an_option_with_another_place_in_the_settings(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"sglang: '{name}' is set by"):
        check_args(tmp_path, args(tmp_path, sglang={name: 1}))


def test_a_head_for_another_target(tmp_path: Path, smollm2: Path) -> None:
    """The scheduler would find out, and SGLang would log it and end this process."""
    head = tiny_head().write(tmp_path / "head")
    settings = load_settings(args(smollm2, drafter={"kind": "eagle3", "path": head}))
    with pytest.raises(ConfigError, match=f"/head: vocab_size: {VOCAB_SIZE} for a target"):
        SGLangTarget(settings, load_tokenizer(str(smollm2)), "127.0.0.1")


def test_a_value_that_sglang_refuses(smollm2: Path) -> None:
    options = {"attention_backend": "intel_amx", "page_size": 16}
    settings = load_settings(args(smollm2, drafter=None, sglang=options))
    with pytest.raises(ConfigError, match="--page-size 16"):
        SGLangTarget(settings, load_tokenizer(str(smollm2)), "127.0.0.1")
