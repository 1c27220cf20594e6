"""`adaptivespec generate` as a person runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.factories import write_hf_folder
from tests.smollm2 import chat, greedy, tokenizer

COLOUR = re.compile(r"\x1b\[\d*m")


def adaptivespec(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("adaptivespec")
    return subprocess.run(
        [str(script), *args], input=stdin, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_folder(tmp_path_factory.mktemp("model")))


def test_the_packaged_model_answers() -> None:
    prompt = "Count from 1 to 20."
    done = adaptivespec("generate", prompt, "--dtype=float32", "--kappa=1", "--max-tokens=40")
    assert done.returncode == 0, done.stderr
    assert done.stdout == tokenizer().decode(greedy(chat(prompt), 40))
    assert re.search(r"40 tokens in \d+ steps", done.stderr)


def test_colours_tell_drafted_promoted_and_own_tokens_apart(folder: str) -> None:
    args = ["generate", "a a a a a", "--model", folder, "--dtype=float32", "--max-tokens=60"]
    drafter = f"--drafter=lm:{folder}"
    plain = adaptivespec(*args, drafter, "--kappa=1")
    coloured = adaptivespec(*args, drafter, "--kappa=1", "--color=always")
    assert COLOUR.sub("", coloured.stdout) == plain.stdout
    assert "\x1b[32m" in coloured.stdout
    assert "\x1b[33m" not in coloured.stdout
    lossy = adaptivespec(*args, "--kappa=0.001", "--color=always")
    promoted = re.search(r"(\d+) of them promoted", lossy.stderr)
    assert promoted is not None
    assert int(promoted[1]) > 0
    assert "\x1b[33m" in lossy.stdout


def test_text_comes_from_standard_input(folder: str) -> None:
    args = ["--model", folder, "--max-tokens=5", "--raw"]
    given = adaptivespec("generate", "the quick", *args)
    piped = adaptivespec("generate", "-", *args, stdin="the quick")
    assert piped.stdout == given.stdout


def test_settings_come_from_a_serve_config(folder: str, tmp_path: Path) -> None:
    config = tmp_path / "serve_config.yaml"
    config.write_text(
        f"applications: [{{args: {{model: {{path: {folder}}}, drafter: null, kappa: 0.5}}}}]"
    )
    done = adaptivespec("generate", "the", "--config", str(config), "--max-tokens=9")
    assert done.returncode == 0, done.stderr
    assert "0 of 0 drafted accepted" in done.stderr


def test_a_serve_config_for_another_engine_is_refused(folder: str, tmp_path: Path) -> None:
    config = tmp_path / "serve_config.yaml"
    config.write_text(f"applications: [{{args: {{model: {{path: {folder}}}, engine: sglang}}}}]")
    done = adaptivespec("generate", "the", "--config", str(config))
    assert done.returncode == 2
    assert "engine: 'sglang' is not allowed" in done.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--kappa=2"], "kappa: 2.0"),
        (["--model=/no/such/model"], "/no/such/model"),
        (["--drafter=medusa"], "lookup, eagle3, lm"),
        (["--drafter=lm"], "lm:PATH"),
        (["--shape=3,4,4"], "--mode static"),
        (["--mode=static", "--shape=3,4,2"], "[3, 4, 2]"),
        (["--kappa=0.5", "--temperature=1"], "temperature 0"),
        (["--stop="], "--stop"),
        (["--config=/no/such.yaml"], "/no/such.yaml"),
        (["--max-tokens=100000"], "100000"),
    ],
)
def test_mistakes_are_one_line(folder: str, args: list[str], named: str) -> None:
    done = adaptivespec("generate", "the", "--model", folder, *args)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
