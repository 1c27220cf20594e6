"""The real SGLang with the plugin, and its drafter in another process."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.sglang.engine import OPTIONS, EndTheCall  # isort: skip  before SGLang

from sglang.srt.utils import kill_process_tree

from adaptivespec.config import Settings, load_settings
from adaptivespec.request import GenerationRequest, Origin
from adaptivespec.sglang import records
from adaptivespec.sglang.requests import Speculation
from adaptivespec.sglang.target import SGLangTarget
from adaptivespec.tokenizer import load_tokenizer
from tests.sglang.draft_process import DraftProcess

EAGLE3 = {"kind": "eagle3", "dtype": "float32"}

# What an application says in other places than `sglang`.
_ELSEWHERE = {"device", "dtype", "max_total_tokens", "max_running_requests"}
_ELSEWHERE |= {"disable_overlap_schedule"}


def settings(model: Path, **args: Any) -> Settings:
    """An application on the model in a folder, in fp32: its output is transformers' own at kappa 1,
    which is the default here."""
    options = {key: value for key, value in OPTIONS.items() if key not in _ELSEWHERE}
    target = {"kv_tokens": 4096, "max_running": 8, "prefill_chunk": 256, "compute": {"threads": 1}}
    return load_settings(
        {
            "model": {"path": str(model), "name": "SmolLM2", "dtype": "float32"},
            "engine": "sglang",
            "kappa": 1,
            "max_shape": [7, 4, 16],
            "link_timeout_s": 30,  # a busy machine is no lost drafter
            **args,
            "target": target | args.get("target", {}),
            "sglang": options | args.get("sglang", {}),
        }
    )


class Output(NamedTuple):
    """One answer. steps: accepted tokens of each verification; promoted: in all of them."""

    tokens: list[int]
    steps: list[int]
    drafted: int
    promoted: int
    meta_info: dict[str, Any]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> "Output":
        info = answer["meta_info"]
        entries = [records.read(entry) for entry in info[records.KEY]]
        steps: list[int] = []
        for entry in entries:
            if entry.step is not None:
                steps.append(0)
            if entry.origin is not Origin.TARGET:
                steps[-1] += 1
        drafted = sum(entry.step.drafted for entry in entries if entry.step)
        promoted = sum(entry.origin is Origin.PROMOTED for entry in entries)
        return cls(answer["output_ids"], steps, drafted, promoted, info)


class SGLangSystem:
    """A running target; `generate` sends requests together."""

    def __init__(self, target: SGLangTarget) -> None:
        self.target = target

    def generate(
        self, requests: Sequence[GenerationRequest], **sampling_params: Any
    ) -> list[Output]:
        """Answers, by SGLang's own offline interface."""
        params = [
            {
                "temperature": request.sampling.temperature,
                "max_new_tokens": request.max_tokens,
                "custom_params": Speculation.params(request),
                **sampling_params,
            }
            for request in requests
        ]
        answers = self.target._engine.generate(
            input_ids=[request.prompt for request in requests], sampling_params=params
        )
        return [Output.of(answer) for answer in answers]


@contextmanager
def running_target(settings: Settings) -> Iterator[SGLangSystem]:
    """SGLang alone: a drafter may come later."""
    tokenizer = load_tokenizer(settings.model.path)
    try:
        target = SGLangTarget(settings, tokenizer, "127.0.0.1")
        target._engine.tokenizer_manager.signal_handler_class = EndTheCall
        yield SGLangSystem(target)
        target.close()
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


@contextmanager
def running_system(settings: Settings) -> Iterator[SGLangSystem]:
    """SGLang with a drafter linked to it."""
    with DraftProcess(settings) as drafter, running_target(settings) as system:
        drafter.join(system.target)
        yield system
