"""What is recorded is the target's own, every job is accounted for, and any run can be resumed."""

import itertools
import string
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from adaptivespec.tokenizer import Tokenizer, load_tokenizer
from adaptivespec.training.corpus import Conversation, Corpus, bytes_used, done
from adaptivespec.training.generate import Generator, Job, Outcome, Skipped, generate
from adaptivespec.training.prompts import Excluded, SelfWritten
from tests.adaptivespec.training.plans import jobs_for, planned, texts
from tests.decoders import greedy, states, tiny_decoder
from tests.factories import tiny_tokenizer, write_hf_folder

AUX_LAYERS = (1, 2, 3)
MAX_PROMPT, MAX_ANSWER = 40, 12

DECODER = tiny_decoder(num_hidden_layers=4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Capital letters end a turn, so that many turns end."""
    capitals = [tiny_tokenizer().token_to_id(letter) for letter in string.ascii_uppercase]
    folder = write_hf_folder(tmp_path_factory.mktemp("model"), eos_token_id=capitals)
    return load_tokenizer(str(folder))


@pytest.fixture
def generator(tokenizer: Tokenizer) -> Generator:
    return new_generator(tokenizer)


def new_generator(
    tokenizer: Tokenizer,
    excluded: Sequence[str] = (),
    *,
    slots: int = 5,
    kind: type[Generator] = Generator,
) -> Generator:
    return kind(
        DECODER,
        tokenizer,
        AUX_LAYERS,
        Excluded(excluded),
        slots=slots,
        max_prompt=MAX_PROMPT,
        max_answer=MAX_ANSWER,
    )


def chat(tokenizer: Tokenizer, message: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": message}])


def message_of(tokenizer: Tokenizer, conversation: Conversation) -> str:
    """The user's message of a recorded conversation."""
    text = tokenizer.decode(conversation.tokens[: conversation.prompt].tolist())
    return text.removeprefix("user\n").removesuffix("\nassistant\n")


def assert_recorded(conversation: Conversation) -> None:
    """Its states are those of a fresh pass, and those of the token that was never fed are zero."""
    fresh = states(DECODER, conversation.tokens.tolist()[:-1], AUX_LAYERS)
    assert fresh.aux is not None
    for ours, theirs in ((conversation.aux, fresh.aux), (conversation.final, fresh.final)):
        torch.testing.assert_close(ours[:-1], theirs, rtol=1e-4, atol=1e-4)
        assert not ours[-1].any()


@pytest.mark.parametrize("slots", [1, 5, 40])
def test_greedy_answers_are_those_of_plain_decoding(tokenizer: Tokenizer, slots: int) -> None:
    messages = texts(24)
    results = dict(new_generator(tokenizer, slots=slots).run(jobs := jobs_for(messages)))
    assert results.keys() == set(jobs)
    lengths = set()
    for job, conversation in results.items():
        assert isinstance(conversation, Conversation)
        assert job.message is not None
        prompt = chat(tokenizer, job.message)
        assert conversation.id == job.id
        assert conversation.tokens[: conversation.prompt].tolist() == prompt
        answer = conversation.tokens[conversation.prompt :].tolist()
        assert answer == greedy(DECODER, prompt, MAX_ANSWER, tokenizer.eos_ids)
        assert_recorded(conversation)
        lengths.add(len(answer))
    assert len(lengths) > 3  # some end by themselves
    assert max(lengths) == MAX_ANSWER  # others are cut


def test_sampled_answers_follow_their_seed(tokenizer: Tokenizer) -> None:
    """The draw does not depend on what else is running."""
    jobs = jobs_for(["the word"] * 12, temperature=1.0)
    by_job = dict(new_generator(tokenizer).run(jobs))
    again = dict(new_generator(tokenizer, slots=2).run(jobs[::-1]))
    answers = set()
    for job in jobs:
        ours, theirs = by_job[job], again[job]
        assert isinstance(ours, Conversation)
        assert isinstance(theirs, Conversation)
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert_recorded(ours)
        answers.add(tuple(ours.tokens.tolist()))
    assert len(answers) > 6


def test_a_generator_can_be_used_again(generator: Generator) -> None:
    jobs = jobs_for(texts(7))
    first, second = (
        {job.id: c.tokens.tolist() for job, c in generator.run(jobs) if isinstance(c, Conversation)}
        for _ in range(2)
    )
    assert first == second
    assert len(first) == 7


# -- prompts that give no conversation, and those the target writes -------------------------------


def test_too_long_prompts_are_skipped(tokenizer: Tokenizer, generator: Generator) -> None:
    frame = len(chat(tokenizer, ""))
    fits, too_long = ("7" * (MAX_PROMPT - frame + more) for more in (0, 1))
    assert len(chat(tokenizer, fits)) == MAX_PROMPT
    results = [(job.message, c) for job, c in generator.run(jobs_for([too_long, fits, too_long]))]
    skipped = [(message, c) for message, c in results if isinstance(c, Skipped)]
    assert skipped == [(too_long, Skipped.PROMPT_TOO_LONG)] * 2
    ((_, conversation),) = ((m, c) for m, c in results if isinstance(c, Conversation))
    assert conversation.prompt == MAX_PROMPT
    assert_recorded(conversation)


def self_written(count: int, start: str) -> list[Job]:
    return planned([], [SelfWritten(count, start)])


def test_the_target_writes_messages_and_answers_them(
    tokenizer: Tokenizer, generator: Generator
) -> None:
    start = "Do "
    results = list(generator.run(self_written(120, start)))
    written = [c for _, c in results if isinstance(c, Conversation)]
    assert len(results) == 120
    assert 8 < len(written) < 120  # others did not end in time
    before = tokenizer.user_turn(start)
    messages = set()
    for conversation in written:
        prompt = conversation.tokens[: conversation.prompt].tolist()
        assert prompt[: len(before) - 1] == before[:-1]  # merges may cross the end of the start
        message = message_of(tokenizer, conversation)
        assert message.startswith(start.strip())
        assert chat(tokenizer, message) == prompt
        messages.add(message)
        answer = conversation.tokens[conversation.prompt :].tolist()
        assert answer == greedy(DECODER, prompt, MAX_ANSWER, tokenizer.eos_ids)
        assert_recorded(conversation)
    assert len(messages) > len(written) // 2


def test_a_message_ends_where_the_template_says(tmp_path: Path) -> None:
    """Also where that is no token that ends an answer: more messages end in time."""

    def messages(end: str) -> list[str]:
        folder = write_hf_folder(tmp_path / end)
        hf = AutoTokenizer.from_pretrained(folder)
        hf.add_tokens(["Q"])  # a letter that no other token has
        hf.chat_template = "user\n{{ messages[0]['content'] }}" + end
        hf.save_pretrained(folder)
        tokenizer = load_tokenizer(str(folder))
        results = [c for _, c in new_generator(tokenizer).run(self_written(120, "Do "))]
        prompts = [c.tokens[: c.prompt].tolist() for c in results if isinstance(c, Conversation)]
        texts = [tokenizer.decode(prompt).removesuffix("Q") for prompt in prompts]
        return [text.removeprefix("user\n") for text in texts]

    ended = messages("Q")
    assert len(ended) > len(messages("<|im_end|>"))
    assert not any("Q" in message for message in ended)


def test_a_message_may_not_outgrow_the_longest_prompt(
    tokenizer: Tokenizer, generator: Generator
) -> None:
    frame = len(tokenizer.user_turn(""))
    for start in ("7" * (MAX_PROMPT - frame), "7" * MAX_PROMPT):
        results = list(generator.run(self_written(3, start)))
        reason = Skipped.UNFINISHED if len(start) < MAX_PROMPT else Skipped.PROMPT_TOO_LONG
        assert [outcome for _, outcome in results] == [reason] * 3


def test_written_messages_that_are_excluded_are_dropped(tokenizer: Tokenizer) -> None:
    jobs = self_written(120, "")

    def messages(excluded: Sequence[str]) -> dict[int, str]:
        results = new_generator(tokenizer, excluded).run(jobs)
        return {
            job.id: message_of(tokenizer, c) for job, c in results if isinstance(c, Conversation)
        }

    everything = messages([])
    unwanted = max(everything.values(), key=len)
    rest = {i: m for i, m in everything.items() if m not in Excluded([unwanted])}
    assert messages([unwanted.upper()]) == rest
    assert len(rest) < len(everything)


# -- shards ---------------------------------------------------------------------------------------

ALL_DISK = 10**12


def mixture() -> list[Job]:
    """Greedy, sampled, too long and self-written."""
    files = [[*texts(30), "7" * 60, "8" * 60], texts(10)]
    return planned(files, [SelfWritten(25, "I ")], sampled=0.3)


def make(
    tokenizer: Tokenizer,
    jobs: Sequence[Job],
    folder: Path,
    max_bytes: int = ALL_DISK,
    kind: type[Generator] = Generator,
    quiet: bool = True,
) -> None:
    new = partial(new_generator, tokenizer, kind=kind)
    generate(new, jobs, folder, shard=8, max_bytes=max_bytes, quiet=quiet)


def content(folder: Path) -> dict[int, list[int]]:
    corpus = Corpus(folder)
    return {entry.id: corpus.read(entry).tokens.tolist() for entry in corpus.entries}


@pytest.fixture(scope="module")
def complete(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("complete") / "corpus"
    make(tokenizer, mixture(), folder)
    return folder


def test_every_job_is_accounted_for(complete: Path) -> None:
    jobs = mixture()
    assert done(complete) == {job.id for job in jobs}
    skipped = {job.id for job in jobs} - content(complete).keys()
    too_long = {job.id for job in jobs if job.message is not None and len(job.message) > 50}
    assert len(too_long) == 2
    assert too_long < skipped
    assert skipped - too_long <= {job.id for job in jobs if job.message is None}


def test_going_on_gives_the_same_conversations(
    tokenizer: Tokenizer, complete: Path, tmp_path: Path
) -> None:
    half = sorted(complete.iterdir())[::2]
    assert len(half) > 2
    for shard in half:
        (tmp_path / shard.name).write_bytes(shard.read_bytes())
    (tmp_path / "shard-00000001.tmp").write_bytes(b"half of a shard")  # of a killed process
    before = {shard.name: shard.read_bytes() for shard in half}
    make(tokenizer, mixture(), tmp_path)
    assert content(tmp_path) == content(complete)
    assert done(tmp_path) == done(complete)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


class Interrupted(Generator):
    """Ctrl-C comes after 21 jobs."""

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
        yield from itertools.islice(super().run(jobs), 21)
        raise KeyboardInterrupt


def test_ctrl_c_keeps_what_is_complete(
    tokenizer: Tokenizer, complete: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tokenizer, mixture(), tmp_path, kind=Interrupted)
    assert len(done(tmp_path)) == 21
    make(tokenizer, mixture(), tmp_path)
    assert content(tmp_path) == content(complete)


def test_several_processes_share_the_jobs(
    tokenizer: Tokenizer, complete: Path, tmp_path: Path
) -> None:
    jobs = mixture()
    for rank in range(2):
        make(tokenizer, jobs[rank::2], tmp_path)
    assert content(tmp_path) == content(complete)


def test_it_stops_at_the_given_size(
    tokenizer: Tokenizer, complete: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enough = bytes_used(complete) // 2
    make(tokenizer, mixture(), tmp_path, enough, quiet=False)
    shards = sorted(tmp_path.iterdir())
    largest = max(shard.stat().st_size for shard in shards)
    assert enough <= bytes_used(tmp_path) < enough + largest
    assert "stopping here" in capsys.readouterr().out
    assert done(tmp_path) < done(complete)
    # a training that is resumed finds the corpus that it began with
    make(tokenizer, mixture(), tmp_path, enough, quiet=False)
    assert sorted(tmp_path.iterdir()) == shards
    assert "stopping here" in capsys.readouterr().out


def test_what_is_done_is_not_done_again(
    tokenizer: Tokenizer, complete: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {shard: shard.stat().st_mtime_ns for shard in complete.iterdir()}
    make(tokenizer, mixture(), complete, max_bytes=1)
    assert {shard: shard.stat().st_mtime_ns for shard in complete.iterdir()} == before
    assert capsys.readouterr().out == ""
