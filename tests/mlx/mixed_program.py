"""A node of a run of two frameworks as a program: ``python -m tests.mlx.mixed_program '{"framework": "torch", ...}'``.

``torch`` is a Hugging Face ``Trainer`` and never imports MLX; ``mlx`` is mlx-lm's training. Both train one tiny
Llama until a commit reaches the step that ``{out}/stop`` names, and print what they hold, and their losses on the
same held-out rows before and after. With ``held`` they say in ``{out}/ready`` that they could join, and wait for
``{out}/go``.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import gradientmail_core as gm
from gradientmail_core.adapters import resolve
from gradientmail_core.events import FragmentAligned
from tests.mlx.shapes import SIZES, VOCABULARY
from tests.sessions import whole

LENGTH = 9
ALGORITHM = gm.DiLoCo(
    sync_every=8, fragments=2, overlap_steps=0, quorum_size=2, follow=False, grace_seconds=1.0, delta_codec="F32"
)
LEASE_SECONDS = 5.0
STEP_SECONDS = 0.01
FOREVER = 10**6


class Stop:
    """Says when to stop: at the first commit that is as far as the file says."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.now = False

    def __call__(self, event: gm.Event) -> None:
        if isinstance(event, FragmentAligned) and self._path.exists():
            self.now = self.now or event.step >= int(self._path.read_text())


def rows(number: int, seed: int) -> Any:
    """Rows that count upwards from a random number."""
    firsts = np.random.default_rng(seed).integers(0, VOCABULARY, number)
    return (firsts[:, None] + np.arange(LENGTH)) % VOCABULARY


HELD_OUT = rows(16, 99)


def digest(model: Any) -> str:
    """sha256 over all parameters in the run's own order and type."""
    adapter = resolve(model)
    layout = whole(adapter)
    values = np.empty(layout.size, np.float32)
    adapter.read(layout, values)
    return hashlib.sha256(values.tobytes()).hexdigest()


def torch_node(options: dict[str, Any], stop: Stop) -> tuple[Any, Callable[[], float], Callable[[], None]]:
    """The model, its held-out loss, and its training."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from gradientmail_hf import GradientMailCallback

    class Ending(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            time.sleep(STEP_SECONDS)
            control.should_training_stop = control.should_training_stop or stop.now

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))

    def loss() -> float:
        ids = torch.from_numpy(HELD_OUT)
        with torch.no_grad():
            return float(model(input_ids=ids, labels=ids).loss)

    def train() -> None:
        args = TrainingArguments(
            output_dir=options["out"],
            max_steps=FOREVER,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            per_device_train_batch_size=4,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        data = [{"input_ids": row, "labels": row} for row in rows(64, 1).tolist()]
        callback = GradientMailCallback(
            options["mailbox"],
            ALGORITHM,
            node=options["node"],
            min_nodes=options["min_nodes"],
            lease_timeout=LEASE_SECONDS,
            callbacks=(stop,),
        )
        Trainer(model, args, train_dataset=data, callbacks=[callback, Ending()]).train()  # type: ignore[arg-type]  # a small model
        assert not any(name == "mlx" or name.startswith("mlx.") for name in sys.modules)

    return model, loss, train


def mlx_node(options: dict[str, Any], stop: Stop) -> tuple[Any, Callable[[], float], Callable[[], None]]:
    """The model, its held-out loss, and its training."""
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx_lm.models import llama
    from mlx_lm.tuner import trainer as stock

    from gradientmail_mlx import train

    mx.disable_compile()
    mx.random.seed(2)
    model = llama.Model(llama.ModelArgs(model_type="llama", **SIZES))

    def loss() -> float:
        lengths = mx.array([(1, LENGTH - 1)] * len(HELD_OUT))
        return float(stock.default_loss(model, mx.array(HELD_OUT), lengths)[0].item())

    def batches(**named: Any) -> Iterator[Any]:
        for batch in stock.iterate_batches(**named):
            time.sleep(STEP_SECONDS)
            if stop.now:
                return
            yield batch

    def training() -> None:
        session = gm.Session(
            model,
            mailbox=options["mailbox"],
            algorithm=ALGORITHM,
            node=options["node"],
            min_nodes=options["min_nodes"],
            lease_timeout=LEASE_SECONDS,
            callbacks=(stop,),
        )
        args = stock.TrainingArgs(
            iters=FOREVER,
            batch_size=4,
            steps_per_save=FOREVER,
            adapter_file=f"{options['out']}/mlx.safetensors",
        )
        data = [(row, 0) for row in rows(64, 2).tolist()]
        train(model, optim.Adam(3e-3), data, args=args, iterate_batches=batches, session=session)

    return model, loss, training


def main() -> None:
    """Train, and print what came of it."""
    options = json.loads(sys.argv[1])
    stop = Stop(Path(options["out"], "stop"))
    build = {"torch": torch_node, "mlx": mlx_node}[options["framework"]]
    model, loss, train = build(options, stop)
    before = loss()
    if options["held"]:
        Path(options["out"], "ready").touch()
        while not Path(options["out"], "go").exists():
            time.sleep(0.05)
    train()
    print(json.dumps({"digest": digest(model), "before": before, "after": loss()}), flush=True)


if __name__ == "__main__":
    main()
