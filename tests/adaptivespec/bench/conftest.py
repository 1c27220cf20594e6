"""A tiny model, a prompt file, and the real HTTP application over that model."""

import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from adaptivespec.bench import sandbox
from adaptivespec.config import Settings, load_settings
from adaptivespec.errors import ConfigError
from adaptivespec.local import LocalSystem
from adaptivespec.request import Delta, GenerationRequest
from deployments.openai.api import create_app
from deployments.status import Status
from deployments.step_loop import StepLoop
from tests.deployments.server import serving
from tests.factories import write_hf_folder


@pytest.fixture(scope="session")
def _sandbox() -> None:
    """Skips where programs cannot be run safely: without the extra `bench`, or a Linux kernel."""
    try:
        sandbox.check()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model, which is also a perfect draft model of itself."""
    return write_hf_folder(tmp_path_factory.mktemp("bench") / "model")


@pytest.fixture(scope="session")
def settings(model: Path) -> Settings:
    return load_settings(
        {
            "model": {"path": str(model), "name": "tiny", "dtype": "float32"},
            "target": {"compute": {"threads": 1}},
            "drafter": {"kind": "lm", "path": str(model), "dtype": "float32"},
        }
    )


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve rows in GSM8K's form."""
    file = tmp_path_factory.mktemp("prompts") / "sums.jsonl"
    rows = [{"question": f"What is {i} and 1?", "answer": f"#### {i + 1}"} for i in range(12)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


class Served:
    """A backend of the HTTP application: a system in this process, stepped by the real loop."""

    def __init__(self, system: LocalSystem) -> None:
        self._system = system
        self._loop = StepLoop(lambda controller: None)
        self._adopted = False

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        async for delta in self._loop.generate(request):
            yield delta

    async def status(self) -> Status:
        if not self._adopted:
            self._adopted = True
            await self._loop.adopt(self._system.controller)
        settings, limits = self._system.settings, self._system.controller.limits
        return Status(
            model=settings.model.name,
            context_length=limits.context,
            vocab_size=limits.vocab_size,
            max_running=limits.max_running,
            kv_tokens=limits.kv_tokens,
            drafter_kind=settings.drafter_kind,
            policy=settings.policy_kind,
            kappa=settings.kappa,
            guards=settings.guards,
            max_shape=settings.max_shape,
            target="ready",
            drafter="ready",
        )


@pytest.fixture(scope="session")
def url(settings: Settings) -> Iterator[str]:
    """Of the tiny model behind the OpenAI API."""
    pytest.importorskip("openai")
    system = LocalSystem.load(settings)
    with serving(create_app(Served(system), system.tokenizer)) as server:
        yield f"{server.url}/v1"
