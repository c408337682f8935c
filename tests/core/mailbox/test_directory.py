"""What the directory mailbox promises beyond the contract: faults of file systems, strangers, and crashes."""

import asyncio
import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gradientmail_core.errors import (
    ConfigurationError,
    MailboxDenied,
    MailboxError,
    MailboxUnavailable,
    MailboxUnsupported,
    PayloadTooLarge,
)
from gradientmail_core.mailbox import CreateOutcome, DirectoryMailbox, Entry, Mailbox


def on(path: Path, work: Callable[[DirectoryMailbox], Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` on a mailbox at ``path``."""

    async def main() -> None:
        mailbox = DirectoryMailbox(path)
        await work(mailbox)
        await mailbox.close()

    asyncio.run(main())


async def listed(mailbox: Mailbox, prefix: str = "", after: str = "") -> list[str]:
    return [entry.key async for entry in mailbox.list(prefix, after=after)]


def broken(number: int) -> Callable[..., Any]:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


# -- what is on disk


def test_a_key_is_a_file_and_nothing_else_is_left(tmp_path: Path) -> None:
    async def work(mailbox: DirectoryMailbox) -> None:
        await mailbox.put("a/b", b"1")
        await mailbox.create("a/c", b"2")
        await mailbox.create("a/c", b"3")
        assert (tmp_path / "a" / "b").read_bytes() == b"1"
        assert sorted(os.listdir(tmp_path / "a")) == ["b", "c"]
        assert (tmp_path / "a" / "c").stat().st_nlink == 1

    on(tmp_path, work)


def test_other_users_may_read_what_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        on(tmp_path, lambda mailbox: mailbox.put("a", b"1"))
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_empty_directories_go_and_the_root_stays(tmp_path: Path) -> None:
    async def work(mailbox: DirectoryMailbox) -> None:
        await mailbox.put("a/b/c", b"1")
        await mailbox.put("a/d", b"1")
        await mailbox.delete("a/b/c")
        assert not (tmp_path / "a" / "b").exists() and (tmp_path / "a" / "d").exists()
        await mailbox.delete("a/d")
        assert list(tmp_path.iterdir()) == []

    on(tmp_path, work)


def test_writers_survive_the_pruning_of_their_directory(tmp_path: Path) -> None:
    async def work(mailbox: DirectoryMailbox) -> None:
        async def churn(name: str) -> None:
            for turn in range(150):
                assert await mailbox.create(f"a/b/{name}", b"x") is CreateOutcome.CREATED, turn
                await mailbox.delete(f"a/b/{name}")

        await asyncio.gather(*map(churn, ("c", "d", "e", "f")))

    on(tmp_path, work)


def test_a_killed_writer_leaves_no_part_and_its_rest_can_be_removed(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import asyncio, os, sys
        from gradientmail_core.mailbox import DirectoryMailbox
        os.fsync = lambda file: (print("written", flush=True), sys.stdin.read())
        asyncio.run(DirectoryMailbox(sys.argv[1]).put("big", bytes(3_000_000)))
        """
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)

    async def work(mailbox: DirectoryMailbox) -> None:
        assert await mailbox.get("big") is None
        assert await listed(mailbox) == []
        assert len(os.listdir(tmp_path)) == 1
        assert (await mailbox.abandoned(3600, remove=True)).count == 0
        assert await mailbox.abandoned(-1, remove=False) == await mailbox.abandoned(-1, remove=True)
        assert os.listdir(tmp_path) == []

    on(tmp_path, work)


# -- strangers and links


def test_what_is_no_object_is_neither_listed_nor_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    root = tmp_path / "root"
    (root / "live").mkdir(parents=True)
    (root / "live" / "file-link").symlink_to(outside / "secret")
    (root / "live" / "loop").symlink_to("loop")
    (root / "dir-link").symlink_to(outside)
    (root / "live" / ".hidden").write_text("x")
    (root / ".nfs0001").write_text("x")
    (root / "live" / "with space").write_text("x")
    (root / "live" / "ümlaut").write_text("x")
    (root / "live" / "empty").mkdir()
    os.mkfifo(root / "live" / "pipe")
    with socket.socket(socket.AF_UNIX) as unheard:
        monkeypatch.chdir(root / "live")
        unheard.bind("socket")
    (root / "live" / "ok").write_text("ok")

    async def work(mailbox: DirectoryMailbox) -> None:
        assert await listed(mailbox) == ["live/ok"]
        assert await listed(mailbox, "dir-link/") == []
        for key in ("file-link", "loop", "pipe", "socket", "empty", "ok/below"):
            assert await mailbox.get(f"live/{key}") is None, key
        assert await mailbox.get("dir-link/secret") is None

    on(root, work)
    assert (outside / "secret").read_text() == "secret"


def test_nothing_is_written_or_deleted_through_a_link(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    root.mkdir()
    (root / "dir").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    (root / "dangling").symlink_to(outside / "new")

    async def work(mailbox: DirectoryMailbox) -> None:
        for call in (mailbox.put("dir/x", b""), mailbox.create("dir/x", b""), mailbox.create("file", b"")):
            with pytest.raises(MailboxDenied):
                await call
        with pytest.raises(MailboxDenied):
            await mailbox.create("dangling", b"")
        await mailbox.delete("dir/secret")
        await mailbox.put("file", b"mine")
        assert await mailbox.get("file") == b"mine"

    on(root, work)
    assert sorted(os.listdir(outside)) == ["secret"]
    assert (outside / "secret").read_text() == "secret"


@pytest.mark.parametrize("key", ["nul", "a/CON", "com1.txt", "a.", "lpt9/x"])
def test_names_that_some_systems_reserve_are_refused(key: str, tmp_path: Path) -> None:
    async def work(mailbox: DirectoryMailbox) -> None:
        with pytest.raises(ConfigurationError, match="file name"):
            await mailbox.put(key, b"")

    on(tmp_path, work)


def test_only_directories_that_can_hold_the_prefix_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(mailbox: DirectoryMailbox) -> None:
        for key in ("tape/000000/1", "tape/000001/2", "tape/000002/3", "live/a/b", "blobs/1/x"):
            await mailbox.put(key, b"")
        read, scan = list[str](), os.scandir

        def watched(path: Any) -> Any:
            read.append(os.path.relpath(path, tmp_path))
            return scan(path)

        monkeypatch.setattr(os, "scandir", watched)
        assert await listed(mailbox, "tape/", "tape/000001/1") == ["tape/000001/2", "tape/000002/3"]
        assert sorted(read) == ["tape", "tape/000001", "tape/000002"]
        read.clear()
        assert await listed(mailbox, "live/a/") == ["live/a/b"]
        assert read == ["live/a"]

    on(tmp_path, work)


# -- faults


def test_a_link_whose_answer_was_lost_has_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that links and then fails: the number of links decides, for errors of every kind."""
    real = os.link

    async def work(mailbox: DirectoryMailbox) -> None:
        for number in (errno.EIO, errno.EEXIST, errno.ESTALE, errno.EPERM):

            def lossy(*arguments: Any, number: int = number, **options: Any) -> None:
                real(*arguments, **options)
                raise OSError(number, os.strerror(number))

            monkeypatch.setattr(os, "link", lossy)
            assert await mailbox.create(f"k/{number}", b"mine") is CreateOutcome.CREATED
            assert await mailbox.get(f"k/{number}") == b"mine"

    on(tmp_path, work)


def test_an_error_of_the_link_without_a_link_is_unsettled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(mailbox: DirectoryMailbox) -> None:
        monkeypatch.setattr(os, "link", broken(errno.EIO))
        with pytest.raises(MailboxUnavailable):
            await mailbox.create("a", b"x")
        assert os.listdir(tmp_path) == []

    on(tmp_path, work)


def test_a_lost_race_after_the_look_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def overtaken(source: Any, target: Any, **options: Any) -> None:
        Path(target).write_bytes(b"theirs")
        real(source, target, **options)

    async def work(mailbox: DirectoryMailbox) -> None:
        monkeypatch.setattr(os, "link", overtaken)
        assert await mailbox.create("a", b"mine") is CreateOutcome.TAKEN
        assert await mailbox.get("a") == b"theirs"

    on(tmp_path, work)


def test_a_key_that_was_taken_and_is_gone_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(mailbox: DirectoryMailbox) -> None:
        monkeypatch.setattr(os, "link", broken(errno.EEXIST))
        assert await mailbox.create("a", b"mine") is CreateOutcome.TAKEN

    on(tmp_path, work)


@pytest.mark.parametrize("call", ["fsync", "write", "replace"])
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, MailboxUnavailable),
        (errno.EDQUOT, MailboxUnavailable),
        (errno.EIO, MailboxUnavailable),
        (errno.ESTALE, MailboxUnavailable),
        (errno.EROFS, MailboxDenied),
        (errno.EACCES, MailboxDenied),
    ],
)
def test_a_failed_write_says_why_and_leaves_nothing(
    call: str, number: int, expected: type[MailboxError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(mailbox: DirectoryMailbox) -> None:
        await mailbox.put("a", b"before")
        with monkeypatch.context() as patched:
            patched.setattr(os, call, broken(number))
            with pytest.raises(expected) as caught:
                await mailbox.put("a", b"after")
        assert type(caught.value) is expected
        assert os.strerror(number) in str(caught.value)
        assert await mailbox.get("a") == b"before"
        assert os.listdir(tmp_path) == ["a"]

    on(tmp_path, work)


def test_a_root_that_vanishes_is_denied_and_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "root"

    async def work(mailbox: DirectoryMailbox) -> None:
        root.rmdir()
        calls = (
            mailbox.get("a"),
            mailbox.put("a/b", b""),
            mailbox.create("c", b""),
            mailbox.delete("a"),
            listed(mailbox),
        )
        for call in calls:
            with pytest.raises(MailboxDenied, match="gone"):
                await call
        assert not root.exists()

    on(root, work)


def test_a_key_that_is_a_directory_is_denied(tmp_path: Path) -> None:
    async def work(mailbox: DirectoryMailbox) -> None:
        await mailbox.put("a/b", b"")
        for call in (mailbox.put("a", b""), mailbox.create("a", b""), mailbox.put("a/b/c", b"")):
            with pytest.raises(MailboxDenied):
                await call
        assert await listed(mailbox) == ["a/b"]

    on(tmp_path, work)


def test_an_oversized_object_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as sparse:
        sparse.truncate(1 << 40)

    async def work(mailbox: DirectoryMailbox) -> None:
        with pytest.raises(PayloadTooLarge):
            await mailbox.get("huge", limit=1 << 20)

    on(tmp_path, work)


# -- file systems without hard links


def test_without_links_or_exclusive_rename_the_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lacking:
        """A C library whose ``renameat2`` the file system does not support."""

        @staticmethod
        def renameat2(*arguments: object) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    async def work(mailbox: DirectoryMailbox) -> None:
        monkeypatch.setattr(os, "link", broken(errno.EOPNOTSUPP))
        monkeypatch.setattr(ctypes, "CDLL", lambda *arguments, **options: Lacking)
        with pytest.raises(MailboxUnsupported, match="hard links"):
            await mailbox.create("a", b"x")
        assert os.listdir(tmp_path) == []
        await mailbox.put("a", b"x")

    on(tmp_path, work)


# -- threads


def test_no_file_is_touched_on_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop_thread, on_loop = threading.get_ident(), list[str]()
    for name in ("open", "link", "unlink", "replace", "fsync", "scandir", "mkdir", "rmdir", "write", "stat", "lstat"):
        real = getattr(os, name)

        def watched(*arguments: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            if threading.get_ident() == loop_thread:
                on_loop.append(name)
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, watched)

    async def work(mailbox: DirectoryMailbox) -> None:
        on_loop.clear()  # opening may look at the disk
        await mailbox.put("a/b", b"x")
        await mailbox.create("a/c", b"x")
        await mailbox.get("a/b")
        await listed(mailbox)
        await mailbox.delete("a/b")

    on(tmp_path, work)
    assert on_loop == []


def test_closing_waits_for_writes_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def slow(file: int) -> None:
        time.sleep(0.2)
        real(file)

    async def main() -> None:
        mailbox = DirectoryMailbox(tmp_path)
        monkeypatch.setattr(os, "fsync", slow)
        call = asyncio.ensure_future(mailbox.put("a", b"x"))
        await asyncio.sleep(0.05)
        await mailbox.close()
        assert (tmp_path / "a").read_bytes() == b"x"
        await call

    asyncio.run(main())


def test_listing_gives_sizes(tmp_path: Path) -> None:
    async def work(mailbox: DirectoryMailbox) -> None:
        await mailbox.put("a/b", b"xyz")
        assert [entry async for entry in mailbox.list("a")] == [Entry("a/b", 3)]

    on(tmp_path, work)


def test_a_directory_tells_its_clock_and_has_no_rules(tmp_path: Path) -> None:
    said = asyncio.run(DirectoryMailbox(tmp_path).surroundings())
    assert said.clock_offset is not None and abs(said.clock_offset) < 30.0
    assert (said.versioned, said.expiring, said.locked) == (False, (), False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="a directory of Linux's")
@pytest.mark.parametrize("key", ["one", "folder/one", "folder/below/one"])
def test_a_directory_in_which_nothing_can_be_made_refuses(key: str) -> None:
    """Linux says there that a name was not found, as in a directory that others prune."""

    async def main() -> None:
        mailbox = DirectoryMailbox("/proc", must_exist=True)
        with pytest.raises(MailboxDenied, match="can be made in /proc"):
            await mailbox.put(key, b"x")
        await mailbox.close()

    asyncio.run(main())
