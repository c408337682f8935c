"""mlx-lm's ``train`` as a node of a run: the same call, and a session around it.

The order is what makes the result trustworthy: join before the first batch, so that training starts from the
run's parameters; one session step after each step of the optimizer; close in the last report, before mlx-lm
writes the adapter file. An exception aborts the session at once: the lease is released, nothing half-trained
is published. Only a failure of the close itself waits until mlx-lm has written its file, so that hours of
training are not lost with it. SIGTERM is such an exception, where nobody else handles it.
"""

import os
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from typing import Literal

from mlx.nn import Module
from mlx.optimizers import Optimizer
from mlx_lm.tuner import trainer as stock
from mlx_lm.tuner.callbacks import TrainingCallback

from gradientmail_core.adapters.mlx import MlxModel
from gradientmail_core.adapters.mlx_handoff import MlxHandoff
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import (
    Callback,
    Event,
    NodeAppeared,
    NodeGone,
    RunCreated,
    RunJoined,
    RunWaited,
    SessionEnded,
    log_event,
)
from gradientmail_core.mailbox import Mailbox
from gradientmail_core.session import Algorithm, Session, termination
from gradientmail_core.session.environment import PREFIX, algorithm_from, handoff_from, mailbox_from, role_from
from gradientmail_mlx.batches import IterateBatches, Tokens, tokens_in
from gradientmail_mlx.callback import Evaluated, NodeCallback, Reading
from gradientmail_mlx.handing import Place
from gradientmail_mlx.node import Node, adapter_of


def train(
    model: Module,
    optimizer: Optimizer,
    train_dataset: Sized,
    val_dataset: Sized | None = None,
    args: stock.TrainingArgs | None = None,
    loss: Callable[..., object] = stock.default_loss,
    iterate_batches: IterateBatches = stock.iterate_batches,
    training_callback: TrainingCallback | None = None,
    *,
    session: Session | None = None,
    mailbox: str | os.PathLike[str] | Mailbox | None = None,
    algorithm: Algorithm | None = None,
    node: str | None = None,
    min_nodes: int = 1,
    syncer: str | None = None,
    role: str | None = None,
    lease_timeout: float = 120.0,
    progress_timeout: float = 300.0,
    close_timeout: float | None = None,
    handoff_every: int | None = None,
    callbacks: Sequence[Callback] = (log_event,),
    buffers: Literal["local", "mean"] | None = None,
    tokens: Tokens = tokens_in,
    max_batch_size: int | None = None,
    own_order: bool = True,
    evaluate: Evaluated = "local",
) -> None:
    """``mlx_lm.tuner.trainer.train`` with others through a mailbox: its arguments, and then ours.

    * ``session``: a session of ``model``, joined or not; it is closed at the end. Or instead:
    * ``mailbox``, ``algorithm``, ``node``, ``min_nodes``, ``syncer``, ``role``, ``lease_timeout``,
      ``progress_timeout``, ``close_timeout``, ``callbacks``: as in :class:`gradientmail_core.Session`; ``mailbox``,
      ``algorithm``, ``node``, ``syncer`` and ``role`` default to the environment (``GRADIENTMAIL_MAILBOX`` …).
    * ``handoff_every``: every so many steps the training's whole state is kept in the mailbox, and a process that
      starts under the same ``node`` goes on from there, with what is left of ``iters`` (default:
      ``GRADIENTMAIL_HANDOFF_EVERY``, else never; see :mod:`gradientmail_mlx.handing`).
    * ``buffers``: ``"mean"`` merges a BatchNorm's running statistics too, on every node; ``"local"`` leaves each node
      its own. Not chosen means local, with a word where there are any.
    * ``tokens``: how much a batch counts, in the unit all nodes use (default: its tokens without padding).
    * ``max_batch_size``: the most rows of an iteration, whatever the node's share of ``global_batch_size`` is.
    * ``own_order``: read the data in another order than every other node.
    * ``evaluate``: validate this node's model (``"local"``) or the run's newest (``"global"``).

    In a group of ``mlx.launch`` all ranks call it alike; rank 0 holds the session. Raises what
    :meth:`Session.join`, :meth:`Session.step` and :meth:`Session.close` raise, and what mlx-lm raises.
    """
    args = stock.TrainingArgs() if args is None else args
    if session is not None and any(given is not None for given in (mailbox, algorithm, node, handoff_every, buffers)):
        raise ConfigurationError(
            "A session was given, and settings for another.", "Give session=, or mailbox= and others."
        )
    reading = Reading(iterate_batches, tokens, max_batch_size, own_order, evaluate)
    adapter = MlxModel(model, buffers=buffers or "local") if session is None else adapter_of(session, model)
    adapter.track_optimizer(optimizer)
    place = None
    if session is None:
        node = node or os.environ.get(PREFIX + "NODE")
        every = handoff_from(handoff_every, node, os.environ)
        place = Place() if every is not None else None
        session = Session(
            adapter,
            mailbox=mailbox_from(os.environ) if mailbox is None else mailbox,
            algorithm=algorithm_from(os.environ) if algorithm is None else algorithm,
            node=node,
            min_nodes=min_nodes,
            syncer=syncer or os.environ.get(PREFIX + "SYNCER"),
            role=role_from(role, os.environ),
            lease_timeout=lease_timeout,
            progress_timeout=progress_timeout,
            close_timeout=close_timeout,
            handoff=MlxHandoff(model, optimizer, place=place) if place is not None else None,
            handoff_every=every or 1,
            callbacks=(*callbacks, announce),
        )
    taking_part = Node(session, adapter, patient=True)
    if place is not None and taking_part.ranks.size > 1:
        raise ConfigurationError(
            "handoff_every cannot hand off a node of several processes.", "Keep adapter files on disk, or leave it out."
        )
    if buffers is None:
        _note_buffers(adapter, taking_part)
    termination.end_by_exception()
    try:
        taking_part.join()
        args = replace(args, iters=max(args.iters - place.iterations, 0)) if place is not None else args
        callback = NodeCallback(taking_part, args, reading, training_callback, place)
        stock.train(
            model,
            optimizer,
            train_dataset,
            val_dataset,
            args=args,
            loss=loss,
            iterate_batches=callback.iterate_batches,
            training_callback=callback,
        )
        taking_part.close()
    except BaseException as error:
        taking_part.abort(f"{type(error).__name__}: {error}".removesuffix(": "))
        raise
    finally:
        termination.end_as_before()
    taking_part.raise_failure()


def announce(event: Event) -> None:
    """Tell a person at the terminal what happens and what is waited for."""
    match event:
        case RunCreated() | RunJoined() | RunWaited() | NodeAppeared() | NodeGone() | SessionEnded():
            print(f"GradientMail: {event}", flush=True)
        case _:
            pass


def _note_buffers(adapter: MlxModel, node: Node) -> None:
    names = adapter.unmerged_buffers
    if names and node.ranks.leads:
        print(
            f"GradientMail: {len(names)} running statistics (such as {names[0]}) are not merged: each node keeps its "
            "own, and one that joins late starts with its own. Where they matter, prefer LayerNorm or RMSNorm.",
            flush=True,
        )
