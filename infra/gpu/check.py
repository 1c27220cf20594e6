"""Whether the GPUs of this machine give what the tests can vouch for on a CPU only.

    infra/gpu/check.sh                                        sets up and runs this
    python infra/gpu/check.py --model FOLDER [--device cpu] [--only NAME ...]

FOLDER holds SmolLM2-135M-Instruct as `infra/export_target.py` writes it. Every check is a function
below, and runs in a process of its own: engines leave neither memory nor threads to the next one,
and one that hangs is ended. Exits with 1 when a check fails, after a table of all.

Answers are compared token for token. Two kernels may round differently, and where the two best
tokens are all but equal that changes a greedy answer: a difference is a failure unless the logits
of the two tokens, computed anew in fp32, are within TIE of each other.
"""

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adaptivespec.config import Settings, load_settings
from adaptivespec.errors import LinkDown
from adaptivespec.policy import make_policy
from adaptivespec.request import NOTHING_USED, GenerationRequest, Usage
from adaptivespec.shape import Shape
from adaptivespec.tokenizer import load_tokenizer
from adaptivespec.tree import DraftTrees
from transport.link import LinkAddress, LinkLayout, TorchLink, connect_link, open_link

LIMIT_S = 300  # for one check; the first ones compile kernels
TIE = {"float32": 1e-3, "bfloat16": 0.5}  # logits of this model are in the tens
BETWEEN = Shape(4, 3, 12)  # no width is captured for 12 nodes: these trees are padded

PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Count from 1 to 20.",
    "Why is the sky blue?",
    "Write a Python class Stack with push, pop and peek.",
    "List the months of the year and the number of days in each.",
    "Repeat this sentence five times: The quick brown fox jumps over the lazy dog.",
    "Write a polite email that asks for a day off.",
]


class Machine(NamedTuple):
    """Where the checks run. `gpus` as CUDA_VISIBLE_DEVICES names them; none on a CPU."""

    model: Path
    work: Path  # for what one check leaves for another
    gpus: list[str]

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def compute(self) -> dict[str, Any]:
        return {"device": "cuda", "num_gpus": 1} if self.gpus else {"threads": 1}

    @property
    def drafter_gpu(self) -> str | None:
        """One of its own, if there are two."""
        return self.gpus[1 % len(self.gpus)] if self.gpus else None

    @property
    def tokens(self) -> int:
        """Of an answer."""
        return 48 if self.gpus else 24

    def prompts(self) -> list[list[int]]:
        tokenizer = load_tokenizer(str(self.model))
        chosen = PROMPTS if self.gpus else PROMPTS[:4]
        return [tokenizer.apply_chat_template([{"role": "user", "content": p}]) for p in chosen]


class CheckFailed(Exception):
    """What is not as it should be."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise CheckFailed(what)


# -- the embedded engine ---------------------------------------------------------------------------


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


# -- the link --------------------------------------------------------------------------------------

LAYOUT = LinkLayout(max_rows=8, max_nodes=16, max_state_rows=64, state_size=64, dtype="bfloat16")
MESSAGES = 256
PATIENT_S, SHORT_S = 30.0, 1.0


def link(machine: Machine) -> str:
    """Trees and states of every size arrive as they were; a peer that is killed or frozen is
    LinkDown, in time and without harm to this process; the next link works."""
    device = torch.device(machine.device)
    with linked(machine, PATIENT_S) as (here, peer):
        for step in range(MESSAGES):
            rows, nodes, states = sizes(step)
            got, sent = here.recv_trees(rows, nodes).cpu(), some_trees(step, rows, nodes)
            same = got.tokens.equal(sent.tokens) and got.parents.equal(sent.parents)
            require(same and got.logprobs.equal(sent.logprobs), f"message {step} is another")
            here.send_states(some_states(step, states).to(device))
        peer.join(PATIENT_S)
        require(peer.exitcode == 0, "the peer received other states than were sent")
        name = here._backend
    for end, number in (("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP)):
        with linked(machine, SHORT_S) as (here, peer):
            here.recv_trees(1, 1)
            os.kill(peer.pid or 0, number)
            started = time.monotonic()
            try:
                here.recv_trees(*sizes(1)[:2])
            except LinkDown:
                waited = time.monotonic() - started
                require(waited < 10 * SHORT_S, f"a {end} peer was noticed after {waited:.1f} s")
            else:
                raise CheckFailed(f"trees came from a {end} peer")
    with linked(machine, PATIENT_S) as (here, _):
        here.recv_trees(1, 1)
    alone = " (NCCL was not tried: it needs two GPUs)" if len(machine.gpus) == 1 else ""
    return f"{name}{alone}: {MESSAGES} messages each way; killed and frozen peers are LinkDown"


@contextmanager
def linked(machine: Machine, timeout_s: float) -> Iterator[tuple[TorchLink, Any]]:
    """This end of a link, and the process at the other, on a GPU of its own if there are two."""
    endpoint = open_link("127.0.0.1", 1, LAYOUT, torch.device(machine.device))
    saved = os.environ.get("CUDA_VISIBLE_DEVICES")
    if machine.drafter_gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = machine.drafter_gpu  # for the process, at its start
    peer = mp.get_context("spawn").Process(
        target=_peer, args=(endpoint.address, machine.device), daemon=True
    )
    peer.start()
    if saved is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = saved
    elif machine.drafter_gpu is not None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    try:
        here = endpoint.accept(timeout_s, PATIENT_S)
        yield here, peer
        here.close()
    finally:
        peer.kill()  # works on a stopped process, too
        peer.join()


def _peer(address: LinkAddress, device: str) -> None:
    """The drafter's end: send trees, receive states. Exit code 1 when these are not as they
    were."""
    there = connect_link(address, LAYOUT, torch.device(device), PATIENT_S, PATIENT_S)
    for step in range(MESSAGES):
        rows, nodes, states = sizes(step)
        try:
            there.send_trees(some_trees(step, rows, nodes).to(device))
            received = there.recv_states(states).cpu()
        except LinkDown:  # the other end may close early
            raise SystemExit(1) from None
        if not received.equal(some_states(step, states)):
            raise SystemExit(1)


def sizes(step: int) -> tuple[int, int, int]:
    """Rows, nodes and state rows of a step; the first are the smallest, and all sizes come."""
    return 1 + step % 8, 1 + step // 8 % 16, 1 + step * 7 % 64


def some_trees(seed: int, rows: int, nodes: int) -> DraftTrees:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, 2**31 - 1, (rows, nodes), dtype=torch.int32, generator=rng)
    parents = torch.randint(-1, 16, (rows, nodes), dtype=torch.int32, generator=rng)
    return DraftTrees(tokens, parents, torch.randn(rows, nodes, generator=rng))


def some_states(seed: int, rows: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, LAYOUT.state_size, generator=rng).to(torch.bfloat16)


# -- SGLang ----------------------------------------------------------------------------------------


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


# -- comparing -------------------------------------------------------------------------------------


def compare(
    machine: Machine,
    dtype: str,
    prompts: list[list[int]],
    ours: list[list[int]],
    theirs: list[list[int]],
    what: str = "answers",
) -> str:
    """How many answers are the same. Raises CheckFailed at a difference that is no tie."""
    ties = 0
    for prompt, a, b in zip(prompts, ours, theirs, strict=False):
        if a == b[: len(a)]:
            continue
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        logits = reference_logits(machine, prompt + a[:at])
        margin = abs(float(logits[a[at]] - logits[b[at]]))
        told = f"{what}: token {at} is {a[at]}, not {b[at]}, whose logits are {margin:.4f} apart"
        require(margin <= TIE[dtype], told)
        ties += 1
    return f"{len(ours) - ties} of {len(ours)} equal" + (f", {ties} but for a tie" if ties else "")


def reference(machine: Machine) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(machine.model, dtype=torch.float32)
    return model.to(machine.device).eval()


@torch.inference_mode()
def reference_logits(machine: Machine, tokens: list[int]) -> torch.Tensor:
    """transformers' logits [V] after these tokens, in fp32."""
    return reference(machine)(torch.tensor([tokens], device=machine.device)).logits[0, -1]


def transformers_greedy(machine: Machine, prompts: list[list[int]]) -> list[list[int]]:
    model = reference(machine)
    answers = []
    for prompt in prompts:
        given = torch.tensor([prompt], device=machine.device)
        output = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=machine.tokens,
            do_sample=False,
            pad_token_id=2,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


# -- running ---------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[Machine], str]] = {
    "torch-engine": torch_engine,
    "link": link,
    "sglang-plain": sglang_plain,
    "sglang-graphs": sglang_graphs,
    "sglang-eager": sglang_eager,
    "speed": speed,
}


class Outcome(NamedTuple):
    """How a check ended: what it says of itself, or why it failed."""

    passed: bool
    seconds: float
    detail: str


def run_alone(name: str, arguments: list[str], result: Path) -> Outcome:
    """Run one check in a process of its own, and end whatever it leaves behind."""
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, *arguments, "--run", name]
    env = os.environ | {"PYTHONWARNINGS": "ignore"}  # SGLang's many, and none of them ours
    started = time.monotonic()
    process = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = None
    seconds = time.monotonic() - started
    with suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    if code is None:
        return Outcome(False, seconds, f"not done after {LIMIT_S} s")
    if not result.exists():
        return Outcome(False, seconds, f"ended with {code}; its output is above")
    passed, detail = json.loads(result.read_text())
    return Outcome(passed, seconds, detail)


def run_here(name: str, machine: Machine, result: Path) -> None:
    sys.excepthook = _leave
    try:
        outcome = True, CHECKS[name](machine)
    except CheckFailed as error:
        outcome = False, str(error)
    result.write_text(json.dumps(outcome))
    # SGLang's threads, and its handlers at exit, are of no interest any more.
    sys.stdout.flush()
    os._exit(0)


def _leave(kind: Any, error: BaseException, trace: Any) -> None:
    """In the place of an orderly exit, which would wait for an engine that was left running."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return named.split(",")[:count] if named else [str(gpu) for gpu in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/gpu-check"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="NAME", help=", ".join(CHECKS))
    parser.add_argument("--run", choices=CHECKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    gpus = visible_gpus() if args.device == "cuda" else []
    if args.device == "cuda" and not gpus:
        parser.error("torch sees no GPU here; --device cpu runs the same checks without")
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # its fp32 is TF32 otherwise
    if args.run:
        run_here(args.run, Machine(args.model, args.work, gpus), args.work / f"{args.run}.json")
    arguments = ["--model", str(args.model), "--work", str(args.work), "--device", args.device]
    outcomes = {}
    # Without graphs on either, the two are one.
    for name in args.only or [name for name in CHECKS if gpus or name != "sglang-eager"]:
        if name == "speed":
            print("| speculation | tokens/s | tokens per step | draft ms | verify ms |")
            print("|---|---|---|---|---|", flush=True)
        outcomes[name] = run_alone(name, arguments, args.work / f"{name}.json")
    where = ", ".join(torch.cuda.get_device_name(i) for i in range(len(gpus))) or "CPU"
    print(f"\n{where}\n| check | | seconds | |\n|---|---|---|---|")
    for name, outcome in outcomes.items():
        word = "passed" if outcome.passed else "FAILED"
        print(f"| {name} | {word} | {outcome.seconds:.0f} | {outcome.detail} |")
    return 0 if all(outcome.passed for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
