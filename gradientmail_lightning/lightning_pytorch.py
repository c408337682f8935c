"""The strategies for programs that import ``lightning.pytorch``.

Lightning ships its classes twice, under two names that do not know each other, so each strategy exists
twice as well. They are ordinary classes: a command line can name them, and they can be pickled.
"""

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, StrategyRegistry

from gradientmail_lightning.hooks import SessionHooks
from gradientmail_lightning.kinds import RanksMixin, SingleMixin

NAMESPACE = "lightning.pytorch"


class Hooks(SessionHooks, Callback):
    """The strategy's ear in the trainer."""


class GradientMailStrategy(SingleMixin, SingleDeviceStrategy):
    """A node of one process on one device. See :class:`gradientmail_lightning.strategy.GradientMailMixin`."""

    strategy_name = "gradientmail"
    _hooks_class, _namespace = Hooks, NAMESPACE


class GradientMailDDPStrategy(RanksMixin, DDPStrategy):
    """A node of several processes that hold the whole model each (data parallel)."""

    strategy_name = "gradientmail_ddp"
    _hooks_class, _namespace = Hooks, NAMESPACE


class GradientMailModelParallelStrategy(RanksMixin, ModelParallelStrategy):
    """A node of several processes that hold parts of the model (FSDP2, tensor parallel)."""

    strategy_name = "gradientmail_fsdp2"
    _hooks_class, _namespace, _hands_off = Hooks, NAMESPACE, False


for _kind in (GradientMailStrategy, GradientMailDDPStrategy, GradientMailModelParallelStrategy):
    StrategyRegistry.register(_kind.strategy_name, _kind, description=_kind.__doc__ or "", override=True)
