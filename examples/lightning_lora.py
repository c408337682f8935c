"""LoRA fine-tuning in Lightning through PEFT: only the adapters train, and only they travel.

    python examples/lightning_lora.py file:///shared/run

Replace ``base_model`` by ``AutoModelForCausalLM.from_pretrained(...)`` for a real one. All machines must load the same
base model: its frozen parameters are compared when a machine joins.
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gradientmail_lightning import DiLoCo, GradientMailStrategy

CONTEXT, STEPS = 32, 60


def base_model() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
        )
    )


class Counting(Dataset[dict[str, Tensor]]):
    """Numbers that go up by one: what the adapters learn."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": (torch.arange(CONTEXT) + index) % 256}


class FineTuning(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = get_peft_model(base_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch, labels=batch["input_ids"]).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((value for value in self.parameters() if value.requires_grad), lr=1e-2)


def main(mailbox: str) -> None:
    strategy = GradientMailStrategy(mailbox=mailbox, algorithm=DiLoCo(sync_every=20, fragments=4))
    trainer = Trainer(strategy=strategy, max_steps=STEPS, logger=False, enable_checkpointing=False)
    trainer.fit(FineTuning(), DataLoader(Counting(), batch_size=8, shuffle=True))


if __name__ == "__main__":
    main(sys.argv[1])
