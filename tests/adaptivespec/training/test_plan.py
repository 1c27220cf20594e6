"""Which conversations are recorded, in which order, and which of them are sampled."""

from collections import Counter

from adaptivespec.training.prompts import SelfWritten
from tests.adaptivespec.training.plans import planned

MESSAGES = [f"Message number {i}." for i in range(200)]


def test_every_prompt_is_one_job() -> None:
    own = [SelfWritten(3, "Write"), SelfWritten(2, "")]
    jobs = planned([MESSAGES[:9], MESSAGES[9:12]], own)
    assert [job.id for job in jobs] == list(range(17))
    wanted = [(m, "") for m in MESSAGES[:12]] + [(None, "Write")] * 3 + [(None, "")] * 2
    assert Counter((job.message, job.start) for job in jobs) == Counter(wanted)
    assert len({job.sampling.seed for job in jobs}) == 17


def test_the_order_is_of_chance_and_fixed_by_the_seed() -> None:
    own = [SelfWritten(50, "")]
    jobs = planned([MESSAGES], own, sampled=0.3)
    assert jobs == planned([MESSAGES], own, sampled=0.3)
    other = planned([MESSAGES], own, sampled=0.3, seed=1)
    assert [job.message for job in jobs] != [job.message for job in other]
    assert not {job.sampling.seed for job in jobs} & {job.sampling.seed for job in other}
    # any first part is a sample of all
    assert 10 < sum(job.message is None for job in jobs[:125]) < 40


def test_excluded_and_empty_messages_are_dropped() -> None:
    jobs = planned([[*MESSAGES[:3], "", "MESSAGE NUMBER... 7"]], excluded=MESSAGES[1:8:6])
    assert {job.message for job in jobs} == {MESSAGES[0], MESSAGES[2]}


def test_a_share_is_sampled_and_so_is_every_repetition() -> None:
    jobs = planned([MESSAGES, MESSAGES, MESSAGES])
    for message in MESSAGES:
        first, *others = (job.sampling for job in jobs if job.message == message)
        assert first.greedy
        assert [sampling.temperature for sampling in others] == [0.7, 0.7]
        assert others[0].seed != others[1].seed
    drawn = sum(not job.sampling.greedy for job in planned([MESSAGES], sampled=0.3))
    assert 30 < drawn < 90
    assert all(not job.sampling.greedy for job in planned([MESSAGES], sampled=1.0))
