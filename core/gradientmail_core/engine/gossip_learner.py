"""The training thread's side of a gossip node: the round's steps, its outer gradient, and the node's own outer step.

A node owns everything that decides its parameters: the start of its round, its momentum and, as soon as it has
arrived, the mixed start. So the outer step needs no one: where Mix2 is nothing it is taken within ``step``, without
any wait, and where others' gradients are waited for, the engine's answer comes within a bounded time whatever the
others do. What has not arrived by then (a mixed start, a partner's gradient) is left out of the row.

Starts are arrays that are made once and never written again, so the engine may read them while training goes on.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.algorithms.gossip import FactoredGossip
from gradientmail_core.algorithms.mixing import Nothing
from gradientmail_core.engine.learner import POISONED_MOST
from gradientmail_core.engine.ledger import BEHIND, EMPTY, ROLLED_BACK, Account, Books, booked
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors import kernels
from gradientmail_core.tensors.buffers import buffer_spans
from gradientmail_core.tensors.model import Flat, Model, Probed
from gradientmail_core.tensors.schema import FragmentLayout

PROBE_ELEMENTS_MOST = 2**18

Outputs: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A round begins: for each fragment its start, followed by the outer state where that is mixed too.

    ``steps`` and ``tokens`` are those of the round before; ``outputs`` are the probe's, fp32 of shape (rows, classes),
    or None.
    """

    round: int
    vectors: tuple[Flat, ...]
    steps: int
    tokens: int
    outputs: Outputs | None


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """A round's outer gradients, one for each fragment; whoever answers may write into them."""

    round: int
    gradients: tuple[Flat, ...]
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    """Mix1 of a fragment, with the outer state where that is mixed too."""

    round: int
    fragment: int
    vector: Flat


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """The mean over all nodes of a fragment's starts."""

    round: int
    fragment: int
    vector: Flat


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The gradients after Mix2, and the partners that are in them; ``waited`` in seconds."""

    round: int
    gradients: tuple[Flat, ...]
    partners: tuple[str, ...]
    waited: float


@dataclass(frozen=True, slots=True, eq=False)
class Rejoin:
    """The node is too far behind: go on in ``round`` from these means, with zero momentum."""

    round: int
    vectors: tuple[Flat, ...]


@dataclass(frozen=True, slots=True)
class Renumber:
    """The round this node calls ``old`` is number ``round`` for everybody else; nothing else changes."""

    old: int
    round: int


@dataclass(frozen=True, slots=True)
class Unmixed:
    """A node that finishes need not wait for Mix1 any more: what is not here does not come in time."""


Message: TypeAlias = Mixed | Mean | Answer | Rejoin | Renumber | Unmixed


@dataclass(frozen=True, slots=True)
class GossipState:
    """Counters of a node.

    ``moves`` are its outer steps since its momentum was zero; ``given`` are the steps and tokens of the round before,
    which the round's start stands for; ``lead`` is by how much the run's clock is ahead of its
    own steps; ``step_then`` and ``tokens_then`` are the counters when the round began; ``holding`` says that the last
    round is trained and waits for its mixed start; ``account`` is what became of the tokens of the rounds before.
    """

    round: int = 0
    local_step: int = 0
    tokens: int = 0
    step_then: int = 0
    tokens_then: int = 0
    moves: int = 0
    given: tuple[int, int] = (0, 0)
    lead: int = 0
    waiting: bool = False
    finishing: bool = False
    holding: bool = False
    poisoned: int = 0
    account: Account = EMPTY

    @property
    def steps(self) -> int:
        """Optimizer steps of the round so far."""
        return self.local_step - self.step_then

    @property
    def global_step(self) -> int:
        """The run's clock as this node knows it; never goes back."""
        return self.local_step + self.lead


@dataclass(frozen=True, slots=True)
class Moved:
    """An outer step was taken: of which round, with whom, from how many mixed fragments."""

    round: int
    steps: int
    partners: tuple[str, ...]
    mixed: int
    waited: float
    rejoined: bool = False


def stepped(state: GossipState, tokens: int) -> GossipState:
    """The state after one optimizer step on ``tokens`` tokens (or samples)."""
    return replace(state, local_step=state.local_step + 1, tokens=state.tokens + tokens)


def accounted(state: GossipState, dropped: str | None = None) -> GossipState:
    """The state with the round's tokens in its account: merged, or dropped for that cause."""
    tokens = state.tokens - state.tokens_then
    losses = [(dropped, tokens)] if dropped and tokens else []
    return replace(state, account=booked(state.account, 0 if dropped else tokens, losses))


def is_over(state: GossipState, sync_every: int, hurried: int) -> bool:
    """Whether the round's training ends now: all its steps are made, or others have gone on (``hurried``)."""
    return not state.waiting and (state.steps >= sync_every or (hurried >= state.round and state.steps > 0))


def advanced(state: GossipState, round: int, sync_every: int, moves: int) -> GossipState:
    """The state at the start of ``round``."""
    return replace(
        state,
        round=round,
        step_then=state.local_step,
        tokens_then=state.tokens,
        moves=moves,
        given=(state.steps, state.tokens - state.tokens_then) if moves else (0, 0),
        waiting=False,
        holding=False,
        lead=max(state.lead, round * sync_every - state.local_step),
    )


class GossipLearner:
    """A model in training, seen by the engine. All methods but ``deliver`` and ``hurry`` run on the training thread.

    ``begin`` and ``exchange`` hand a round's start and its gradients to the engine. ``applied`` hears of outer steps.
    """

    def __init__(
        self,
        model: Model,
        layouts: Sequence[FragmentLayout],
        settings: FactoredGossip,
        joined: Rejoin,
        *,
        begin: Callable[[Begun], None],
        exchange: Callable[[Ended], None],
        applied: Callable[[Moved], None],
        delivered: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._layouts = layouts
        self._settings = settings
        self._begin = begin
        self._exchange = exchange
        self._applied = applied
        self._delivered = delivered
        self._inbox: deque[Message] = deque()
        self._hurried = -1
        self._mixes: dict[int, Flat] = {}
        self._means: dict[int, tuple[int, Flat]] = {}
        self._buffers = [np.empty(layout.size, np.float32) for layout in layouts]
        self._starts: list[Flat] = []
        self._state: list[tuple[Flat, ...]] = []
        self.state = GossipState()
        self._place(joined.vectors)
        self.state = advanced(self.state, joined.round, settings.sync_every, 0)

    def launch(self) -> None:
        """Begin the first round; the engine must be ready."""
        self._begun()

    def deliver(self, message: Message) -> None:
        """Hand over what the engine has for the learner. Any thread."""
        self._inbox.append(message)
        self._delivered()

    def hurry(self, round: int) -> None:
        """End ``round`` with the steps it has, because others wait or have gone on. Any thread."""
        self._hurried = max(self._hurried, round)

    def step(self, tokens: int) -> bool:
        """Count one optimizer step, and end the round if it is over. True if the model was written."""
        self.state = stepped(self.state, tokens)
        changed = self.align() if self._inbox else False
        if is_over(self.state, self._settings.sync_every, self._hurried):
            return self._end_round() or changed
        return changed

    def align(self) -> bool:
        """Take in what was delivered; True if the model was written."""
        changed = False
        while self._inbox:
            changed = self._take(self._inbox.popleft()) or changed
        if self.state.holding and self._is_mixed:
            changed = self._let_go()
        return changed

    def finish(self) -> None:
        """End the round with the steps it has, from its mixed start; the start after it is the last one published.

        The mixed start may be on its way: then the round ends in :meth:`align`, once it is here or is given up.
        """
        self.align()
        self.state = replace(self.state, finishing=True)
        if not self.state.waiting and self.state.steps:
            self.state = replace(self.state, holding=True)
            self.align()

    @property
    def _is_mixed(self) -> bool:
        return isinstance(self._settings.mix1, Nothing) or len(self._mixes) == len(self._layouts)

    def _let_go(self) -> bool:
        self.state = replace(self.state, holding=False)
        return self._end_round()

    def settle(self) -> None:
        """Set the model to the newest mean over all nodes, where one is complete; else leave it as it is."""
        self.align()
        if len(self._means) == len(self._layouts):
            for layout in self._layouts:
                self._model.write(layout, self._means[layout.fragment][1][: layout.size])

    @property
    def blocked(self) -> bool:
        """True while training must wait for Mix2."""
        return self.state.waiting

    @property
    def poisoned(self) -> bool:
        """True once so many rounds in a row ended in values that are not finite that the node should leave."""
        return self.state.poisoned >= POISONED_MOST

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Fragments whose mean is still awaited by a node that finishes."""
        if not self.state.finishing:
            return ()
        here = {} if self.state.waiting or self.state.holding else self._means
        return tuple(
            layout.fragment
            for layout in self._layouts
            if layout.fragment not in here or here[layout.fragment][0] < self.state.round
        )

    @property
    def versions(self) -> tuple[int, ...]:
        """The round the model is in, for each fragment."""
        return (self.state.round,) * len(self._layouts)

    def committed(self) -> list[Mean]:
        """Means that are here and not taken in yet."""
        return [message for message in tuple(self._inbox) if isinstance(message, Mean)]

    def anchors(self) -> list[Flat]:
        """For each fragment, the newest mean over all nodes that is here, or the start of the round."""
        while self._inbox:
            self._take(self._inbox.popleft())
        return [
            self._means[layout.fragment][1][: layout.size] if layout.fragment in self._means else start
            for layout, start in zip(self._layouts, self._starts, strict=True)
        ]

    @property
    def books(self) -> tuple[Books, ...]:
        """Where this node's tokens are, of all fragments alike: merged by an outer step, dropped, or of this round."""
        state = self.state
        open_tokens = state.tokens - state.tokens_then
        flying = open_tokens if state.waiting else 0
        account = state.account
        return (Books(state.tokens, account.merged, flying, open_tokens - flying, dict(account.dropped)),)

    def resume(self) -> None:
        """Nothing is timed here."""

    # -- messages ------------------------------------------------------------------------------------------

    def _take(self, message: Message) -> bool:
        match message:
            case Mixed():
                if message.round == self.state.round:
                    self._mixes[message.fragment] = message.vector
            case Mean():
                if message.round >= self._means.get(message.fragment, (-1,))[0]:
                    self._means[message.fragment] = (message.round, message.vector)
            case Answer():
                if self.state.waiting and message.round == self.state.round:
                    self._move(message)
                    return True
            case Rejoin():
                return self._rejoin(message)
            case Renumber():
                if message.old == self.state.round and not self.state.waiting:
                    self.state = replace(self.state, round=message.round)
                    self._mixes.clear()
                    self._begun()
            case Unmixed():
                return self.state.holding and self._let_go()
            case _:
                assert_never(message)
        return False

    def _rejoin(self, message: Rejoin) -> bool:
        if message.round <= self.state.round:
            return False
        steps = self.state.steps
        self._place(message.vectors)
        self.state = advanced(accounted(self.state, BEHIND), message.round, self._settings.sync_every, 0)
        self._applied(Moved(message.round, steps, (), len(self._layouts), 0.0, rejoined=True))
        self._begun()
        return True

    def _place(self, vectors: Sequence[Flat]) -> None:
        """Start from ``vectors`` with zero momentum."""
        self._starts = [vector[: layout.size].copy() for layout, vector in zip(self._layouts, vectors, strict=True)]
        self._state = [self._zeros(layout) for layout in self._layouts]
        self._mixes.clear()
        for layout, start in zip(self._layouts, self._starts, strict=True):
            self._model.write(layout, start)

    def _zeros(self, layout: FragmentLayout) -> tuple[Flat, ...]:
        return tuple(np.zeros(layout.size, np.float32) for _ in self._settings.outer.state_names())

    # -- rounds --------------------------------------------------------------------------------------------

    def _begun(self) -> None:
        if self._settings.average_momentum:
            pairs = zip(self._starts, self._state, strict=True)
            vectors = tuple(np.concatenate((start, *state)) for start, state in pairs)
        else:
            vectors = tuple(self._starts)
        state = self.state
        self._begin(Begun(state.round, vectors, *state.given, self._outputs()))

    def _outputs(self) -> Outputs | None:
        """The probe's outputs, where the model has one and it is due."""
        if not isinstance(self._model, Probed) or self.state.round % self._settings.probe_every:
            return None
        outputs = np.ascontiguousarray(self._model.probe_outputs(), np.float32)
        if outputs.ndim != 2 or not 0 < outputs.size <= PROBE_ELEMENTS_MOST:
            raise ConfigurationError(
                f"The probe gave outputs of shape {outputs.shape}.",
                f"Give probabilities of shape (rows, classes), at most {PROBE_ELEMENTS_MOST} of them.",
            )
        return outputs

    def _end_round(self) -> bool:
        gradients = []
        for layout, start, buffer in zip(self._layouts, self._starts, self._buffers, strict=True):
            self._model.read(layout, buffer)
            kernels.subtract(start, buffer, buffer)
            gradients.append(buffer)
        if not all(kernels.is_finite(gradient) for gradient in gradients):
            self._roll_back()
            return True
        self.state = replace(self.state, poisoned=0, waiting=True)
        if self._settings.blocking:
            state = self.state
            self._exchange(
                Ended(state.round, tuple(gradients), state.steps, state.tokens - state.tokens_then),
            )
            return False
        self._move(Answer(self.state.round, tuple(gradients), (), 0.0))
        return True

    def _roll_back(self) -> None:
        """Give up a round whose values are not finite: go on from its start, with nothing of it in any momentum."""
        self._model.reset_optimizer()
        poisoned = self.state.poisoned + 1
        for layout, start in zip(self._layouts, self._starts, strict=True):
            self._model.write(layout, start)
        state = accounted(self.state, ROLLED_BACK)
        self.state = replace(state, step_then=state.local_step, tokens_then=state.tokens, poisoned=poisoned)

    def _move(self, answer: Answer) -> None:
        """The outer step: ``u <- mu*u + g``, ``theta <- mix1(theta_start) - lr*(g + mu*u)`` (Nesterov's, here).

        Merged buffers (running means and the like) take the gradient as it is, without rate and momentum.
        """
        for layout, gradient in zip(self._layouts, answer.gradients, strict=True):
            self._move_fragment(layout, gradient, len(answer.partners) + 1)
        state, mixed = self.state, len(self._mixes)
        self._mixes.clear()
        self.state = advanced(accounted(state), state.round + 1, self._settings.sync_every, state.moves + 1)
        self._applied(Moved(state.round, state.steps, answer.partners, mixed, answer.waited))
        self._begun()

    @property
    def _share(self) -> float:
        """How much of an outer step the round gets: all of it, or its share of the steps where the node leaves.

        Momentum stands for a whole round: after a step or two it would carry the run away from what they trained.
        """
        state = self.state
        return min(state.steps / self._settings.sync_every, 1.0) if state.finishing else 1.0

    def _move_fragment(self, layout: FragmentLayout, gradient: Flat, participants: int) -> None:
        number, start = layout.fragment, self._starts[layout.fragment]
        mixed = self._mixes.get(number)
        theta = np.empty(layout.size, np.float32)
        if mixed is None:
            kernels.copy(start, theta)
        elif self._settings.pull == "base":
            kernels.copy(mixed[: layout.size], theta)
        else:
            kernels.subtract(start, mixed[: layout.size], theta)
            kernels.add(gradient, theta, gradient)
            kernels.copy(start, theta)
        if mixed is not None and self._settings.average_momentum:
            for index, values in enumerate(self._state[number], 1):
                kernels.copy(mixed[index * layout.size : (index + 1) * layout.size], values)
        buffers = buffer_spans(layout)
        plain = [theta[span] - gradient[span] for span in buffers]
        share, trained = self._share, None
        if share < 1.0:
            trained = np.empty(layout.size, np.float32)
            kernels.subtract(theta, gradient, trained)
        self._settings.outer.step(theta, gradient, self._state[number], self.state.moves + 1, participants)
        for span, values in zip(buffers, plain, strict=True):
            theta[span] = values
            for state in self._state[number]:
                state[span] = 0.0
        if trained is not None:
            theta = np.float32(share) * theta + np.float32(1.0 - share) * trained
        self._starts[number] = theta
        self._model.write(layout, theta)
