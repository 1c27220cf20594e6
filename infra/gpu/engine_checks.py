"""Both engines, with their head: the same answers as without, and how fast they come."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from machine import Machine, compare, require, transformers_greedy

from adaptivespec.config import Settings, load_settings
from adaptivespec.policy import make_policy
from adaptivespec.request import NOTHING_USED, GenerationRequest, Usage
from adaptivespec.shape import Shape
from adaptivespec.tokenizer import load_tokenizer

BETWEEN = Shape(4, 3, 12)  # no width is captured for 12 nodes: these trees are padded


def torch_engine(machine: Machine) -> str:
    """The embedded engine with its head at kappa 1, in fp32: transformers' greedy answers."""
    from adaptivespec.local import LocalSystem

    prompts = machine.prompts()
    settings = load_settings(
        {
            "model": {"path": str(machine.model), "dtype": "float32"},
            "target": {"kv_tokens": 4096, "compute": machine.compute},
            "drafter": {"kind": "eagle3", "dtype": "float32", "compute": machine.compute},
        }
    )
    requests = [GenerationRequest(prompt=p, max_tokens=machine.tokens) for p in prompts[:4]]
    answers = LocalSystem.load(settings).generate(requests)
    ours = [[token for delta in deltas for token in delta.tokens] for deltas in answers]
    same = compare(machine, "float32", prompts, ours, transformers_greedy(machine, prompts[:4]))
    usage = sum((deltas[-1].usage or NOTHING_USED for deltas in answers), NOTHING_USED)
    return f"{same}; {usage.mean_acceptance_length:.2f} tokens per step"


def sglang_plain(machine: Machine) -> str:
    """SGLang without speculation, in fp32: what `sglang-graphs` and `sglang-eager` are held to."""
    import sglang

    settings = sglang_settings(machine, "float32")
    engine = sglang.Engine(
        model_path=str(machine.model),
        device=machine.device,
        dtype="float32",
        max_total_tokens=settings.target.kv_tokens,
        max_running_requests=settings.target.max_running,
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        **settings.sglang,
    )
    params = {"temperature": 0, "max_new_tokens": machine.tokens, "ignore_eos": True}
    prompts = machine.prompts()
    answers = [a["output_ids"] for a in engine.generate(input_ids=prompts, sampling_params=params)]
    (machine.work / "plain.json").write_text(json.dumps(answers))
    engine.shutdown()
    return f"{len(answers)} answers of {machine.tokens} tokens"


def sglang_graphs(machine: Machine) -> str:
    """The plugin in fp32, every tree size by a captured graph: SGLang's plain greedy answers."""
    return plugin(machine, graphs=bool(machine.gpus))


def sglang_eager(machine: Machine) -> str:
    """The same without graphs."""
    return plugin(machine, graphs=False)


def plugin(machine: Machine, graphs: bool) -> str:
    plain: list[list[int]] = json.loads((machine.work / "plain.json").read_text())
    prompts = machine.prompts()
    settings = sglang_settings(
        machine, "float32", **({} if graphs else {"disable_cuda_graph": True})
    )
    results = []
    with serving(machine, settings) as served:
        together = served.generate(prompts)
        results.append(compare(machine, "float32", prompts, together.answers, plain))
        length = together.usage.mean_acceptance_length
        require(length > 1.5, f"the head is of little use: {length:.2f} tokens per step")
        reachable = [*make_policy(settings.policy).reachable, BETWEEN, settings.max_shape]
        for shape in [None, *reachable]:
            mode = {"mode": "off"} if shape is None else {"mode": "static", "shape": shape}
            before = served.target.state()
            run = served.generate(prompts[:2], **mode)
            after = served.target.state()
            what = "plain decoding" if shape is None else f"shape {list(shape)}"
            compare(machine, "float32", prompts, run.answers, plain, what)
            drafted = run.usage.drafted_tokens > 0
            require(drafted == (shape is not None), f"{what}: {run.usage}")
            passes = after.passes - before.passes
            replays = after.graph_passes - before.graph_passes
            require(passes > 0, f"{what}: no verification")
            expected = passes if graphs else 0
            require(replays == expected, f"{what}: graphs at {replays} of {passes} passes")
    used = "each by its graph" if graphs else "no graphs"
    return f"{results[0]}; {len(reachable)} shapes, {used}; {length:.2f} tokens per step"


def speed(machine: Machine) -> str:
    """Tokens per second in bf16, one request at a time, and where the time goes."""
    dtype = "bfloat16" if machine.gpus else "float32"
    prompts = machine.prompts() if machine.gpus else machine.prompts()[:1]
    modes: dict[str, dict[str, Any]] = {
        "off": {"mode": "off"},
        "lossless": {"kappa": 1.0},
        "kappa 0.2": {"kappa": 0.2},
    }
    runs = {}
    with serving(machine, sglang_settings(machine, dtype)) as served:
        for name, mode in modes.items():
            served.generate(prompts[:1], **mode)  # warms up
            before, started = served.target.state(), time.perf_counter()
            alone = [served.generate([prompt], **mode) for prompt in prompts]
            seconds, after = time.perf_counter() - started, served.target.state()
            answers = [answer for run in alone for answer in run.answers]
            usage = sum((run.usage for run in alone), NOTHING_USED)
            passes = after.passes - before.passes
            runs[name] = answers
            print(
                f"| {name} | {usage.completion_tokens / seconds:.1f} "
                f"| {usage.mean_acceptance_length:.2f} "
                f"| {1e3 * (after.drafter_s - before.drafter_s) / passes:.2f} "
                f"| {1e3 * (after.verify_s - before.verify_s) / passes:.2f} |"
            )
    return compare(machine, dtype, prompts, runs["lossless"], runs["off"])


def sglang_settings(machine: Machine, dtype: str, **sglang: Any) -> Settings:
    """An application on SGLang with an EAGLE-3 head. FlashInfer knows no fp32; Triton does."""
    options: dict[str, Any]
    if machine.gpus:
        options = {
            "attention_backend": "triton" if dtype == "float32" else "flashinfer",
            "context_length": 2048,
            "mem_fraction_static": 0.4,  # the drafter may be on the same GPU
            "cuda_graph_bs_decode": [1, 2, 4, 8],
            "log_level": "error",
        }
    else:
        from tests.sglang.engine import OPTIONS

        elsewhere = ("device", "dtype", "max_total_tokens", "max_running_requests")
        dropped = (*elsewhere, "disable_overlap_schedule", "custom_sigquit_handler")
        options = {k: v for k, v in OPTIONS.items() if k not in dropped} | {"log_level": "error"}
    return load_settings(
        {
            "engine": "sglang",
            "model": {"path": str(machine.model), "name": "SmolLM2", "dtype": dtype},
            "target": {"kv_tokens": 8192, "prefill_chunk": 512, "compute": machine.compute},
            "drafter": {"kind": "eagle3", "dtype": dtype, "compute": machine.compute},
            "max_shape": [7, 4, 16],
            "sglang": options | sglang,
        }
    )


class Run(NamedTuple):
    """Answers to some prompts, and their usage together."""

    answers: list[list[int]]
    usage: Usage


class Served:
    """A running target with its drafter."""

    def __init__(self, target: Any, tokens: int) -> None:
        self.target = target
        self._tokens = tokens

    def generate(self, prompts: Sequence[list[int]], **fields: Any) -> Run:
        """Answer the prompts together; `fields` of their requests."""
        requests = [
            GenerationRequest(prompt=p, max_tokens=self._tokens, ignore_eos=True, **fields)
            for p in prompts
        ]

        async def answer(request: GenerationRequest) -> tuple[list[int], Usage]:
            tokens, usage = [], NOTHING_USED
            async for delta in self.target.generate(request):
                tokens += delta.tokens
                usage = delta.usage or usage
            return tokens, usage

        async def all_of_them() -> list[tuple[list[int], Usage]]:
            return await asyncio.gather(*map(answer, requests))

        results = self.target._engine.loop.run_until_complete(all_of_them())
        usage = sum((usage for _, usage in results), NOTHING_USED)
        return Run([tokens for tokens, _ in results], usage)


@contextmanager
def serving(machine: Machine, settings: Settings) -> Iterator[Served]:
    from drafter import DrafterProcess

    from adaptivespec.sglang.target import SGLangTarget

    tokenizer = load_tokenizer(str(machine.model))
    with DrafterProcess(settings, machine.drafter_gpu) as drafter:
        target = SGLangTarget(settings, tokenizer, "127.0.0.1")
        drafter.join(target)
        served = Served(target, machine.tokens)
        yield served
        lost = target.state().lost
        target.close()
        require(lost is None, f"the drafter was lost: {lost}")
