from collections.abc import Iterator

import pytest
from openai import OpenAI

from adaptivespec.tokenizer import Tokenizer, load_tokenizer
from deployments.openai.api import create_app
from tests.deployments.echo import Echo
from tests.deployments.server import Server, serving


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer("smollm2")


@pytest.fixture
def echo(tokenizer: Tokenizer) -> Echo:
    return Echo(tokenizer)


@pytest.fixture
def server(echo: Echo, tokenizer: Tokenizer) -> Iterator[Server]:
    with serving(create_app(echo, tokenizer, max_body_bytes=100_000)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
