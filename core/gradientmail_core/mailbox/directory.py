"""A mailbox in a directory, on a local or shared file system.

A body is written to a dot-file beside its key, flushed, and then linked to its name. A link exists
whole or not at all, and among all processes and machines at most one link to a name succeeds. An error
of the link does not settle it: a file server may have linked and lost its answer, so the number of
links of the file just written decides. Where there are no hard links, Linux's ``renameat2`` with
``RENAME_NOREPLACE`` promises the same; without either the directory is refused.

Nothing outside the directory can be reached: keys are checked, symbolic links are neither followed nor
listed, and only regular files are read. All file work runs on the mailbox's own threads.
"""

import asyncio
import ctypes
import errno
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from gradientmail_core.errors import (
    ConfigurationError,
    MailboxDenied,
    MailboxError,
    MailboxUnavailable,
    MailboxUnsupported,
    PayloadTooLarge,
)
from gradientmail_core.mailbox.base import Body, CreateOutcome, Entry, checked_key, checked_prefix, is_key
from gradientmail_core.mailbox.surroundings import Abandoned, Surroundings
from gradientmail_core.mailbox.workers import Workers

T = TypeVar("T")

CLOSE_SECONDS = 5.0
_THREADS = 4
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp\Z")
_ATTEMPTS = 100  # of a write whose directory others keep pruning
_WRITE_CHUNK = 1 << 30  # one write(2) takes at most 2 GiB
_DENIED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
)
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EINVAL})
_WINDOWS_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}
)
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_READ |= getattr(os, "O_BINARY", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class DirectoryMailbox:
    """Objects as files below ``path``, which is made if it is missing.

    With ``must_exist`` nothing is made and a directory one may only read will do. Raises
    :class:`ConfigurationError` if ``path`` is no directory, :class:`MailboxDenied` without permission.
    """

    def __init__(self, path: str | os.PathLike[str], *, must_exist: bool = False) -> None:
        self._root = _opened_root(Path(path).expanduser().absolute(), must_exist)
        self._threads = Workers(_THREADS, "gradientmail-directory")
        self._closed = False

    def __repr__(self) -> str:
        return f"DirectoryMailbox({str(self._root)!r})"

    @property
    def url(self) -> str:
        """``file:///path``."""
        return self._root.as_uri()

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :meth:`Mailbox.get`."""
        path = self._path(key)
        return await self._run(lambda: self._read(path, limit))

    async def put(self, key: str, body: Body) -> None:
        """See :meth:`Mailbox.put`."""
        path = self._path(key)
        await self._run(lambda: self._written(path, body, _replace))

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """See :meth:`Mailbox.create`; :class:`MailboxUnsupported` where the file system cannot decide races."""
        path = self._path(key)
        return await self._run(lambda: self._create(path, body))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        """See :meth:`Mailbox.list`; only directories that can hold such keys are read."""
        directory, _, start = checked_prefix(prefix).rpartition("/")
        for entry in await self._run(lambda: self._entries(directory, start, after)):
            yield entry

    async def delete(self, key: str) -> None:
        """See :meth:`Mailbox.delete`; directories left empty go too."""
        path = self._path(key)
        await self._run(lambda: self._remove(path))

    async def close(self) -> None:
        """Let writes in progress finish and release the threads; a file system that blocks is not waited for long."""
        if not self._closed:
            self._closed = True
            await asyncio.wait([asyncio.wrap_future(self._threads.closed())], timeout=CLOSE_SECONDS)

    async def abandoned(self, older_than: float, *, remove: bool) -> Abandoned:
        """See :class:`Littered`: dot-files that crashed writers left.

        Age is counted on the file system's own clock, read off a file written for the purpose.
        """
        return await self._run(lambda: self._abandoned(older_than, remove))

    async def surroundings(self) -> Surroundings:
        """See :class:`Described`: a file server may have another clock; a directory has no rules."""
        offset = await self._run(lambda: self._file_time() - time.time())
        return Surroundings(offset, versioned=False, expiring=(), locked=False, uploads_expire=True)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise MailboxDenied(f"The mailbox {self.url} is closed.")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._explaining, work)

    def _explaining(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except OSError as error:
            raise _explained(error, self._root) from error

    def _path(self, key: str) -> Path:
        for segment in checked_key(key).split("/"):
            if segment.endswith(".") or segment.split(".")[0].lower() in _WINDOWS_DEVICES:
                raise ConfigurationError(
                    f"The name {segment!r} is no file name on every system.", "Choose another one."
                )
        return self._root / key

    def _read(self, path: Path, limit: int | None) -> bytes | None:
        file = self._opened(path)
        if file is None:
            return None
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                return None
            if limit is not None and found.st_size > limit:
                raise PayloadTooLarge(f"{path} has {found.st_size} bytes, more than the {limit} expected of it.")
            return open(file, "rb", buffering=0, closefd=False).readall()
        finally:
            os.close(file)

    def _opened(self, path: Path) -> int | None:
        if self._linked(path.parent):
            return None
        try:
            return os.open(path, _READ)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                raise
        os.stat(self._root)  # a missing object is None, a missing store an error
        return None

    def _linked(self, directory: Path) -> bool:
        """Whether a symbolic link stands between the root and ``directory``."""
        below = directory.relative_to(self._root).parts
        return any(self._root.joinpath(*below[: n + 1]).is_symlink() for n in range(len(below)))

    def _create(self, path: Path, body: Body) -> CreateOutcome:
        if not os.path.lexists(path) and self._written(path, body, _publish):
            return CreateOutcome.CREATED
        with suppress(FileNotFoundError):  # taken, and deleted since
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise OSError(errno.EISDIR, "not a regular file", str(path))
        return CreateOutcome.TAKEN

    def _written(self, path: Path, body: Body, publish: Callable[[int, Path, Path], bool]) -> bool:
        """Write ``body`` beside ``path``, flush it, and ``publish`` it under that name."""
        temporary, file = self._temporary(path)
        try:
            _write_all(file, body)
            os.fsync(file)
            return publish(file, temporary, path)
        finally:
            with suppress(OSError):
                os.unlink(temporary)
            os.close(file)
            _flush_directory(path.parent)

    def _temporary(self, path: Path) -> tuple[Path, int]:
        """A new dot-file beside ``path``. Its directory may be pruned by a sweep at any moment, so try again."""
        temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
        for _ in range(_ATTEMPTS):
            if self._linked(path.parent):
                raise OSError(errno.ELOOP, "a symbolic link", str(path.parent))
            with suppress(FileNotFoundError):
                return temporary, os.open(temporary, _WRITE, 0o666)
            self._make_directory(path.parent)
            if path.parent == self._root:
                raise _unable(self._root)
        raise OSError(errno.EAGAIN, "others remove the directory as fast as it is made", str(path.parent))

    def _make_directory(self, directory: Path) -> None:
        """Make every missing directory below the root, but never the root: it may be an absent mount."""
        os.stat(self._root)
        below = directory.relative_to(self._root).parts
        for depth in range(len(below)):
            try:
                os.mkdir(self._root.joinpath(*below[: depth + 1]))
                _flush_directory(self._root.joinpath(*below[:depth]))
            except FileExistsError:
                continue
            except FileNotFoundError as error:
                if depth == 0:
                    raise _unable(self._root) from error

    def _entries(self, directory: str, start: str, after: str) -> tuple[Entry, ...]:
        os.stat(self._root)
        if self._linked(self._root / directory):
            return ()
        return tuple(sorted(self._walk(directory, start, after), key=lambda entry: entry.key))

    def _walk(self, directory: str, start: str, after: str) -> Iterator[Entry]:
        for found in _scanned(self._root / directory):
            key = f"{directory}/{found.name}" if directory else found.name
            if not found.name.startswith(start) or not is_key(key):
                continue
            with suppress(FileNotFoundError):
                if found.is_dir(follow_symlinks=False):
                    if key + "/" > after or after.startswith(key + "/"):
                        yield from self._walk(key, "", after)
                elif found.is_file(follow_symlinks=False) and key > after:
                    seen = found.stat(follow_symlinks=False)
                    yield Entry(key, seen.st_size, seen.st_mtime)

    def _remove(self, path: Path) -> None:
        if self._linked(path.parent):
            return
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            os.stat(self._root)
        with suppress(OSError):
            for directory in path.parents[: len(path.relative_to(self._root).parts) - 1]:
                os.rmdir(directory)

    def _abandoned(self, older_than: float, remove: bool) -> Abandoned:
        newest, sizes = self._file_time() - older_than, list[int]()
        for path in self._root.rglob(".*.tmp"):
            with suppress(FileNotFoundError):  # its writer may be alive and done
                found = path.lstat()
                if _TEMPORARY.match(path.name) and found.st_mtime < newest:
                    if remove:
                        path.unlink()
                    sizes.append(found.st_size)
        return Abandoned(len(sizes), sum(sizes))

    def _file_time(self) -> float:
        """Now, on the clock of the file system."""
        probe, file = self._temporary(self._root / "probe")
        with open(file, "wb"):
            now = os.fstat(file).st_mtime
        os.unlink(probe)
        return now


def _opened_root(root: Path, must_exist: bool) -> Path:
    if must_exist and not root.exists():
        raise ConfigurationError(
            f"There is no directory {root}.", "Check the path, or that its file system is mounted."
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigurationError(f"{root} is not a directory.", "Give the path of a directory.") from error
    except OSError as error:
        raise _explained(error, root) from error
    if not os.access(root, os.R_OK | os.X_OK | (0 if must_exist else os.W_OK)):
        raise _explained(PermissionError(errno.EACCES, "no permission"), root)
    return root


def _unable(root: Path) -> MailboxDenied:
    """What a directory such as /proc answers, which exists and in which nothing can be made."""
    return MailboxDenied(
        f"Neither a file nor a directory can be made in {root}.", "Use a directory on a file system that stores files."
    )


def _scanned(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _write_all(file: int, body: Body) -> None:
    rest = memoryview(body).cast("B")
    while rest:
        rest = rest[os.write(file, rest[:_WRITE_CHUNK]) :]


def _replace(file: int, temporary: Path, path: Path) -> bool:
    os.replace(temporary, path)
    return True


def _publish(file: int, temporary: Path, path: Path) -> bool:
    """Give the open ``temporary`` its name unless the name is taken; whether this call won."""
    try:
        os.link(temporary, path, follow_symlinks=False)
    except OSError as error:
        if os.fstat(file).st_nlink == 2:
            return True
        if error.errno in _NO_HARD_LINKS:
            return _renamed(temporary, path)
        if error.errno != errno.EEXIST:
            raise
        return False
    return True


def _renamed(temporary: Path, path: Path) -> bool:
    """:func:`_publish` by ``renameat2(RENAME_NOREPLACE)``, for file systems without hard links."""
    code = errno.ENOSYS
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        here, no_replace = -100, 1
        if libc.renameat2(here, os.fsencode(temporary), here, os.fsencode(path), no_replace) == 0:
            return True
        code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    if code not in _NO_HARD_LINKS:
        raise OSError(code, os.strerror(code), str(path))
    raise MailboxUnsupported(
        f"The file system of {path.parent} has neither hard links nor an exclusive rename.",
        "Use a directory on another file system, or an object store.",
    )


def _flush_directory(directory: Path) -> None:
    """Make new names in ``directory`` durable, where directories can be opened and still exist."""
    with suppress(FileNotFoundError, PermissionError, NotADirectoryError):
        file = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _explained(error: OSError, root: Path) -> MailboxError:
    """The fault in the mailbox's terms: passing, or lasting with what to do about it."""
    reason = f"{os.strerror(error.errno) if error.errno else error} ({error.filename or root})"
    if not root.is_dir():
        return MailboxDenied(f"The directory {root} is gone: {reason}.", "Check that its file system is mounted.")
    if error.errno in _DENIED:
        return MailboxDenied(f"The directory {root} refuses: {reason}.", "Check owner, permissions and mount options.")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MailboxUnavailable(f"The directory {root} is full: {reason}.", "Free some space; work goes on then.")
    return MailboxUnavailable(f"The directory {root} does not answer as it should: {reason}.")
