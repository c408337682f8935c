"""Credentials that are renewed in time, once for all requests that wait, and never shown.

A provider is asked when its last answer is about to expire, or when the store says that it has. However
many requests notice that at once, it is asked once. While it fails and the old credentials still hold,
they are used; after that its failure is a passing fault, since training can go on without the store.
"""

import asyncio
import importlib.util
import inspect
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from gradientmail_core.errors import MailboxDenied, MailboxUnavailable

RENEW_BEFORE = timedelta(minutes=2)
ASK_CHAIN_EVERY = timedelta(minutes=12)


@dataclass(frozen=True, slots=True)
class Credentials:
    """An access key as S3 knows it. ``expires_at`` (with a time zone) is None for one that stays."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    expires_at: datetime | None = None

    def holds(self, margin: timedelta = timedelta(0)) -> bool:
        """Whether they are good for ``margin`` more."""
        return self.expires_at is None or datetime.now(UTC) + margin < self.expires_at


CredentialProvider: TypeAlias = Callable[[], Credentials | Awaitable[Credentials]]


class CredentialSource:
    """The provider's newest answer. ``generation`` counts the answers, so that a refusal renews only what it met."""

    def __init__(self, provider: CredentialProvider) -> None:
        self._provider = provider
        self._lock = asyncio.Lock()
        self._newest: Credentials | None = None
        self.generation = 0

    async def current(self) -> Credentials:
        """Credentials that hold; raises :class:`MailboxUnavailable` while the provider has none."""
        async with self._lock:
            if self._newest is None or not self._newest.holds(RENEW_BEFORE):
                await self._ask()
            return self.newest

    @property
    def newest(self) -> Credentials:
        """The last answer, which :meth:`current` has waited for."""
        if self._newest is None:
            raise MailboxUnavailable("The credential provider has not answered yet.")
        return self._newest

    async def renew(self, refused: int) -> None:
        """Ask again, unless the answer numbered ``refused`` has been replaced in the meantime."""
        async with self._lock:
            if self.generation == refused:
                await self._ask(still_good=False)

    async def _ask(self, still_good: bool = True) -> None:
        try:
            answer = await _called(self._provider)
        except Exception as error:
            if isinstance(error, MailboxDenied) and self._newest is None:
                raise
            if still_good and self._newest is not None and self._newest.holds():
                return
            cause = f"The credential provider failed ({type(error).__name__})."
        else:
            self._newest, self.generation = answer, self.generation + 1
            return
        raise MailboxUnavailable(cause)


async def _called(provider: CredentialProvider) -> Credentials:
    """The provider's answer, asked on a thread because it may use the network."""
    answer = await asyncio.to_thread(provider)
    return await answer if inspect.isawaitable(answer) else answer


def chain_provider() -> CredentialProvider | None:
    """AWS's usual chain: variables, profile, single sign-on, instance role.

    None where botocore is not installed and no variables are set; obstore then looks for an instance role itself.
    """
    if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
        return _from_environment
    return _from_chain if importlib.util.find_spec("botocore") else None


def configured_region() -> str | None:
    """The region of the AWS profile in use, if botocore is there to read it."""
    if not importlib.util.find_spec("botocore"):
        return None
    from botocore.session import Session

    region = Session().get_config_variable("region")
    return str(region) if region else None


def _from_environment() -> Credentials:
    token = os.environ.get("AWS_SESSION_TOKEN") or None
    return Credentials(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"], token)


def _from_chain() -> Credentials:
    """Asked anew every time, so that a file renewed by another process is noticed."""
    from botocore.session import Session

    found = Session().get_credentials()
    if found is None:
        raise MailboxDenied(
            "No credentials for the object store were found.",
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE.",
        )
    frozen = found.get_frozen_credentials()
    expires_at = datetime.now(UTC) + ASK_CHAIN_EVERY
    return Credentials(frozen.access_key, frozen.secret_key, frozen.token, expires_at)
