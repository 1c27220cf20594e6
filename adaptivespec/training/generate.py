"""First stage: the target answers prompts, and its hidden states are recorded on the way."""

import random
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from adaptivespec.models.decoder import Decoder, Hidden
from adaptivespec.sampling import SamplingParams, target_tokens, uniforms
from adaptivespec.tokenizer import Tokenizer
from adaptivespec.training.corpus import Conversation, bytes_used, done, write_shard
from adaptivespec.training.prompts import Excluded, PromptSet, SelfWritten
from adaptivespec.training.slots import Slots


@dataclass(frozen=True, slots=True)
class Job:
    """One conversation to record. Its answer is sampled with `sampling`; `message` None: the target
    first writes the user's message itself, beginning with `start`."""

    id: int
    sampling: SamplingParams
    message: str | None
    start: str = ""


def plan(
    files: Sequence[PromptSet],
    self_written: Sequence[SelfWritten],
    excluded: Excluded,
    sampled: float,
    temperature: float,
    seed: int,
) -> list[Job]:
    """All jobs, in an order of chance that the seed fixes, so that any first part of them is a
    sample of all. The share `sampled` of the answers is drawn at `temperature`, all others are
    greedy; a message that comes again is always sampled, or it would get the same answer."""
    messages = [m for s in files for m in s.messages]
    wanted: list[tuple[str | None, str]] = [(m, "") for m in messages if m and m not in excluded]
    wanted += [(None, s.start) for s in self_written for _ in range(s.count)]
    chance = random.Random(seed)
    chance.shuffle(wanted)
    seen: set[str] = set()
    jobs = []
    for i, (message, start) in enumerate(wanted):
        again = message is not None and message in seen
        if message is not None:
            seen.add(message)
        drawn = again or chance.random() < sampled
        sampling = SamplingParams(temperature if drawn else 0.0, seed=(seed << 32) + 2 * i)
        jobs.append(Job(i, sampling, message, start))
    return jobs


class Skipped(Enum):
    """Why a job gave no conversation."""

    PROMPT_TOO_LONG = "prompts longer than --max-prompt"
    UNFINISHED = "self-written messages that did not end in time"
    EMPTY = "self-written messages that were empty"
    EXCLUDED = "self-written messages that are excluded"


Outcome = Conversation | Skipped


_Waiting = deque[tuple[Job, str | None]]
"""Jobs with their message, None if it has yet to be written."""


@dataclass(slots=True)
class _Sequence:
    """What runs in a slot: a message being written (`writing`), or an answer."""

    job: Job
    prompt: list[int]
    writing: bool
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)  # generated


class Generator:
    """Runs jobs through a fixed number of slots, each refilled as soon as its sequence ends."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        aux_layers: Sequence[int],
        excluded: Excluded,
        *,
        slots: int,
        max_prompt: int,
        max_answer: int,
    ) -> None:
        """`max_prompt`, `max_answer` in tokens: a longer prompt is skipped, a longer answer cut."""
        self._decoder, self._tokenizer = decoder, tokenizer
        self._aux_layers = tuple(aux_layers)
        self._message_ends = tokenizer.eos_ids | {tokenizer.end_of_user_turn()}
        self._excluded = excluded
        self._max_prompt, self._max_answer = max_prompt, max_answer
        capacity = max_prompt + max_answer
        self._slots = Slots(decoder, slots, capacity)
        self._running: list[_Sequence | None] = [None] * slots
        self._next = torch.zeros(slots, dtype=torch.int64, device=decoder.device)
        width = (len(self._aux_layers) + 1) * decoder.config.hidden_size
        self._states = torch.zeros((slots, capacity, width), dtype=decoder.dtype)
        self._all = torch.arange(slots)

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
        """Every job with what came of it, in the order in which they end."""
        waiting: _Waiting = deque((job, job.message) for job in jobs)
        count = len(self._running)
        while waiting or any(self._running):
            free = [i for i, sequence in enumerate(self._running) if sequence is None]
            if waiting and len(free) >= min(len(waiting), max(1, count // 16)):
                while waiting and free:
                    sequence = self._start(*waiting.popleft())
                    if len(sequence.prompt) > self._max_prompt:
                        yield sequence.job, Skipped.PROMPT_TOO_LONG
                    else:
                        self._running[free.pop()] = sequence
                yield from self._fill(waiting)
            elif any(self._running):
                yield from self._advance(waiting)

    def _start(self, job: Job, message: str | None) -> _Sequence:
        if message is None:
            prompt = self._tokenizer.user_turn(job.start)
            sampling = SamplingParams(1.0, min_p=_MIN_P, seed=job.sampling.seed + 1)
            return _Sequence(job, prompt, True, sampling)
        prompt = self._tokenizer.apply_chat_template([{"role": "user", "content": message}])
        return _Sequence(job, prompt, False, job.sampling)

    def _fill(self, waiting: _Waiting) -> Iterator[tuple[Job, Outcome]]:
        """Prefill the slots whose sequence has no tokens yet."""
        new = [i for i, s in enumerate(self._running) if s is not None and not s.tokens]
        prompts = [s.prompt for s in self._running if s is not None and not s.tokens]
        if not new:
            return
        hidden = self._slots.fill(new, prompts, self._aux_layers)
        states = _states(hidden)
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0)
        for slot, prompt, end in zip(new, prompts, ends.tolist(), strict=True):
            self._states[slot, : len(prompt)] = states[end - len(prompt) : end]
        last = hidden.final[(ends - 1).to(hidden.final.device)]
        yield from self._take(new, self._decoder.logits(last), waiting)

    def _advance(self, waiting: _Waiting) -> Iterator[tuple[Job, Outcome]]:
        hidden = self._slots.advance(self._next, self._aux_layers)
        self._states[self._all, (self._slots.lengths - 1).cpu()] = _states(hidden)
        active = [i for i, sequence in enumerate(self._running) if sequence is not None]
        final = hidden.final
        if len(active) < len(final):
            final = final[torch.tensor(active, device=final.device)]
        yield from self._take(active, self._decoder.logits(final), waiting)

    def _take(
        self, slots: list[int], logits: Tensor, waiting: _Waiting
    ) -> Iterator[tuple[Job, Outcome]]:
        """Give every one of `slots` its next token, and end the sequences that are complete."""
        running = [sequence for slot in slots if (sequence := self._running[slot]) is not None]
        draws = torch.zeros(len(running), dtype=torch.float64)
        for row, sequence in enumerate(running):
            if not sequence.sampling.greedy:
                draws[row] = uniforms(sequence.sampling.seed, len(sequence.tokens), 1)[0]
        chosen = target_tokens(logits, [s.sampling for s in running], draws)
        self._next[torch.tensor(slots, device=chosen.device)] = chosen
        for slot, sequence, token in zip(slots, running, chosen.tolist(), strict=True):
            sequence.tokens.append(token)
            if sequence.writing:
                ends, limit = self._message_ends, self._max_prompt - len(sequence.prompt)
            else:
                ends, limit = self._tokenizer.eos_ids, self._max_answer
            ended = token in ends
            if not ended and len(sequence.tokens) < limit:
                continue
            self._running[slot] = None
            if not sequence.writing:
                yield sequence.job, self._record(slot, sequence)
            elif isinstance(message := self._message(sequence, ended), Skipped):
                yield sequence.job, message
            else:
                waiting.appendleft((sequence.job, message))

    def _message(self, sequence: _Sequence, ended: bool) -> str | Skipped:
        """A message that the target has written; its last token is the one that ended it."""
        if not ended:
            return Skipped.UNFINISHED
        written = self._tokenizer.decode(sequence.tokens[:-1], continued=True)
        text = (sequence.job.start + written).strip()
        if not text:
            return Skipped.EMPTY
        return Skipped.EXCLUDED if text in self._excluded else text

    def _record(self, slot: int, sequence: _Sequence) -> Conversation:
        tokens = sequence.prompt + sequence.tokens
        states = self._states[slot, : len(tokens)].clone()
        states[-1] = 0
        width = self._decoder.config.hidden_size
        aux, final = states[:, :-width].contiguous(), states[:, -width:].contiguous()
        numbers = torch.tensor(tokens, dtype=torch.int32)
        return Conversation(sequence.job.id, numbers, len(sequence.prompt), aux, final)


_MIN_P = 0.05
"""For messages that the target writes: without a filter every tenth loses its thread."""


def _states(hidden: Hidden) -> Tensor:
    assert hidden.aux is not None
    return torch.cat((hidden.aux, hidden.final), -1).cpu()


def generate(
    new_generator: Callable[[], Generator],
    jobs: Sequence[Job],
    folder: Path,
    *,
    shard: int,
    max_bytes: int,
    quiet: bool,
) -> Counter[Skipped]:
    """Run all jobs that the shards in `folder` do not account for, `shard` conversations to a
    shard, until they are done, the shards have `max_bytes`, or the disk is nearly full. Returns how
    many were skipped now. The generator is made if there is something to do. `quiet`: without a
    progress bar."""
    folder.mkdir(parents=True, exist_ok=True)
    known = done(folder)
    left = [job for job in jobs if job.id not in known]
    conversations: list[Conversation] = []
    skipped: list[int] = []
    reasons: Counter[Skipped] = Counter()
    answered = largest = 0

    def write() -> None:
        nonlocal conversations, skipped, largest
        if conversations or skipped:
            largest = max(largest, write_shard(folder, conversations, skipped))
            conversations, skipped = [], []

    def full() -> bool:
        if bytes_used(folder) >= max_bytes:
            reason = f"{max_bytes / 1e9:.1f} GB of states"
        elif shutil.disk_usage(folder).free < _SPARE_SHARDS * largest:
            reason = "the disk is nearly full"
        else:
            return False
        if not quiet:
            bar.write(f"generate: {reason}; stopping here")
        return True

    bar = tqdm(
        total=len(jobs),
        initial=len(jobs) - len(left),
        desc="generate",
        unit="prompt",
        disable=quiet,
        mininterval=1,
    )
    with bar:
        if not left or full():  # nothing may be added before training is resumed
            return reasons
        try:
            for job, outcome in new_generator().run(left):
                if isinstance(outcome, Skipped):
                    skipped.append(job.id)
                    reasons[outcome] += 1
                else:
                    conversations.append(outcome)
                    answered += len(outcome.tokens) - outcome.prompt
                if not quiet:
                    rate = answered / bar.format_dict["elapsed"]
                    bar.set_postfix_str(f"{rate:.0f} answer tokens/s", refresh=False)
                bar.update()
                if len(conversations) >= shard:
                    write()
                    if full():
                        break
        finally:  # whoever presses Ctrl-C keeps what is complete
            write()
    return reasons


_SPARE_SHARDS = 4
"""What must be free on the disk to go on: other processes write too, and so does training."""
