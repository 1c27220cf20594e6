"""The whole system in one process: the same controller and workers over an in-process link."""

import torch

from adaptivespec.config import Settings
from adaptivespec.controller import Controller
from adaptivespec.drafters.base import Drafter
from adaptivespec.drafters.build import make_drafter
from adaptivespec.engine.build import make_target
from adaptivespec.engine.engine import TargetEngine
from adaptivespec.limits import Limits
from adaptivespec.link import InProcessLink
from adaptivespec.policy import Policy, make_policy
from adaptivespec.port import Local
from adaptivespec.request import Delta, GenerationRequest
from adaptivespec.startup import draft_costs, verify_costs
from adaptivespec.tokenizer import Tokenizer, load_tokenizer
from adaptivespec.worker import DraftWorker, TargetWorker


class LocalSystem:
    """A controller with its target and drafter. `submit` requests to `controller` and call its
    `step`, or let `generate` do both."""

    def __init__(
        self,
        settings: Settings,
        engine: TargetEngine,
        tokenizer: Tokenizer,
        drafter: Drafter | None,
        policy: Policy | None = None,
    ) -> None:
        """`policy`: in the place of the settings' own."""
        self.settings = settings
        self.tokenizer = tokenizer
        self.target = TargetWorker(engine)
        self.policy = policy or make_policy(settings.policy)
        self.policy.profiled(verify_costs(settings, engine), None)
        self.controller = Controller(
            Local(self.target.handle),
            Limits.of(settings, engine.config),
            tokenizer,
            self.policy,
            settings,
        )
        self._generation = 0
        if drafter is not None:
            self.attach(drafter)

    @classmethod
    def load(cls, settings: Settings, policy: Policy | None = None) -> "LocalSystem":
        """Load everything that the settings name. Raises ConfigError."""
        torch.set_num_threads(settings.target.compute.threads)
        engine = make_target(settings, settings.target.compute.device)
        drafter = (
            make_drafter(settings, settings.drafter.compute.device) if settings.drafter else None
        )
        return cls(settings, engine, load_tokenizer(settings.model.path), drafter, policy)

    def attach(self, drafter: Drafter) -> DraftWorker:
        """Use this drafter from here on, in the place of another or of none."""
        self._generation += 1
        self.policy.profiled(None, draft_costs(self.settings, drafter))
        worker, link = DraftWorker(drafter), InProcessLink()
        for side in (self.target, worker):
            side.offer_link(self._generation, link)
        self.controller.attach(Local(worker.handle), self._generation, drafter.state_size > 0)
        return worker

    def generate(self, requests: list[GenerationRequest]) -> list[list[Delta]]:
        """Run requests together to their end; the deltas of each. Raises what ends one early."""
        results: list[list[Delta | Exception]] = [[] for _ in requests]
        for request, deltas in zip(requests, results, strict=True):
            self.controller.submit(request, deltas.append)
        while self.controller.busy:
            self.controller.step()
        for deltas in results:
            for delta in deltas:
                if isinstance(delta, Exception):
                    raise delta
        return [[d for d in deltas if isinstance(d, Delta)] for deltas in results]
