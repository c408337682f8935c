"""What turns a stock Lightning strategy into a node of a run.

A mixin, because Lightning asks for its own strategies' types in many places: a subclass of the stock one
keeps precision plugins, samplers, compilation and launchers working.

A session lives from the start of training to its end, within one ``fit``. It makes one step for each
batch in which an optimizer really stepped. Optimizers are asked through their own post-step hook: an
accumulating batch, or one whose gradients overflowed and were skipped by the scaler, does not count; its
samples do, with the next step. A GAN's two optimizers in one batch are one step.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from gradientmail_core.adapters.torch import Buffers, TorchModel
from gradientmail_core.adapters.torch_distributed import Alone, Processes
from gradientmail_core.adapters.torch_loaders import Share, in_own_order, samples_in
from gradientmail_core.adapters.torch_queue import SharedQueueDataset
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import (
    Callback,
    Event,
    RunCreated,
    RunJoined,
    RunResumed,
    RunWaited,
    SessionEnded,
    log_event,
)
from gradientmail_core.mailbox import Mailbox
from gradientmail_core.session import Algorithm, Session, default_node
from gradientmail_core.session.environment import (
    PREFIX,
    Plain,
    algorithm_from,
    algorithm_with,
    handoff_from,
    mailbox_from,
    role_from,
)
from gradientmail_core.tensors.model import Model
from gradientmail_lightning.dealing import Dealing
from gradientmail_lightning.evaluating import checked_choice, committed, evaluation
from gradientmail_lightning.following import follow
from gradientmail_lightning.handing import FitHandoff
from gradientmail_lightning.hooks import SessionHooks
from gradientmail_lightning.interrupts import interruptible_waits
from gradientmail_lightning.restoring import Restoring
from gradientmail_lightning.shares import BatchShares

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Tokens: TypeAlias = Callable[[Any], int]
"""How much a batch counts, in the unit all nodes use."""

SHOWN = frozenset({"round", "live_nodes"})
"""Metrics that have a place in the progress bar; loggers get all."""


class GradientMailMixin(Restoring):
    """Options of every GradientMail strategy; all others go to the stock strategy.

    * ``mailbox``: URL of the run's store, or a mailbox (default: the environment's ``GRADIENTMAIL_MAILBOX``).
    * ``algorithm``: the run's settings, the same on every node, also as a mapping of plain ones
      (default: DiLoCo's, and the environment's).
    * ``node``: this node's name in the run (default: host name and random hex).
    * ``min_nodes``: nodes to wait for before training starts.
    * ``syncer``: the same on every node, names the one that creates the run and closes all its rounds, for stores
      without a conditional create (default: the environment's ``GRADIENTMAIL_SYNCER``, else none).
    * ``role``: "both", "learner" for a node that never closes rounds, or "either" for one that stops training and
      closes for all while the run has elected it its syncer (default: ``GRADIENTMAIL_ROLE``, else "both").
    * ``lease_timeout``, ``progress_timeout``: seconds after which others stop waiting for a node that is
      silent, or alive without taking steps.
    * ``close_timeout``: seconds without a commit after which a node that leaves gives up the rounds in flight.
    * ``handoff_every``: every so many steps the fit's whole state is kept in the mailbox, and a process that starts
      under the same ``node`` goes on from there (default: ``GRADIENTMAIL_HANDOFF_EVERY``, else never; see
      :mod:`gradientmail_lightning.handing`).
    * ``callbacks`` receive every event of the session, such as sinks; the default logs them. They are not Lightning's.
    * ``tokens``: samples or tokens in a batch (default: ``input_ids``, else the batch's length).
    * ``own_order``: shuffle differently from every other node.
    * ``buffers``: ``"mean"`` merges floating-point buffers (a BatchNorm's statistics) too, on every node;
      ``"local"`` leaves each node its own. Not chosen means local, with a warning where there are any.
    * ``max_batch_size``: with ``global_batch_size``, the most samples that one process takes in one batch.
    * ``epoch``: with ``global_batch_size``, what stays when a share changes: ``"steps"``, an epoch's number of batches,
      or ``"samples"``, so that an epoch is one pass over the data and nobody knows its length beforehand.
    * ``evaluate``: ``"global"`` validates and tests on the committed parameters; ``"local"`` on this node's own.
    * ``follow_run``: start where the run is: ``global_step``, epoch, learning rate schedules (see
      :mod:`gradientmail_lightning.following`). So ``max_steps`` and ``max_epochs`` are the run's, not each node's.
    * ``own_directories``: keep checkpoints whose directory Lightning chooses in a folder named after the node.
    """

    _hooks_class: ClassVar[type[SessionHooks]]
    _namespace: ClassVar[str]
    _hands_off: ClassVar[bool] = True

    def __init__(
        self,
        mailbox: str | os.PathLike[str] | Mailbox | None = None,
        algorithm: dict[str, Plain] | Algorithm | None = None,
        *,
        node: str | None = None,
        min_nodes: int = 1,
        syncer: str | None = None,
        role: str | None = None,
        lease_timeout: float = 120.0,
        progress_timeout: float = 300.0,
        close_timeout: float | None = None,
        handoff_every: int | None = None,
        callbacks: Sequence[Callback] = (log_event,),
        tokens: Tokens | None = None,
        own_order: bool = True,
        buffers: Buffers | None = None,
        max_batch_size: int | None = None,
        epoch: str = "steps",
        evaluate: str = "local",
        follow_run: bool = True,
        own_directories: bool = True,
        **stock: object,
    ) -> None:
        if max_batch_size is not None and max_batch_size < 1:
            raise ConfigurationError(f"max_batch_size is {max_batch_size}.", "Use 1 or more.")
        if epoch not in ("steps", "samples"):
            raise ConfigurationError(f"epoch is {epoch!r}.", "Use 'steps' or 'samples'.")
        if tokens is not None and not callable(tokens):
            raise ConfigurationError(f"tokens is {tokens!r}.", "Give a function from a batch to a whole number.")
        super().__init__(**stock)  # type: ignore[arg-type]  # each stock strategy has its own
        url = os.fspath(mailbox) if isinstance(mailbox, str | os.PathLike) else None
        self.mailbox = mailbox_from(os.environ) if not mailbox else (url or cast(Mailbox, mailbox))
        given = algorithm_with(algorithm) if isinstance(algorithm, dict) else algorithm
        self.algorithm = given or algorithm_from(os.environ)
        named = node or os.environ.get(PREFIX + "NODE")
        self.node = named or default_node()
        self.min_nodes = min_nodes
        self.syncer = syncer or os.environ.get(PREFIX + "SYNCER")
        self.lease_timeout = lease_timeout
        self.role = role_from(role, os.environ)
        self.progress_timeout = progress_timeout
        self.close_timeout = close_timeout
        self.handoff_every = handoff_from(handoff_every, named, os.environ)
        self.hearers = tuple(callbacks)
        self._handoff = FitHandoff(self)
        if self.handoff_every is not None and not self._hands_off:
            raise ConfigurationError(
                "handoff_every cannot hand off a model in parts.", "Keep checkpoints on disk, or leave it out."
            )
        self._tokens = tokens or samples_in
        self._own_order = own_order
        self._buffers = buffers
        self._max_batch_size = max_batch_size
        self._evaluate = checked_choice(evaluate)
        self.follows_run = follow_run
        self.own_directories = own_directories
        self._shares = BatchShares(self.share, self._warn_of_rigid, one_pass=epoch == "samples")
        self._dealing = Dealing(self)
        self._may_join = self._early = False
        self._share = 0
        self._saved: Mapping[str, object] = {}
        self._lent = ExitStack()
        self._visiting: Processes | None = None
        self._session: Session | None = None
        self._processes: Processes | None = None
        self._trainer: Trainer | None = None
        self._adapter: TorchModel | None = None
        self._progress: dict[str, object] = {}
        self._watched: list[RemovableHandle] = []
        self._stepped = False
        self._pending = 0
        self._seen = False
        self._steps = 0

    # -- taking part in Lightning --------------------------------------------------------------------------

    def connect(self, model: "LightningModule") -> None:
        """Put the hooks first among the trainer's callbacks, once."""
        super().connect(model)
        self._shares.begin()
        self._dealing.begin()
        self._may_join = False
        callbacks = model.trainer.callbacks  # type: ignore[attr-defined]  # typed as if it had none
        if not any(isinstance(callback, SessionHooks) for callback in callbacks):
            callbacks.insert(0, self._hooks_class(self))

    @property
    def optimizers(self) -> list[Optimizer]:
        """The stock strategy's optimizers; every list that replaces them is watched for real steps."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        super(GradientMailMixin, type(self)).optimizers.fset(self, optimizers)  # type: ignore[attr-defined]  # a property
        for watch in self._watched:
            watch.remove()
        hooked = [optimizer for optimizer in optimizers if hasattr(optimizer, "register_step_post_hook")]
        self._watched = [optimizer.register_step_post_hook(self._saw_step) for optimizer in hooked]

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], object],
        model: "LightningModule | Module | None" = None,
        **kwargs: object,
    ) -> object:
        """The stock step; an optimizer without hooks of its own is believed to have stepped."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if not hasattr(getattr(optimizer, "_optimizer", optimizer), "register_step_post_hook"):
            self._stepped = True
        return result

    def process_dataloader(self, dataloader: object) -> object:
        """The stock loader; while training in this node's own order, and in batches that follow its share."""
        loader = super().process_dataloader(dataloader)
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is None or not trainer.training:
            return loader
        if self._own_order:
            loader = in_own_order(loader, self.node, torch.initial_seed() + trainer.current_epoch)
        elif self.handoff_every is not None:
            self._handoff.note_order(loader)
        if not self._arranges(trainer):
            return loader
        if isinstance(getattr(loader, "dataset", None), SharedQueueDataset):
            return self._dealing.taken(cast("DataLoader[object]", loader))
        return self._shares.taken(loader) if self.share is not None or self.handoff_every is not None else loader

    def _arranges(self, trainer: "Trainer") -> bool:
        """Not for a tuner, which has put the hooks aside; not where the same few batches are wanted again."""
        joins = any(isinstance(callback, SessionHooks) for callback in trainer.callbacks)  # type: ignore[attr-defined]  # set later
        fixed = trainer.fast_dev_run or trainer.overfit_batches  # type: ignore[attr-defined]  # set later
        return joins and not fixed

    def barrier(self, name: str | None = None) -> None:
        """The stock barrier. Once a stage begins no tuner is at work, and data may have the run joined."""
        super().barrier(name)  # type: ignore[safe-super]  # each stock strategy has one
        self._may_join = self._may_join or name == "run-stage"

    def teardown(self) -> None:
        """Let the session go whatever happened before; then the stock teardown."""
        self.abort_run("the strategy was torn down")
        super().teardown()

    def _saw_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """An optimizer that is told of overflow by the scaler runs its step and leaves the parameters alone."""
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is None or not bool(overflow):
            self._stepped = True

    # -- one fit -------------------------------------------------------------------------------------------

    def set_up_fit(self, trainer: "Trainer") -> None:
        """Let the trainer restore what this node handed off, if hand-offs are asked for."""
        if self.handoff_every is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set later
            self._handoff.look_up(trainer)

    @property
    def fitting(self) -> "Trainer":
        """The trainer of the fit that is under way."""
        assert self._trainer is not None
        return self._trainer

    def begin_training(self, trainer: "Trainer") -> None:
        """Join the run, unless the data needed it earlier. Raises what :meth:`enter_run` raises."""
        if not self._early:
            self.enter_run(trainer)
        self._early = False
        self._dealing.follow(trainer)

    def enter_early(self, trainer: "Trainer") -> bool:
        """Join for the sake of what is read before training begins; whether there is a run to read from."""
        if self._processes is None and self._may_join and not trainer.fit_loop.skip:
            self.enter_run(trainer)
            self._early = True
        return self._processes is not None

    def enter_run(self, trainer: "Trainer") -> None:
        """Join the run with the model as it is now; not in a ``fast_dev_run``, which only tries the code.

        Raises what :meth:`Session.join` raises, and what the model's adapter refuses.
        """
        self.abort_run("a new fit started")
        self._may_join = False
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set later
            self._say("fast_dev_run: no run is joined")
            return
        assert self.lightning_module is not None
        adapter = self._adapt(self.lightning_module)
        for optimizer in self.optimizers:
            adapter.track_optimizer(optimizer)
        if self._buffers is None:
            self._note_buffers(adapter.unmerged_buffers)
        self._handoff.enter()
        self._processes = self._make_processes(adapter)
        self._adapter = adapter
        self._stepped, self._pending, self._seen, self._steps = False, 0, False, 0
        if self._processes.leads:
            self._session = self._open_session(self._processes.model)
        self._trainer = trainer
        self._share = self._processes.run(self._join)
        if self.follows_run:
            self._follow(trainer, self._processes)

    @property
    def processes(self) -> Processes | None:
        """The processes of this node, while it is in a run."""
        return self._processes

    @property
    def session(self) -> Session | None:
        """The session, while this node is in a run, on its leading process."""
        return self._session

    @property
    def replica(self) -> tuple[int, int]:
        """Which of how many processes that read different data this is."""
        return 0, 1

    @property
    def share(self) -> Share | None:
        """How large the next batch of this process should be; None where the loader decides."""
        return self._batch_size if self.algorithm.global_batch_size is not None else None

    def see_batch(self, batch: object, *, first: bool) -> None:
        """Count a batch that is about to be trained on; ``first`` of its epoch, the parameters are checked."""
        if self._processes is None:
            return
        self._handoff.go_on()
        self._stepped = False
        self._seen = batch is not None
        if self._seen:
            self._pending += self._tokens(batch)
        if first:
            self._check_trainable()

    def finish_batch(self, trainer: "Trainer", module: "LightningModule", batch: object) -> None:
        """One step of the session if an optimizer stepped, with the samples since the last one."""
        self._shares.confirm()
        self._dealing.confirm()
        if self._processes is None:
            return
        if not self._seen and batch is not None:
            self._pending += self._tokens(batch)
        if not self._stepped:
            return
        self._stepped = False
        samples, self._pending = self._processes.total(self._pending), 0
        self._share, changed = divmod(self._processes.run(lambda: self._step(samples)), 2)
        self._steps += 1
        if changed:
            self._check_trainable()
            self._log(trainer, module, SHOWN)
        if self._steps % (trainer.log_every_n_steps or 50) == 0:  # type: ignore[attr-defined]  # set later
            self._log(trainer, module)

    def leave_run(self) -> None:
        """Wait for what is in flight, take the newest commit, and leave."""
        if self._processes is not None:
            self._processes.run(self._leave)
            self._processes.close()
        self._forget()

    def begin_evaluation(self, trainer: "Trainer") -> None:
        """Let the model hold what is to be evaluated; all processes call it.

        Outside of a fit, ``evaluate="global"`` looks the committed parameters up, and raises what
        :func:`gradientmail_core.session.align` raises.
        """
        visits = self._evaluate == "global" and trainer.state.fn in ("validate", "test")
        if self._processes is None and visits:
            assert self.lightning_module is not None
            self._visiting = self._make_processes(self._adapt(self.lightning_module))
        processes = self._processes or self._visiting
        if processes is not None:
            processes.run(self._lend)

    def end_evaluation(self) -> None:
        """Put this node's own parameters back, bit for bit."""
        processes = self._processes or self._visiting
        if processes is not None:
            processes.run(self._take_back)
        if self._visiting is not None:
            self._visiting.close()
            self._visiting = None

    def abort_run(self, reason: str) -> None:
        """Leave without waiting or publishing. Never raises; does nothing when no run is joined.

        The model is left with this node's own parameters, also in the middle of an evaluation.
        """
        session, processes = self._session, self._processes or self._visiting
        self._forget()
        try:
            if processes is not None:
                processes.abandon()
                self._lent.close()
        finally:
            if session is not None:
                self._abort(session, reason)

    def _abort(self, session: Session, reason: str) -> None:
        try:
            session.abort(reason)
        except Exception:
            self._logger.exception("The session could not be aborted in order")

    def progress(self) -> dict[str, object]:
        """The node's name and how far the run is, in plain types; as last known once the run is left."""
        if self._session is not None:
            steps, rounds = int(self._session.global_step), int(self._session.rounds_seen)
            self._progress = {"node": self.node, "global_step": steps, "rounds": rounds}
        return dict(self._progress)

    def state(self) -> dict[str, object]:
        """What a checkpoint needs so that this node goes on where it was: plain types only."""
        state = self.progress()
        streams = self._shares.state()
        if streams:
            state["streams"] = streams
        units = self._dealing.state()
        if units:
            state["units"] = units
        if self._session is not None:
            state["session"] = self._session.state_dict()
        return state

    def restore(self, state: Mapping[str, object]) -> None:
        """Go on from ``state`` at the next join. Another node's position in its data is not this one's."""
        self._saved = state
        streams = state.get("streams")
        if isinstance(streams, list) and state.get("node") == self.node:
            self._shares.restore(streams)
        units = state.get("units")
        if isinstance(units, dict) and state.get("node") == self.node:
            self._dealing.restore(units)

    def _forget(self) -> None:
        self.progress()
        self._session = None
        self._processes = self._visiting = None
        self._early = False
        self._trainer = None
        self._adapter = None

    # -- parts ---------------------------------------------------------------------------------------------

    def _adapt(self, module: "LightningModule") -> TorchModel:
        return TorchModel(module, buffers=self._buffers or "local")

    def _make_processes(self, adapter: TorchModel) -> Processes:
        return Alone(adapter)

    def _open_session(self, model: Model) -> Session:
        return Session(
            model,
            mailbox=self.mailbox,
            algorithm=self.algorithm,
            node=self.node,
            min_nodes=self.min_nodes,
            syncer=self.syncer,
            role=self.role,
            lease_timeout=self.lease_timeout,
            progress_timeout=self.progress_timeout,
            close_timeout=self.close_timeout,
            handoff=self._handoff if self.handoff_every is not None else None,
            handoff_every=self.handoff_every or 1,
            callbacks=(*self.hearers, self._announce),
        )

    def _join(self) -> int:
        assert self._session is not None
        saved, self._saved = self._saved.get("session"), {}
        if isinstance(saved, dict):
            self._session.load_state_dict(saved)
        with interruptible_waits():
            self._session.join()
        return self._session.batch_size or 0

    def _step(self, samples: int) -> int:
        """Twice the node's share, plus 1 if commits were written.

        Nothing more is counted once the process was told to end: a step might wait for a round.
        """
        assert self._session is not None and self._trainer is not None
        if self._trainer.received_sigterm:
            return 2 * self._share
        with interruptible_waits():
            changed = self._session.step(samples)
        return 2 * (self._session.batch_size or 0) + changed

    def _leave(self) -> int:
        assert self._session is not None
        with interruptible_waits():
            self._session.close()
        return 0

    def _lend(self) -> int:
        if self._session is not None:
            self._lent.enter_context(evaluation(self._session, self._evaluate))
        else:
            assert self._visiting is not None
            self._lent.enter_context(committed(self._visiting.model, self.mailbox))
        return 0

    def _take_back(self) -> int:
        self._lent.close()
        return 0

    def _follow(self, trainer: "Trainer", processes: Processes) -> None:
        step = processes.run(lambda: self._session.global_step if self._session is not None else 0)
        behind = follow(trainer, step)
        if behind and self.is_global_zero:
            self._say(f"following the run: {behind} steps forward, to step {step}")

    def _batch_size(self) -> int:
        """The size of one process's next batch, rounded up. Before the run is joined its start is assumed."""
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        whole = self._share or -(-(self.algorithm.global_batch_size or 1) // self.min_nodes)
        parts = self.replica[1] * (trainer.accumulate_grad_batches if trainer is not None else 1)
        size = -(-whole // parts)
        return size if self._max_batch_size is None else min(size, self._max_batch_size)

    def _warn_of_rigid(self, reason: str) -> None:
        if self.handoff_every is not None:
            self._handoff.omit("the place in the data", reason)
        if self.is_global_zero and self.share is not None:
            self._logger.warning(
                "GradientMail: train loaders keep their batch sizes, whatever the node's share: %s.", reason
            )

    def _check_trainable(self) -> None:
        """Raise :class:`ConfigurationError` if a parameter trains that the run knows nothing of."""
        assert self._adapter is not None
        added = self._adapter.newly_trainable()
        if added:
            names = ", ".join(added[:5]) + (" and more" if len(added) > 5 else "")
            raise ConfigurationError(
                f"{names} became trainable after the run was joined.",
                "Let everything that will train have requires_grad=True from the start, or start a new run after it.",
            )

    def _log(self, trainer: "Trainer", module: "LightningModule", only: frozenset[str] | None = None) -> None:
        if self._session is None or trainer.barebones:
            return
        for name, value in self._session.metrics().items():
            if only is None or name in only:
                module.log(
                    f"gradientmail/{name}",
                    value,
                    prog_bar=name in SHOWN,
                    logger=bool(trainer.loggers),
                    on_step=True,
                    on_epoch=False,
                    batch_size=1,
                    rank_zero_only=True,
                )

    @property
    def _logger(self) -> logging.Logger:
        """Below Lightning's own logger, which prints to the terminal."""
        return logging.getLogger(f"{self._namespace}.gradientmail")

    def _say(self, text: str) -> None:
        self._logger.info("GradientMail: %s", text)

    def _note_buffers(self, names: list[str]) -> None:
        if names and self.is_global_zero:
            self._logger.warning(
                "GradientMail: %d buffers (such as %s) are not merged: each node keeps its own, and a node that joins "
                "late starts with its own. buffers='mean' merges them, buffers='local' says that this is meant.",
                len(names),
                names[0],
            )

    def _announce(self, event: Event) -> None:
        """Tell a person what they wait for; called on the engine's thread, on the leading process only."""
        match event:
            case RunCreated() | RunJoined() | RunResumed() | RunWaited() | SessionEnded():
                self._say(str(event))
            case _:
                pass
