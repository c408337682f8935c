"""The parameters of a version, from its own payload or from an older version's and the changes since.

A record names the parameters (``theta``), the change from the version before (``change``), or both. A change names the
digest of what it makes, so whoever adds changes up knows whether the result is the committed one. A node that holds
a recent version downloads changes only, and goes back to a whole payload where a digest does not match; a joiner
takes the newest whole payload and the changes after it. Additions are elementwise fp32, then rounded to the run's
master format as the closer did, so the bytes are the closer's on any machine.

A void round names what the version before named. So a change that two versions name in a row counts once.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np

from gradientmail_core.algorithms.diloco import Dtype
from gradientmail_core.algorithms.outer import restated
from gradientmail_core.clock import Clock
from gradientmail_core.mailbox.base import Mailbox
from gradientmail_core.protocol.exchange import Decided, get_section, read_round
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.records import Manifest, Section
from gradientmail_core.tensors.codecs import Codec, codec_named
from gradientmail_core.tensors.kernels import add
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout

CHANGES_AT_ONCE = 3
"""Versions that a node may be behind and still add changes to what it holds."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the versions of one fragment of a run are read from."""

    mailbox: Mailbox
    clock: Clock
    manifest: Manifest
    layout: FragmentLayout

    @property
    def master(self) -> Codec:
        """The format of the committed parameters."""
        named = self.manifest.algorithm.get("master_dtype")
        return codec_named(named if isinstance(named, str) and named in get_args(Dtype) else "F32")

    async def sections(self, version: int) -> Sequence[Section] | None:
        """What a version's record names, if it is found."""
        fragment, fragments = self.layout.fragment, len(self.manifest.plan)
        if version == 0:
            return (self.manifest.theta[fragment],)
        state = await read_round(self.mailbox, self.manifest.run, version * fragments + fragment)
        return state.record.sections if isinstance(state, Decided) else None


@dataclass(frozen=True, slots=True)
class Held:
    """A version whose parameters are here, and the sections that its record names."""

    version: int
    sections: tuple[Section, ...]
    theta: Flat


def named(sections: Sequence[Section], name: str) -> Section | None:
    """The section of that name, if there is one."""
    return next((section for section in sections if section.name == name), None)


def same_parameters(one: Sequence[Section], other: Sequence[Section]) -> bool:
    """Whether two versions of a chain name the same parameters, as a void round does."""
    return all(named(one, name) == named(other, name) for name in ("theta", "change"))


def made_by(theta: Flat, codec: Codec) -> str:
    """The digest of parameters as a payload in ``codec`` would hold them."""
    parts = [np.empty(part.nbytes, np.uint8) for part in codec.parts(theta.size)]
    codec.encode(theta, parts)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.data)
    return digest.hexdigest()


def changed(theta: Flat, change: Flat, master: Codec) -> Flat:
    """The parameters after a decoded ``change``, in a new array."""
    moved = np.empty_like(theta)
    add(theta, change, moved)
    restated(moved, master)
    return moved


async def parameters(
    source: Source, version: int, sections: Sequence[Section], held: Held | None = None
) -> Flat | Rejected:
    """The parameters of ``version``, whose record names ``sections``, or why they cannot be had now."""
    if held is not None and same_parameters(sections, held.sections):
        return held.theta
    if held is not None and version - held.version <= CHANGES_AT_ONCE:
        changes = await _changes_since(source, version, sections, held)
        if changes:
            made = await _added(source, held.theta, changes)
            if not isinstance(made, Rejected):
                return made
    return await _from_whole(source, version, sections)


async def _changes_since(source: Source, version: int, sections: Sequence[Section], held: Held) -> list[Section] | None:
    """The changes from what is held to ``version``, oldest first; None if a version names none."""
    changes: list[Section] = []
    known: Sequence[Section] | None = sections
    for number in range(version, held.version, -1):
        known = sections if number == version else await source.sections(number)
        change = named(known or (), "change")
        if change is None:
            return None
        if change not in changes and change not in held.sections:
            changes.insert(0, change)
    return changes


async def _from_whole(source: Source, version: int, sections: Sequence[Section]) -> Flat | Rejected:
    """From the newest whole payload at or before ``version``, and the changes after it."""
    changes: list[Section] = []
    known: Sequence[Section] | None = sections
    while known is not None:
        theta, change = named(known, "theta"), named(known, "change")
        if theta is not None:
            whole = await get_section(source.mailbox, source.clock, theta, source.layout)
            later = [one for one in changes if one != change]
            return whole if isinstance(whole, Rejected) else await _added(source, whole, later)
        if change is None:
            return Rejected("no parameters are named")
        if change not in changes:
            changes.insert(0, change)
        version -= 1
        known = await source.sections(version)
    return Rejected("the record of an older version was not found")


async def _added(source: Source, theta: Flat, changes: Sequence[Section]) -> Flat | Rejected:
    """``theta`` after the changes, oldest first, if that is what the last of them says it makes."""
    values = await asyncio.gather(
        *(get_section(source.mailbox, source.clock, change, source.layout) for change in changes)
    )
    for value in values:
        if isinstance(value, Rejected):
            return value
        theta = await source.clock.compute(partial(changed, theta, value, source.master))
    if changes and await source.clock.compute(lambda: made_by(theta, source.master)) != changes[-1].makes:
        return Rejected("the changes make other parameters than the record names")
    return theta
