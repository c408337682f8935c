"""A byte-level Llama trained by mlx-lm from scratch, on every machine that runs this file, a Mac or not.

    python examples/mlx_text.py file:///shared/run
    mlx.launch -n 2 examples/mlx_text.py s3://bucket/run

Start it on as many machines as you like, whenever you like; the first creates the run. A PyTorch node with the
same Llama (transformers' ``LlamaForCausalLM``) may be among them.
"""

import sys
import tempfile
from pathlib import Path

import mlx.optimizers as optim
import mlx_lm
from mlx_lm.models import llama
from mlx_lm.tuner import TrainingArgs

from gradientmail_mlx import DiLoCo, train

CONTEXT, STEPS = 32, 60


def rows() -> list[tuple[list[int], int]]:
    """Windows of mlx-lm's own sources as bytes; the 0 says that no part of a row is a prompt."""
    text = b"".join(path.read_bytes() for path in sorted(Path(mlx_lm.__file__).parent.glob("*.py")))
    return [(list(text[at : at + CONTEXT]), 0) for at in range(0, len(text) - CONTEXT, CONTEXT)]


def main(mailbox: str) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = llama.Model(llama.ModelArgs(model_type="llama", vocab_size=256, rms_norm_eps=1e-5, **sizes))
    data = rows()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArgs(batch_size=16, iters=STEPS, val_batches=4, adapter_file=f"{folder}/model.safetensors")
        train(
            model,
            optim.AdamW(learning_rate=3e-3),
            data[64:],
            data[:64],
            args=args,
            mailbox=mailbox,
            algorithm=DiLoCo(sync_every=20, fragments=4),
        )


if __name__ == "__main__":
    main(sys.argv[1])
