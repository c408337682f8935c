"""The two kinds of node: one process on one device, or several processes of which the first holds the session."""

import os
from typing import cast

import torch

from gradientmail_core.adapters.seeding import node_seed
from gradientmail_core.adapters.torch import TorchModel
from gradientmail_core.adapters.torch_distributed import Processes, Ranks
from gradientmail_core.errors import ConfigurationError
from gradientmail_lightning.strategy import GradientMailMixin


class SingleMixin(GradientMailMixin):
    """One process on one device: Lightning's choice of device is taken over."""

    _root_device: torch.device

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Nothing, so that Lightning sets the devices it chose."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and len(devices) > 1:
            raise ConfigurationError(
                f"GradientMailStrategy trains on one device, and the trainer has {len(devices)}.",
                "Use devices=1, or GradientMailDDPStrategy or GradientMailModelParallelStrategy for several.",
            )
        if devices:
            self._root_device = devices[0]


class RanksMixin(GradientMailMixin):
    """A node of several processes: rank 0 holds the session, the others mirror it."""

    def setup_environment(self) -> None:
        """The stock setup; then all ranks take the first one's name for the node."""
        super().setup_environment()
        self.node = self.broadcast(self.node)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, object]:
        """The stock settings, with a seed that other nodes do not share."""
        kwargs: dict[str, object] = dict(super().distributed_sampler_kwargs)  # type: ignore[misc]  # of ParallelStrategy
        if self._own_order:
            kwargs["seed"] = node_seed(self.node, int(os.environ.get("PL_GLOBAL_SEED", "0")))
        return kwargs

    def _make_processes(self, adapter: TorchModel) -> Processes:
        return Ranks(adapter, self.root_device, replicas=self.replica[1])

    @property
    def replica(self) -> tuple[int, int]:
        """Which of the processes that read different data; with tensor parallelism fewer than there are."""
        kwargs = self.distributed_sampler_kwargs
        return cast(int, kwargs["rank"]), cast(int, kwargs["num_replicas"])
