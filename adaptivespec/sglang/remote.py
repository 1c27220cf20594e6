"""The drafter, as the worker in SGLang's scheduler knows it: connected on a thread of its own, used
by the scheduler's."""

import logging
import threading
from typing import NamedTuple

import torch

from adaptivespec.config import Settings
from adaptivespec.drafting import Drafting
from adaptivespec.errors import AdaptiveSpecError, DrafterLost, LinkDown
from adaptivespec.link import Link
from adaptivespec.messages import UseLink
from adaptivespec.port import DraftPort
from adaptivespec.sglang.messages import JoinLink
from transport.frames import FROM_DRAFT
from transport.link import LinkAddress, LinkEndpoint, LinkLayout, open_link
from transport.port import open_port

log = logging.getLogger(__name__)


class _Connected(NamedTuple):
    generation: int
    port: DraftPort
    link: Link


class RemoteDrafter:
    """`open_link` and `join_link` are for the set-up thread; everything else for the thread that
    steps. `drafting` and `link` are None while there is no drafter."""

    def __init__(
        self, settings: Settings, host: str, state_size: int, device: torch.device
    ) -> None:
        self.drafting: Drafting | None = None
        self.link: Link | None = None
        self._lost: str | None = None
        self._settings = settings
        self._host = host
        self._layout = LinkLayout.of(settings, state_size)
        self._needs_states = state_size > 0
        self._device = device
        self._endpoint: LinkEndpoint | None = None
        self._offered: _Connected | None = None
        self._lock = threading.Lock()

    def open_link(self, generation: int) -> LinkAddress:
        """Listen for the drafter of this generation, and for no earlier one any longer."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._endpoint = open_link(self._host, generation, self._layout, self._device)
        return self._endpoint.address

    def join_link(self, message: JoinLink) -> None:
        """Meet the drafter, and offer it to the next step. Raises LinkDown or DrafterLost."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None or endpoint.address.generation != message.generation:
            raise LinkDown(f"nobody waits for a drafter of generation {message.generation}")
        self._offer(None)  # a drafter listens to one at a time
        if (current := self.drafting) is not None:  # the next step will find it gone
            current.close()
        settings = self._settings
        link = endpoint.accept(settings.link_timeout_s, settings.link_setup_timeout_s)
        try:
            port = open_port(message.drafter, FROM_DRAFT, settings.link_timeout_s, DrafterLost)
        except DrafterLost:
            link.close()
            raise
        self._offer(_Connected(message.generation, port, link))

    def _offer(self, connected: _Connected | None) -> None:
        with self._lock:
            unused, self._offered = self._offered, connected
        if unused is not None:
            unused.port.close()
            unused.link.close()

    @property
    def lost(self) -> str | None:
        """Why the last drafter was given up; None while there is one, if only for the next step."""
        with self._lock:
            return None if self._offered else self._lost

    def adopt(self) -> bool:
        """Use what was offered since the last step; whether that is another drafter, which knows no
        request."""
        with self._lock:
            offered, self._offered = self._offered, None
            if offered is None:
                return False
            self.close()
            self._lost, self.link = None, offered.link
            max_rows = self._settings.max_state_rows
            self.drafting = Drafting(offered.port, self._needs_states, max_rows)
        try:
            offered.port.post(UseLink(offered.generation))
        except DrafterLost as error:
            self.lose(error)
        return True

    def lose(self, error: AdaptiveSpecError) -> None:
        """Go on without the drafter, which broke off with `error`."""
        log.warning("decoding goes on without the drafter: %s", error)
        self._lost = str(error)
        self.close()

    def close(self) -> None:
        """Hang up; idempotent."""
        if self.drafting is not None:
            self.drafting.close()
        if self.link is not None:
            self.link.close()
        self.drafting = self.link = None
