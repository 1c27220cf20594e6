"""Recorded conversations on disk: tokens and the target's hidden states, in shards."""

import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Conversation:
    """id: of the job that made it. tokens int32 [n]: prompt, then answer. prompt: tokens of the
    prompt. aux [n, 3 * H]: the target's auxiliary states; final [n, H]: its last, normed one. The
    last token was never fed to the target, so its states are zero."""

    id: int
    tokens: Tensor
    prompt: int
    aux: Tensor
    final: Tensor


def write_shard(folder: Path, conversations: list[Conversation], skipped: list[int]) -> int:
    """Write a shard, whole or not at all; returns its bytes. `skipped`: ids of jobs that gave no
    conversation."""
    ids = [c.id for c in conversations]
    file = folder / f"shard-{min(ids + skipped):08d}.safetensors"
    tensors = {
        "ids": torch.tensor(ids, dtype=torch.int64),
        "skipped": torch.tensor(skipped, dtype=torch.int64),
        "prompts": torch.tensor([c.prompt for c in conversations], dtype=torch.int64),
        "lengths": torch.tensor([len(c.tokens) for c in conversations], dtype=torch.int64),
    }
    if conversations:
        for name in ("tokens", "aux", "final"):
            tensors[name] = torch.cat([getattr(c, name) for c in conversations])
    unfinished = file.with_suffix(".tmp")
    save_file(tensors, unfinished)
    os.replace(unfinished, file)
    return file.stat().st_size


def done(folder: Path) -> set[int]:
    """Ids of all jobs that the shards account for."""
    ids: set[int] = set()
    for file in _files(folder):
        with safe_open(file, "pt") as shard:
            ids.update(shard.get_tensor("ids").tolist(), shard.get_tensor("skipped").tolist())
    return ids


def bytes_used(folder: Path) -> int:
    """Size of all shards."""
    return sum(file.stat().st_size for file in _files(folder))


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a conversation lies: `start` is its first row in the shard."""

    file: Path
    id: int
    start: int  # of its rows in the shard
    length: int
    prompt: int
    prompt_hash: int  # 32 bits


class Corpus:
    """Reads conversations of folders one by one; nothing but an index is kept in memory."""

    def __init__(self, *folders: Path) -> None:
        self.entries: list[Entry] = []
        for file in (file for folder in folders for file in _files(folder)):
            with safe_open(file, "pt") as shard:
                columns = [shard.get_tensor(n).tolist() for n in ("ids", "lengths", "prompts")]
                tokens = shard.get_tensor("tokens").numpy() if columns[0] else None
            start = 0
            for number, length, prompt in zip(*columns, strict=True):
                assert tokens is not None
                key = zlib.crc32(tokens[start : start + prompt].tobytes())
                self.entries.append(Entry(file, number, start, length, prompt, key))
                start += length
        self.entries.sort(key=lambda entry: entry.id)

    def digest(self) -> str:
        """Tells this set of conversations from others, by their prompts and lengths."""
        known = [(e.id, e.length, e.prompt, e.prompt_hash) for e in self.entries]
        return hashlib.sha256(repr(known).encode()).hexdigest()[:16]

    def read(self, entry: Entry) -> Conversation:
        rows = slice(entry.start, entry.start + entry.length)
        with safe_open(entry.file, "pt") as shard:
            tokens, aux, final = (shard.get_slice(n)[rows] for n in ("tokens", "aux", "final"))
        return Conversation(entry.id, tokens, entry.prompt, aux, final)

    def prompt(self, entry: Entry) -> list[int]:
        """The prompt's tokens."""
        with safe_open(entry.file, "pt") as shard:
            tokens: list[int] = shard.get_slice("tokens")[
                entry.start : entry.start + entry.prompt
            ].tolist()
        return tokens

    def answers(self) -> Iterator[Tensor]:
        """Answer tokens int32 [n] of every conversation, shard by shard."""
        by_file: dict[Path, list[Entry]] = {}
        for entry in self.entries:
            by_file.setdefault(entry.file, []).append(entry)
        for file, entries in by_file.items():
            with safe_open(file, "pt") as shard:
                tokens = shard.get_tensor("tokens")
            for entry in entries:
                yield tokens[entry.start + entry.prompt : entry.start + entry.length]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))
