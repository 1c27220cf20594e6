"""The thread that steps the controller, and how the event loop talks to it."""

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from adaptivespec.controller import Controller
from adaptivespec.errors import AdaptiveSpecError, TargetLost
from adaptivespec.request import Delta, GenerationRequest

log = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE_PING_S = 1.0  # how soon the death of an idle target or drafter is noticed


class StepLoop:
    """Runs `Controller.step` while there is work. Everything that touches the controller runs on
    this thread, between two steps; callers on the event loop wait for it without blocking.

    `on_target_lost` is called on the thread when the target is gone, with its controller, whose
    requests have then ended with TargetLost; `adopt` gives the loop a new one.
    """

    def __init__(self, on_target_lost: Callable[[Controller], None]) -> None:
        self._on_target_lost = on_target_lost
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._controller: Controller | None = None
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread still runs, as it always should."""
        return self._thread.is_alive()

    async def adopt(self, controller: Controller) -> None:
        """Step this controller from now on."""

        def adopt() -> None:
            self._controller = controller

        await self._call(adopt)

    async def ask(self, question: Callable[[Controller], T]) -> T:
        """Run `question` on the controller between two steps. Raises TargetLost without one."""
        return await self._call(lambda: question(self._require()))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Submit a request and yield its deltas; leaving the iterator early cancels it."""
        events: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(event: Delta | Exception) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        submitted: list[tuple[Controller, int]] = []

        def submit() -> None:
            try:
                controller = self._require()
                submitted.append((controller, controller.submit(request, sink)))
            except AdaptiveSpecError as error:
                sink(error)

        def cancel() -> None:
            for controller, id in submitted:
                controller.cancel(id)

        self._inbox.put(submit)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.finish_reason:
                    return
        finally:
            self._inbox.put(cancel)

    async def _call(self, work: Callable[[], T]) -> T:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has given up
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, TargetLost):
                    raise

        self._inbox.put(run)
        return await asyncio.wrap_future(future)

    def _require(self) -> Controller:
        if self._controller is None:
            raise TargetLost("the target is not ready; it is being started")
        return self._controller

    def _run(self) -> None:
        while True:
            try:
                self._turn()
            except TargetLost as error:
                self._lose_target(error)
            except Exception as error:
                log.exception("a step failed; the target is started anew")
                self._lose_target(TargetLost(f"{type(error).__name__}: {error}"))

    def _turn(self) -> None:
        """Everything in the inbox, then one step; when idle, wait for the inbox and ping."""
        controller = self._controller
        busy = controller is not None and controller.busy
        try:
            if busy:
                while True:
                    self._inbox.get_nowait()()
            else:
                self._inbox.get(timeout=_IDLE_PING_S)()
        except queue.Empty:
            if controller is not None and not busy:
                controller.ping()
        if controller is not None and controller is self._controller and controller.busy:
            controller.step()

    def _lose_target(self, error: TargetLost) -> None:
        controller, self._controller = self._controller, None
        if controller is not None:
            log.error("target lost: %s", error)
            told = TargetLost(f"the target was lost and is being started again ({error})")
            controller.fail_all(told)
            self._on_target_lost(controller)
