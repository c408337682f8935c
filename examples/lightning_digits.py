"""Image classification in Lightning: scikit-learn's handwritten digits, a small convolutional network with BatchNorm.

    python examples/lightning_digits.py file:///shared/run

Every machine that runs this file trains the same model on its own shuffle. ``buffers="mean"`` merges BatchNorm's
statistics too, and ``evaluate="global"`` measures the merged model, so all machines report the same accuracy.
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from gradientmail_lightning import DiLoCo, GradientMailStrategy

STEPS, ENOUGH = 120, 0.8


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: list[Tensor], index: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(dim=1) == labels).float().mean(), batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main(mailbox: str) -> None:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    strategy = GradientMailStrategy(
        mailbox=mailbox, algorithm=DiLoCo(sync_every=20, fragments=4), buffers="mean", evaluate="global"
    )
    trainer = Trainer(strategy=strategy, max_steps=STEPS, max_epochs=-1, logger=False, enable_checkpointing=False)
    model = Digits()
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True))
    (result,) = trainer.test(model, DataLoader(test, batch_size=120))
    if result["accuracy"] < ENOUGH:
        sys.exit(f"the merged model is right in {result['accuracy']:.0%} of the cases only")


if __name__ == "__main__":
    main(sys.argv[1])
