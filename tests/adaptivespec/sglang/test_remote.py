"""The worker's end of the set-up of a drafter, and of its replacement."""

from collections.abc import Callable
from threading import Thread

import pytest
import torch

from adaptivespec.config import load_settings
from adaptivespec.drafters.build import make_drafter
from adaptivespec.drafting import Drafting
from adaptivespec.errors import DrafterLost
from adaptivespec.messages import Pong
from adaptivespec.sglang.messages import JoinLink
from adaptivespec.sglang.remote import RemoteDrafter
from adaptivespec.worker import DraftWorker
from transport.frames import TO_DRAFT
from transport.link import LinkLayout, connect_link
from transport.server import serve

CPU = torch.device("cpu")
SETTINGS = load_settings(
    {"model": {"path": "a/model"}, "engine": "sglang", "drafter": {"kind": "lookup"}}
)


@pytest.fixture
def remote() -> RemoteDrafter:
    return RemoteDrafter(SETTINGS, "127.0.0.1", 0, CPU)


@pytest.fixture
def join(remote: RemoteDrafter) -> Callable[[int], None]:
    """Join one and the same drafter by a link of this generation."""
    worker = DraftWorker(make_drafter(SETTINGS))
    address = serve(worker, "127.0.0.1", TO_DRAFT, "draft")
    limits = SETTINGS.link_timeout_s, SETTINGS.link_setup_timeout_s

    def join(generation: int) -> None:
        link = remote.open_link(generation)

        def meet() -> None:
            joined = connect_link(link, LinkLayout.of(SETTINGS, 0), CPU, *limits)
            worker.offer_link(generation, joined)

        meeting = Thread(target=meet)
        meeting.start()
        remote.join_link(JoinLink(generation, address))
        meeting.join()

    return join


def adopted(remote: RemoteDrafter) -> Drafting:
    assert remote.adopt()
    assert not remote.adopt()
    assert remote.lost is None
    assert remote.drafting is not None
    return remote.drafting


def test_a_joined_drafter_is_used_from_the_next_step_on(
    remote: RemoteDrafter, join: Callable[[int], None]
) -> None:
    join(1)
    assert remote.drafting is None
    assert adopted(remote).ping() == Pong(0)


def test_a_drafter_may_join_again_while_it_is_in_use(
    remote: RemoteDrafter, join: Callable[[int], None]
) -> None:
    """Its owner may have given up on a set-up that came about after all."""
    join(1)
    before = adopted(remote)
    join(2)
    with pytest.raises(DrafterLost) as caught:
        before.ping()
    remote.lose(caught.value)
    assert remote.lost is None, "another one is offered"
    assert adopted(remote).ping() == Pong(0)


def test_a_drafter_is_lost_until_another_one_joins(
    remote: RemoteDrafter, join: Callable[[int], None]
) -> None:
    join(1)
    adopted(remote)
    remote.lose(DrafterLost("gone"))
    assert (remote.lost, remote.drafting, remote.link) == ("gone", None, None)
    join(2)
    assert remote.lost is None
    assert adopted(remote).ping() == Pong(0)
