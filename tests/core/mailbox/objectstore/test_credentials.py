"""Credentials are renewed in time, once, and appear nowhere."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gradientmail_core.errors import MailboxDenied, MailboxUnavailable
from gradientmail_core.mailbox.objectstore import Credentials
from gradientmail_core.mailbox.objectstore.credentials import CredentialSource, chain_provider, configured_region


def lasting(seconds: float) -> Credentials:
    return Credentials("AKIACANARY", "canary-secret", "canary-token", datetime.now(UTC) + timedelta(seconds=seconds))


class Provider:
    """Answers in turn with what it was given; an exception is raised."""

    def __init__(self, *answers: Credentials | Exception) -> None:
        self._answers = list(answers)
        self.asked = 0

    def __call__(self) -> Credentials:
        self.asked += 1
        time.sleep(0.01)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_provider_is_asked_once_for_all_that_wait() -> None:
    provider = Provider(Credentials("a", "b"))

    async def work() -> None:
        source = CredentialSource(provider)
        assert len(set(await asyncio.gather(*(source.current() for _ in range(50))))) == 1

    asyncio.run(work())
    assert provider.asked == 1


def test_what_is_about_to_expire_is_replaced() -> None:
    provider = Provider(lasting(60), lasting(3600))

    async def work() -> None:
        source = CredentialSource(provider)
        await source.current()
        await asyncio.gather(*(source.current() for _ in range(10)))

    asyncio.run(work())
    assert provider.asked == 2


def test_a_refusal_renews_once_for_all_that_met_it() -> None:
    provider = Provider(Credentials("old", "x"), Credentials("new", "x"))

    async def work() -> None:
        source = CredentialSource(provider)
        await source.current()
        refused = source.generation
        await asyncio.gather(*(source.renew(refused) for _ in range(20)))
        assert (await source.current()).access_key == "new"
        assert source.generation == refused + 1

    asyncio.run(work())
    assert provider.asked == 2


def test_an_async_provider() -> None:
    async def provide() -> Credentials:
        await asyncio.sleep(0)
        return Credentials("a", "b")

    async def work() -> None:
        assert (await CredentialSource(provide).current()).access_key == "a"

    asyncio.run(work())


def test_a_failing_provider_passes_while_the_old_ones_hold() -> None:
    async def work() -> None:
        source = CredentialSource(Provider(lasting(60), OSError("canary-secret")))
        assert await source.current() == await source.current()
        with pytest.raises(MailboxUnavailable) as caught:
            await source.renew(source.generation)
        assert "canary" not in str(caught.value) and caught.value.__cause__ is None

    asyncio.run(work())


def test_a_provider_that_fails_at_first_is_asked_again() -> None:
    async def work() -> None:
        source = CredentialSource(Provider(OSError("x"), Credentials("a", "b")))
        with pytest.raises(MailboxUnavailable, match="OSError"):
            await source.current()
        with pytest.raises(MailboxUnavailable):
            _ = source.newest
        assert (await source.current()).access_key == "a"

    asyncio.run(work())


def test_no_credentials_at_the_start_is_lasting_and_later_passing() -> None:
    denied = MailboxDenied("none found")

    async def work() -> None:
        with pytest.raises(MailboxDenied):
            await CredentialSource(Provider(denied)).current()
        source = CredentialSource(Provider(lasting(-1), denied))
        await source.current()
        with pytest.raises(MailboxUnavailable):
            await source.current()

    asyncio.run(work())


@pytest.mark.parametrize("show", [repr, str, "{}".format, "{!r}".format])
def test_nothing_shows_them(show: Callable[[object], str]) -> None:
    assert "canary" not in show(lasting(60)).lower()
    assert "canary" not in show([lasting(60)]).lower()


@pytest.fixture
def no_chain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without credentials of any kind; the directory its configuration would be in."""
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_DEFAULT_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path


def asked() -> Credentials:
    provider = chain_provider()
    assert provider is not None
    return asyncio.run(CredentialSource(provider).current())


def test_the_chain_reads_variables(no_chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    assert asked() == Credentials("a", "b")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "c")
    assert asked() == Credentials("a", "b", "c")


def test_the_chain_reads_profiles_and_notices_changes(no_chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "lab")
    for key in ("first", "second"):
        text = f"[lab]\naws_access_key_id={key}\naws_secret_access_key=s\n"
        (no_chain / "credentials").write_text(text)
        assert asked().access_key == key
    (no_chain / "config").write_text("[profile lab]\nregion=eu-west-3\n")
    assert configured_region() == "eu-west-3"


def test_the_end_of_the_chain_is_explained(no_chain: Path) -> None:
    with pytest.raises(MailboxDenied, match="AWS_ACCESS_KEY_ID"):
        asked()
    assert configured_region() is None
