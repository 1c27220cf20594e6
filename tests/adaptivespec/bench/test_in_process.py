"""Arms in this process, over models that are loaded once."""

import gc
from collections.abc import Sequence

import msgspec
import pytest
import torch

from adaptivespec.bench.arms import STRICT, Arm, Rule, adaptive_arm, static_arm
from adaptivespec.bench.in_process import InProcess
from adaptivespec.bench.records import Outcome
from adaptivespec.bench.runner import Options
from adaptivespec.bench.sets import Item
from adaptivespec.config import (
    UNGUARDED,
    DCSPolicy,
    GuardSettings,
    LookupSettings,
    Settings,
    load_settings,
)
from adaptivespec.errors import ConfigError
from adaptivespec.models.decoder import Decoder
from adaptivespec.shape import Shape
from tests.smollm2 import PROMPTS

PLAIN = Arm(name="plain")
CHAIN = static_arm(Shape(3, 1, 4))
ADAPTIVE = adaptive_arm("dcs", DCSPolicy())
LOSSY = adaptive_arm("dcs", DCSPolicy(), Rule(0.05))
ITEMS = [Item(i, text) for i, text in enumerate(PROMPTS[:3])]


@pytest.fixture(scope="module")
def runner(settings: Settings) -> InProcess:
    return InProcess({None: settings}, ITEMS, 40, 3)


def texts(outcome: Outcome) -> list[str]:
    return [answer.text for answer in outcome.answers]


def test_strict_arms_say_what_plain_decoding_says(runner: InProcess) -> None:
    options = Options(max_tokens=40)
    plain = runner.run(PLAIN, ITEMS, 1, options)
    for arm in (CHAIN, ADAPTIVE):
        for concurrency in (1, 3):
            assert texts(runner.run(arm, ITEMS, concurrency, options)) == texts(plain)
    lossy = runner.run(LOSSY, ITEMS, 1, options)
    assert texts(lossy) == texts(plain)  # the drafter, the target itself, proposes its first choice


def test_what_is_counted_agrees_with_what_came(runner: InProcess) -> None:
    outcome = runner.run(CHAIN, ITEMS, 2, Options(max_tokens=40, ignore_eos=True))
    assert [answer.row for answer in outcome.answers] == [0, 1, 2]
    for answer in outcome.answers:
        assert answer.tokens == 40
        assert answer.finish_reason == "length"
        assert answer.counts is not None
        assert answer.counts.steps == len(answer.gaps)
        assert sum(answer.counts.accepted_per_position) == answer.counts.accepted_tokens > 0
        assert answer.tokens == 1 + answer.counts.steps + answer.counts.accepted_tokens
        assert 0 < answer.first_token_s < answer.seconds <= outcome.seconds
        assert answer.first_token_s + sum(answer.gaps) == pytest.approx(answer.seconds)


def test_the_time_of_steps_is_split(runner: InProcess) -> None:
    options = Options(max_tokens=40, ignore_eos=True)
    for answer in runner.run(CHAIN, ITEMS, 1, options).answers:
        assert answer.counts is not None
        seconds = answer.counts.step_seconds
        assert seconds.transfer == 0
        assert min(seconds.draft, seconds.verify, seconds.other) > 0
        assert seconds.total < answer.seconds  # which includes the prompt's steps
    for answer in runner.run(PLAIN, ITEMS, 1, options).answers:
        assert answer.counts is not None
        assert answer.counts.step_seconds.draft == 0 < answer.counts.step_seconds.verify


def test_seeds_fix_sampled_answers_whatever_the_arm(runner: InProcess) -> None:
    hot = Options(max_tokens=40, temperature=1.0, seed=5)
    plain = runner.run(PLAIN, ITEMS, 1, hot)
    assert [answer.seed for answer in plain.answers] == [5, 6, 7]
    assert texts(runner.run(CHAIN, ITEMS, 3, hot)) == texts(plain)
    other = msgspec.structs.replace(hot, seed=6)
    assert texts(runner.run(PLAIN, ITEMS, 1, other)) != texts(plain)


def test_the_settings_are_in_the_identity(runner: InProcess, settings: Settings) -> None:
    identity = msgspec.to_builtins(runner.identity())
    assert identity["settings"][""]["drafter"]["kind"] == "lm"
    assert settings.model.path in identity["resolved"]


def test_a_context_that_is_too_short_is_named_at_once(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="--max-tokens: 512 and the longest prompt"):
        InProcess({None: settings}, ITEMS, 512, 1)


class TestThePackagedModel:
    """With its head, and with prompt lookup beside it."""

    DRAFTERS: Sequence[str] = ("eagle3", "lookup")

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls) -> InProcess:
        args = {"model": {"dtype": "float32"}, "target": {"compute": {"threads": 1}}}
        eagle = load_settings(args)
        lookup = msgspec.structs.replace(eagle, drafter=LookupSettings())
        window = GuardSettings(max_promotions_per_window=1, promotion_window=64)
        guarded = msgspec.structs.replace(eagle, **msgspec.structs.asdict(window))
        settings: dict[str | None, Settings] = {
            "eagle3": eagle,
            "lookup": lookup,
            "guarded": guarded,
        }
        return InProcess(settings, ITEMS, 16, 2)

    def test_every_drafter_is_lossless(self, runner: InProcess) -> None:
        options = Options(max_tokens=16)
        plain = texts(runner.run(PLAIN, ITEMS[:2], 2, options))
        for drafter in self.DRAFTERS:
            arm = adaptive_arm("dcs", DCSPolicy(), STRICT, drafter)
            assert texts(runner.run(arm, ITEMS[:2], 2, options)) == plain

    def test_a_lossy_arm_promotes(self, runner: InProcess) -> None:
        lossy = static_arm(Shape(5, 4, 16), Rule(0.05), "eagle3")
        outcome = runner.run(lossy, ITEMS[:1], 1, Options(max_tokens=16))
        counts = outcome.answers[0].counts
        assert counts is not None
        assert 0 < counts.promoted_tokens <= counts.accepted_tokens

    def test_an_arm_has_guards_of_its_own_in_the_place_of_the_settings(
        self, runner: InProcess
    ) -> None:
        options = Options(max_tokens=16)
        (plain,) = texts(runner.run(PLAIN, ITEMS[:1], 1, options))
        promoted = {}
        for name, guards in {
            "as in the settings": None,
            "strict": GuardSettings(max_promotions=0),
            "unguarded": UNGUARDED,
        }.items():
            arm = static_arm(Shape(5, 4, 16), Rule(0.05, guards), "guarded")
            (answer,) = runner.run(arm, ITEMS[:1], 1, options).answers
            assert answer.counts is not None
            promoted[name] = answer.counts.promoted_tokens
            assert (answer.text == plain) == (name == "strict")
        assert promoted["strict"] == 0
        assert promoted["as in the settings"] == 1 < promoted["unguarded"]

    def test_the_weights_are_there_once(self, runner: InProcess) -> None:
        decoders = [d for d in gc.get_objects() if type(d) is Decoder]
        large = [d for d in decoders if d.config.vocab_size == 49152 and d.config.layers == 30]
        assert len(large) == 1


def test_threads_are_those_of_the_settings(settings: Settings) -> None:
    before = torch.get_num_threads()
    try:
        InProcess({None: settings}, ITEMS, 8, 1)
        assert torch.get_num_threads() == settings.target.compute.threads
    finally:
        torch.set_num_threads(before)
