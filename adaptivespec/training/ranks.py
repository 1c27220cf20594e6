"""One process or several under torchrun: who this one is, and how they agree."""

import os
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from adaptivespec.errors import ConfigError

_PATIENCE = timedelta(days=7)
"""For each other: one may generate for hours after another has run out of prompts. A process that
dies is noticed by torchrun, which ends the others."""


class Ranks:
    """The processes of one run. `device`: this one's."""

    def __init__(self, device: str, threads: int) -> None:
        """Join the run that torchrun's environment describes; without it, be alone. Raises
        ConfigError for a CUDA device that is not there."""
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device(device)
        if self.device.type == "cuda":
            local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
            if local >= count:
                raise ConfigError(f"--device: no CUDA device {local}, torch sees {count} in all")
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)
        torch.set_num_threads(threads)
        if self.world > 1:
            on_cuda = self.device.type == "cuda"
            dist.init_process_group(
                "nccl" if on_cuda else "gloo",
                timeout=_PATIENCE,
                device_id=self.device if on_cuda else None,
            )

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and reports."""
        return self.rank == 0

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Replace every tensor by its mean over the processes."""
        if self.world > 1:
            for gradient in gradients:
                dist.all_reduce(gradient)
                gradient /= self.world

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the processes."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def wait(self) -> None:
        """Until all processes are here."""
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()
