"""What the HTTP layer needs of whatever generates the tokens."""

from collections.abc import AsyncGenerator
from typing import Protocol

from adaptivespec.request import Delta, GenerationRequest
from deployments.status import Status


class Backend(Protocol):
    """Runs requests. Every method may raise TargetLost."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield what each step adds to the request; the last delta has finish_reason and usage.
        Closing the generator early aborts the request. Raises RequestError and Overloaded before
        the first delta, TargetLost at any time."""
        ...

    async def status(self) -> Status: ...
