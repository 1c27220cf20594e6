"""An SGLang engine as a target: requests in, deltas out, the same as of the embedded engine."""

import threading
import uuid
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import torch

from adaptivespec.config import Settings
from adaptivespec.errors import (
    AdaptiveSpecError,
    ConfigError,
    LinkDown,
    Overloaded,
    RequestError,
    TargetLost,
)
from adaptivespec.limits import Limits
from adaptivespec.messages import Failed
from adaptivespec.output import OutputStream
from adaptivespec.request import Delta, GenerationRequest, Tally
from adaptivespec.sglang import records
from adaptivespec.sglang.launch import WorkerConfig, engine_arguments, publish
from adaptivespec.sglang.messages import (
    VERSION,
    Ask,
    FromWorker,
    Hello,
    Joined,
    JoinLink,
    LinkOpened,
    OpenLink,
    Refused,
    State,
    ToWorker,
)
from adaptivespec.sglang.plugin import check_registration
from adaptivespec.sglang.requests import Speculation
from adaptivespec.sglang.states import head_projector
from adaptivespec.tokenizer import Tokenizer
from transport.channel import Address, Channel, ChannelClosed, Listener, ProtocolError
from transport.link import LinkAddress

Reply = TypeVar("Reply")

_SPARE = 6
"""Positions of the context, and cache slots, that SGLang keeps from every request."""

_HELLO_S = 30.0

_UNTRACED = f"00-{1:032x}-{1:016x}-00"
"""A trace context that is not sampled: without any, SGLang would begin a trace of its own."""


class SGLangTarget:
    """Owns an `sglang.Engine`. `generate` belongs to one event loop; the other calls block, and may
    come from any thread.

    When one of SGLang's processes dies, SGLang kills this one.
    """

    def __init__(self, settings: Settings, tokenizer: Tokenizer, host: str) -> None:
        """Start an engine; `host` is this machine's address for the drafter's. Raises ConfigError
        for what cannot work."""
        check_registration()
        arguments = engine_arguments(settings)
        # The scheduler loads it too; but what is raised there as it starts, SGLang only logs.
        head_projector(settings, torch.device("cpu"))
        import sglang

        self._tokenizer = tokenizer
        self._running = 0
        listener = Listener(host, VERSION)
        file = publish(WorkerConfig(settings, listener.address))
        answer_s = settings.target_timeout_s
        try:
            self._engine = sglang.Engine(**arguments)
            try:
                self._questions = _Line(listener.accept(FromWorker, _HELLO_S), answer_s)
                self._links = _Line(
                    listener.accept(FromWorker, _HELLO_S), answer_s + settings.link_setup_timeout_s
                )
                self.limits = _limits(settings, self._questions.hello)
            except BaseException:
                self._engine.shutdown()
                raise
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"sglang: {error}") from error
        finally:
            listener.close()
            file.unlink()

    # -- requests ---------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests being prefilled or decoded, or next in SGLang's queue."""
        return min(self._running, self.limits.max_running)

    @property
    def waiting(self) -> int:
        """Requests not admitted yet."""
        return self._running - self.running

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield what each step adds; closing early aborts the request. Raises RequestError,
        Overloaded or TargetLost."""
        self.limits.check(request)
        if self._running >= self.limits.max_running + self.limits.max_queued:
            raise Overloaded(
                f"{self.running} requests are running and {self.waiting} waiting; max_running is "
                f"{self.limits.max_running}, max_queued {self.limits.max_queued}"
            )
        answer = Answer(request, self._tokenizer)
        rid = uuid.uuid4().hex
        self._running += 1
        try:
            chunks = await self._engine.async_generate(
                input_ids=request.prompt,
                sampling_params=_sampling_params(request, self._tokenizer),
                stream=True,
                rid=rid,
                external_trace_header={"traceparent": request.traceparent or _UNTRACED},
            )
            async for chunk in chunks:
                delta = answer.extend(chunk)
                if delta.tokens:
                    yield delta
                if delta.finish_reason:
                    return
        finally:
            self._running -= 1
            # Also of an answer that ended here, at a stop string, and not yet for SGLang.
            self._engine.tokenizer_manager.abort_request(rid)

    # -- the worker -------------------------------------------------------------------------------

    def open_link(self, generation: int) -> LinkAddress:
        """Wait for the drafter of this generation, and for no earlier one any longer."""
        return self._links.ask(OpenLink(generation), LinkOpened, LinkDown).address

    def join_link(self, generation: int, drafter: Address) -> None:
        """Meet the drafter, whose messages go to `drafter`; the next step uses it. Raises
        LinkDown."""
        self._links.ask(JoinLink(generation, drafter), Joined, LinkDown)

    def state(self) -> State:
        """What the worker and its drafter hold. Raises TargetLost."""
        return self._questions.ask(Ask(), State, TargetLost)

    def close(self) -> None:
        """End the engine's processes."""
        self._questions.close()
        self._links.close()
        self._engine.shutdown()


class _Line:
    """A line to the worker: one message at a time, whichever thread it comes from."""

    def __init__(self, channel: Channel[ToWorker, FromWorker], timeout_s: float) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._due = 0  # answers: of earlier messages, too, when these came too late
        self._asking = threading.Lock()
        hello = channel.recv(_HELLO_S)
        assert isinstance(hello, Hello)
        self.hello = hello

    def ask(self, message: ToWorker, kind: type[Reply], failure: type[AdaptiveSpecError]) -> Reply:
        """The worker's answer. Raises `failure` when it refuses, TargetLost when there is none."""
        with self._asking:
            try:
                self._channel.send(message)
                self._due += 1
                while self._due:
                    answer = self._channel.recv(self._timeout_s)
                    self._due -= 1
            except (ChannelClosed, ProtocolError, TimeoutError) as error:
                raise TargetLost(f"SGLang's scheduler does not answer: {error}") from error
        if isinstance(answer, kind):
            return answer
        raise failure(answer.reason if isinstance(answer, Refused | Failed) else f"{answer!r}")

    def close(self) -> None:
        """Hang up."""
        self._channel.close()


class Answer:
    """What a client receives of a request, and the counts of what it received."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._prompt_tokens = len(request.prompt)
        eos: frozenset[int] = frozenset() if request.ignore_eos else tokenizer.eos_ids
        self._output = OutputStream(
            tokenizer, stop=request.stop, eos=eos, max_tokens=request.max_tokens
        )
        self._tally = Tally()

    def extend(self, chunk: dict[str, Any]) -> Delta:
        """Take SGLang's next tokens. Raises what made SGLang give the request up."""
        info = chunk["meta_info"]
        ended = info["finish_reason"] or {}
        if ended.get("type") == "abort":
            rejected = ended.get("status_code") == 400
            raise (RequestError if rejected else TargetLost)(f"SGLang: {ended['message']}")
        counted, pieces, reason = self._output.push(chunk["output_ids"])
        if ended and not reason:
            raise TargetLost(f"SGLang ended the answer before its end: {ended}")
        entries = [records.read(entry) for entry in info[records.KEY][:counted]]
        for entry in entries:
            if entry.step is not None:
                self._tally.step(*entry.step)
            self._tally.delivered([entry.origin])
        return Delta(
            tokens=chunk["output_ids"][:counted],
            origins=[entry.origin for entry in entries],
            pieces=pieces,
            finish_reason=reason,
            usage=self._tally.usage(self._prompt_tokens, self._output.count) if reason else None,
        )


def _sampling_params(request: GenerationRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "max_new_tokens": request.max_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "ignore_eos": request.ignore_eos,
        "stop_token_ids": [] if request.ignore_eos else sorted(tokenizer.eos_ids),
        "custom_params": Speculation.params(request),
    }


def _limits(settings: Settings, hello: Hello) -> Limits:
    """SGLang reserves no room for a whole answer, but for two trees and a page ahead of it. Its
    table of slots has room for one of these trees beyond the context, and does not check."""
    nodes = settings.max_shape.nodes
    ahead = 2 * nodes + hello.page_size
    limits = Limits(
        context=hello.context - max(_SPARE, nodes + hello.page_size),
        vocab_size=hello.vocab_size,
        kv_tokens=hello.kv_tokens - ahead - _SPARE,
        prefill_chunk=settings.target.prefill_chunk,
        max_running=settings.target.max_running,
        max_queued=settings.target.max_queued,
        max_nodes=nodes,
        max_state_rows=settings.max_state_rows,
    )
    if limits.longest < 1:
        raise ConfigError(
            f"target.kv_tokens: {hello.kv_tokens} leaves no room beside two trees of max_shape "
            f"{list(settings.max_shape)}; more than {2 * ahead} is needed"
        )
    return limits
