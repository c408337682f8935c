"""A character-level language model in Lightning, trained by every machine that runs this file.

    python examples/lightning_text.py file:///shared/run
    python examples/lightning_text.py s3://bucket/run

Start it on as many machines as you like, whenever you like; the first creates the run.
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gradientmail_lightning import DiLoCo, GradientMailStrategy

CONTEXT, STEPS = 32, 120


class NextByte(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 48)
        self.memory = torch.nn.GRU(48, 96, batch_first=True)
        self.head = torch.nn.Linear(96, 256)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (text,) = batch
        hidden, _ = self.memory(self.embedding(text[:, :-1]))
        loss = cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(mailbox: str) -> None:
    text = b"".join(path.read_bytes() for path in sorted(Path(torch.__file__).parent.glob("*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    loader = DataLoader(TensorDataset(windows.long()), batch_size=16, shuffle=True)
    strategy = GradientMailStrategy(mailbox=mailbox, algorithm=DiLoCo(sync_every=20, fragments=4))
    Trainer(strategy=strategy, max_steps=STEPS, logger=False, enable_checkpointing=False).fit(NextByte(), loader)


if __name__ == "__main__":
    main(sys.argv[1])
