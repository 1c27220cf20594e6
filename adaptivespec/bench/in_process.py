"""Arms in this process: one loaded target, and a controller over it for each policy and drafter."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import torch

from adaptivespec.bench.arms import Arm
from adaptivespec.bench.records import Answer, Counts, Outcome
from adaptivespec.bench.runner import Options
from adaptivespec.bench.sets import Item
from adaptivespec.config import DrafterSettings, EagleSettings, Settings
from adaptivespec.drafters.base import Drafter
from adaptivespec.drafters.build import make_drafter
from adaptivespec.engine.build import load_decoder, make_engine
from adaptivespec.engine.engine import TargetEngine
from adaptivespec.errors import ConfigError
from adaptivespec.local import LocalSystem
from adaptivespec.models.sources import resolve
from adaptivespec.request import Delta, GenerationRequest
from adaptivespec.sampling import SamplingParams
from adaptivespec.tokenizer import load_tokenizer


class InProcess:
    """The weights of target and drafters are loaded once. Every arm has an engine, over the same
    decoder, that keeps only what its own drafter needs: plain decoding pays for no drafter."""

    def __init__(
        self,
        settings: Mapping[str | None, Settings],
        items: Sequence[Item],
        max_tokens: int,
        concurrency: int,
    ) -> None:
        """`settings`: by drafter as the arms name it; they differ in nothing but the drafter. The
        cache has room for `concurrency` of these prompts with answers of `max_tokens`. Drafters
        are loaded when an arm first asks for them. Raises ConfigError."""
        shared = next(iter(settings.values()))
        torch.set_num_threads(shared.target.compute.threads)
        self._tokenizer = load_tokenizer(shared.model.path)
        self._prompts = {item.message: self._encode(item) for item in items}
        longest = max(map(len, self._prompts.values())) + max_tokens
        self._settings = {
            name: _with_room(each, longest, concurrency) for name, each in settings.items()
        }
        self._decoder = load_decoder(shared, shared.target.compute.device)
        if longest > (context := self._decoder.config.context_length):
            raise ConfigError(
                f"--max-tokens: {max_tokens} and the longest prompt make {longest} tokens; "
                f"the model's context is {context}"
            )
        self._engines: dict[EagleSettings | None, TargetEngine] = {}
        self._drafters: dict[DrafterSettings, Drafter] = {}
        self._systems: dict[str, LocalSystem] = {}

    def identity(self) -> dict[str, Any]:
        drafters = [each.drafter for each in self._settings.values()]
        paths = [path for d in drafters if (path := getattr(d, "path", None)) is not None]
        shared = next(iter(self._settings.values()))
        return {
            "settings": {name or "": each for name, each in self._settings.items()},
            "resolved": {path: str(resolve(path)) for path in (shared.model.path, *paths)},
        }

    def status(self) -> None:
        return None

    def close(self) -> None:
        self._systems.clear()
        self._drafters.clear()
        self._engines.clear()

    def run(self, arm: Arm, items: Sequence[Item], concurrency: int, options: Options) -> Outcome:
        controller = self._system(arm).controller
        waiting = deque((item, self._request(arm, item, options)) for item in items)
        started: list[_Recorder] = []
        while waiting or controller.busy:
            while waiting and controller.running + controller.waiting < concurrency:
                item, request = waiting.popleft()
                started.append(_Recorder(item, request))
                controller.submit(request, started[-1])
            controller.step()
        begun = started[0].begun
        return Outcome(
            max(recorder.ended for recorder in started) - begun,
            [recorder.answer() for recorder in started],
        )

    def _encode(self, item: Item) -> list[int]:
        return self._tokenizer.apply_chat_template([{"role": "user", "content": item.message}])

    def _request(self, arm: Arm, item: Item, options: Options) -> GenerationRequest:
        return GenerationRequest(
            prompt=self._prompts[item.message],
            max_tokens=options.max_tokens,
            sampling=SamplingParams(temperature=options.temperature, seed=options.seed_of(item)),
            ignore_eos=options.ignore_eos,
            mode=arm.mode,
            kappa=arm.kappa,
            shape=arm.shape,
        )

    def _system(self, arm: Arm) -> LocalSystem:
        """The arm's own controller, for a policy may learn. Engines and drafters are shared: turns
        never overlap, and one ends when both sides have let its requests go."""
        if arm.name not in self._systems:
            plain = arm.mode == "off"
            settings = next(iter(self._settings.values())) if plain else self._settings[arm.drafter]
            settings = msgspec.structs.replace(
                settings,
                drafter=None if plain else settings.drafter,
                policy=arm.policy or settings.policy,
                **msgspec.structs.asdict(arm.guards or settings.guards),
            )
            self._systems[arm.name] = LocalSystem(
                settings, self._engine(settings), self._tokenizer, self._drafter(settings)
            )
        return self._systems[arm.name]

    def _engine(self, settings: Settings) -> TargetEngine:
        """The one that keeps what the settings' drafter needs."""
        states = settings.drafter if isinstance(settings.drafter, EagleSettings) else None
        if states not in self._engines:
            self._engines[states] = make_engine(self._decoder, settings)
        return self._engines[states]

    def _drafter(self, settings: Settings) -> Drafter | None:
        named = settings.drafter
        if named is not None and named not in self._drafters:
            self._drafters[named] = make_drafter(settings, named.compute.device)
        return None if named is None else self._drafters[named]


def _with_room(settings: Settings, longest: int, concurrency: int) -> Settings:
    """With slots and cache for `concurrency` requests of `longest` tokens, and their trees."""
    kv_tokens = concurrency * (longest + settings.max_shape.nodes)
    target = msgspec.structs.replace(
        settings.target, max_running=concurrency, kv_tokens=kv_tokens, max_queued=0
    )
    return msgspec.structs.replace(settings, target=target)


class _Recorder:
    """The sink of one request: every delta, and when it came."""

    def __init__(self, item: Item, request: GenerationRequest) -> None:
        self._item = item
        self._request = request
        self.deltas: list[Delta] = []
        self._times: list[float] = []
        self.begun = time.perf_counter()

    def __call__(self, event: Delta | Exception) -> None:
        if isinstance(event, Exception):
            raise event
        self._times.append(time.perf_counter())
        self.deltas.append(event)

    @property
    def ended(self) -> float:
        return self._times[-1]

    def answer(self) -> Answer:
        usage, reason = self.deltas[-1].usage, self.deltas[-1].finish_reason
        if usage is None or reason is None:
            raise ConfigError(f"row {self._item.row}: the answer was cut off")
        return Answer(
            row=self._item.row,
            seed=self._request.sampling.seed,
            text="".join(delta.text for delta in self.deltas),
            finish_reason=reason,
            prompt_tokens=usage.prompt_tokens,
            tokens=usage.completion_tokens,
            seconds=self.ended - self.begun,
            first_token_s=self._times[0] - self.begun,
            gaps=[b - a for a, b in pairwise(self._times)],
            counts=msgspec.convert(usage, Counts, from_attributes=True),
        )
