"""A GAN in Lightning with manual optimization: two optimizers step in each batch, and the run counts one step.

    python examples/lightning_gan.py file:///shared/run

The generator learns to place points on a circle; both networks are merged.
"""

import math
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from gradientmail_lightning import DiLoCo, GradientMailStrategy

NOISE, STEPS = 4, 150


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


class Circle(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = network(NOISE, 2), network(2, 1)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        (real,) = batch
        of_critic, of_generator = self.optimizers()
        fake = self.generator(torch.randn(len(real), NOISE, device=self.device))
        loss = self.judged(real, 1.0) + self.judged(fake.detach(), 0.0)
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        deceit = self.judged(fake, 1.0)
        of_generator.zero_grad()
        self.manual_backward(deceit)
        of_generator.step()
        self.log_dict({"critic": loss, "generator": deceit}, prog_bar=True)

    def judged(self, points: Tensor, truth: float) -> Tensor:
        verdict = self.critic(points)
        return binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, truth))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.999)) for net in (self.critic, self.generator)
        ]


def main(mailbox: str) -> None:
    angles = torch.rand(4096) * 2 * math.pi
    data = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))
    strategy = GradientMailStrategy(mailbox=mailbox, algorithm=DiLoCo(sync_every=25, fragments=5))
    trainer = Trainer(strategy=strategy, max_steps=2 * STEPS, max_epochs=-1, logger=False, enable_checkpointing=False)
    model = Circle()
    trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True))
    with torch.no_grad():
        radius = model.generator(torch.randn(1000, NOISE)).norm(dim=1)
    print(f"generated points have a radius of {radius.mean():.2f} ± {radius.std():.2f}")


if __name__ == "__main__":
    main(sys.argv[1])
