"""Train with others through a mailbox from mlx-lm: its ``train`` with one more argument.

    from gradientmail_mlx import DiLoCo, train

    train(model, optimizer, data, args=args, mailbox="s3://bucket/run", algorithm=DiLoCo(sync_every=100, fragments=4))

``python -m gradientmail_mlx.lora`` is mlx-lm's command line with ``--mailbox``. Who calls mlx-lm's own ``train`` takes
:class:`GradientMailCallback`.
"""

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_mlx.callback import GradientMailCallback
from gradientmail_mlx.training import train

__all__ = ["DiLoCo", "GradientMailCallback", "train"]
