"""First stage: the target answers prompts, and its hidden states are recorded on the way."""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
    wanted: list[tuple[str | None, str]] = [(m, "") for s in files for m in s.messages]
    wanted = [(message, "") for message, _ in wanted if message and message not in excluded]
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
        self._excluded = excluded
        self._max_prompt, self._max_answer = max_prompt, max_answer
        capacity = max_prompt + max_answer
        self._slots = Slots(decoder, slots, capacity)
        self._running: list[_Sequence | None] = [None] * slots
        self._next = torch.zeros(slots, dtype=torch.int64, device=decoder.device)
        width = (len(self._aux_layers) + 1) * decoder.config.hidden_size
        self._states = torch.zeros((slots, capacity, width), dtype=decoder.dtype)
        self._all = torch.arange(slots)

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Conversation | None]]:
        """Every job with what came of it, in the order in which they end."""
        waiting = deque(self._start(job) for job in jobs)
        count = len(self._running)
        while waiting or any(self._running):
            free = [i for i, sequence in enumerate(self._running) if sequence is None]
            if waiting and len(free) >= min(len(waiting), max(1, count // 16)):
                while waiting and free:
                    sequence = waiting.popleft()
                    if len(sequence.prompt) > self._max_prompt:
                        yield sequence.job, None
                    else:
                        self._running[free.pop()] = sequence
                yield from self._fill(waiting)
            elif any(self._running):
                yield from self._advance(waiting)

    def _start(self, job: Job) -> _Sequence:
        if job.message is None:
            prompt = self._tokenizer.user_turn(job.start)
            sampling = SamplingParams(1.0, min_p=_MIN_P, seed=job.sampling.seed + 1)
            return _Sequence(job, prompt, True, sampling)
        return self._answer(job, job.message)

    def _answer(self, job: Job, message: str) -> _Sequence:
        prompt = self._tokenizer.apply_chat_template([{"role": "user", "content": message}])
        return _Sequence(job, prompt, False, job.sampling)

    def _fill(self, waiting: deque[_Sequence]) -> Iterator[tuple[Job, Conversation | None]]:
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

    def _advance(self, waiting: deque[_Sequence]) -> Iterator[tuple[Job, Conversation | None]]:
        hidden = self._slots.advance(self._next, self._aux_layers)
        self._states[self._all, (self._slots.lengths - 1).cpu()] = _states(hidden)
        active = [i for i, sequence in enumerate(self._running) if sequence is not None]
        final = hidden.final
        if len(active) < len(final):
            final = final[torch.tensor(active, device=final.device)]
        yield from self._take(active, self._decoder.logits(final), waiting)

    def _take(
        self, slots: list[int], logits: Tensor, waiting: deque[_Sequence]
    ) -> Iterator[tuple[Job, Conversation | None]]:
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
            ended = token in self._tokenizer.eos_ids
            limit = (
                self._max_prompt - len(sequence.prompt) if sequence.writing else self._max_answer
            )
            if not ended and len(sequence.tokens) < limit:
                continue
            self._running[slot] = None
            if not sequence.writing:
                yield sequence.job, self._record(slot, sequence)
            elif (message := self._message(sequence, ended)) is None:
                yield sequence.job, None
            else:
                waiting.appendleft(self._answer(sequence.job, message))

    def _message(self, sequence: _Sequence, ended: bool) -> str | None:
        """A message that the target has written, unless it is cut, empty or excluded."""
        text = sequence.job.start + self._tokenizer.decode(sequence.tokens)
        return text.strip() if ended and text.strip() and text not in self._excluded else None

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
    generator: Generator,
    jobs: Sequence[Job],
    folder: Path,
    *,
    shard: int,
    max_bytes: int,
    quiet: bool,
) -> None:
    """Run all jobs that the shards in `folder` do not account for, `shard` conversations to a
    shard, until they are done or the shards have `max_bytes`. `quiet`: without a progress bar."""
    folder.mkdir(parents=True, exist_ok=True)
    known = done(folder)
    left = [job for job in jobs if job.id not in known]
    conversations: list[Conversation] = []
    skipped: list[int] = []
    answered = 0

    def full() -> bool:
        reached = bytes_used(folder) >= max_bytes
        if reached:
            bar.write(f"generate: {max_bytes / 1e9:.1f} GB of states; stopping here")
        return reached

    bar = tqdm(
        total=len(jobs),
        initial=len(jobs) - len(left),
        desc="generate",
        unit="prompt",
        disable=quiet,
        mininterval=1,
    )
    with bar:
        if left and full():  # nothing may be added before training is resumed
            return
        try:
            for job, conversation in generator.run(left):
                if conversation is None:
                    skipped.append(job.id)
                else:
                    conversations.append(conversation)
                    answered += len(conversation.tokens) - conversation.prompt
                if not quiet:
                    rate = answered / bar.format_dict["elapsed"]
                    bar.set_postfix_str(f"{rate:.0f} answer tokens/s", refresh=False)
                bar.update()
                if len(conversations) >= shard:
                    write_shard(folder, conversations, skipped)
                    conversations, skipped = [], []
                    if full():
                        return
        finally:  # whoever presses Ctrl-C keeps what is complete
            if conversations or skipped:
                write_shard(folder, conversations, skipped)
