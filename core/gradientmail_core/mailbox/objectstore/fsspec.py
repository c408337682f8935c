"""Any file system of fsspec. Only those known to create exclusively may create at all.

fsspec's own default for an exclusive write asks whether the file exists and then writes, so two writers
may both succeed. A store reached that way serves a run with one named syncer, or none.
"""

import asyncio
import contextlib
import importlib.util
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

from gradientmail_core.errors import ConfigurationError, MailboxUnsupported, PayloadTooLarge
from gradientmail_core.mailbox.base import Body, Entry
from gradientmail_core.mailbox.objectstore.answers import Answer
from gradientmail_core.mailbox.objectstore.uploads import UPLOADS_UNLISTED
from gradientmail_core.mailbox.surroundings import Abandoned

Untyped: TypeAlias = Any  # fsspec has no types

WHOLE = 1 << 40  # larger than any body: one request per write
IN_ONE_REQUEST: Mapping[str, Mapping[str, object]] = {
    "gs": {"chunksize": WHOLE},
    "gcs": {"chunksize": WHOLE},
    "az": {},
    "abfs": {},
    "abfss": {},
}
"""Schemes whose ``mode="create"`` is exclusive, and what makes it a single request for a small record."""

UNSUITABLE = frozenset({"http", "https", "ftp", "git", "github", "zip", "tar", "data", "cached", "simplecache"})


def open_file_system(scheme: str, **settings: object) -> Untyped:
    """fsspec's file system for ``scheme``; :class:`ConfigurationError` if it, or its library, is not there."""
    if scheme in UNSUITABLE:
        raise ConfigurationError(
            f"{scheme}:// names no store that nodes can write to and create in.",
            "Use a directory, or a bucket: s3://, gs://, az://, hf://.",
        )
    if importlib.util.find_spec("fsspec") is None:
        raise ConfigurationError(f"{scheme}:// URLs need fsspec.", "Install it, or use another store.")
    import fsspec

    try:
        implementation = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError):
        raise ConfigurationError(
            f"No installed library knows {scheme}:// URLs.", "Install one, or check the URL."
        ) from None
    options = {"skip_instance_cache": True, "use_listings_cache": False}
    try:
        return implementation(**(options if implementation.async_impl else {}), **settings)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{implementation.__name__} cannot be opened with these settings ({type(error).__name__}).",
            "Check the URL's settings and the variables that the library reads.",
        ) from None


def azure_settings(query: Mapping[str, str]) -> dict[str, object]:
    """What adlfs is told of an ``az://`` URL: an endpoint of its own can be named only in a connection string."""
    account = query.get("account") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    endpoint_url = query.get("endpoint_url")
    if endpoint_url is None:
        return {"account_name": account} if account else {}
    parts = {"BlobEndpoint": endpoint_url, "AccountName": account}
    parts["AccountKey"] = os.environ.get("AZURE_STORAGE_ACCOUNT_KEY")
    parts["SharedAccessSignature"] = os.environ.get("AZURE_STORAGE_SAS_TOKEN")
    return {"connection_string": ";".join(f"{name}={value}" for name, value in parts.items() if value)}


class FsspecTransport:
    """One file system below ``bucket``: on fsspec's own event loop if it has async methods, else on threads."""

    def __init__(self, files: Untyped, scheme: str, bucket: str) -> None:
        self._files = files
        self._create_options = IN_ONE_REQUEST.get(scheme)
        self._bucket = bucket

    async def get(self, path: str, limit: int | None) -> bytes:
        if limit is None:
            whole: bytes = await self._call("cat_file", self._at(path))
            return whole
        if (await self._call("info", self._at(path)))["size"] > limit:
            raise PayloadTooLarge(f"{path} has more bytes than the {limit} expected of it.")
        body: bytes = await self._call("cat_file", self._at(path))
        return body

    async def put(self, path: str, body: Body) -> None:
        await self._call("pipe_file", self._at(path), bytes(body))

    async def create(self, path: str, body: Body) -> None:
        if self._create_options is None:
            raise MailboxUnsupported(
                f"{type(self._files).__name__} cannot create a file only if there is none.",
                "Use a store that can, or a run with one named syncer.",
            )
        await self._call("pipe_file", self._at(path), bytes(body), mode="create", **self._create_options)

    async def list(self, prefix: str, after: str) -> AsyncIterator[Sequence[Entry]]:
        directory = self._at(prefix.rpartition("/")[0])
        found = await self._call("find", directory, detail=True)
        cut = len(self._bucket) + 1
        yield [Entry(name.lstrip("/")[cut:], int(info["size"] or 0), _written(info)) for name, info in found.items()]

    async def delete(self, path: str) -> None:
        await self._call("rm_file", self._at(path))

    async def abandoned(self, prefix: str, older_than: float, remove: bool) -> Abandoned:
        raise MailboxUnsupported(*UPLOADS_UNLISTED)

    async def close(self) -> None:
        """Nothing to release: the library closes its connections when the file system is forgotten."""

    def answer(self, error: Exception) -> Answer | None:
        match error:
            case FileExistsError():
                return Answer(412)
            case FileNotFoundError():
                return Answer(404)
            case PermissionError():
                return Answer(403, "AccessDenied")
            case NotImplementedError():
                return Answer(501)
        for name in ("status_code", "status", "code"):
            if isinstance(status := getattr(error, name, None), int):
                return Answer(status)
        return Answer(None, type(error).__name__) if isinstance(error, OSError | TimeoutError) else None

    def _at(self, path: str) -> str:
        return f"{self._bucket}/{path}".rstrip("/")

    async def _call(self, name: str, *arguments: object, **options: object) -> Untyped:
        if not self._files.async_impl:
            return await asyncio.to_thread(getattr(self._files, name), *arguments, **options)
        request = getattr(self._files, f"_{name}")(*arguments, **options)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(request, self._files.loop))


def _written(info: Mapping[str, object]) -> float | None:
    """When a file was written, under the name that its library gives that; None where it gives none."""
    for name in ("mtime", "last_modified", "LastModified", "updated", "modified"):
        match info.get(name):
            case datetime() as moment:
                return moment.timestamp()
            case int() | float() as seconds:
                return float(seconds)
            case str() as text:
                with contextlib.suppress(ValueError):
                    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
            case _:
                pass
    return None
