"""What an experiment makes of its nodes' messages; the whole of it runs in test_command."""

from pathlib import Path

import pytest

from gradientmail_core.errors import RunMismatch
from gradientmail_lightning.demo.experiment import Seen, below, check_unused, node_names, seen_after
from gradientmail_lightning.demo.messages import Ended, Evaluated, Said, Started, Stepped
from gradientmail_lightning.demo.results import Point


def test_messages_add_up() -> None:
    seen = Seen()
    for message in (Started(4), Stepped(5, 1.0, 2.0), Evaluated(6, 1.5, 1.9), Said("x"), Ended(8, 2.0)):
        seen = seen_after(seen, "a", message)
    assert seen.step("a") == 5 and seen.step("b") == 0
    assert seen.curves["a"] == (Point(6, 1.5, 1.9),)
    assert seen.first_steps["a"] == 4 and seen.ended["a"].step == 8


def test_prefixes_keep_the_query() -> None:
    assert below("s3://bucket/run?endpoint_url=http://x", "seed-0") == "s3://bucket/run/seed-0?endpoint_url=http://x"
    assert below("file:///tmp/run/", "churn") == "file:///tmp/run/churn"


def test_names() -> None:
    assert node_names(3) == ["a", "b", "c"]


async def used(mailbox: Path) -> None:
    await check_unused(mailbox.as_uri())


def test_a_used_mailbox_is_refused(tmp_path: Path) -> None:
    import asyncio

    asyncio.run(used(tmp_path / "new"))
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(RunMismatch, match="already a run"):
        asyncio.run(used(tmp_path))
