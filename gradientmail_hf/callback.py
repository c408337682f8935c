"""What makes a Hugging Face ``Trainer`` a node of a run.

Steps. ``on_step_end`` is one optimizer step, unless the gradient scaler skipped it; its samples then count with the
next one. It comes before the Trainer logs, evaluates and saves, and this callback is the first to hear of it, so all
that follows sees what was merged. Samples are counted where the batch is, around ``training_step``: the tokens of
``input_ids``, unless the trainer counts what it feeds to the model itself (``include_num_input_tokens_seen``, GRPO).

The end. No one event says that training is over in time: when ``on_train_end`` comes, the best checkpoint has been
loaded, and the newest commit would overwrite it. So the session is closed at the first sign: the last step, the end
of an epoch after which training stops, the summary in the log, ``on_train_end``. An exception aborts it, and so does
whatever begins training anew without having ended it (``auto_find_batch_size``, a notebook's cell run twice).
"""

import os
import sys
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging as transformers_logging

from gradientmail_core.adapters.seeding import node_seed
from gradientmail_core.adapters.torch import Buffers, TorchModel
from gradientmail_core.adapters.torch_distributed import Alone, Processes, Ranks
from gradientmail_core.adapters.torch_loaders import ElasticStream, Share, samples_in
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import Callback, Event, RunCreated, RunJoined, RunWaited, SessionEnded, log_event
from gradientmail_core.mailbox import Mailbox
from gradientmail_core.session import Algorithm, Session, default_node, termination
from gradientmail_core.session.environment import PREFIX, algorithm_from, handoff_from, mailbox_from, role_from
from gradientmail_core.tensors.model import Model
from gradientmail_hf.attaching import Method, caller_of, place_early, refuse_unusable, wrap
from gradientmail_hf.checkpoint import Progress, read_progress, write_progress
from gradientmail_hf.data import batches_behind, own_order, resize, why_fixed
from gradientmail_hf.following import Followed, follow, resumed
from gradientmail_hf.following import entered as epoch_entered
from gradientmail_hf.handing import TrainerHandoff
from gradientmail_hf.membership import Membership

Tokens: TypeAlias = Callable[[object], int]
"""How much a batch counts, in the unit all nodes use."""

LOGGED: Final = "gradientmail/"
"""What the names of all metrics begin with in logs."""
SHOWN: Final = {"round": "round", "live_nodes": "nodes"}
"""Metrics that have a place beside the progress bar, and their names there; loggers get all."""

logger = transformers_logging.get_logger("transformers.gradientmail")


class GradientMailCallback(TrainerCallback):
    """Train in a run: ``Trainer(..., callbacks=[GradientMailCallback(mailbox=..., algorithm=...)])``.

    * ``mailbox``: URL of the run's store, or a mailbox (default: the environment's ``GRADIENTMAIL_MAILBOX``).
    * ``algorithm``: the run's settings, the same on every node (default: DiLoCo's, and the environment's).
    * ``node``: this node's name in the run (default: a resumed checkpoint's, else host name and random hex).
    * ``min_nodes``: nodes to wait for before training starts.
    * ``syncer``: the same on every node, names the one that creates the run and closes all its rounds, for stores
      without a conditional create (default: the environment's ``GRADIENTMAIL_SYNCER``, else none).
    * ``role``: "both", "learner" for a node that never closes rounds, or "either" for one that stops training and
      closes for all while the run has elected it its syncer (default: ``GRADIENTMAIL_ROLE``, else "both").
    * ``lease_timeout``, ``progress_timeout``: seconds after which others stop waiting for a node that is silent, or
      alive without taking steps.
    * ``close_timeout``: seconds without a commit after which a node that leaves gives up the rounds in flight.
    * ``handoff_every``: every so many steps the training's whole state is kept in the mailbox, and a process that
      starts under the same ``node`` goes on from there (default: ``GRADIENTMAIL_HANDOFF_EVERY``, else never; see
      :mod:`gradientmail_hf.handing`).
    * ``tokens``: samples or tokens in a batch, as ``training_step`` gets it.
    * ``buffers``: ``"mean"`` merges floating-point buffers (a BatchNorm's statistics) too, on every node; ``"local"``
      leaves each node its own. Not chosen means local, with a warning where there are any.
    * ``own_order``: shuffle differently from every other node.
    * ``max_batch_size``: with a global batch size, the most samples that one process trains on at once.
    * ``follow_run``: start where the run is: ``global_step``, epoch, learning rate schedule (see
      :mod:`gradientmail_hf.following`). So ``max_steps`` and ``num_train_epochs`` are the run's, not each node's.
    * ``evaluate``: what is evaluated while training, this node's model (``"local"``) or the run's newest
      (``"global"``). Checkpoints hold the node's own in both cases.
    * ``callbacks`` receive every event of the session; the default logs them.

    Raises :class:`ConfigurationError` for settings and trainers that cannot work.
    """

    def __init__(
        self,
        mailbox: str | os.PathLike[str] | Mailbox | None = None,
        algorithm: Algorithm | None = None,
        *,
        node: str | None = None,
        min_nodes: int = 1,
        syncer: str | None = None,
        role: str | None = None,
        lease_timeout: float = 120.0,
        progress_timeout: float = 300.0,
        close_timeout: float | None = None,
        handoff_every: int | None = None,
        tokens: Tokens | None = None,
        buffers: Buffers | None = None,
        own_order: bool = True,
        max_batch_size: int | None = None,
        follow_run: bool = True,
        evaluate: Literal["local", "global"] = "local",
        callbacks: Sequence[Callback] = (log_event,),
    ) -> None:
        if evaluate not in ("local", "global"):
            raise ConfigurationError(f"evaluate is {evaluate!r}.", "Use 'local' or 'global'.")
        if max_batch_size is not None and max_batch_size < 1:
            raise ConfigurationError(f"max_batch_size is {max_batch_size}.", "Use 1 or more.")
        self.mailbox = mailbox if mailbox is not None else mailbox_from(os.environ)
        self.algorithm: Algorithm = algorithm or algorithm_from(os.environ)
        self.node = node or os.environ.get(PREFIX + "NODE")
        self.min_nodes = min_nodes
        self.syncer = syncer or os.environ.get(PREFIX + "SYNCER")
        self.lease_timeout = lease_timeout
        self.role = role_from(role, os.environ)
        self.progress_timeout = progress_timeout
        self.close_timeout = close_timeout
        self.handoff_every = handoff_from(handoff_every, self.node, os.environ)
        self._handoff: TrainerHandoff | None = None
        self._has_trained = False
        self._tokens = tokens
        self._buffers = buffers
        self._own_order = own_order
        self._max_batch_size = max_batch_size
        self._follow_run = follow_run
        self._evaluate_committed = evaluate == "global"
        self._callbacks = tuple(callbacks)
        self._attached: weakref.WeakSet[Trainer] = weakref.WeakSet()
        self._trainer: Trainer | None = None
        self._membership: Membership | None = None
        self._running_name = self.node or ""
        self._stream: ElasticStream | None = None
        self._followed: Followed | None = None
        self._figures: dict[str, float] = {}
        self._trainer_counted: int | None = None
        self._watch: RemovableHandle | None = None
        self._overflowed = False

    # -- the trainer ---------------------------------------------------------------------------------------

    def attach(self, trainer: Trainer) -> None:
        """Take part in ``trainer``, and be told when its training fails. Done by itself; safe to call again.

        Raises :class:`ConfigurationError` for DeepSpeed, Megatron-LM, and a second callback of this kind.
        """
        refuse_unusable(trainer)
        place_early(trainer, self)
        self._trainer = trainer
        if trainer in self._attached:
            return
        self._attached.add(trainer)
        # An epoch is guarded as well as the whole: with a callback added late, the whole is under way already.
        for name, around in {
            "train": self._guarded,
            "_run_epoch": self._entered,
            "training_step": self._counted,
            "evaluate": self._evaluated,
        }.items():
            wrap(trainer, name, around)

    def _guarded(self, stock: Method) -> Method:
        def guarded(*args: object, **kwargs: object) -> object:
            try:
                return stock(*args, **kwargs)
            except BaseException as error:
                self._abort(f"{type(error).__name__}: {error}".removesuffix(": "))
                raise

        return guarded

    def _entered(self, stock: Method) -> Method:
        guarded = self._guarded(stock)

        def entered(*args: object, **kwargs: object) -> object:
            assert self._trainer is not None
            if self._followed is None:
                return guarded(*args, **kwargs)
            state = self._trainer.state
            if state.global_step >= state.max_steps:
                return None
            return guarded(*args, **epoch_entered(kwargs, self._followed, self._trainer.args.output_dir))

        return entered

    def _counted(self, stock: Method) -> Method:
        def counted(model: nn.Module, inputs: object, *args: object, **kwargs: object) -> object:
            if self._membership is not None and self._trainer_counted is None:
                self._membership.count((self._tokens or samples_in)(inputs))
            if self._handoff is not None:
                self._handoff.go_on()
            loss = stock(model, inputs, *args, **kwargs)
            if self._stream is not None:
                self._stream.confirm()
            return loss

        return counted

    def _evaluated(self, stock: Method) -> Method:
        def evaluated(*args: object, **kwargs: object) -> object:
            if self._membership is None:
                return stock(*args, **kwargs)
            with self._membership.evaluating(committed=self._evaluate_committed):
                return stock(*args, **kwargs)

        return evaluated

    # -- events of the trainer -----------------------------------------------------------------------------

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Attach to the trainer that is being made."""
        caller = caller_of(self)
        if caller is not None:
            self.attach(caller.trainer)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Join: whatever restores a checkpoint has done so, and no batch was drawn yet."""
        self._abort("training began anew")
        self._followed = None
        caller = caller_of(self)
        if caller is None:
            raise ConfigurationError(
                "GradientMailCallback is not called by a Trainer.", "Give it to a transformers.Trainer, or attach() it."
            )
        self.attach(caller.trainer)
        _refuse_search(state)
        if state.global_step >= state.max_steps:
            return
        try:
            self._enter(args, state, kwargs, caller.checkpoint)
            if state.global_step >= state.max_steps:
                control.should_training_stop = True
                self._leave()
        except BaseException as error:
            self._abort(f"{type(error).__name__} while joining")
            raise

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Make sure that nothing trains that the run knows nothing of."""
        if self._membership is not None:
            self._membership.check_trainable()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """One step of the session, unless the scaler skipped the optimizer's; after the last one the end."""
        if self._membership is None:
            return
        skipped = self._overflowed or getattr(kwargs["optimizer"], "step_was_skipped", False)
        self._overflowed = False
        if not skipped:
            self._step(state)
        if state.global_step >= state.max_steps:
            self._leave()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Leave if this was the last epoch."""
        if control.should_training_stop:
            self._leave()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Add the run's figures to what is logged of training."""
        logs = kwargs.get("logs")
        if not isinstance(logs, MutableMapping):
            return
        if "train_runtime" in logs:
            self._leave()
        if "loss" in logs or "train_runtime" in logs:
            figures = {LOGGED + name: value for name, value in self._newest_figures().items()}
            logs.update(figures)
            if figures and state.log_history:
                state.log_history[-1].update(figures)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Leave what is needed to go on from here beside the checkpoint."""
        if self._membership is None or not self._membership.leads or not state.is_world_process_zero:
            return
        folder = Path(args.output_dir or ".", f"checkpoint-{state.global_step}")
        write_progress(folder, self._running_name, self._membership.progress(), self._stream_state())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Leave, if nothing told before that this was the end."""
        self._leave()

    # -- one training --------------------------------------------------------------------------------------

    def _enter(
        self, args: TrainingArguments, state: TrainerState, parts: dict[str, object], checkpoint: str | None
    ) -> None:
        model, optimizer = parts["model"], parts["optimizer"]
        assert isinstance(model, nn.Module) and self._trainer is not None
        progress = read_progress(Path(checkpoint)) if checkpoint is not None else None
        adapter = TorchModel(model, buffers=self._buffers or "local")
        bare = getattr(optimizer, "optimizer", optimizer)
        if isinstance(bare, Optimizer):
            adapter.track_optimizer(bare)
            self._watch = bare.register_step_post_hook(self._saw_step)
        self._figures = {}
        self._running_name = self.node or (progress.node if progress is not None else default_node())
        processes = _processes(self._trainer, adapter)
        self._handoff = self._prepared_handoff(model, optimizer, processes, declined=checkpoint is not None)
        self._membership = Membership(adapter, processes, self._open_session)
        if self._buffers is None and self._membership.leads:
            _note_buffers(adapter.unmerged_buffers)
        termination.end_by_exception()
        self._membership.join(progress.session if progress is not None else None)
        self._trainer_counted = state.num_input_tokens_seen if self._counts_itself(args) else None
        if self._handoff is not None and self._handoff.restored is not None:
            self._followed = resumed(self._trainer, parts["train_dataloader"], self._handoff.restored.step)
        if self._follow_run:
            self._follow(self._trainer, parts["train_dataloader"])
        self._arrange_data(args, state, parts["train_dataloader"], progress)
        if self._handoff is not None:
            self._handoff.note_data(parts["train_dataloader"], streamed=self._stream is not None)

    def _prepared_handoff(
        self, model: nn.Module, optimizer: object, processes: Processes, *, declined: bool
    ) -> TrainerHandoff | None:
        if self.handoff_every is None:
            return None
        if not isinstance(processes, Alone):
            raise ConfigurationError(
                "handoff_every cannot hand off a node of several processes.",
                "Keep checkpoints on disk, or leave it out.",
            )
        assert self._trainer is not None
        declined = declined or self._has_trained
        return TrainerHandoff(self._trainer, model, optimizer, self._stream_state, declined=declined)

    def _stream_state(self) -> Mapping[str, object]:
        return self._stream.state_dict() if self._stream is not None else {}

    def _follow(self, trainer: Trainer, loader: object) -> None:
        assert self._membership is not None
        state = trainer.state
        moved = follow(trainer, loader, self._membership.run_step())
        if moved is None:
            return
        self._followed = moved
        if not self._membership.leads:
            return
        if state.global_step >= state.max_steps:
            logger.warning(
                "GradientMail: the run is at step %d, and this trainer ends at step %d: nothing is left to train. More "
                "max_steps go on; follow_run=False counts this node's own.",
                state.global_step,
                state.max_steps,
            )
        else:
            logger.warning(
                "GradientMail: following the run, %d steps forward to step %d of %d.",
                moved.steps,
                state.global_step,
                state.max_steps,
            )

    def _saw_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """A fused optimizer that is told of overflow by the scaler runs its step and leaves the parameters alone."""
        overflow = getattr(optimizer, "found_inf", None)
        self._overflowed = overflow is not None and bool(overflow)

    def _counts_itself(self, args: TrainingArguments) -> bool:
        """Whether the trainer counts tokens: asked to by the user, or where prompts become batches only inside it."""
        asked = getattr(args, "include_num_input_tokens_seen", "no") not in ("no", False)
        return self._tokens is None and (asked or hasattr(self._trainer, "num_generations"))

    def _arrange_data(
        self, args: TrainingArguments, state: TrainerState, loader: object, progress: Progress | None
    ) -> None:
        assert self._membership is not None
        if self._own_order:
            seed = self._membership.agreed(lambda: node_seed(self._running_name, args.data_seed or args.seed))
            reason = own_order(loader, seed)
            if reason is not None and self._membership.leads:
                logger.warning("GradientMail: every node reads the same data in the same order, because %s.", reason)
        if self.algorithm.global_batch_size is None:
            return
        reason = why_fixed(loader)
        if reason is not None:
            logger.warning("GradientMail: the training batches keep their size, because %s.", reason)
            return
        accumulated = args.gradient_accumulation_steps
        self._stream = resize(
            loader,
            self._share_of(self._membership, args.world_size * accumulated),
            rank=args.process_index,
            world=args.world_size,
            skipped=0 if args.ignore_data_skip else batches_behind(loader, state.global_step, accumulated),
            position=self._position(args, progress),
        )

    def _position(self, args: TrainingArguments, progress: Progress | None) -> Mapping[str, object]:
        """Where the stream goes on: at the checkpoint's place in the data, or about at the run's in its epochs.

        Another node's place, in its order, is not this one's.
        """
        handed = self._handoff.restored if self._handoff is not None else None
        if handed is not None and handed.stream:
            return handed.stream
        if progress is not None and progress.stream and progress.node == self._running_name:
            return progress.stream
        place = self._followed.place if self._followed is not None else None
        if place is None or args.ignore_data_skip:
            return {}
        rows = place.batches * args.per_device_train_batch_size * args.world_size
        return {"pass": place.epoch, "position": rows}

    def _share_of(self, membership: Membership, parts: int) -> Share:
        """One of ``parts`` of the node's share, rounded up, within the user's bound."""
        most = self._max_batch_size or sys.maxsize
        return lambda: min(-(-membership.share // parts), most)

    def _step(self, state: TrainerState) -> None:
        assert self._membership is not None
        self._has_trained = True
        if self._trainer_counted is not None:
            self._membership.count(state.num_input_tokens_seen - self._trainer_counted)
            self._trainer_counted = state.num_input_tokens_seen
        if self._membership.step(counted_by_all=self._trainer_counted is not None):
            self._membership.check_trainable()
            self._show()

    def _show(self) -> None:
        """Write beside the progress bar, where there is one."""
        assert self._trainer is not None
        figures = self._newest_figures()
        shown = {label: int(figures[name]) for name, label in SHOWN.items() if name in figures}
        for callback in self._trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None and shown:
                bar.set_postfix(shown, refresh=False)

    def _newest_figures(self) -> dict[str, float]:
        if self._membership is not None:
            self._figures = self._membership.figures()
        return self._figures

    def _leave(self) -> None:
        if self._membership is not None:
            self._membership.leave()
            self._newest_figures()
            self._forget()

    def _abort(self, reason: str) -> None:
        membership = self._membership
        self._forget()
        if membership is not None:
            membership.abort(reason)

    def _forget(self) -> None:
        self._membership = None
        self._stream = self._handoff = None
        if self._watch is not None:
            self._watch.remove()
        self._watch, self._overflowed = None, False
        termination.end_as_before()

    def _open_session(self, model: Model) -> Session:
        return Session(
            model,
            mailbox=self.mailbox,
            algorithm=self.algorithm,
            node=self._running_name,
            min_nodes=self.min_nodes,
            syncer=self.syncer,
            role=self.role,
            lease_timeout=self.lease_timeout,
            progress_timeout=self.progress_timeout,
            close_timeout=self.close_timeout,
            handoff=self._handoff,
            handoff_every=self.handoff_every or 1,
            callbacks=(*self._callbacks, Announcer()),
        )


def _processes(trainer: Trainer, adapter: TorchModel) -> Processes:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Alone(adapter)
    alike = 1
    for degree in ("get_tp_size", "get_cp_size", "get_sp_size"):
        alike *= getattr(trainer, degree, lambda: 1)()
    return Ranks(adapter, trainer.args.device, replicas=dist.get_world_size() // alike)


def _refuse_search(state: TrainerState) -> None:
    if state.is_hyper_param_search:
        raise ConfigurationError(
            "A hyperparameter search trains one model after another, and a run has one.",
            "Search without GradientMailCallback, and join the run with what was found.",
        )


def _note_buffers(names: list[str]) -> None:
    if names:
        logger.warning(
            "GradientMail: %d buffers (such as %s) are not merged: each node keeps its own, and a node that joins late "
            "starts with its own. buffers='mean' merges them, buffers='local' says that this is meant.",
            len(names),
            names[0],
        )


class Announcer:
    """Tells a person what they wait for, in one line for as long as it is the same; on the engine's thread."""

    def __init__(self) -> None:
        self._told = ""

    def __call__(self, event: Event) -> None:
        match event:
            case RunWaited():
                if str(event) != self._told:
                    logger.warning("GradientMail: %s", event)
                self._told = str(event)
            case RunCreated() | RunJoined() | SessionEnded():
                logger.info("GradientMail: %s", event)
            case _:
                pass
