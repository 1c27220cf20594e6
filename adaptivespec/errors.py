"""Every error that a caller is expected to handle, in one place."""


class AdaptiveSpecError(Exception):
    """Base of them all."""


class ConfigError(AdaptiveSpecError, ValueError):
    """A setting, model folder or checkpoint is unusable; the message says which, and why."""


class RequestError(AdaptiveSpecError, ValueError):
    """A request is malformed or unsupported (HTTP 400). `param` names the offending field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class Overloaded(AdaptiveSpecError):
    """The request queue is full (HTTP 429)."""


class TargetLost(AdaptiveSpecError):
    """The target engine died or stopped answering; its requests cannot go on (HTTP 503)."""


class DrafterLost(AdaptiveSpecError):
    """The drafter died, stopped answering or broke protocol; decoding goes on without it."""


class LinkDown(AdaptiveSpecError):
    """The tensor link's peer is gone, silent past the timeout, or of another generation."""


class CacheFull(AdaptiveSpecError):
    """The KV cache cannot hold another request of the asked capacity."""
