"""Somebody who asks a question is answered, if only that the store is silent."""

import asyncio
from pathlib import Path

import pytest

from gradientmail_core.errors import ConfigurationError, MailboxUnavailable
from gradientmail_core.session import visiting
from gradientmail_core.session.visiting import Visit, visited
from tests.core.mailbox.servers import ACCESS_KEY, SECRET_KEY


async def looked(visit: Visit) -> tuple[str, float]:
    return visit.store.url, visit.now()


def test_a_directory_is_opened_and_nothing_is_made(tmp_path: Path) -> None:
    url, now = asyncio.run(visited(str(tmp_path), 120.0, False, looked))
    assert url == tmp_path.as_uri() and now > 1e9 and list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigurationError, match="no directory"):
        asyncio.run(visited(str(tmp_path / "typo"), 120.0, False, looked))


def test_a_store_that_is_silent_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visiting, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with pytest.raises(MailboxUnavailable, match="has not answered") as caught:
        asyncio.run(visited("s3://bucket/run?endpoint_url=http://127.0.0.1:9", 120.0, False, looked))
    assert "Check the URL" in caught.value.remedy and SECRET_KEY not in str(caught.value)
