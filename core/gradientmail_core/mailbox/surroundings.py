"""What a store says about itself beyond its objects: its clock, and settings that work against a run.

Everything here may be unknown, and then it is None: many stores do not tell, or not to everybody.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Surroundings:
    """``clock_offset`` is the store's clock minus this machine's, in seconds.

    ``versioned`` stores keep what was deleted, ``old_versions_expire`` only for a while. ``expiring`` are the
    store's rules that remove or archive objects under the prefix, ``locked`` says that objects cannot be deleted
    for a time, ``uploads_expire`` that unfinished uploads are removed.
    """

    clock_offset: float | None = None
    versioned: bool | None = None
    old_versions_expire: bool | None = None
    expiring: tuple[str, ...] | None = None
    locked: bool | None = None
    uploads_expire: bool | None = None


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Writes that crashed processes left unfinished and no listing shows: how many, and their bytes."""

    count: int = 0
    size: int = 0


@runtime_checkable
class Littered(Protocol):
    """A mailbox whose store keeps what was written of an object until the whole is there."""

    async def abandoned(self, older_than: float, *, remove: bool) -> Abandoned:
        """Unfinished writes begun ``older_than`` seconds ago or more by the store's clock; ``remove`` ends them.

        One that is in progress and older fails, and its writer begins again.
        """
        ...


@runtime_checkable
class Described(Protocol):
    """A mailbox whose store can be asked."""

    async def surroundings(self) -> Surroundings:
        """What the store says; what it does not say is None."""
        ...
