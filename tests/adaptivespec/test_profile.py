"""`adaptivespec profile` over a real model and drafter."""

from pathlib import Path

import pytest

from adaptivespec.cli import main
from tests.factories import write_hf_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_folder(tmp_path_factory.mktemp("target"), "llama", seed=1))


def test_every_shape_is_measured_at_every_batch(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "profile.svg"
    options = ["--shape", "2,1,3", "--shape", "3,2,6", "--batch", "1", "--batch", "3"]
    few = ["--steps", "3", "--prompt", "20", "--plot", str(plot)]
    drafter = f"lm:{model}"
    status = main(
        ["profile", "--model", model, "--dtype", "float32", "--drafter", drafter, *options, *few]
    )
    assert status == 0
    header, *rows, learned = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["requests", "shape", "nodes"]
    cells = [row.split() for row in rows]
    assert [cell[:3] for cell in cells] == [
        [batch, shape, str(int(batch) * nodes)]
        for batch in ("1", "3")
        for shape, nodes in (("plain", 1), ("2,1,3", 3), ("3,2,6", 6))
    ]
    for _, shape, _, verify, draft, _, step, ratio in cells:
        assert 0 < float(verify) <= float(step)
        assert (float(draft) == 0) == (shape == "plain")
        assert (float(ratio) == 1) == (shape == "plain")
    assert "plain step" in learned
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--batch", "99"], ["--batch", "99", "max_running"]),
        (["--shape", "3,4,3"], ["--shape", "[3, 4, 3]"]),
        (["--drafter", "none"], ["--drafter"]),
    ],
)
def test_mistakes_are_named(
    model: str, options: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--model", model, *options]) == 2
    message = capsys.readouterr().err
    for part in named:
        assert part in message
