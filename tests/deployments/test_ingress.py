"""The ingress on Ray Serve: what crosses its processes, in both directions."""

import asyncio
import os
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
import ray
from openai import OpenAI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from adaptivespec.config import Settings
from adaptivespec.errors import Overloaded, RequestError, TargetLost
from adaptivespec.request import GenerationRequest
from adaptivespec.tokenizer import load_tokenizer
from deployments.delivery import Recipient, Sender
from deployments.ingress import Ingress
from deployments.status import Status
from tests.deployments.echo import Echo

MESSAGES: Any = [{"role": "user", "content": "Say it again."}]


class EchoOrchestrator:
    """Echo as a deployment, with a handle on what it does."""

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer("smollm2")
        self._echo = Echo(self._tokenizer)
        self._answers = Sender()

    async def generate(self, request: GenerationRequest, to: Recipient) -> None:
        await self._answers.send(self._echo.generate(request), to)

    async def status(self) -> Status:
        return await self._echo.status()

    async def renew(self, held: int | None, failures: dict[int, Exception]) -> None:
        self._echo = Echo(self._tokenizer)
        self._echo.held = held
        self._echo.failures = failures

    async def wait(self, event: str) -> None:
        async with asyncio.timeout(30):
            await getattr(self._echo, event).wait()

    async def release(self) -> None:
        self._echo.release.set()

    async def die(self) -> None:
        os._exit(1)


class Application:
    """A running application, and the handle of its orchestrator."""

    def __init__(self, port: int, orchestrator: DeploymentHandle) -> None:
        self.port = port
        self._orchestrator = orchestrator

    def renew(self, held: int | None = None, failures: dict[int, Exception] | None = None) -> None:
        self._orchestrator.renew.remote(held, failures or {}).result()

    def wait(self, event: str) -> None:
        self._orchestrator.wait.remote(event).result()

    def release(self) -> None:
        self._orchestrator.release.remote().result()

    def kill_orchestrator(self) -> None:
        with pytest.raises(RayActorError):
            self._orchestrator.die.remote().result()

    def post(self, **parameters: Any) -> socket.socket:
        fields = {"model": "echo", "messages": MESSAGES, "max_tokens": 8} | parameters
        body = msgspec.json.encode(fields)
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return connection


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="warning")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    orchestrator = serve.deployment(EchoOrchestrator, name="Orchestrator", max_ongoing_requests=100)
    ingress = serve.deployment(Ingress, name="Ingress", max_ongoing_requests=100)
    serve.run(ingress.bind(Settings(), orchestrator.bind()), name="echo")
    yield Application(port, serve.get_deployment_handle("Orchestrator", "echo"))
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
def client(application: Application) -> Iterator[OpenAI]:
    application.renew()
    url = f"http://127.0.0.1:{application.port}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def chat(client: OpenAI, **parameters: Any) -> Any:
    return client.chat.completions.create(
        model="echo", messages=MESSAGES, max_tokens=8, **parameters
    )


def test_an_answer_whole_and_streamed(client: OpenAI) -> None:
    whole = chat(client)
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert last.usage == whole.usage
    assert last.usage.speculation["accepted_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (RequestError("stop: too long", "stop"), openai.BadRequestError),
        (Overloaded("64 requests are waiting"), openai.RateLimitError),
        (TargetLost("the target died"), openai.InternalServerError),
    ],
)
def test_errors_arrive_as_the_orchestrator_raised_them(
    application: Application,
    client: OpenAI,
    failure: Exception,
    expected: type[openai.APIStatusError],
    stream: bool,
) -> None:
    application.renew(failures={0: failure})
    with pytest.raises(expected) as caught:
        chat(client, stream=stream)
    assert caught.value.body["message"] == str(failure)  # type: ignore[index]
    assert caught.value.param == getattr(failure, "param", None)


def test_a_target_lost_amid_a_stream(application: Application, client: OpenAI) -> None:
    application.renew(failures={1: TargetLost("the target died")})
    with pytest.raises(openai.APIError, match=r"^the target died$"):
        list(chat(client, stream=True))


def test_every_delta_is_sent_before_the_next_exists(
    application: Application, client: OpenAI
) -> None:
    application.renew(held=2)
    chunks = iter(chat(client, stream=True))
    before = [next(chunks).choices[0].delta.content for _ in range(3)]
    assert before[0] == ""
    assert all(before[1:])
    application.release()
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "length"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("held", [0, 2])
def test_a_client_that_leaves_ends_its_generation(
    application: Application, client: OpenAI, held: int, stream: bool
) -> None:
    application.renew(held=held)
    with application.post(stream=stream):
        application.wait("waiting")
    application.wait("closed")


@pytest.mark.parametrize("stream", [False, True])
def test_an_orchestrator_that_dies(application: Application, client: OpenAI, stream: bool) -> None:
    application.renew(held=2)
    with application.post(stream=stream) as connection:
        application.wait("waiting")
        application.kill_orchestrator()
        response = b""
        while part := connection.recv(4096):
            response += part
            if b"the orchestrator is gone" in response:
                break
    assert b"the orchestrator is gone" in response
    assert response.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")
