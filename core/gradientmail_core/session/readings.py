"""What a session tells its user at any moment: counts, the run's clock, this node's share, figures for a logger.

Reading changes nothing and asks the store for nothing: everything here is what the engine and the learner already know.
"""

from collections import deque

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.gossip import FactoredGossip
from gradientmail_core.engine.gossip import GossipNode
from gradientmail_core.engine.gossip_learner import GossipLearner
from gradientmail_core.engine.learner import Commit, Learner, merged_tokens
from gradientmail_core.engine.ledger import Ledger, Tally
from gradientmail_core.engine.node import Node
from gradientmail_core.events import Event, FragmentAligned, TokensBooked
from gradientmail_core.mailbox import MeteredMailbox
from gradientmail_core.session.figures import figures
from gradientmail_core.session.recipes import Patterns
from gradientmail_core.tensors.model import Model

Algorithm = DiLoCo | FactoredGossip

DECISIONS_KEPT = 1000


class Decisions:
    """The newest entries of the ledger, as the events told them."""

    def __init__(self) -> None:
        self._newest: deque[TokensBooked] = deque(maxlen=DECISIONS_KEPT)

    @property
    def newest(self) -> tuple[TokensBooked, ...]:
        """Oldest first."""
        return tuple(self._newest)

    def heard(self, event: Event) -> None:
        """Keep an entry, pass over all else."""
        if isinstance(event, TokensBooked):
            self._newest.append(event)


class Readings(Patterns):
    """The part of a session that is read: its model, its place in the run, its figures."""

    def __init__(self, node: str, model: Model, algorithm: Algorithm, meter: MeteredMailbox, ranks: int | None) -> None:
        super().__init__(ranks)
        self.node = node
        self._model = model
        self._algorithm = algorithm
        self._meter = meter
        self._engine: Node | GossipNode | None = None
        self._learner: Learner | GossipLearner | None = None
        self._ended = False
        self._waiting = False
        self._stall_seconds = 0.0
        self._last_aligned: FragmentAligned | None = None
        self._merged_rounds = 0
        self._rounds = Decisions()

    @property
    def model(self) -> Model:
        """The model as the run sees it: the adapter made for it, or what was given."""
        return self._model

    @property
    def joined(self) -> bool:
        """Whether the session was joined and has not ended."""
        return self._learner is not None and not self._ended

    @property
    def ended(self) -> bool:
        """Whether the session was left, in order or not."""
        return self._ended

    @property
    def global_step(self) -> int:
        """The run's clock as this node knows it, in optimizer steps."""
        return self._learner.state.global_step if self._learner is not None else 0

    @property
    def run_tokens(self) -> int:
        """Tokens (or samples) of all nodes that were merged so far, averaged over the fragments."""
        return self._engine.merged_tokens if self._engine is not None else 0

    @property
    def waiting(self) -> bool:
        """True while join, step or close wait for the store or for other nodes.

        A signal handler may raise then to end the wait: nothing is half written, and leaving by an exception aborts.
        """
        return self._waiting

    @property
    def rounds_seen(self) -> int:
        """Commits of the run, all fragments together."""
        return self._engine.rounds_seen if self._engine is not None else 0

    @property
    def versions(self) -> tuple[int, ...]:
        """For each fragment, the version the model was last aligned with."""
        return self._learner.versions if self._learner is not None else ()

    @property
    def batch_size(self) -> int | None:
        """This node's share of ``global_batch_size``, rounded up or by its speed (``share``); None if none was set."""
        whole = self._algorithm.global_batch_size
        if whole is None:
            return None
        if isinstance(self._engine, Node) and self._learner is not None:
            return self._engine.batch_share
        return -(-whole // (self._engine.live_learners if self._engine is not None else 1))

    @property
    def ledger(self) -> Ledger:
        """Where this node's tokens went, merged and in flight and carried and dropped, and what others merged."""
        books = self._learner.books if self._learner is not None else ()
        tally = self._engine.board.tally if self._engine is not None else Tally()
        return Ledger(self.node, books, self._rounds.newest, tally.merged, tally.refused)

    def metrics(self) -> dict[str, float]:
        """Figures for a progress bar or a logger, by name."""
        return figures(
            usage=self._meter.usage,
            live=self._engine.live_learners if self._engine is not None else 0,
            rounds=self.rounds_seen,
            tokens=self.run_tokens,
            step=self.global_step,
            stalled=self._stall_seconds,
            merged=self._merged_rounds,
            aligned=self._last_aligned,
        )

    def _noted(self, commit: Commit) -> FragmentAligned:
        """Count a commit that was written into the model; the event that tells of it."""
        record = commit.head.record
        aligned = FragmentAligned(
            fragment=commit.head.fragment,
            round=record.round if record is not None else 0,
            step=commit.head.step,
            participants=len(record.participants) if record is not None else 0,
            tokens=merged_tokens(record),
            merged=commit.merged,
            cosine=record.cosine if record is not None else None,
        )
        self._last_aligned = aligned
        self._merged_rounds += commit.merged
        return aligned
