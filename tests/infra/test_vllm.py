"""The scripts that set up and start vLLM, as far as they go without it."""

import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "infra" / "vllm"


def run(script: str, args: list[str]) -> tuple[int, str]:
    """Its exit status, and what it says."""
    done = subprocess.run([FOLDER / script, *args], capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("args", [[], ["one", "two"]])
def test_setup_takes_one_folder(args: list[str]) -> None:
    assert run("setup.sh", args) == (2, "usage: infra/vllm/setup.sh DIR\n")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ([], ""),
        (["nowhere"], ""),
        (["nowhere", "8001", "plain", "more"], ""),
        (["nowhere", "http"], " (PORT is a number, not http)"),
        (["nowhere", "8001", "lookup"], " (lookup is neither plain nor eagle3)"),
        (["nowhere", "8001", "eagle3"], " (infra/vllm/setup.sh nowhere comes first)"),
    ],
)
def test_serve_says_what_is_wrong(args: list[str], reason: str) -> None:
    usage = "usage: infra/vllm/serve.sh DIR PORT [plain|eagle3]"
    assert run("serve.sh", args) == (2, f"{usage}{reason}\n")


def test_every_package_is_pinned_once() -> None:
    lines = (FOLDER / "requirements.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert len({pin.split("==")[0].lower() for pin in pins}) == len(pins)
