"""A small byte-level GPT: pre-norm blocks, rotary positions, tied embedding.

It predicts the next byte of a text, so it needs no tokenizer and its loss (nats per byte) means the same on
every machine. The network is a plain ``nn.Module``; the Lightning module around it adds a loss and an
optimizer and knows nothing of other nodes: training alone and training together run the same code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

from gradientmail_core.errors import ConfigurationError

BYTES = 256
HEAD_WIDTH = 32


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Width (a multiple of :data:`HEAD_WIDTH`), number of blocks, and context length in bytes.

    Raises :class:`ConfigurationError` for a size that cannot be built.
    """

    width: int
    layers: int
    context: int

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.context) < 1 or self.width % HEAD_WIDTH:
            raise ConfigurationError(
                f"A model of width {self.width}, {self.layers} layers and context {self.context} cannot be built.",
                f"Use a width that is a multiple of {HEAD_WIDTH}, and 1 or more of the others.",
            )

    @property
    def heads(self) -> int:
        """Attention heads of a block."""
        return self.width // HEAD_WIDTH


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to a residual stream of shape (batch, time, width)."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.attention_out = nn.Linear(size.width, size.width, bias=False)
        self.feed_norm = nn.RMSNorm(size.width)
        self.feed_in = nn.Linear(size.width, 4 * size.width, bias=False)
        self.feed_out = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The stream after this block; ``cos`` and ``sin`` are the rotary tables, (time, head width / 2)."""
        x = x + self.attention_out(self._attend(self.attention_norm(x), cos, sin))
        hidden: Tensor = self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))
        return x + hidden

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, width)


class ByteGPT(nn.Module):
    """Logits of the next byte, (batch, time, 256), from bytes, (batch, time), int64."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        cos, sin = _rotary_tables(size.context, size.width // size.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(_initialise)
        for name, weight in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * size.layers))

    def forward(self, text: Tensor) -> Tensor:
        """Logits for the byte after each of ``text``'s."""
        time = text.shape[1]
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x, self.cos[:time], self.sin[:time])
        return F.linear(self.norm(x), self.embedding.weight)


class LanguageModel(LightningModule):
    """:class:`ByteGPT` trained with AdamW at ``lr``, reached linearly in ``lr_warmup`` steps and then constant.

    A constant rate, because it is the same for a node that joins late as for one that was there from the start.
    """

    def __init__(self, size: ModelSize, lr: float, lr_warmup: int) -> None:
        super().__init__()
        self.gpt = ByteGPT(size)
        self.lr, self.lr_warmup = lr, lr_warmup

    def forward(self, text: Tensor) -> Tensor:
        """The network's logits."""
        logits: Tensor = self.gpt(text)
        return logits

    def training_step(self, window: Tensor, batch_idx: int) -> Tensor:
        """The loss on one batch of windows, (batch, time + 1)."""
        loss = next_byte_loss(self, window)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW and its warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.lr_warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def next_byte_loss(model: nn.Module, window: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte of a window (batch, time + 1): each byte but the first is predicted."""
    logits = model(window[:, :-1])
    return F.cross_entropy(logits.reshape(-1, BYTES), window[:, 1:].reshape(-1))


@torch.no_grad()
def held_out_loss(model: nn.Module, windows: Sequence[Tensor]) -> float:
    """Mean loss in nats per byte over batches of windows of equal size, with the model as it is."""
    return float(torch.stack([next_byte_loss(model, window) for window in windows]).mean())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def _rotary_tables(time: int, head_width: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each (time, head_width / 2), of Su et al. 2021 (arXiv 2104.09864), base 10,000."""
    rates = 10_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(time), rates)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys, (…, time, head width), turned by their positions' angles."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
