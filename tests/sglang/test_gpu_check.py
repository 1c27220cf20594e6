"""The checks for machines with GPUs, as far as a CPU can run them: they pass, and they can fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import tests.sglang.engine  # noqa: F401  before SGLang

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "infra" / "gpu" / "check.sh"

pytestmark = pytest.mark.timeout(900, method="thread")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu-check")


def dry_run(model: Path, work: Path, *arguments: str) -> tuple[int, dict[str, str]]:
    """The script's exit status, and what its last table says of each check."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [SCRIPT, "--dry-run", "--model", model, "--work", work, *arguments],
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    _, _, table = done.stdout.partition("| check |")
    rows = [line.split("|") for line in table.splitlines()[2:]]
    return done.returncode, {row[1].strip(): row[2].strip() for row in rows}


def test_all_checks_pass(smollm2: Path, work: Path) -> None:
    status, outcomes = dry_run(smollm2, work)
    assert outcomes == dict.fromkeys(
        ["torch-engine", "link", "sglang-plain", "sglang-graphs", "speed"], "passed"
    )
    assert status == 0


def test_another_answer_fails(smollm2: Path, work: Path) -> None:
    """After the test above, whose plain answers are changed here."""
    file = work / "plain.json"
    answers = json.loads(file.read_text())
    answers[1][5] += 1
    file.write_text(json.dumps(answers))
    status, outcomes = dry_run(smollm2, work, "--only", "sglang-graphs")
    assert outcomes == {"sglang-graphs": "FAILED"}
    assert status == 1


def test_a_check_that_breaks_fails(tmp_path: Path) -> None:
    status, outcomes = dry_run(tmp_path / "no-model", tmp_path, "--only", "torch-engine")
    assert outcomes == {"torch-engine": "FAILED"}
    assert status == 1


@pytest.mark.parametrize("file", sorted((ROOT / "infra" / "configs").iterdir()), ids=str)
def test_sglang_knows_the_options_of_the_shipped_configurations(file: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    (application,) = yaml.safe_load(file.read_text())["applications"]
    assert application["args"]["sglang"].keys() <= set(ServerArgs.__struct_fields__)
