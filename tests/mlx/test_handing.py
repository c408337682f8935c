"""A node that is killed and started elsewhere, with an empty folder, goes on with all it had.

Its first life is a process of its own, ended by SIGKILL as soon as a hand-off lies in the mailbox. Its second is
compared, bit for bit, with a node that never stopped.
"""

# ruff: noqa: E402  # what follows the skip needs mlx

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="mlx has no wheel for this platform")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.tuner import trainer as stock

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import RunResumed
from gradientmail_mlx import train
from gradientmail_mlx.handing import Place
from tests.handing import ALONE, Handover, await_the_end, killed
from tests.mlx.nodes import Bigram, Node, Reports, Seen, counting

EVERY, ITERS = 6, 20


class Dropping(Bigram):
    """A model that draws random numbers as it trains."""

    def __init__(self, seed: int) -> None:
        mx.random.seed(seed)
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def __call__(self, tokens: Any) -> Any:
        return self.drop(super().__call__(tokens))


def trained(folder: Path, seed: int, reports: Any = None, **options: Any) -> tuple[Node, Seen]:
    """Train to the end, with validation in between; ``folder`` has the mailbox, the adapter file lies elsewhere."""
    folder.mkdir(exist_ok=True)
    schedule = optim.linear_schedule(1e-2, 1e-3, ITERS)
    node = Node(folder, ITERS, {"steps_per_eval": 5}, Dropping(seed), optim.Adam(learning_rate=schedule))
    seen = Seen(stock.iterate_batches)
    settings: dict[str, Any] = {"node": "a", "algorithm": ALONE, "handoff_every": EVERY, "callbacks": ()}
    np.random.seed(7)
    train(
        node.model, node.optimizer, counting(), counting(8, start=3), args=node.args, iterate_batches=seen,
        training_callback=reports, mailbox=(folder / "run").as_uri(), **{**settings, **options},
    )  # fmt: skip
    return node, seen


class Wait(Reports):
    """Waits for the first hand-off, in the report after it, and then does what was asked for."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self.end, self.handover = end, Handover()
        self.heard = self.handover.heard

    def on_train_loss_report(self, info: dict[str, Any]) -> None:
        if info["iteration"] > EVERY:
            self.handover.wait()
            self.end()


def first_life(folder: str) -> None:
    """Train until the first hand-off is in the mailbox, say so, and wait to be killed."""
    wait = Wait(await_the_end)
    trained(Path(folder), 0, wait, callbacks=[wait.heard])


def goes_on_in(broken: Path, whole: tuple[Node, Seen], **options: Any) -> list[Any]:
    """Start again in ``broken`` from another beginning; what was told."""
    (straight, seen), reports, events = whole, Reports(), list[Any]()
    again, rest = trained(broken, 99, reports, callbacks=[events.append], **options)
    left = ITERS - EVERY
    assert rest.first[-left:] == seen.first[-left:] and len(rest.first) == ITERS, "its place in the data"
    assert reports.train[-1]["iteration"] == ITERS
    assert all(mx.array_equal(array, again.tensors[name]) for name, array in straight.tensors.items())
    assert int(again.optimizer.step) == int(straight.optimizer.step) == ITERS
    return events


def test_killed_and_started_elsewhere_with_an_empty_folder_a_node_ends_on_the_bits_of_one_that_never_stopped(tmp_path):
    program = f"from tests.mlx.test_handing import first_life; first_life({str(tmp_path / 'broken')!r})"
    with killed(program):
        whole = trained(tmp_path / "whole", 0)
    events = goes_on_in(tmp_path / "broken", whole)
    assert [event.step for event in events if isinstance(event, RunResumed)] == [EVERY]


def test_a_share_goes_on_too_and_a_node_that_is_done_has_nothing_left(tmp_path):
    def fail() -> None:
        raise ZeroDivisionError("the machine is gone")

    wait, shared = Wait(fail), replace(ALONE, global_batch_size=3)
    whole = trained(tmp_path / "whole", 0, algorithm=shared)
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path / "broken", 0, wait, callbacks=[wait.heard], algorithm=shared)
    goes_on_in(tmp_path / "broken", whole, algorithm=shared)
    _, seen = trained(tmp_path / "broken", 5, algorithm=shared)
    assert len(seen.first) == ITERS, "it read to where the last hand-off was, and trained the rest"


def test_a_hand_off_needs_a_name_and_a_session_of_its_own(tmp_path):
    node = Node(tmp_path, model=Bigram())
    with pytest.raises(ConfigurationError, match="node's name"):
        train(node.model, node.optimizer, counting(), mailbox="memory://", handoff_every=5)
    with pytest.raises(ConfigurationError, match="settings for another"):
        train(node.model, node.optimizer, counting(), session=node.session, handoff_every=5)


def test_what_is_no_place_is_refused():
    with pytest.raises(ConfigurationError, match="no place in the data"):
        Place().load_state_dict({"iterations": 3})
