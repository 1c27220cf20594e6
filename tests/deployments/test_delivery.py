"""Deltas between an orchestrator and an ingress, over real sockets."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from adaptivespec.errors import RequestError, TargetLost
from adaptivespec.request import Delta, Origin
from deployments.delivery import VERSION, Deltas, Receiver, Recipient, Sender
from transport.channel import Listener


def delta(token: int) -> Delta:
    return Delta(tokens=[token], origins=[Origin.TARGET], pieces=[str(token)])


async def answer(*tokens: int) -> AsyncGenerator[Delta, None]:
    for token in tokens:
        await asyncio.sleep(0)
        yield delta(token)


def test_every_answer_gets_its_own_deltas_in_order() -> None:
    async def run() -> None:
        sender, receiver = Sender(), Receiver("127.0.0.1")
        with receiver.answer() as (one, first), receiver.answer() as (other, second):
            await asyncio.gather(
                sender.send(answer(1, 2, 3), one), sender.send(answer(11, 12, 13), other)
            )
            assert [await first.get() for _ in range(3)] == [delta(n) for n in (1, 2, 3)]
            assert [await second.get() for _ in range(3)] == [delta(n) for n in (11, 12, 13)]

    asyncio.run(run())


def test_what_is_there_at_one_time_is_one_frame() -> None:
    listener = Listener("127.0.0.1", VERSION)

    async def run() -> None:
        sender = Sender()
        accepted = asyncio.create_task(asyncio.to_thread(listener.accept, Deltas, 10))
        await sender.send(answer(), Recipient(listener.address, 0))
        channel = await accepted
        answers = [sender.send(answer(k, k), Recipient(listener.address, k)) for k in range(5)]
        await asyncio.gather(*answers)
        for _ in range(2):
            frame = await asyncio.to_thread(channel.recv, 10)
            assert frame.of == [(k, delta(k)) for k in range(5)]

    asyncio.run(run())


def test_errors_of_an_answer_are_raised() -> None:
    async def failing() -> AsyncGenerator[Delta, None]:
        yield delta(1)
        raise RequestError("no more")

    async def run() -> None:
        receiver = Receiver("127.0.0.1")
        with receiver.answer() as (recipient, deltas):
            with pytest.raises(RequestError, match="no more"):
                await Sender().send(failing(), recipient)
            assert await deltas.get() == delta(1)

    asyncio.run(run())


def test_an_answer_that_nobody_takes_ends() -> None:
    closed = []

    async def endless() -> AsyncGenerator[Delta, None]:
        try:
            while True:
                await asyncio.sleep(0.001)
                yield delta(1)
        finally:
            closed.append(True)

    async def run() -> None:
        sender, listener = Sender(), Listener("127.0.0.1", VERSION)
        recipient = Recipient(listener.address, 0)
        sending = asyncio.create_task(sender.send(endless(), recipient))
        channel = await asyncio.to_thread(listener.accept, Deltas, 10)
        await asyncio.to_thread(channel.recv, 10)
        listener.close()
        channel.close()
        with pytest.raises(TargetLost, match="the ingress takes no answers"):
            await sending
        with pytest.raises(TargetLost, match="the ingress takes no answers"):
            await sender.send(endless(), recipient)

    asyncio.run(run())
    assert closed == [True], "the second one had not begun"


def test_an_ingress_that_comes_back_is_reached_again() -> None:
    async def run() -> None:
        sender, listener = Sender(), Listener("127.0.0.1", VERSION)
        recipient = Recipient(listener.address, 0)
        for token in (1, 2):
            accepted = asyncio.create_task(asyncio.to_thread(listener.accept, Deltas, 10))
            while True:  # until the channel that was closed is found out
                try:
                    await sender.send(answer(token), recipient)
                except TargetLost:
                    continue
                if accepted.done():
                    break
                await asyncio.sleep(0.01)
            channel = await accepted
            assert (await asyncio.to_thread(channel.recv, 10)).of == [(0, delta(token))]
            channel.close()

    asyncio.run(run())
