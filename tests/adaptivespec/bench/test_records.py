"""What is measured survives, whatever happens to the process."""

from pathlib import Path

import pytest

from adaptivespec.bench.records import Answer, Counts, Journal, Outcome, Turn
from adaptivespec.errors import ConfigError
from adaptivespec.request import StepSeconds

ANSWER = Answer(
    row=3,
    seed=10,
    text="föö\n",
    finish_reason="stop",
    prompt_tokens=5,
    tokens=4,
    seconds=1.5,
    first_token_s=0.5,
    gaps=[0.25, 0.75],
    counts=Counts(2, 6, 1, 1, [1], StepSeconds(draft=0.25, verify=0.5, other=0.25)),
)
FIRST = Turn("measure", "gsm8k", 1, 0, 0, "plain")
SECOND = FIRST._replace(arm="dcs strict")
OUTCOME = Outcome(1.5, [ANSWER])


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "measurements.jsonl"
    journal = Journal(file)
    journal.add(FIRST, OUTCOME)
    journal.add(SECOND, Outcome(2.0, []))
    again = Journal(file)
    assert again[FIRST] == OUTCOME
    assert SECOND in again
    assert FIRST._replace(round=1) not in again
    assert [turn for turn, _ in again.records("measure")] == [FIRST, SECOND]
    assert list(again.records("sweep")) == []


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "measurements.jsonl"
    journal = Journal(file)
    journal.add(FIRST, OUTCOME)
    whole = file.read_bytes()
    journal.add(SECOND, OUTCOME)
    file.write_bytes(file.read_bytes()[:-20])
    again = Journal(file)
    assert SECOND not in again
    assert file.read_bytes() == whole
    again.add(SECOND, OUTCOME)
    assert SECOND in Journal(file)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "measurements.jsonl"
    file.write_text('{"turn": 1}\n')
    with pytest.raises(ConfigError, match=str(file)):
        Journal(file)
    assert file.read_text() == '{"turn": 1}\n'
