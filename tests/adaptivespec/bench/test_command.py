"""`adaptivespec bench` as a person runs it."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adaptivespec.bench.arms import STRICT, Rule
from adaptivespec.bench.choices import check_unguarded
from adaptivespec.cli import main
from adaptivespec.config import UNGUARDED, GuardSettings
from adaptivespec.errors import ConfigError

pytest.importorskip("matplotlib", reason="needs the extra `bench`")
pytest.importorskip("openai", reason="needs the extra `bench`")


GUARDED = msgspec.json.decode(msgspec.json.encode(GuardSettings(max_promotions=3)))


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    file = tmp_path / "serve_config.yaml"
    file.write_text(
        f"applications: [{{args: {{model: {{path: {model}, dtype: float32}}, "
        f"target: {{compute: {{threads: 1}}}}, "
        f"drafter: {{kind: lm, path: {model}, dtype: float32}}}}}}]"
    )
    return file


def results(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "results.json").read_text())
    return content


def test_from_prompts_to_a_report(
    tmp_path: Path, config: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    args = ["bench", str(out), "--config", str(config), "--set", f"gsm8k={prompts}:6"]
    args += ["--set", f"{prompts}:question:3", "--max-tokens=12", "--seed=40"]
    assert main(args) == 0
    table = capsys.readouterr().out
    for arm in ("plain", "static 3,4,4 strict", "dcs strict", "dcs kappa 0.2"):
        assert re.search(rf"\| gsm8k +\| {arm} +\| \d+\.\d ", table)
    content = results(out)
    assert content["baseline"] == "static 3,4,4 strict"
    assert content["plan"]["arms"][0]["name"] == "plain"
    assert content["plan"]["system"]["settings"][""]["model"]["dtype"] == "float32"
    assert content["plan"]["sets"][0]["items"][2]["message"].startswith("What is 2 and 1?")
    assert {"command", "versions", "machine", "started"} <= set(content["starts"][0])
    cells = {(cell["set"], cell["arm"]): cell for cell in content["cells"]}
    assert len(cells) == 3 * 5
    strict = cells["gsm8k", "dcs strict"]
    assert strict["answers"] == 6
    assert strict["vs_plain"]["low"] < strict["vs_plain"]["high"]
    for arm in ("plain", "static 3,4,4 strict", "dcs strict"):
        assert cells["sums", arm]["agreement"] == 1.0
    assert cells["sums", "plain"]["accuracy"] is None
    report = (out / "report.md").read_text()
    figures = re.findall(r"\]\((\w+\.svg)\)", report)
    assert {"speed.svg", "positions.svg", "steps.svg", "quality.svg"} <= set(figures)
    assert all((out / figure).read_text().startswith("<?xml") for figure in figures)
    lines = (out / "measurements.jsonl").read_text().splitlines()
    assert len(lines) == (6 + 3) * 5
    assert json.loads(lines[0])["outcome"]["answers"][0]["seed"] == 40


def test_a_rerun_goes_on_and_another_run_is_refused(
    tmp_path: Path, config: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    args = ["bench", str(out), "--config", str(config), "--set", f"gsm8k={prompts}:2"]
    args += ["--max-tokens=8", "--policy=none"]
    assert main(args) == 0
    journal = out / "measurements.jsonl"
    whole = journal.read_bytes()
    first = results(out)["cells"]
    assert main(args) == 0
    assert journal.read_bytes() == whole
    assert results(out)["cells"] == first
    assert len(results(out)["starts"]) == 2
    lines = whole.splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-2]) + lines[-2][:30])
    assert main(args) == 0
    again = journal.read_bytes().splitlines(keepends=True)
    assert again[:-2] == lines[:-2]
    turns = [json.loads(line)["turn"] for line in again]
    assert turns == [json.loads(line)["turn"] for line in lines]
    capsys.readouterr()
    assert main([*args, "--seed=1"]) == 2
    assert "options" in capsys.readouterr().err
    assert journal.read_bytes() == b"".join(again)


def test_the_sweeps_best_shape_is_the_baseline(tmp_path: Path, config: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    shapes = ["--sweep-shape=1,1,2", "--sweep-shape=6,1,7", "--sweep-shape=2,2,5"]
    args = ["bench", str(out), "--config", str(config), "--set", f"gsm8k={prompts}:2"]
    args += ["--max-tokens=16", "--ignore-eos", "--policy=none", "--kappa=1", "--sweep", *shapes]
    assert main([*args, "--sweep-prompts=2"]) == 0
    content = results(out)
    found = content["sweep"][""]
    assert set(found["rates"]) == {f"static {s} strict" for s in ("1,1,2", "6,1,7", "2,2,5")}
    assert content["baseline"] == found["best"] == next(iter(found["rates"]))
    assert {cell["arm"] for cell in content["cells"]} == {
        "plain",
        "static 3,4,4 strict",
        found["best"],
    }
    assert content["plan"]["sweep"]["unseen"] is True
    assert "Sweep of static shapes" in (out / "report.md").read_text()


def test_a_server_and_a_peer_by_requests_at_once(tmp_path: Path, prompts: Path, url: str) -> None:
    out = tmp_path / "out"
    args = ["bench", str(out), "--url", url, "--peer", f"other={url}/", "--concurrency=1,3"]
    assert main([*args, "--set", f"gsm8k={prompts}:6", "--max-tokens=8", "--kappa=1"]) == 0
    content = results(out)
    cells = {(cell["concurrency"], cell["arm"]): cell for cell in content["cells"]}
    arms = ("plain", "static 3,4,4 strict", "adaptive strict", "other")
    assert set(cells) == {(level, arm) for level in (1, 3) for arm in arms}
    assert cells[3, "other"]["answers"] == 6
    assert set(cells[1, "adaptive strict"]["step"]) == set(cells[3, "plain"]["step"])
    assert len(cells[1, "adaptive strict"]["accepted_at"]) > 0
    assert content["status"]["model"] == "tiny"
    assert content["plan"]["peers"] == {url: {"url": url, "model": "tiny"}}
    report = (out / "report.md").read_text()
    assert {"ladder.svg", "steps.svg", "positions.svg"} <= set(re.findall(r"\w+\.svg", report))
    assert re.search(r"\| arm +\| step, ms \| draft +\| transfer \| verify \| other", report)


def test_what_guards_cost_and_bring(tmp_path: Path, prompts: Path) -> None:
    """Without promotions every answer is the strict one, and agrees with it."""
    out = tmp_path / "out"
    args = ["bench", str(out), "--dtype=float32", "--set", f"gsm8k={prompts}:2", "--max-tokens=16"]
    args += ["--policy=none", "--kappa=1", "--kappa=0.01", "--guard=none"]
    assert main([*args, "--guard={max_promotions: 0}"]) == 0
    cells = {cell["arm"]: cell for cell in results(out)["cells"]}
    strict, lossy = "static 3,4,4 strict", "static 3,4,4 kappa 0.01"
    assert set(cells) == {"plain", strict, f"{lossy} unguarded", f"{lossy} 0 a step"}
    free, guarded = cells[f"{lossy} unguarded"], cells[f"{lossy} 0 a step"]
    assert free["promoted_per_step"] > guarded["promoted_per_step"] == 0
    assert free["agreement"] < guarded["agreement"] == 1
    assert free["vs_unguarded"]["value"] == 1
    assert guarded["vs_unguarded"]["value"] > 0
    assert cells[strict]["vs_unguarded"] is None
    report = (out / "report.md").read_text()
    (table,) = re.findall(r"\| arm +\| tokens/s +\| to unguarded.*?\n\n", report, re.DOTALL)
    assert re.search(r"0 a step .* \| 0\.000 .* \| 100\.0 % +\| \+\d+\.0 ", table)
    assert strict not in table


def test_a_server_is_asked_for_guards(tmp_path: Path, prompts: Path, url: str) -> None:
    out = tmp_path / "out"
    args = ["bench", str(out), "--url", url, "--set", f"gsm8k={prompts}:2", "--max-tokens=8"]
    args += ["--shape=none", "--guard=none", "--guard={max_promotions: 1}"]
    assert main(args) == 0
    names = {cell["arm"] for cell in results(out)["cells"]}
    lossy = {f"adaptive kappa 0.2 {guards}" for guards in ("unguarded", "1 a step")}
    assert names == {"plain", "adaptive strict", *lossy}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"guards": GUARDED}, "{.max_promotions.: 3}"),
        ({"model": "of another program"}, "does not say"),
        (None, "does not say"),
    ],
)
def test_no_request_is_unguarded_on_a_guarded_server(
    status: dict[str, Any] | None, said: str
) -> None:
    check_unguarded([STRICT, Rule(0.2, GuardSettings(max_promotions=1))], status)
    with pytest.raises(ConfigError, match=f"--guard none: .*{said}"):
        check_unguarded([STRICT, Rule(0.2, UNGUARDED)], status)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--set=gsm9k"], "gsm8k, math500"),
        (["--kappa=2"], "kappa: 2.0"),
        (["--kappa=0.5", "--temperature=1"], "temperature 0"),
        (["--shape=3,4,2"], "[3, 4, 2]"),
        (["--shape=9,1,10"], "[8, 16, 64]"),
        (["--policy=best"], "dcs"),
        (["--policy={kind: dcs, scale: 0}"], "scale"),
        (["--guard={max_promotion: 1}"], "max_promotion`; allowed: max_promotions, max_"),
        (["--guard={max_promotions: -1}"], "max_promotions: -1 is not allowed"),
        (["--guard={never_promote: [verbs]}"], "digits, operators"),
        (["--guard={promotion_window: 8}"], "max_promotions_per_window"),
        (["--guard={}"], "limits nothing; 'none'"),
        (["--guard=strict"], "--guard 'strict'"),
        (["--guard={max_promotions: 1}", "--kappa=1"], "--guard: limits promotions"),
        (["--drafter=none"], "--drafter"),
        (["--drafter=medusa"], "lookup"),
        (["--concurrency=99"], "99"),
        (["--sweep-shape=1,1,2"], "--sweep-shape: needs --sweep"),
        (["--sweep-prompts=2"], "--sweep-prompts: needs --sweep"),
        (["--sweep", "--sweep-shape=1,1,2"], "nothing to choose from"),
        (["--url=http://127.0.0.1:9/v1"], "--config"),
        (["--peer=plain=http://127.0.0.1:9/v1"], "'plain' is there twice"),
        (["--max-tokens=100000"], "context"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    config: Path,
    prompts: Path,
    args: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    given = ["bench", str(out), "--config", str(config), "--set", f"gsm8k={prompts}:2"]
    assert main([*given, *args]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert len(error.splitlines()) == 1
    assert not out.exists()


def test_drafters_side_by_side(tmp_path: Path, config: Path, prompts: Path, model: Path) -> None:
    out = tmp_path / "out"
    args = ["bench", str(out), "--config", str(config), "--set", f"gsm8k={prompts}:2"]
    args += ["--max-tokens=8", "--kappa=1", "--policy=none"]
    assert main([*args, "--drafter=lookup", f"--drafter=lm:{model}"]) == 0
    names = [cell["arm"] for cell in results(out)["cells"]]
    static = "static 3,4,4 strict"
    assert set(names) == {"plain", f"lookup: {static}", f"lm:{model}: {static}"}
    assert results(out)["baseline"] == f"lookup: {static}"


def test_a_missing_library_is_named_before_anything_is_measured(
    tmp_path: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "out"
    assert main(["bench", str(out), "--set", f"gsm8k={prompts}"]) == 2
    assert "adaptivespec[bench]" in capsys.readouterr().err
    assert not out.exists()
