"""Costs are found from steps that took what a known machine takes."""

import numpy as np
import pytest

from adaptivespec.cost import CostModel, Line, StepWork, VerifyCosts
from adaptivespec.pricing import Growth
from tests.adaptivespec.machine import CPU, GPU, Machine


def observe(costs: CostModel, machine: Machine, steps: int, noise: float = 0.0) -> None:
    random = np.random.default_rng(0)
    for _ in range(steps):
        requests = int(random.integers(1, 9))
        passes = int(random.integers(0, 6))
        growth = Growth(passes, passes * int(random.integers(1, 5))) if passes else None
        nodes = requests * int(random.integers(1, 20)) if growth else requests
        fed = int(random.integers(0, 4)) * requests
        costs.observe(machine.step(requests, nodes, 0, fed, growth, 1 + noise * random.random()))


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_a_machines_prices_are_found(machine: Machine) -> None:
    costs = CostModel()
    observe(costs, machine, 150)
    for requests in (1, 4, 8):
        more = costs.nodes(requests, [0, 1, 10, 30])
        expected = machine.node * np.array([0, 1, 10, 30])
        np.testing.assert_allclose(more, expected, rtol=0.15, atol=machine.base / 20)
    assert costs.level == pytest.approx(machine.level, rel=0.1)
    assert costs.expansion == pytest.approx(machine.expansion, rel=0.2, abs=machine.base / 2000)
    assert costs.plain(8) == pytest.approx(machine.step(8, 8, 0, 0, None).total_s, rel=0.05)
    work = machine.step(2, 30, 0, 5, Growth(3, 9))
    assert costs.seconds(work) == pytest.approx(work.total_s, rel=0.05)


def test_the_first_step_sets_the_scale_and_ratios_of_a_middling_machine_the_rest() -> None:
    costs = CostModel()
    before = costs.nodes(1, [10])[0] / costs.plain(1)
    costs.observe(Machine(base=7.0, node=0.2).step(1, 1, 0, 0, None))
    assert costs.plain(1) == pytest.approx(7.2, rel=0.1)
    assert costs.nodes(1, [10])[0] / costs.plain(1) == pytest.approx(before, rel=0.3)


def test_blocks_of_rows_are_a_staircase() -> None:
    costs = CostModel()
    random = np.random.default_rng(1)

    def seconds(rows: int) -> float:
        return 10.0 + 8.0 * max(0, -(-rows // 4) - 1)

    for _ in range(300):
        rows = int(random.choice([1, 2, 3, 4, 5, 6, 8, 12, 16]))
        growth = Growth(1, 1) if rows > 1 else None
        noise = 1 + 0.2 * random.random()
        costs.observe(StepWork(1, rows, 1, 0, 0.0, growth, 1.0, noise * seconds(rows), 12.0))
    more = costs.nodes(1, [3, 4, 7, 11, 15])
    np.testing.assert_allclose(np.array(more) / 1.1, [0, 8, 8, 16, 24], atol=1.5)


def test_a_size_that_was_never_seen_is_like_those_that_were() -> None:
    costs = CostModel()
    work = StepWork(1, 1, 1, 0, 0.0, None, 0.0, 10.0, 10.0)
    costs.observe(work)
    for _ in range(20):
        costs.observe(work._replace(nodes=16, growth=Growth(1, 1), verify_s=40.0, total_s=41.0))
        costs.observe(work)
    assert costs.nodes(1, [31])[0] > 30
    assert 0 < costs.nodes(1, [7])[0] < 30


def test_it_follows_a_machine_that_slows_down_and_ignores_a_stall() -> None:
    costs = CostModel()
    observe(costs, CPU, 300)
    stall = CPU.step(1, 1, 0, 0, None, 1000.0)
    costs.observe(stall)
    assert costs.plain(1) < 1.2 * CPU.step(1, 1, 0, 0, None).total_s
    observe(costs, Machine(*(2 * part for part in CPU)), 200)
    assert costs.plain(1) == pytest.approx(2 * CPU.step(1, 1, 0, 0, None).total_s, rel=0.1)
    assert costs.nodes(1, [10])[0] == pytest.approx(20 * CPU.node, rel=0.3)


@pytest.mark.parametrize("phase", [30, 200])
def test_long_runs_of_one_size_are_not_taken_for_a_slow_machine(phase: int) -> None:
    """Trees cost more than was measured beforehand; the machine drifts."""
    costs = CostModel()
    costs.profiled(VerifyCosts([1, 8, 16, 32], [10.0, 11.0, 12.0, 14.0]), None)
    random = np.random.default_rng(0)
    for run in range(8):
        speed = random.uniform(0.8, 1.25)
        for _ in range(phase):
            noise = speed * np.exp(0.1 * random.standard_normal())
            work = StepWork(1, 1, 1, 0, 0.0, None, 0.0, 10.0 * noise, 10.0 * noise)
            if run % 2:
                work = work._replace(nodes=16, verify_s=30.0 * noise, total_s=30.0 * noise + 5.0)
                work = work._replace(growth=Growth(3, 9), draft_s=5.0)
            costs.observe(work)
        if run > 2:
            assert costs.nodes(1, [15])[0] / costs.plain(1) == pytest.approx(2.0, rel=0.2)
            assert costs.plain(1) == pytest.approx(10 * speed, rel=0.15)


def test_where_a_measured_curve_falls_what_is_seen_holds() -> None:
    """A few sizes were measured while something else ran, and are not seen again."""
    costs = CostModel()
    measured = [10.0, 10.5, 14.0, 14.0, 14.0, 14.0, 11.0, 11.5, 12.0, 14.0]
    costs.profiled(VerifyCosts([1, 2, 3, 4, 5, 6, 8, 10, 12, 16], measured), None)
    random = np.random.default_rng(0)
    plain = StepWork(8, 8, 8, 0, 0.0, None, 0.0, 22.0, 22.0)
    drafted = plain._replace(nodes=12, growth=Growth(1, 1), draft_s=1.0, verify_s=24.0)
    for _ in range(200):
        for work in (plain, plain, plain, drafted):
            verify_s = work.verify_s * float(np.exp(0.1 * random.standard_normal()))
            total_s = verify_s + work.draft_s
            costs.observe(work._replace(verify_s=verify_s, total_s=total_s))
    more = costs.nodes(8, [4])[0] / costs.plain(8)
    assert costs.plain(8) == pytest.approx(22.0, rel=0.05)
    assert more == pytest.approx(2.0 / 22.0, rel=0.5)


def test_requests_cost_something_beside_their_rows() -> None:
    costs = CostModel()
    one = StepWork(1, 8, 3, 0, 0.0, None, 0.0, 10.0, 10.0)
    for _ in range(40):
        costs.observe(one._replace(nodes=1, verify_s=8.0, total_s=8.0))
        costs.observe(one)
        costs.observe(one._replace(requests=8, verify_s=14.0, total_s=14.0))
    assert costs.plain(8) == pytest.approx(14.0, rel=0.05)
    assert costs.plain(1) + costs.nodes(1, [7])[0] == pytest.approx(10.0, rel=0.05)


def test_what_was_never_varied_keeps_its_prior() -> None:
    line = Line((1.0, 0.5), (1, 1), 1.0)
    for _ in range(50):
        line.observe(3.0, 1, 0)
        line.solve()
    assert line.coefficients == pytest.approx([3.0, 0.5], abs=0.15)


def test_costs_are_never_negative() -> None:
    line = Line((1.0, 0.5), (1, 1), 1.0)
    for x in range(50):
        line.observe(max(10.0 - x, 0.1), 1, x)
        line.solve()
    assert min(line.coefficients) >= 0


def test_prompts_are_not_fed_for_free() -> None:
    costs = CostModel()
    assert costs.feeding(0) == 0
    assert costs.feeding(3) > 0
    assert isinstance(CPU.step(1, 1, 1, 0, None), StepWork)
