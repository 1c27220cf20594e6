"""Tokens per second of a running server, speculation off, lossless and lossy, in turn.

    python infra/bench_server.py [--url http://127.0.0.1:8000/v1] [--rounds 2] [--max-tokens 128]

Every prompt is answered in every mode before the next one, so that a machine whose speed drifts
treats all alike. Figures are medians over prompts and rounds; ratios are taken prompt by prompt.
The step's overhead is what `/health` says after a round with one request at a time.
"""

import argparse
import json
import statistics
import time
import urllib.request
from typing import Any

from openai import OpenAI

MODES: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    "lossless": {"mode": "adaptive", "kappa": 1},
    "kappa 0.2": {"mode": "adaptive", "kappa": 0.2},
}

PROMPTS = [
    "Repeat this sentence five times: The quick brown fox jumps over the lazy dog.",
    "Fix the spelling, and repeat the text: Teh cat sat on teh mat and teh dog sat on teh rug.",
    "Write a Python class Stack with push, pop and peek, then a test for each method.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Count from 1 to 40.",
    "List the months of the year and the number of days in each.",
    "Explain photosynthesis to a child.",
    "Tell me a short story about a robot and a bird.",
    "A train travels 60 miles in 1.5 hours. How fast does it go? Explain step by step.",
    "Write a polite email that asks for a day off.",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key="none", timeout=600)
    model = client.models.list().data[0].id
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    lengths: dict[str, list[float]] = {mode: [] for mode in MODES}
    for round_ in range(args.rounds + 1):
        for prompt in PROMPTS if round_ else PROMPTS[:1]:
            for mode, speculation in MODES.items():
                started = time.perf_counter()
                answer = client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": prompt}],
                    temperature=0,
                    max_tokens=args.max_tokens,
                    extra_body={"speculation": speculation},
                )
                seconds = time.perf_counter() - started
                assert answer.usage is not None
                if round_:  # the first is for warming up
                    usage = answer.usage.model_dump()
                    rates[mode].append(usage["completion_tokens"] / seconds)
                    lengths[mode].append(usage["speculation"]["mean_acceptance_length"])
    print("| mode | tokens/s | ratio to off | tokens per step |\n|---|---|---|---|")
    for mode in MODES:
        ratio = statistics.median(a / b for a, b in zip(rates[mode], rates["off"], strict=True))
        length = statistics.mean(lengths[mode])
        print(f"| {mode} | {statistics.median(rates[mode]):.1f} | {ratio:.2f} | {length:.2f} |")
    with urllib.request.urlopen(args.url.removesuffix("/v1") + "/health") as health:
        status = json.load(health)
    print(f"step overhead: median {status['step_overhead_ms']:.2f} ms")


if __name__ == "__main__":
    main()
