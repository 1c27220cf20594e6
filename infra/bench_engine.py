"""How fast the embedded engine is on this machine, against its floors and against transformers.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE python infra/bench_engine.py

Everything that is compared is measured in turn, round by round, because a shared machine drifts;
minima and medians are of the same rounds. The floor of a pass is the larger of two times: the bytes
of the weights and of the cached keys and values over the measured memory bandwidth, and two
floating-point operations per weight and row over the rate of torch's products, in the model's dtype
or in float32. Where a pass spends
its time is what its kernels take, and the rest: torch and Python around them.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from adaptivespec.engine.engine import TargetEngine
from adaptivespec.kernels.team import Team
from adaptivespec.messages import Chunk
from adaptivespec.models.decoder import Decoder
from adaptivespec.models.loading import load_model
from adaptivespec.models.sources import read_config, resolve
from adaptivespec.sampling import SamplingParams
from adaptivespec.tree import DraftTrees, roots

GREEDY = SamplingParams()
VERIFIED = 16
"""Nodes per tree where several requests are verified."""
Pass = Callable[[], object]
Cases = dict[tuple[int, int], Pass]  # by requests and nodes per request


def timed(calls: Mapping[Any, Callable[[], object]], rounds: int) -> dict[Any, list[float]]:
    """Seconds of each call in each round, after one round of warming up."""
    seconds: dict[Any, list[float]] = {key: [] for key in calls}
    for warm in [True] + [False] * rounds:
        for key, call in calls.items():
            started = time.perf_counter()
            call()
            if not warm:
                seconds[key].append(time.perf_counter() - started)
    return seconds


def summary(seconds: list[float]) -> str:
    return f"{min(seconds) * 1e3:9.2f} {statistics.median(seconds) * 1e3:9.2f}"


def machine(dtype: torch.dtype) -> tuple[dict[str, Pass], int, int]:
    """Calls that read memory and multiply, the bytes of the one and the operations of the other."""
    memory = torch.ones(2**26)  # zeros that were never written share one page
    rows, size = 256, 2048
    calls: dict[str, Pass] = {"read": memory.sum}
    for kind in {dtype, torch.float32}:  # many a CPU multiplies bfloat16 slowly
        weight, x = torch.randn(size, size, dtype=kind), torch.randn(rows, size, dtype=kind)
        calls[f"multiply {kind}"] = partial(F.linear, x, weight)
    return calls, memory.nbytes, 2 * rows * size * size


def random_trees(batch: int, nodes: int, vocabulary: int) -> DraftTrees:
    """Trees in which every node but the root has a random parent before it."""
    parents = [[-1] + [int(torch.randint(0, i, ())) for i in range(1, nodes)] for _ in range(batch)]
    return DraftTrees(
        torch.randint(0, vocabulary, (batch, nodes), dtype=torch.int32),
        torch.tensor(parents, dtype=torch.int32),
        torch.zeros(batch, nodes),
    )


def passes(decoder: Decoder, args: argparse.Namespace) -> Cases:
    """Plain decoding and verification behind `--cached` tokens: a tree of each size for one
    request, one node and `VERIFIED` for each number of them."""
    vocabulary = decoder.config.vocab_size
    most = max(args.batches)
    capacity = args.cached + max(*args.nodes, VERIFIED)
    engine = TargetEngine(decoder, most * capacity)
    for request in range(most):
        engine.open(request, capacity, GREEDY)
        prompt = torch.randint(0, vocabulary, (args.cached,)).tolist()
        engine.forward([Chunk(request, prompt, True)], [], roots([]))

    def forward(batch: int, nodes: int) -> Pass:
        trees = random_trees(batch, nodes, vocabulary)
        return lambda: engine.forward([], list(range(batch)), trees)

    shapes = [(1, nodes) for nodes in {1, VERIFIED, *args.nodes}]
    shapes += [(batch, nodes) for batch in args.batches for nodes in (1, VERIFIED)]
    return {shape: forward(*shape) for shape in sorted(set(shapes))}


def bench_passes(cases: Cases, decoder: Decoder, weights: int, args: argparse.Namespace) -> None:
    """Each pass against its floor. `weights` counts those that a pass multiplies with."""
    c = decoder.config
    size = weights * decoder.dtype.itemsize
    cached = args.cached * c.layers * 2 * c.kv_heads * c.head_dim * decoder.dtype.itemsize
    calls, read, multiplied = machine(decoder.dtype)
    seconds: dict[Any, list[float]] = timed({**calls, **cases}, args.rounds)
    bandwidth = read / min(seconds.pop("read"))
    products = [name for name in calls if name != "read"]
    rate = multiplied / min(min(seconds.pop(name)) for name in products)
    print(
        f"weights {size / 1e6:.0f} MB, cache {cached / 1e6:.1f} MB per request, "
        f"memory {bandwidth / 1e9:.1f} GB/s, products {rate / 1e9:.0f} GFLOP/s"
    )
    print(
        f"{'requests':>8} {'nodes':>6} {'min ms':>9} {'median':>9} {'/ 1 node':>9} "
        f"{'floor ms':>9} {'min/floor':>9}"
    )
    one = seconds[1, 1]
    for (batch, nodes), values in seconds.items():
        ratio = statistics.median(each / base for each, base in zip(values, one, strict=True))
        memory = (size + batch * cached) / bandwidth
        floor = max(memory, 2 * weights * batch * nodes / rate)
        print(
            f"{batch:8} {nodes:6} {summary(values)} {ratio:9.2f} {floor * 1e3:9.2f} "
            f"{min(values) / floor:9.2f}"
        )


def bench_parts(cases: Cases, rounds: int) -> None:
    """Milliseconds per pass in each kernel, and in all else, medians of the rounds."""
    spent: dict[str, float] = {}
    run = Team.run

    def timed_run(team: Team, kernel: Any, *args: Any) -> None:
        started = time.perf_counter()
        run(team, kernel, *args)
        spent[kernel.__name__] = spent.get(kernel.__name__, 0.0) + time.perf_counter() - started

    Team.run = timed_run  # type: ignore[assignment,method-assign]
    kernels = ("decode", "linear")
    print(f"\n{'requests':>8} {'nodes':>6} {'layers':>9} {'output':>9} {'other':>9}")
    for (batch, nodes), call in cases.items():
        parts = []
        for _ in range(rounds):
            spent.clear()
            started = time.perf_counter()
            call()
            wall = time.perf_counter() - started
            parts.append([*(spent[kernel] for kernel in kernels), wall - sum(spent.values())])
        medians = [statistics.median(part) * 1e3 for part in zip(*parts, strict=True)]
        print(f"{batch:8} {nodes:6}" + "".join(f" {median:9.2f}" for median in medians))
    Team.run = run  # type: ignore[method-assign]


def bench_decode(decoder: Decoder, model: Any, args: argparse.Namespace) -> None:
    """Greedy generation of `--generate` tokens after a prompt of `--prompt`, by both."""
    prompt = torch.randint(0, decoder.config.vocab_size, (args.prompt,)).tolist()

    def ours() -> None:
        engine = TargetEngine(decoder, args.prompt + args.generate)
        engine.open(0, args.prompt + args.generate, GREEDY)
        token = engine.forward([Chunk(0, prompt, True)], [], roots([])).first_tokens[0]
        for _ in range(args.generate - 1):
            token = int(engine.forward([], [0], roots([token])).target[0, 0])
            engine.commit(0, [0])

    def theirs() -> None:
        length = args.generate
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, args.prompt, dtype=torch.int64),
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
        )

    seconds = timed({"this engine": ours, "transformers": theirs}, args.rounds)
    print(f"\n{args.generate} tokens after {args.prompt}: tokens/s (best, median)")
    for name, values in seconds.items():
        best, median = args.generate / min(values), args.generate / statistics.median(values)
        print(f"{name:>14} {best:9.1f} {median:9.1f}")
    ratios = [b / a for a, b in zip(seconds["this engine"], seconds["transformers"], strict=True)]
    print(f"{'ratio':>14} {max(ratios):9.2f} {statistics.median(ratios):9.2f}")


def transformers_model(path: str, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """The same weights in transformers' own class."""
    config = AutoConfig.for_model(**read_config(resolve(path)))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict(weights | {"lm_head.weight": head})
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2", help="folder, hub id, GGUF file or smollm2")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cached", type=int, default=256, help="tokens before each tree")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--generate", type=int, default=48)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    config, weights = load_model(args.model, dtype)
    decoder = Decoder(config, weights, dtype)
    lookup = set() if config.tie_word_embeddings else {"model.embed_tokens.weight"}
    multiplied = sum(w.numel() for name, w in weights.items() if name not in lookup)
    cases = passes(decoder, args)
    bench_passes(cases, decoder, multiplied, args)
    shown = sorted({(b, n) for b in args.batches for n in (1, VERIFIED)})
    bench_parts({shape: cases[shape] for shape in shown}, args.rounds)
    bench_decode(decoder, transformers_model(args.model, weights, dtype), args)


if __name__ == "__main__":
    main()
