"""Train with others through a mailbox: a callback for the Hugging Face ``Trainer`` is all that changes.

    from transformers import Trainer
    from gradientmail_hf import DiLoCo, GradientMailCallback

    callback = GradientMailCallback(mailbox="file:///shared/run", algorithm=DiLoCo(sync_every=100, fragments=4))
    Trainer(model, args, train_dataset=data, callbacks=[callback]).train()

The trainers of TRL take it too, with PEFT or without.
"""

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_hf.callback import GradientMailCallback

__all__ = ["DiLoCo", "GradientMailCallback"]
