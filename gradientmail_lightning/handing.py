"""A fit's whole state, as a checkpoint of Lightning's holds it, in the run's mailbox in the place of a file.

What is handed off is what Lightning itself saves after a batch: parameters, optimizers, schedules, the precision's
scaler, loops, callbacks, and with the strategy's own state the place in the data. A process that starts under the same
name puts it where a loaded checkpoint lies while the trainer is set up, and Lightning restores it as ever. A
``ckpt_path`` is loaded in its place: what somebody names comes before what lies there.

Frozen parameters and hyperparameters stay behind, because the program that builds the model has them. A part with
something in it that is neither a number, text, a tensor nor a container stays behind too, and an event says so.

Random numbers go on with the first batch, when all that Lightning draws between two processes is drawn.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, cast

from gradientmail_core.adapters.torch_handoff import (
    Stepping,
    given,
    random_state,
    set_random_state,
    taken,
    unfrozen,
)
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import Event, HandoffSkipped, emitter
from gradientmail_core.protocol.belongings import Array, Belongings
from gradientmail_core.session.aligning import handed_off
from gradientmail_lightning.hooks import STATE_KEY

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from gradientmail_lightning.strategy import GradientMailMixin

MARK: Final = "gradientmail_handoff"
"""The key by which a checkpoint is known as one that came out of a mailbox."""

KINDS: Final = "gradientmail_optimizers"
"""The key under which a hand-off says of what kind each optimizer is."""

_BUILT: Final = ("hparams", "hyper_parameters")
_NEEDED: Final = frozenset(("state_dict", "optimizer_states", KINDS, "lr_schedulers", "loops"))


class FitHandoff:
    """What the sessions of ``strategy`` hand off, and what its first fit goes on from."""

    def __init__(self, strategy: "GradientMailMixin") -> None:
        self._strategy = strategy
        self._omitted: dict[str, str] = {}
        self._entered = False
        self._random: object = None

    @property
    def omitted(self) -> Mapping[str, str]:
        """Parts of the state that are not handed off, each with the reason."""
        return self._omitted

    def omit(self, part: str, reason: str) -> None:
        """Note that hand-offs do without ``part``."""
        self._omitted[part] = reason

    def note_order(self, loader: object) -> None:
        """Note it where the order of the data is drawn anew at each start."""
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        if getattr(sampler, "generator", sampler) is None and hasattr(sampler, "generator"):
            self.omit("the order of the data", "own_order=False leaves it to the process's seed")

    def look_up(self, trainer: "Trainer") -> None:
        """Let ``trainer``, which is being set up, restore what this node's last process handed off.

        Not once this process has joined: a later fit goes on from what it holds.
        """
        if self._entered:
            return
        strategy = self._strategy
        found = strategy.broadcast(self._newest() if strategy.is_global_zero else None)
        checkpoint = self._unpacked(found) if found is not None else {}
        if checkpoint:
            trainer._checkpoint_connector._loaded_checkpoint = checkpoint

    def _newest(self) -> Belongings | None:
        """What lies there. Where nothing can be used, the session that joins next finds and says the same."""
        strategy, skipped, emit = self._strategy, list[Event](), emitter(self._strategy.hearers)

        def hear(event: Event) -> None:
            if isinstance(event, HandoffSkipped):
                skipped.append(event)
            else:
                emit(event)

        found = handed_off(strategy.mailbox, strategy.node, [hear])
        for event in skipped if found is not None else ():
            emit(event)
        return found

    def enter(self) -> None:
        """The run is about to be joined: from now on this process has a state of its own."""
        self._entered = True

    def go_on(self) -> None:
        """The first batch is about to be trained on: draw what the last process would have drawn."""
        state, self._random = self._random, None
        if state is not None:
            set_random_state(state)

    def save(self) -> Belongings:
        """A copy of the fit as it is after a batch."""
        trainer = self._strategy.fitting
        if any(hasattr(optimizer, "consolidate_state_dict") for optimizer in trainer.optimizers):
            raise ConfigurationError("The optimizer's state is spread over processes.", "Keep checkpoints on disk.")
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        names = unfrozen(trainer.lightning_module)
        checkpoint["state_dict"] = {name: checkpoint["state_dict"][name] for name in names}
        checkpoint["callbacks"].get(STATE_KEY, {}).pop("session", None)
        checkpoint[KINDS] = [Stepping(optimizer).kind() for optimizer in self._strategy.optimizers]
        arrays: dict[str, Array] = {}
        callbacks = self._taken(checkpoint.pop("callbacks"), "callback ", arrays)
        parts = {name: part for name, part in checkpoint.items() if not any(word in name for word in _BUILT)}
        rows = [*self._taken(parts, "", arrays), ["callbacks", {"dict": callbacks}]]
        return Belongings(arrays, {"checkpoint": {"dict": rows}, "random": self._drawn(arrays)})

    def load(self, belongings: Belongings) -> bool:
        """Nothing: it was restored while the trainer was set up, or is not this fit's."""
        return False

    def _taken(self, parts: Mapping[str, object], kind: str, arrays: dict[str, Array]) -> list[list[object]]:
        """Names and states of the parts that can be handed off."""
        rows: list[list[object]] = []
        for name, part in parts.items():
            own: dict[str, Array] = {}
            try:
                rows.append([name, taken(part, kind + name, own)])
            except ConfigurationError as problem:
                if name in _NEEDED:
                    raise
                self.omit(kind + name, problem.cause)
                continue
            arrays |= own
        return rows

    def _drawn(self, arrays: dict[str, Array]) -> object:
        if self._strategy.replica[1] > 1:
            self.omit("random numbers", "each process of a node draws its own")
            return None
        return taken(random_state(), "random", arrays)

    def _unpacked(self, found: Belongings) -> dict[str, object]:
        trainer, session = found.plain.get("trainer"), found.plain.get("session")
        if not isinstance(trainer, dict) or "checkpoint" not in trainer:
            raise ConfigurationError(
                f"What {self._strategy.node} handed off is not of Lightning.",
                "Start the program that made it, or use another node name.",
            )
        checkpoint = cast("dict[str, object]", given(trainer["checkpoint"], found.arrays))
        self._random = given(trainer["random"], found.arrays)
        cast("dict[str, dict[str, object]]", checkpoint["callbacks"]).setdefault(STATE_KEY, {})["session"] = session
        return {**checkpoint, MARK: True}
