"""Restoring what a node handed off where Lightning restores a checkpoint, with what a stock checkpoint need not check.

A checkpoint is loaded by who knows what is in it. What lies in a mailbox is taken up unasked, and torch loads the state
of another kind of optimizer without a word.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from gradientmail_core.adapters.torch_handoff import Stepping, check_names
from gradientmail_core.errors import ConfigurationError
from gradientmail_lightning.handing import KINDS, MARK

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as _Stock
else:
    _Stock = object


class Restoring(_Stock):
    """A stock strategy's restoring, of checkpoints and of hand-offs."""

    def load_model_state_dict(self, checkpoint: Mapping[str, object], strict: bool = True) -> None:
        """The stock restoring; what was handed off lacks frozen parameters, which stay as they are."""
        handed = checkpoint.get(MARK, False)
        if handed:
            assert self.lightning_module is not None
            check_names(self.lightning_module, cast("Mapping[str, object]", checkpoint["state_dict"]))
        super().load_model_state_dict(checkpoint, strict=strict and not handed)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, object]) -> None:
        """The stock restoring; what was handed off by other optimizers is refused."""
        kinds = checkpoint.get(KINDS)
        if checkpoint.get(MARK, False) and isinstance(kinds, list):
            if len(kinds) != len(self.optimizers):
                raise ConfigurationError(
                    f"The hand-off and this program differ in how many optimizers there are: {len(kinds)} there, "
                    f"{len(self.optimizers)} here.",
                    "Start the program that made it, or use another node name.",
                )
            for kind, optimizer in zip(kinds, self.optimizers, strict=True):
                Stepping(optimizer).check(kind)
        super().load_optimizer_state_dict(checkpoint)
