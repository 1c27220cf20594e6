"""One server for most of the tests: three applications of the same model with different drafters.

All are float32 and lossless, so that whatever the drafter does, or is done to it, the text must be
transformers' own.
"""

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, application
from tests.smollm2 import save_shallow_lm

LM_RUNNING, LM_QUEUED = 2, 1


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    lm = save_shallow_lm(tmp_path_factory.mktemp("lm"))
    applications = [
        application("lookup", target={"max_running": 16}),
        application(
            "lm",
            drafter={"kind": "lm", "path": str(lm), "dtype": "float32"},
            target={"max_running": LM_RUNNING, "max_queued": LM_QUEUED},
        ),
        application("eagle3", drafter={"kind": "eagle3", "dtype": "float32"}),
    ]
    with Server(applications) as server:
        server.wait_until_ready()
        yield server
