"""Sampling: the right distribution, and the same text whatever was drafted."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adaptivespec.sampling import SamplingParams, gaps, target_tokens, uniforms
from adaptivespec.tree import depths
from tests.adaptivespec.trees import Tree, batch, walk

GREEDY = SamplingParams()
WEIGHTS = [8, 1, 5, 0, 2, 4, 1]  # of a small vocabulary; sum 21
LOGITS = torch.tensor(WEIGHTS, dtype=torch.float32).log()


def p_value(observed: Tensor, expected: Tensor) -> float:
    """Of Pearson's chi-square test. Cells expected to be empty must be."""
    possible = expected > 0
    assert observed[~possible].sum() == 0
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    return float(torch.special.gammaincc(freedom.double() / 2, statistic.double() / 2))


def filtered(params: SamplingParams) -> list[float]:
    """The distribution after all filters, from its definition."""
    weights = [w ** (1 / params.temperature) for w in WEIGHTS]
    if params.top_k:
        kth = sorted(weights, reverse=True)[: params.top_k][-1]
        weights = [w if w >= kth else 0.0 for w in weights]
    if params.top_p < 1:
        best_first = sorted(weights, reverse=True)
        held = np.cumsum(best_first) / sum(weights)
        last = best_first[int(np.argmax(held >= params.top_p))]
        weights = [w if w >= last else 0.0 for w in weights]
    weights = [w if w >= params.min_p * max(weights) else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


class TestUniforms:
    def test_a_draw_depends_on_seed_and_position_alone(self) -> None:
        whole = uniforms(7, 0, 50)
        for start in (0, 1, 13, 49):
            assert np.array_equal(uniforms(7, start, 50 - start), whole[start:])
        assert len(uniforms(7, 3, 0)) == 0

    @given(st.integers(-(2**63), 2**64), st.integers(0, 2**40))
    def test_any_integer_seeds(self, seed: int, start: int) -> None:
        draws = uniforms(seed, start, 2)
        assert draws.dtype == np.float64
        assert ((draws >= 0) & (draws < 1)).all()
        assert draws[0] != draws[1]

    def test_draws_are_uniform_and_independent_over_positions_and_seeds(self) -> None:
        for draws in (
            uniforms(0, 0, 20_000),
            np.concatenate([uniforms(seed, 5, 1) for seed in range(20_000)]),
        ):
            pairs = torch.from_numpy(
                (draws[:-1:2] * 10).astype(int) * 10 + (draws[1::2] * 10).astype(int)
            )
            counts = pairs.bincount(minlength=100).double()
            assert p_value(counts, torch.full((100,), len(pairs) / 100)) > 1e-4


class TestTargetTokens:
    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=0.5),
            SamplingParams(temperature=2.0),
            SamplingParams(temperature=1.0, top_k=3),
            SamplingParams(temperature=1.0, top_k=5),  # ties at the cutoff: both stay
            SamplingParams(temperature=1.0, top_k=100),
            SamplingParams(temperature=1.0, top_p=0.5),
            SamplingParams(temperature=1.0, top_p=0.96),  # ties again
            SamplingParams(temperature=1.5, top_p=0.9),
            SamplingParams(temperature=1.0, min_p=0.3),
            SamplingParams(temperature=1.0, top_k=3, top_p=0.7),  # top_p of what top_k left
            SamplingParams(temperature=1.0, top_p=0.75, min_p=0.5),  # min_p comes last
            SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05),
        ],
        ids=repr,
    )
    def test_frequencies_are_those_of_the_filtered_distribution(
        self, params: SamplingParams
    ) -> None:
        draws = 20_000
        drawn = target_tokens(
            LOGITS.expand(draws, -1), [params] * draws, torch.from_numpy(uniforms(1, 0, draws))
        )
        counts = drawn.bincount(minlength=len(WEIGHTS)).double()
        assert p_value(counts, draws * torch.tensor(filtered(params))) > 1e-4

    @given(st.floats(0, 1, exclude_max=True), st.integers(1, 7), st.floats(0.01, 1))
    def test_the_draw_inverts_the_cumulative_distribution(
        self, draw: float, top_k: int, top_p: float
    ) -> None:
        params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
        token = int(
            target_tokens(LOGITS[None], [params], torch.tensor([draw], dtype=torch.float64))
        )
        probabilities = filtered(params)
        below, rounding = sum(probabilities[:token]), 1e-6
        assert probabilities[token] > 0
        assert below - rounding <= 1 - draw <= below + probabilities[token] + rounding

    @pytest.mark.parametrize("draw", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
    def test_extreme_draws_stay_within_what_the_filters_left(self, draw: float) -> None:
        logits = torch.full((1, 1000), -3.0)
        logits[0, 500:502] = 4.0
        params = SamplingParams(temperature=0.01, top_k=2)
        token = target_tokens(logits, [params], torch.tensor([draw], dtype=torch.float64))
        assert int(token) in (500, 501)

    def test_a_nucleus_wider_than_the_first_look_is_still_exact(self) -> None:
        logits = torch.linspace(1, 0, 2000)
        cumulative = logits.double().softmax(0).cumsum(0)
        wide = int((cumulative < 0.9).sum()) + 1
        assert wide > 256
        peaked = torch.zeros(2000)
        peaked[7] = 50.0  # a row that the first look settles
        params = [SamplingParams(temperature=1.0, top_p=0.9)] * 2
        for draw, expected in ((0.0, wide - 1), (1 - 2.0**-53, 0)):
            draws = torch.tensor([draw, draw], dtype=torch.float64)
            drawn = target_tokens(torch.stack([logits, peaked]), params, draws)
            assert drawn.tolist() == [expected, 7]

    def test_rows_keep_their_own_parameters(self) -> None:
        kinds = [
            GREEDY,
            SamplingParams(temperature=1.0, top_k=1),
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=1.0, top_k=30),
            SamplingParams(temperature=0.7, top_p=0.6),
            SamplingParams(temperature=1.0, min_p=0.4),
        ]
        rows = kinds * 10
        logits = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(0))
        draws = torch.from_numpy(uniforms(5, 0, len(rows)))
        together = target_tokens(logits, rows, draws)
        alone = [
            target_tokens(logits[i : i + 1], [params], draws[i : i + 1]).item()
            for i, params in enumerate(rows)
        ]
        assert together.tolist() == alone
        for greedy in (0, 1):
            assert torch.equal(together[greedy::6], logits[greedy::6].argmax(-1))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_greedy_takes_the_lowest_of_equals(self, dtype: torch.dtype) -> None:
        logits = torch.zeros(2, 50_000, dtype=dtype)
        logits[0, [40_000, 123, 7_000]] = 2.0
        unused = torch.zeros(2, dtype=torch.float64)
        assert target_tokens(logits, [GREEDY] * 2, unused).tolist() == [123, 0]

    def test_a_vanishing_temperature_is_greedy(self) -> None:
        params = SamplingParams(temperature=1e-300)
        assert params.greedy
        assert target_tokens(LOGITS[None], [params], torch.tensor([0.9])).tolist() == [0]


class TestGaps:
    @given(st.data())
    def test_gaps_are_log_probability_ratios_to_the_parents_top_1(
        self, data: st.DataObject
    ) -> None:
        size = data.draw(st.integers(1, 8))
        weights = data.draw(
            st.lists(
                st.lists(st.integers(1, 9), min_size=6, max_size=6), min_size=size, max_size=size
            )
        )
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(size)]
        tokens = [data.draw(st.integers(-1, 5)) for _ in range(size)]
        gap, argmax = gaps(
            torch.tensor(weights).float().log() + 3.0,
            torch.tensor(tokens, dtype=torch.int32),
            torch.tensor(parents, dtype=torch.int32),
        )
        assert gap.dtype == torch.float32
        assert argmax.tolist() == [row.index(max(row)) for row in weights]
        for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent < 0 or token < 0:
                assert gap[i] == -torch.inf
            else:
                ratio = Fraction(weights[parent][token], max(weights[parent]))
                assert gap[i].item() == pytest.approx(math.log(ratio), abs=1e-5)


class TestSpeculation:
    """The whole procedure on a target that is a table: draw at every node, then walk."""

    VOCABULARY = 4
    LENGTH = 3
    SEQUENCES = 6000
    TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(11))

    def sampled(self, contexts: Tensor, params: SamplingParams, draws: Tensor) -> Tensor:
        return target_tokens(self.TABLE[contexts.long()], [params] * len(contexts), draws)

    def plainly(self, params: SamplingParams, seeds: range) -> list[list[int]]:
        draws = torch.from_numpy(np.stack([uniforms(seed, 0, self.LENGTH) for seed in seeds]))
        last = torch.zeros(len(seeds), dtype=torch.int64)
        columns = []
        for position in range(self.LENGTH):
            last = self.sampled(last, params, draws[:, position])
            columns.append(last)
        return torch.stack(columns, 1).tolist()

    def speculatively(self, params: SamplingParams, seeds: range) -> tuple[list[list[int]], int]:
        """The same outputs from steps with random trees, and how many drafted tokens they took."""
        rng = np.random.default_rng(5)
        outputs: list[list[int]] = [[] for _ in seeds]
        accepted = 0
        while any(len(output) < self.LENGTH for output in outputs):
            forest = batch([self.random_tree(rng, [0, *output][-1]) for output in outputs])
            depth = depths(forest.parents)
            draws = torch.from_numpy(
                np.stack(
                    [
                        uniforms(seed, len(output), forest.tokens.shape[1])
                        for seed, output in zip(seeds, outputs, strict=True)
                    ]
                )
            ).gather(1, depth)
            target = self.sampled(forest.tokens.clamp_min(0).flatten(), params, draws.flatten())
            walks = walk(forest, target.view_as(forest.tokens))
            for row, (output, (path, bonus)) in enumerate(zip(outputs, walks, strict=True)):
                output += [*forest.tokens[row, path[1:]].tolist(), bonus]
                accepted += len(path) - 1
        return [output[: self.LENGTH] for output in outputs], accepted

    def random_tree(self, rng: np.random.Generator, root: int) -> Tree:
        tree = Tree([root], [-1], [0.0])
        for _ in range(rng.integers(0, 7)):
            parent, token = int(rng.integers(len(tree.tokens))), int(rng.integers(self.VOCABULARY))
            if token not in [tree.tokens[child] for child in tree.children(parent)]:
                tree.tokens.append(token)
                tree.parents.append(parent)
                tree.logprobs.append(-1.0)
        return tree

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=0.8, top_p=0.9),
            SamplingParams(temperature=1.2, top_k=3),
        ],
        ids=repr,
    )
    def test_output_is_the_targets_own_and_equal_token_for_token(
        self, params: SamplingParams
    ) -> None:
        seeds = range(self.SEQUENCES)
        outputs, accepted = self.speculatively(params, seeds)
        assert accepted > self.SEQUENCES / 2  # the trees did matter
        assert outputs == self.plainly(params, seeds)

    def test_continuations_have_the_targets_joint_distribution(self) -> None:
        seeds = range(self.SEQUENCES)
        outputs, _ = self.speculatively(SamplingParams(temperature=1.0), seeds)
        next_token = self.TABLE.double().softmax(-1)
        joint = torch.einsum("a,ab,bc->abc", next_token[0], next_token, next_token)
        a, b, c = torch.tensor(outputs).unbind(1)
        size = self.VOCABULARY
        counts = ((a * size + b) * size + c).bincount(minlength=size**3).double()
        assert p_value(counts, len(outputs) * joint.flatten()) > 1e-4
