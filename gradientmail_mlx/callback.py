"""Where a node takes part in mlx-lm's loop: between two batches, and at the last report.

mlx-lm asks for the next batch exactly between two iterations, when parameters, optimizer state and report
are done and nothing is being computed. There a session's step is safe: what it writes is what the next
compiled step reads. Nothing asks for a batch after the last iteration, but its loss is always reported, and
only then is the adapter file written. So the last step and the close are made in that report: the file holds
what was committed, and errors surface like any other. An exception in the loop never reaches that report,
which is how it is told from an end.

With gradient accumulation ``grad_accumulation_steps`` iterations are one step; what remains of them at the
end is never applied by mlx-lm, and not counted here.
"""

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx_lm.tuner import trainer as stock
from mlx_lm.tuner.callbacks import TrainingCallback

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.session import Session
from gradientmail_mlx.batches import Batch, IterateBatches, Tokens, drawn_seed, rows_for, seed_order, tokens_in
from gradientmail_mlx.handing import Place
from gradientmail_mlx.node import Node, adapter_of

_NO_BATCH: Final[Batch] = ()
Evaluated: TypeAlias = Literal["local", "global"]
"""Whose parameters a validation sees: this node's, or the run's newest."""

LOGGED: Final = "gradientmail/"
"""What the names of all metrics begin with in reports."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a node reads: by mlx-lm's ``iterate_batches`` or another, what a batch counts, and what may be changed."""

    iterate_batches: IterateBatches = stock.iterate_batches
    tokens: Tokens = tokens_in
    max_batch_size: int | None = None
    own_order: bool = True
    evaluate: Evaluated = "local"

    def __post_init__(self) -> None:
        if self.evaluate not in get_args(Evaluated):
            raise ConfigurationError(f"evaluate is {self.evaluate!r}.", "Use 'local' or 'global'.")
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise ConfigurationError(f"max_batch_size is {self.max_batch_size}.", "Use 1 or more.")


class NodeCallback(TrainingCallback):
    """Steps ``node`` through one call of mlx-lm's ``train``; its reports go on to ``then``, with the run's figures.

    With a ``place`` the training can be handed off, and goes on where it was restored to.
    """

    def __init__(
        self,
        node: Node,
        args: stock.TrainingArgs,
        reading: Reading,
        then: TrainingCallback | None = None,
        place: Place | None = None,
    ) -> None:
        self._node = node
        self._args = args
        self._reading = reading
        self._then = then
        self._place = place
        self._behind = place.iterations if place is not None else 0
        self._by_batch = False
        self._finished = 0
        self._pending = 0
        self._reported = 0

    def iterate_batches(
        self,
        dataset: Sized,
        batch_size: int,
        max_seq_length: int,
        loop: bool = False,
        *,
        comm_group: mx.distributed.Group | None = None,
    ) -> Iterator[Batch]:
        """What to give to mlx-lm in the place of its own: training batches step the node, validation pauses it."""
        if not loop:
            return self._validating(dataset, batch_size, max_seq_length, comm_group)
        return self._training(dataset, batch_size, max_seq_length, comm_group)

    def on_train_loss_report(self, train_info: Mapping[str, float]) -> None:
        """Pass the report on; at the last one leave the run first."""
        iteration = int(train_info["iteration"])
        last = iteration >= self._args.iters
        if not self._by_batch:
            self._count_to(iteration, int(train_info["trained_tokens"]))
        elif last:
            self._finish(iteration)
        if last:
            self._node.close()
        figures = self._node.metrics()
        if figures:
            print(f"GradientMail: {_summary(figures)}", flush=True)
        if self._then is not None:
            shown = {LOGGED + name: figures[name] for name in figures}
            self._then.on_train_loss_report({**train_info, "iteration": self._behind + iteration, **shown})

    def on_val_loss_report(self, val_info: Mapping[str, float]) -> None:
        """Pass the report on."""
        if self._then is not None:
            self._then.on_val_loss_report({**val_info, "iteration": self._behind + int(val_info["iteration"])})

    def _training(
        self, dataset: Sized, batch_size: int, length: int, group: mx.distributed.Group | None
    ) -> Iterator[Batch]:
        self._by_batch = True
        rows, source = self._begun(dataset, length, group)
        number = 0
        while True:
            wanted = self._rows(dataset, batch_size) if self._at_start(number) else rows
            if wanted != rows:
                rows = wanted
                source = self._opened(dataset, rows, length, group)
            batch = self._drawn(source)
            if batch is _NO_BATCH:
                self._node.close()
                return
            self._pending += self._reading.tokens(batch)
            number += 1
            yield batch
            self._finish(number)

    def _begun(self, dataset: Sized, length: int, group: mx.distributed.Group | None) -> tuple[int, Iterator[Batch]]:
        """Rows and batches to go on with; none yet, in this node's own order, unless the place was restored."""
        place = self._place
        if place is None or not place.was_restored:
            if self._reading.own_order:
                seed_order(self._node.seed(drawn_seed()))
            return 0, iter([])
        with place.drawing_again(), place.drawing():
            source = iter(self._asked(dataset, place.rows, length, loop=True, group=group))
            for _ in range(place.drawn):
                next(source, _NO_BATCH)
        return place.rows, source

    def _opened(self, dataset: Sized, rows: int, length: int, group: mx.distributed.Group | None) -> Iterator[Batch]:
        if self._place is None:
            return iter(self._asked(dataset, rows, length, loop=True, group=group))
        self._place.begin(rows)
        with self._place.drawing():
            return iter(self._asked(dataset, rows, length, loop=True, group=group))

    def _drawn(self, source: Iterator[Batch]) -> Batch:
        if self._place is None:
            return next(source, _NO_BATCH)
        with self._place.drawing():
            batch = next(source, _NO_BATCH)
        self._place.drawn += 1
        return batch

    def _validating(
        self, dataset: Sized, batch_size: int, length: int, group: mx.distributed.Group | None
    ) -> Iterator[Batch]:
        """A validation may take long, and no round should wait for it."""
        with self._node.validating(committed=self._reading.evaluate == "global"):
            yield from self._asked(dataset, batch_size, length, loop=False, group=group)

    def _asked(
        self, dataset: Sized, rows: int, length: int, *, loop: bool, group: mx.distributed.Group | None
    ) -> Iterator[Batch]:
        """Call the inner ``iterate_batches`` by keywords, as mlx-lm does."""
        return self._reading.iterate_batches(
            dataset=dataset, batch_size=rows, max_seq_length=length, loop=loop, comm_group=group
        )

    def _at_start(self, iteration: int) -> bool:
        """Whether a window of accumulated gradients starts: only there the size may change."""
        return iteration % self._args.grad_accumulation_steps == 0

    def _rows(self, dataset: Sized, batch_size: int) -> int:
        if self._node.share is None:
            return batch_size
        bounds = [self._reading.max_batch_size, len(dataset) if hasattr(dataset, "__len__") else None]
        most = min((bound for bound in bounds if bound is not None), default=self._node.share)
        return rows_for(self._node.share, self._args.grad_accumulation_steps, self._node.ranks.size, most)

    def _finish(self, iteration: int) -> None:
        """Count the iteration, once, and step if the optimizer did."""
        if iteration <= self._finished:
            return
        self._finished = iteration
        if self._place is not None:
            self._place.iterations = self._behind + iteration
        if self._at_start(iteration):
            samples, self._pending = self._pending, 0
            self._node.step(samples)

    def _count_to(self, iteration: int, tokens: int) -> None:
        """Count the steps since the last report; their tokens go with the first, before anything is merged."""
        every = self._args.grad_accumulation_steps
        steps = iteration // every - self._finished // every
        samples, self._finished = tokens - self._reported, iteration
        if steps:
            self._reported = tokens
        for index in range(steps):
            self._node.step(0 if index else samples)


class GradientMailCallback(NodeCallback):
    """Takes part in a run for those who call mlx-lm's ``train`` themselves.

        with Session(model, mailbox=..., algorithm=...) as session:
            callback = GradientMailCallback(session, args, optimizer=optimizer)
            train(model, optimizer, data, args=args,
                  training_callback=callback, iterate_batches=callback.iterate_batches)

    With both arguments every optimizer step is counted as it happens, batches follow the node's share, validation
    pauses the node, and each node shuffles differently. As ``training_callback`` alone it only hears of training
    every ``steps_per_report`` iterations: steps are counted and merges taken at reports, so keep those much closer
    together than ``sync_every``; batches, their order and validation stay mlx-lm's. Either way the run's figures are
    added to what ``training_callback`` (another callback) is told, and the session is closed at the last report,
    before the adapter file is written. It cannot hear of an exception: that is for the ``with`` block.

    ``args`` are the ``TrainingArgs`` that ``train`` gets too; ``optimizer`` is the one to restart if the run refuses
    this node's values; ``tokens`` counts a batch; ``max_batch_size`` bounds the rows of an iteration;
    ``own_order=False`` leaves the order of the data alone; ``evaluate="global"`` validates what the run committed last.
    Raises :class:`ConfigurationError` for a session that is
    not joined, and in a group of several processes, which need ``gradientmail_mlx.train``.
    """

    def __init__(
        self,
        session: Session,
        args: stock.TrainingArgs,
        *,
        optimizer: Optimizer | None = None,
        training_callback: TrainingCallback | None = None,
        iterate_batches: IterateBatches = stock.iterate_batches,
        tokens: Tokens = tokens_in,
        max_batch_size: int | None = None,
        own_order: bool = True,
        evaluate: Evaluated = "local",
    ) -> None:
        if not session.joined:
            raise ConfigurationError(
                "The session is not joined.",
                "Train inside: with Session(...) as session. Or use gradientmail_mlx.train.",
            )
        adapter = adapter_of(session)
        if optimizer is not None:
            adapter.track_optimizer(optimizer)
        node = Node(session, adapter)
        if node.ranks.size > 1:
            raise ConfigurationError(
                f"This node has {node.ranks.size} processes.", "Use gradientmail_mlx.train, on all of them."
            )
        node.join()
        reading = Reading(iterate_batches, tokens, max_batch_size, own_order, evaluate)
        super().__init__(node, args, reading, training_callback)


def _summary(figures: Mapping[str, float]) -> str:
    step, rounds, live = (figures.get(name, 0) for name in ("global_step", "round", "live_nodes"))
    up, down = (figures.get(name, 0) / 1e6 for name in ("bytes_up", "bytes_down"))
    return f"step {step:.0f}, {rounds:.0f} rounds, {live:.0f} live nodes, {up:.1f} MB up, {down:.1f} MB down"
