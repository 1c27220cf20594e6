"""How fast the embedded engine is on this machine, against its floors and against transformers.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE python infra/bench_engine.py

Everything that is compared is measured in turn, round by round, because a shared machine drifts;
minima and medians are of the same rounds. Floors: the bytes of the weights over the measured memory
bandwidth, and two floating-point operations per weight and row over the measured rate of products.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from adaptivespec.engine.engine import TargetEngine
from adaptivespec.messages import Chunk
from adaptivespec.models.decoder import Decoder
from adaptivespec.models.layers import make_linear
from adaptivespec.models.loading import load_model
from adaptivespec.models.sources import read_config, resolve
from adaptivespec.sampling import SamplingParams
from adaptivespec.tree import DraftTrees, roots

GREEDY = SamplingParams()


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


def measure_machine(dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    """(bytes per second of reading memory, operations per second of large products)."""
    memory = torch.zeros(2**27)
    size = 2048
    product = make_linear(torch.randn(size, size, dtype=dtype))
    x = torch.randn(256, size, dtype=dtype)
    seconds = timed({"read": memory.sum, "product": lambda: product(x)}, rounds)
    bandwidth = memory.numel() * memory.element_size() / min(seconds["read"])
    return bandwidth, 2 * len(x) * size * size / min(seconds["product"])


def random_tree(nodes: int, vocabulary: int) -> DraftTrees:
    """One tree in which every node but the root has a random parent before it."""
    parents = [-1] + [int(torch.randint(0, i, ())) for i in range(1, nodes)]
    return DraftTrees(
        torch.randint(0, vocabulary, (1, nodes), dtype=torch.int32),
        torch.tensor([parents], dtype=torch.int32),
        torch.zeros(1, nodes),
    )


def bench_verify(decoder: Decoder, weights: int, args: argparse.Namespace) -> None:
    """Verification of trees by size, and plain decoding by batch, behind `--cached` tokens.
    `weights` counts those that a pass multiplies with."""
    vocabulary = decoder.config.vocab_size
    most = max(args.batches)
    capacity = args.cached + max(args.nodes)
    engine = TargetEngine(decoder, most * capacity)
    for request in range(most):
        engine.open(request, capacity, GREEDY)
        prompt = torch.randint(0, vocabulary, (args.cached,)).tolist()
        engine.forward([Chunk(request, prompt, True)], [], roots([]))
    size = weights * decoder.dtype.itemsize
    bandwidth, rate = measure_machine(decoder.dtype, args.rounds)
    print(
        f"weights {size / 1e6:.0f} MB, memory {bandwidth / 1e9:.1f} GB/s, "
        f"products {rate / 1e9:.0f} GFLOP/s"
    )
    shapes = [(1, nodes) for nodes in sorted({1, *args.nodes})] + [
        (b, 1) for b in args.batches if b > 1
    ]

    def forward(batch: int, nodes: int) -> Callable[[], object]:
        tree = random_tree(nodes, vocabulary) if batch == 1 else roots(list(range(batch)))
        return lambda: engine.forward([], list(range(batch)), tree)

    seconds = timed({shape: forward(*shape) for shape in shapes}, args.rounds)
    print(
        f"{'requests':>8} {'nodes':>6} {'min ms':>9} {'median':>9} {'/ 1 node':>9} {'floor ms':>9}"
    )
    one = seconds[1, 1]
    for batch, nodes in shapes:
        ratio = statistics.median(
            each / base for each, base in zip(seconds[batch, nodes], one, strict=True)
        )
        floor = max(size / bandwidth, 2 * weights * batch * nodes / rate)
        print(
            f"{batch:8} {nodes:6} {summary(seconds[batch, nodes])} {ratio:9.2f} {floor * 1e3:9.2f}"
        )


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
    bench_verify(decoder, multiplied, args)
    bench_decode(decoder, transformers_model(args.model, weights, dtype), args)


if __name__ == "__main__":
    main()
