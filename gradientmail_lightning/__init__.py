"""Train with others through a mailbox: a Lightning strategy is all that changes.

    from lightning.pytorch import Trainer
    from gradientmail_lightning import DiLoCo, GradientMailStrategy

    strategy = GradientMailStrategy(mailbox="file:///shared/run", algorithm=DiLoCo(sync_every=100, fragments=4))
    Trainer(strategy=strategy).fit(model)

For programs that import ``pytorch_lightning``, the same classes are in ``gradientmail_lightning.pytorch_lightning``;
where only that package is installed, they are these. Importing registers the strategies under the names
``gradientmail``, ``gradientmail_ddp`` and ``gradientmail_fsdp2``.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from gradientmail_core.adapters.torch_queue import SharedQueueDataset
from gradientmail_core.algorithms.diloco import DiLoCo

if TYPE_CHECKING or find_spec("lightning") is not None:
    from gradientmail_lightning.lightning_pytorch import (
        GradientMailDDPStrategy,
        GradientMailModelParallelStrategy,
        GradientMailStrategy,
    )
else:
    from gradientmail_lightning.pytorch_lightning import (
        GradientMailDDPStrategy,
        GradientMailModelParallelStrategy,
        GradientMailStrategy,
    )

__all__ = [
    "DiLoCo",
    "GradientMailDDPStrategy",
    "GradientMailModelParallelStrategy",
    "GradientMailStrategy",
    "SharedQueueDataset",
]
