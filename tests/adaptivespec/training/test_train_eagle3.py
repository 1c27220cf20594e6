"""`adaptivespec train-eagle3` as a person runs it: killed, resumed, shared out."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from adaptivespec.cli import main
from adaptivespec.models.eagle3 import load_head
from adaptivespec.models.loading import load_model
from adaptivespec.tokenizer import load_tokenizer
from adaptivespec.training.corpus import Corpus, done
from adaptivespec.training.export import export
from adaptivespec.training.train import LOG_EVERY
from adaptivespec.training.warm_start import head_config, warm_start
from tests.adaptivespec.training.workshop import (
    EXCLUDED,
    MAX_ANSWER,
    OWN,
    PATIENCE_S,
    PROMPTS,
    SCRIPT,
    SHAPE,
    START,
    Workshop,
    checkpoint_of,
    digests,
    kill_when,
    log_of,
    new_workshop,
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return new_workshop(tmp_path_factory.mktemp("workshop"))


@dataclass(frozen=True)
class Run:
    """A run that was killed twice: with `shards` written, and at `step` of its training."""

    output: Path
    shards: dict[str, str]
    step: int

    @property
    def corpus(self) -> Corpus:
        return Corpus(self.output / "corpus")


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Run:
    """Killed while it generates, killed while it trains, called a third time; always with the same
    words."""
    output = workshop.folder / "run"
    command, log = workshop.command(output), workshop.folder / "log"
    corpus, checkpoint = output / "corpus", output / "checkpoint.pt"

    kill_when(lambda: any(corpus.glob("*.safetensors")), command, log)
    shards = {name: d for name, d in digests(corpus).items() if name.endswith(".safetensors")}
    assert not checkpoint.exists()
    (corpus / "shard-00000000.tmp").write_bytes(b"what a kill may leave")

    kill_when(checkpoint.exists, command, log)
    step = int(checkpoint_of(output)["step"])
    assert not (output / "head").exists()

    with log.open("w") as out:
        subprocess.run(
            [str(SCRIPT), *command], stdout=out, stderr=out, check=True, timeout=PATIENCE_S
        )
    return Run(output, shards, step)


# -- what comes of it -----------------------------------------------------------------------------


def test_conversations_from_before_a_kill_are_kept(run: Run) -> None:
    now = digests(run.output / "corpus")
    assert run.shards.items() <= now.items()
    assert len([name for name in now if name.endswith(".safetensors")]) > len(run.shards)


def test_every_prompt_is_answered_once_or_accounted_for(workshop: Workshop, run: Run) -> None:
    corpus, tokenizer = run.corpus, load_tokenizer(workshop.model)
    jobs = PROMPTS - 1 + OWN
    assert done(run.output / "corpus") == set(range(jobs))
    ids = [entry.id for entry in corpus.entries]
    assert len(set(ids)) == len(ids)
    texts = Counter(
        tokenizer.decode(corpus.prompt(e)).removeprefix("user\n").removesuffix("\nassistant\n")
        for e in corpus.entries
    )
    rows = [json.loads(r)["text"] for r in (workshop.folder / "prompts.jsonl").open()]
    rows.remove(EXCLUDED)
    assert EXCLUDED not in texts
    own = texts - Counter(rows)
    assert Counter(rows) <= texts
    assert 0 < own.total() < OWN  # others did not end in time
    assert all(text.startswith(START.strip()) for text in own)


def test_training_goes_on_from_its_last_checkpoint(run: Run) -> None:
    steps = checkpoint_of(run.output)["steps"]
    assert 0 < run.step < steps
    assert checkpoint_of(run.output)["step"] == steps
    reported = [entry["step"] for entry in log_of(run.output)]
    assert reported == [*range(LOG_EVERY, steps, LOG_EVERY), steps]


def test_killed_twice_it_ends_as_if_it_had_not_been(workshop: Workshop, run: Run) -> None:
    output = workshop.folder / "straight"
    shutil.copytree(run.output / "corpus", output / "corpus")
    shutil.copy(run.output / "plan.json", output)
    assert main(workshop.command(output, "--stage=train")) == 0
    assert digests(output / "head") == digests(run.output / "head")
    assert log_of(run.output) == log_of(output)


def test_the_head_accepts_more_than_where_it_began(workshop: Workshop, run: Run) -> None:
    config, weights = load_model(workshop.model, torch.bfloat16)
    ids = load_head(str(run.output / "head"), workshop.model).target_ids
    made = head_config(config, len(ids))
    export(
        untrained := workshop.folder / "untrained", made, warm_start(config, weights, ids, 0), ids
    )
    before = workshop.measure(untrained, run.corpus)
    after = workshop.measure(run.output / "head", run.corpus)
    gains = [m.usage.accepted_tokens / m.usage.steps for m in (before, after)]
    assert gains[1] > 2 * gains[0]

    evaluation = json.loads((run.output / "evaluation.json").read_text())
    shown = evaluation["shapes"][",".join(map(str, SHAPE))]
    assert shown["acceptance_length"] == round(after.usage.mean_acceptance_length, 3)
    assert shown["by_depth"] == [round(share, 3) for share in after.by_depth]


def test_a_later_run_begins_where_an_earlier_one_ended(workshop: Workshop, run: Run) -> None:
    """With other conversations beside the earlier ones, and the earlier head."""
    output = workshop.folder / "later"
    options = ["--seed=1", "--passes=1", f"--after={run.output}"]
    command = workshop.command(output, *options, prompts=40)
    assert main([*command, "--stage=generate", "--stage=train"]) == 0
    first, later = log_of(run.output)[0], log_of(output)[0]
    assert later["top1"][0] > first["top1"][0]
    heads = [load_head(str(o / "head"), workshop.model) for o in (run.output, output)]
    assert heads[0].target_ids.equal(heads[1].target_ids)
    own = len(Corpus(output / "corpus").entries)
    both = len(Corpus(output / "corpus", run.output / "corpus").entries)
    assert both == own + len(run.corpus.entries)
    assert checkpoint_of(output)["steps"] > own * MAX_ANSWER / 1024


def test_what_is_complete_is_not_done_again(workshop: Workshop, run: Run) -> None:
    made = ["corpus", "head"]
    before = [digests(run.output / name) for name in made]
    files = ["log.jsonl", "checkpoint.pt", "evaluation.json"]
    times = [(run.output / name).stat().st_mtime_ns for name in files]
    assert main(workshop.command(run.output)) == 0
    assert [digests(run.output / name) for name in made] == before
    assert [(run.output / name).stat().st_mtime_ns for name in files] == times


def test_other_prompts_are_evaluated_anew(workshop: Workshop, run: Run) -> None:
    output = workshop.folder / "evaluated"
    shutil.copytree(run.output, output)
    assert main(workshop.command(output, "--stage=evaluate", "--evaluation-prompts=1")) == 0
    before, now = (json.loads((o / "evaluation.json").read_text()) for o in (run.output, output))
    assert now["prompts"] == 1 < before["prompts"]
    assert now["shapes"] != before["shapes"]


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-answer=63"], "plan.json: max_answer 64 there, 63 now; resume"),
        (["--self-written=5"], "plan.json: self_written"),
        (["--seed=1"], "plan.json: seed 0 there, 1 now"),
        (["--exclude=/dev/null:text"], "plan.json: exclude"),
        (["--stage=train", "--model=smollm2"], "--model: smollm2, but"),
        (["--stage=evaluate", "--model=smollm2"], "--model: smollm2, but"),
        (["--stage=train", "--learning-rate=1e-3"], "learning_rate"),
        (["--stage=train", "--passes=7"], "checkpoint.pt: steps"),
        (["--stage=train", "--draft-vocabulary=99"], "draft vocabulary"),
        (["--prompts=/no/such.jsonl:text"], "/no/such.jsonl"),
        (["--self-written=some"], "'some'"),
        pytest.param(
            ["--device=cuda"],
            "no CUDA device 0, torch sees 0",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_another_run_in_the_same_folder_is_refused(
    workshop: Workshop,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    named: str,
) -> None:
    before = digests(run.output / "corpus"), digests(run.output / "head")
    assert main(workshop.command(run.output, *options)) == 2
    assert_one_line(capsys.readouterr().err, named)
    assert (digests(run.output / "corpus"), digests(run.output / "head")) == before


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "--prompts or --self-written"),
        (["--stage=train"], "run the stage generate first"),
        (["--stage=evaluate"], "run the stage train first"),
    ],
)
def test_what_a_stage_needs_is_said(
    workshop: Workshop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    named: str,
) -> None:
    assert main(["train-eagle3", str(tmp_path), f"--model={workshop.model}", *options]) == 2
    assert_one_line(capsys.readouterr().err, named)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--shape=9,1,10"], "--shape: [9, 1, 10]"),
        (["--max-prompt=500", "--max-answer=13"], "than the 512 tokens"),
        (["--exclude={prompts}"], "all are empty or excluded"),
        (["--max-prompt=4"], "skipped: 1 prompts longer than --max-prompt"),
        ([], "none of 1 conversations is among the 2% of prompts"),
    ],
)
def test_what_cannot_work_is_said_before_the_work(
    workshop: Workshop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    named: str,
) -> None:
    prompts = f"{workshop.folder}/prompts.jsonl:text:1"
    options = [option.format(prompts=prompts) for option in options]
    command = ["train-eagle3", str(tmp_path), f"--model={workshop.model}", f"--prompts={prompts}"]
    assert main([*command, "--max-answer=8", "--slots=3", *options]) == 2
    assert_one_line(capsys.readouterr().err.splitlines(keepends=True)[-1], named)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_file_is_no_output_folder(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(workshop.command(tmp_path / "file")) == 2
    assert_one_line(capsys.readouterr().err, "file: File exists")


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (None, "has no chat template"),
        ("{{ messages[0]['content'] }} [/INST]", "does not end a user's message with a token"),
    ],
)
def test_a_chat_template_must_do_for_training(
    workshop: Workshop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    template: str | None,
    named: str,
) -> None:
    model = shutil.copytree(workshop.model, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    assert main(workshop.command(tmp_path / "out", f"--model={model}")) == 2
    assert_one_line(capsys.readouterr().err, named)


def assert_one_line(text: str, named: str) -> None:
    assert text.startswith("adaptivespec: ")
    assert text.count("\n") == 1
    assert named in text


# -- several processes ----------------------------------------------------------------------------


def test_two_processes_share_the_work(workshop: Workshop) -> None:
    output = workshop.folder / "shared"
    torchrun = Path(sys.executable).with_name("torchrun")
    options = ["--max-answer=16", "--passes=5", "--tokens-per-step=512", "--evaluation-prompts=2"]
    command = workshop.command(output, *options, prompts=150)
    result = subprocess.run(
        [str(torchrun), "--standalone", "--nproc-per-node=2", str(SCRIPT), *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    by_process = sorted(map(accounted, (output / "corpus").iterdir()), key=min)
    assert by_process == [set(range(rank, 150 + OWN, 2)) for rank in range(2)]
    steps = checkpoint_of(output)["steps"]
    log = log_of(output)
    assert [entry["step"] for entry in log] == [*range(LOG_EVERY, steps, LOG_EVERY), steps]
    assert log[-1]["loss"] < log[0]["loss"]
    load_head(str(output / "head"), workshop.model)
    assert json.loads((output / "evaluation.json").read_text())["prompts"] == 2


def accounted(shard: Path) -> set[int]:
    """Ids that one shard accounts for."""
    with safe_open(shard, "pt") as tensors:
        return {*tensors.get_tensor("ids").tolist(), *tensors.get_tensor("skipped").tolist()}
