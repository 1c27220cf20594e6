"""The step over real engines and drafters on tiny random models, in one process."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor

from adaptivespec.config import UNGUARDED, GuardSettings, LMSettings, Settings, load_settings
from adaptivespec.drafters.base import Drafter, Extension
from adaptivespec.drafters.build import make_drafter
from adaptivespec.errors import DrafterLost, Overloaded, RequestError
from adaptivespec.local import LocalSystem
from adaptivespec.pricing import Growth, Prices
from adaptivespec.request import Delta, GenerationRequest, Origin
from adaptivespec.sampling import SamplingParams
from adaptivespec.shape import Shape
from adaptivespec.tree import DraftTrees
from tests.factories import write_hf_folder

PROMPTS = [
    [5, 9, 5, 9, 5, 9, 17],
    [40],
    list(range(3, 60)),
    [7, 7, 7, 8, 7, 7, 7, 8, 7],
    [100, 20, 3],
]
"""Shorter and longer than a prefill chunk."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("target"), "llama", seed=1)


def settings(folder: Path, drafter: str = "lookup", **changes: object) -> Settings:
    kinds = {
        "none": None,
        "lookup": {"kind": "lookup"},
        "itself": {"kind": "lm", "path": str(folder), "dtype": "float32"},
    }
    args = {
        "model": {"path": str(folder), "dtype": "float32"},
        "target": {
            "compute": {"threads": 1},
            "kv_tokens": 600,
            "prefill_chunk": 16,
            "max_running": 3,
            "max_queued": 8,
        },
        "drafter": kinds[drafter],
        "max_shape": [8, 4, 32],
        "kappa": 1.0,
    }
    return load_settings(args | changes)


def request(prompt: list[int], **changes: object) -> GenerationRequest:
    return structs.replace(GenerationRequest(prompt=prompt, max_tokens=24), **changes)


def tokens(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[GenerationRequest], list[int]]:
    """What a request gets alone, without any drafter."""
    system = LocalSystem.load(settings(folder, "none"))

    def run(wanted: GenerationRequest) -> list[int]:
        return tokens(system.generate([wanted])[0])

    return run


Plain = Callable[[GenerationRequest], list[int]]
SHAPES = [None, Shape(1, 1, 2), Shape(3, 4, 4), Shape(7, 1, 8), Shape(5, 4, 16), Shape(8, 4, 32)]


@pytest.mark.parametrize("drafter", ["lookup", "itself"])
@pytest.mark.parametrize("shape", SHAPES)
def test_strict_output_is_plain_output(
    folder: Path, plain: Plain, drafter: str, shape: Shape | None
) -> None:
    system = LocalSystem.load(settings(folder, drafter))
    mode = "static" if shape else "adaptive"
    requests = [request(p, mode=mode, shape=shape) for p in PROMPTS]
    for wanted, deltas in zip(requests, system.generate(requests), strict=True):
        assert tokens(deltas) == plain(wanted)


@pytest.mark.parametrize("drafter", ["lookup", "itself"])
def test_strict_output_under_prices_is_plain_output(
    folder: Path, plain: Plain, drafter: str
) -> None:
    policy = {"kind": "goodput", "largest": [8, 4, 32]}
    system = LocalSystem.load(settings(folder, drafter, policy=policy))
    shaped = request(PROMPTS[0], mode="static", shape=Shape(5, 4, 16))
    requests = [shaped, request(PROMPTS[1], mode="off"), *map(request, PROMPTS)]
    for wanted, deltas in zip(requests, system.generate(requests), strict=True):
        assert tokens(deltas) == plain(wanted)
    assert system.controller.totals.accepted_tokens > 0


@pytest.mark.parametrize("drafter", ["lookup", "itself"])
def test_sampled_output_is_plain_output_of_the_same_seed(
    folder: Path, plain: Plain, drafter: str
) -> None:
    system = LocalSystem.load(settings(folder, drafter, kappa=0.2))
    requests = [
        request(p, kappa=0.2, sampling=SamplingParams(temperature=1.0, top_p=0.9, seed=i))
        for i, p in enumerate(PROMPTS)
    ]
    outputs = system.generate(requests)
    for wanted, deltas in zip(requests, outputs, strict=True):
        assert tokens(deltas) == plain(wanted)
        usage = deltas[-1].usage
        assert usage is not None
        assert usage.promoted_tokens == 0


def test_a_perfect_drafter_is_always_accepted(folder: Path) -> None:
    system = LocalSystem.load(settings(folder, "itself"))
    wanted = request([5, 9, 17], max_tokens=33, mode="static", shape=Shape(7, 1, 8))
    (deltas,) = system.generate([wanted])
    usage = deltas[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 33
    assert usage.steps == 4  # one token from the prefill, then 8 per step
    assert usage.accepted_tokens == usage.drafted_tokens == 28
    assert usage.mean_acceptance_length == 8.0
    assert usage.accepted_per_position == [4] * 7
    origins = [origin for delta in deltas for origin in delta.origins]
    assert origins == [Origin.TARGET] + ([Origin.DRAFTED] * 7 + [Origin.TARGET]) * 4


def test_positions_count_what_each_step_delivered(folder: Path) -> None:
    system = LocalSystem.load(settings(folder, "lookup"))
    wanted = [request(prompt, max_tokens=40, kappa=0.01) for prompt in PROMPTS]
    answers = system.generate(wanted)
    lengths = [
        [sum(o is not Origin.TARGET for o in delta.origins) for delta in deltas[1:]]
        for deltas in answers
    ]
    for deltas, accepted in zip(answers, lengths, strict=True):
        usage = deltas[-1].usage
        assert usage is not None
        assert usage.accepted_per_position == [
            sum(length > position for length in accepted) for position in range(max(accepted))
        ]
        assert sum(usage.accepted_per_position) == usage.accepted_tokens
    totals = system.controller.totals
    together = [length for accepted in lengths for length in accepted]
    assert totals.accepted_per_position == [
        sum(length > position for length in together) for position in range(max(together))
    ]


def test_a_requests_steps_are_timed_part_by_part(folder: Path) -> None:
    system = LocalSystem.load(settings(folder, "itself"))
    started = time.perf_counter()
    answers = system.generate([request(PROMPTS[0], max_tokens=40, ignore_eos=True)] * 2)
    wall = time.perf_counter() - started
    one, other = (deltas[-1].usage for deltas in answers)
    assert one is not None
    assert other is not None
    seconds = one.step_seconds
    assert seconds == other.step_seconds  # both took part in every step
    assert seconds.transfer == 0  # nothing travels in one process
    assert min(seconds.draft, seconds.verify, seconds.other) > 0
    assert seconds.total < wall
    (plain,) = system.generate([request(PROMPTS[0], max_tokens=8, mode="off")])
    assert plain[-1].usage is not None
    assert plain[-1].usage.step_seconds.draft == 0


def test_smaller_kappa_promotes_and_says_so(folder: Path) -> None:
    system = LocalSystem.load(settings(folder, "lookup"))
    wanted = request(PROMPTS[3], max_tokens=64, kappa=0.01)
    (deltas,) = system.generate([wanted])
    usage = deltas[-1].usage
    assert usage is not None
    promoted = [o for delta in deltas for o in delta.origins if o is Origin.PROMOTED]
    assert usage.promoted_tokens == len(promoted) > 0
    assert usage.promoted_tokens <= usage.accepted_tokens <= usage.drafted_tokens


def test_no_promotion_beyond_the_cap(folder: Path) -> None:
    system = LocalSystem.load(settings(folder, "lookup", max_promotions=1))
    (deltas,) = system.generate([request(PROMPTS[3], max_tokens=64, kappa=0.001)])
    per_step = [delta.origins.count(Origin.PROMOTED) for delta in deltas]
    assert max(per_step) == 1


def test_no_promotion_beyond_the_windows_cap(folder: Path) -> None:
    limits = {"max_promotions_per_window": 2, "promotion_window": 16}
    system = LocalSystem.load(settings(folder, "lookup", **limits))
    (deltas,) = system.generate([request(PROMPTS[3], max_tokens=64, kappa=0.001)])
    origins = [origin for delta in deltas for origin in delta.origins]
    windows = [origins[i : i + 16].count(Origin.PROMOTED) for i in range(len(origins))]
    assert max(windows) == 2


def test_requests_have_guards_of_their_own_in_one_batch(folder: Path) -> None:
    """Under those of the engine, which a request cannot lift."""
    system = LocalSystem.load(settings(folder, "lookup", max_promotions=2))
    strict, one, wider = GuardSettings(max_promotions=0), GuardSettings(max_promotions=1), UNGUARDED
    answers = system.generate(
        [
            request(PROMPTS[3], max_tokens=64, kappa=0.001, guards=guards)
            for guards in (strict, one, wider)
        ]
    )
    most = [max(d.origins.count(Origin.PROMOTED) for d in deltas) for deltas in answers]
    assert most == [0, 1, 2]
    (plain,) = system.generate([request(PROMPTS[3], max_tokens=64, mode="off")])
    assert tokens(answers[0]) == tokens(plain)


def test_requests_join_and_leave_at_any_step(folder: Path, plain: Plain) -> None:
    system = LocalSystem.load(settings(folder, "itself"))
    controller = system.controller
    outputs: list[list[Delta | Exception]] = []
    wanted = [request(p, max_tokens=9 + 7 * i) for i, p in enumerate(PROMPTS * 2)]
    for i, each in enumerate(wanted):
        outputs.append([])
        id = controller.submit(each, outputs[-1].append)
        if i % 4 == 3:
            controller.cancel(id)
        for _ in range(i % 3):
            controller.step()
    while controller.busy:
        controller.step()
    for i, (each, deltas) in enumerate(zip(wanted, outputs, strict=True)):
        expected = [] if i % 4 == 3 else plain(each)
        assert tokens([d for d in deltas if isinstance(d, Delta)]) == expected
    target, drafter = controller.ping()
    assert (target.requests, target.cache_tokens) == (0, 0)
    assert drafter is not None
    assert drafter.requests == 0
    assert (controller.running, controller.waiting, controller.kv_used) == (0, 0, 0)


def test_cancelling_midway_frees_both_sides_at_the_next_step(folder: Path) -> None:
    system = LocalSystem.load(settings(folder, "itself"))
    controller = system.controller
    id = controller.submit(request([5, 9], max_tokens=200), lambda event: None)
    for _ in range(4):
        controller.step()
    target, drafter = controller.ping()
    assert target.requests == 1
    assert drafter is not None
    assert drafter.requests == 1
    controller.cancel(id)
    controller.step()
    target, drafter = controller.ping()
    assert (target.requests, target.cache_tokens) == (0, 0)
    assert drafter is not None
    assert drafter.requests == 0
    assert not controller.busy


class Mortal:
    """A real drafter that fails at its n-th call of `draft` or `commit`, as a killed one would."""

    def __init__(self, inner: Drafter, calls: int, method: str) -> None:
        self._inner = inner
        self._calls = calls
        self._method = method
        self.state_size = inner.state_size
        self.open = inner.open
        self.close = inner.close

    def _count(self, method: str) -> None:
        self._calls -= method == self._method
        if self._calls < 0:
            raise DrafterLost("killed")

    def commit(self, extensions: Sequence[Extension], states: Tensor | None) -> Tensor:
        self._count("commit")
        return self._inner.commit(extensions, states)

    @property
    def growth(self) -> Growth:
        return self._inner.growth

    def draft(
        self, requests: Sequence[int], shapes: Sequence[Shape], prices: Prices | None = None
    ) -> DraftTrees:
        self._count("draft")
        return self._inner.draft(requests, shapes, prices)


@pytest.mark.parametrize("method", ["draft", "commit"])
@pytest.mark.parametrize("calls", [0, 1, 5])
def test_a_drafter_that_dies_changes_nothing_but_speed(
    folder: Path, plain: Plain, method: str, calls: int
) -> None:
    config = settings(folder, "itself")
    assert isinstance(config.drafter, LMSettings)
    system = LocalSystem.load(config)
    controller = system.controller
    outputs: list[list[Delta | Exception]] = [[] for _ in PROMPTS]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        controller.submit(request(prompt), output.append)
    steps = 0
    for _ in range(2):
        system.attach(Mortal(make_drafter(config, torch.device("cpu")), calls, method))
        for _ in range(7):
            controller.step()
            steps += 1
    system.attach(make_drafter(config, torch.device("cpu")))
    while controller.busy:
        controller.step()
    for prompt, deltas in zip(PROMPTS, outputs, strict=True):
        got = [d for d in deltas if isinstance(d, Delta)]
        assert tokens(got) == plain(request(prompt))
    accepted = controller.totals.accepted_tokens
    assert accepted > 0, "speculation resumed after the deaths"


def test_a_useless_drafter_is_not_even_fed(folder: Path, tmp_path: Path) -> None:
    stranger = write_hf_folder(tmp_path, "llama", seed=7)
    config = settings(folder, "none", policy={"kind": "goodput", "largest": [8, 4, 32]})
    system = LocalSystem.load(config)
    config = structs.replace(config, drafter=LMSettings(path=str(stranger), dtype="float32"))
    counting = Mortal(make_drafter(config), 10**6, "commit")
    system.attach(counting)
    system.controller.submit(request([5, 9], max_tokens=200), lambda event: None)
    fed = []
    while system.controller.busy:
        before = counting._calls
        system.controller.step()
        fed.append(before - counting._calls)
    assert fed[1] == 1
    assert sum(fed[20:]) <= 12, "two probes after rests of 8, 16, 32, ... steps"


def test_speculation_off_never_drafts(folder: Path) -> None:
    system = LocalSystem.load(settings(folder, "itself"))
    (deltas,) = system.generate([request([5, 9], mode="off")])
    usage = deltas[-1].usage
    assert usage is not None
    assert (usage.drafted_tokens, usage.accepted_tokens) == (0, 0)
    assert usage.steps == usage.completion_tokens - 1


def test_a_full_queue_is_refused_and_nothing_accepted_is_lost(folder: Path, plain: Plain) -> None:
    system = LocalSystem.load(settings(folder, "lookup"))
    outputs: list[list[Delta | Exception]] = []
    for _ in range(3 + 8):
        outputs.append([])
        system.controller.submit(request([5, 9]), outputs[-1].append)
    with pytest.raises(Overloaded, match="max_queued 8"):
        system.controller.submit(request([5, 9]), lambda event: None)
    while system.controller.busy:
        system.controller.step()
    for deltas in outputs:
        assert tokens([d for d in deltas if isinstance(d, Delta)]) == plain(request([5, 9]))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"), [([], 5, "prompt"), ([5] * 500, 100, "max_tokens")]
)
def test_what_can_never_fit_is_refused(
    folder: Path, prompt: list[int], max_tokens: int, param: str
) -> None:
    system = LocalSystem.load(settings(folder, "lookup"))
    with pytest.raises(RequestError) as caught:
        system.controller.submit(request(prompt, max_tokens=max_tokens), lambda event: None)
    assert caught.value.param == param


def test_more_requests_than_the_cache_holds_take_turns(folder: Path, plain: Plain) -> None:
    """Two of these reservations exceed the 600 cache tokens; three slots are free."""
    system = LocalSystem.load(settings(folder, "itself"))
    requests = [request([9, 5, i], max_tokens=300) for i in range(3, 6)]
    for wanted, deltas in zip(requests, system.generate(requests), strict=True):
        assert tokens(deltas) == plain(wanted)
