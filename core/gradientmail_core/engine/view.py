"""One node's view of a chain: the newest commit with its parameters, its own snapshot, what it has gathered.

The state that following and closing share. Everything here is this node's alone and can be rebuilt from the
store, so a crash loses nothing that others need.
"""

import asyncio
from collections.abc import Callable, Collection

from gradientmail_core.algorithms.spool import Spool
from gradientmail_core.engine.chain import Head
from gradientmail_core.engine.closing import OuterState
from gradientmail_core.engine.gathering import (
    Gathering,
)
from gradientmail_core.engine.healing import written_again
from gradientmail_core.engine.learner import Commit, Message, Overdue, Wanted
from gradientmail_core.engine.loading import Source
from gradientmail_core.engine.polling import (
    overdue_after,
)
from gradientmail_core.engine.publishing import Published
from gradientmail_core.engine.residuals import LeftOver, left_over, taken_up
from gradientmail_core.engine.run import Bell, Board, Host, Run
from gradientmail_core.engine.sweeping import Sweeper
from gradientmail_core.protocol.exchange import (
    Decided,
)
from gradientmail_core.protocol.keys import WantedKey
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.error_feedback import Feedback, forgotten, published, resolved
from gradientmail_core.tensors.model import Flat

UPLOAD_SMOOTHING = 0.3
NEVER = float("inf")


class ChainView:
    """What a node knows of one fragment. ``deliver`` and ``hurry`` lead to the learner."""

    def __init__(
        self,
        host: Host,
        run: Run,
        board: Board,
        commit: Commit,
        deliver: Callable[[Message], None],
        hurry: Callable[[int, bool], None],
    ) -> None:
        self._host = host
        self._run = run
        self._board = board
        self._deliver = deliver
        self._hurry = hurry
        self._sweeper = Sweeper(host, run, board)
        self.layout = run.layouts[commit.head.fragment]
        self._source = Source(host.mailbox, host.clock, run.manifest, self.layout)
        self.head: Head = commit.head
        self.theta: Flat = commit.theta
        self.published: Published | None = None
        self.taken: int | None = None  # the open round, once the learner has given its snapshot
        self.gathering = Gathering()
        self.started_at = host.clock.now()
        self.bell = board.bells.setdefault(commit.head.fragment, Bell())
        self._outer: tuple[str, OuterState] | None = None
        self._quorum_known_at: float | None = None
        self._wanted_told = False
        self._upload_seconds = 0.0
        self._lag = 0.0
        self.moved = asyncio.Event()
        self._committed_about: float | None = None
        self._ours: Decided | None = None
        self._skipped = commit.skipped
        self._whole_next = commit.skipped is not None
        self._wanted_listings = 0
        self._spool: Spool | None = None
        self._feedback = Feedback(codec_named(run.settings.delta_codec).name)
        self._rollbacks = 0
        self._announce()

    @property
    def round(self) -> int:
        """The open round."""
        return self.head.next_round(self._run.fragments)

    @property
    def closing(self) -> bool:
        """True if this node is the named closer of the open round, and closes rounds at all."""
        return self._board.closes and self.head.closer == self._host.node

    @property
    def settling(self) -> bool:
        """True while this node closes a round that others already contributed to."""
        return self.closing and bool(self.gathering.accepted)

    @property
    def feedback(self) -> Feedback | None:
        """The fragment's error feedback, if that is on; from zero if the model was rolled back meanwhile."""
        if self._run.settings.feedback_decay is None:
            return None
        if self._rollbacks != self._board.rollbacks:
            self._rollbacks, self._feedback = self._board.rollbacks, forgotten(self._feedback)
        return self._feedback

    @property
    def outer(self) -> OuterState | None:
        """The outer optimizer's state at the head, if this node has it at hand."""
        return self._outer[1] if self._outer is not None and self._outer[0] == self.head.digest else None

    @property
    def left_over(self) -> LeftOver | None:
        """What a checkpoint keeps of the fragment's error feedback."""
        return left_over(self.feedback, self.head.digest)

    def take_up(self, kept: LeftOver | None) -> None:
        """Go on with a checkpoint's error feedback, if this is still the commit that it belongs to."""
        if self._run.settings.feedback_decay is not None:
            self._feedback = taken_up(kept, self._feedback, self.head.digest, self.layout.size)

    def publishing(self, own: Published) -> None:
        """This node's snapshot of the open round is encoded and about to go out."""
        self.published = own
        if own.residual is not None:
            self._feedback = published(self._feedback, own.digest, own.residual)
        self.bell.ring()

    def _settle_feedback(self, merged: Collection[str], *, kept: bool) -> None:
        """After a round's record: what it merged, and whether the residual still belongs to this model's base."""
        self._feedback = resolved(self._feedback, merged) if kept else forgotten(self._feedback)

    def uploaded(self, seconds: float) -> None:
        """Learn how long an upload of this fragment takes."""
        self._upload_seconds += UPLOAD_SMOOTHING * (seconds - self._upload_seconds)

    async def hint(self) -> None:
        """Leave a hint at the newest commit, if this node closes the fragment."""
        if self.closing:
            await self._sweeper.hint(self.head, force=True)

    async def heal(self) -> None:
        """Write again what the head names, if somebody misses it and it is here; its closer first, then one by one."""
        round, fragments = self.round - self._run.fragments, self._run.fragments
        if self.closing:
            for old in [each for each in self._board.wanted if each < round and (round - each) % fragments == 0]:
                await self._host.mailbox.delete(WantedKey(old).path)
        if round not in self._board.wanted or self._skipped is not None:
            self._wanted_listings = 0
            return
        self._wanted_listings += 1
        if self._wanted_listings <= self._turn():
            return
        head, theta = self.head, self.theta
        outer = self._outer[1] if self._outer is not None and self._outer[0] == head.digest else None
        whole = await written_again(self._host, self._run, round, head.sections, theta, outer)
        self._whole_next = self._whole_next or not whole
        await self._host.mailbox.delete(WantedKey(round).path)

    def _turn(self) -> int:
        """How many listings this node leaves to others to write something again."""
        if self.closing:
            return 0
        order = self._board.candidates(self._run, self.head.fragment)
        return 1 + (order.index(self._host.node) if self._host.node in order else len(order))

    async def tidy(self) -> None:
        """Remove what is left of closed rounds, if this node closes the fragment; else once it commits one.

        What it kept back for a joiner while it closed goes in either case: the next closer does not know of it.
        """
        if self.closing:
            await self._sweeper.tidy(self.head.fragment)
        else:
            await self._sweeper.release()

    def _announce(self) -> None:
        self._board.closers[self.head.fragment] = self.head.closer
        self._board.open_rounds[self.head.fragment] = self.round

    def _needed(self) -> int:
        """Accepted snapshots that make a quorum: fewer than asked for only if fewer nodes train or have reported."""
        reported = self._board.deltas.get(self.round, set()) | self.gathering.heard
        return min(self._run.settings.quorum_size, max(len(reported.union(self._board.live_learners())), 1))

    def _is_quorum(self, known: int) -> bool:
        """Whether so many known snapshots, of nodes that have reported, make a quorum."""
        return known >= self._run.settings.quorum_size or (known > 0 and known >= self._needed())

    def _expected_at(self) -> float:
        """When the open round should be committed, if it goes as usual."""
        return self.head.seen + (self.head.interval or 0.0)

    def _hurry_at(self) -> float:
        """When to publish early: when the round will probably close within one upload, or enough others have."""
        if self._run.settings.follow is False or self.published is not None:
            return NEVER
        if self._follows is not None:
            return -NEVER if len(self._followed()) >= self._follows else NEVER
        if self.head.interval is None:
            return NEVER
        if self._run.settings.overlap_steps == 0:  # it would stand still from then on, and others for it
            return NEVER
        return self.head.seen + self.head.interval - self._upload_seconds

    @property
    def _follows(self) -> int | None:
        """How many others must have published before this node does early (``follow=n``); None if it counts none."""
        follow = self._run.settings.follow
        return None if follow is None or follow is False else follow

    def _reported_others(self) -> set[str]:
        """The others that are known to have published for the open round."""
        return (self._board.deltas.get(self.round, set()) | self.gathering.heard) - {self._host.node}

    def _followed(self) -> set[str]:
        """Those of them whose pace this node goes by: not who has left or is about to, nor who fell silent since."""
        leavers = self._board.leavers()
        return {
            node
            for node in self._reported_others()
            if node not in leavers and self._board.may_live(node, self.started_at)
        }

    def _stands_since(self) -> float | None:
        """Since when training stands still for this round (``overlap_steps=0``); None if it does not."""
        own = self.published
        waits = own is not None and own.round == self.round and self._run.settings.overlap_steps == 0
        return own.at if waits and own is not None else None

    def _unlock(self, now: float) -> None:
        """Keep nodes from waiting for each other for ever.

        A round that takes too long frees its place in ``in_flight``. While this node has such a round, it reports
        at once, without trained steps if need be, on every fragment on which another node has reported.
        """
        fragment = self.head.fragment
        own = self.published
        late_after = overdue_after(self.head, self._host.timeouts.lease)
        if own is not None and now >= own.at + late_after and fragment not in self._board.overdue:
            self._board.overdue.add(fragment)
            self._deliver(Overdue(fragment))
        if self._board.overdue and own is None and not self._wanted_told and self._reported_others():
            self._wanted_told = True
            self._deliver(Wanted(fragment))
