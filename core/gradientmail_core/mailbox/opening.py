"""Opening a mailbox by its URL.

====================================  ==============================================================
``memory://name``                     this process only; equal names share their objects
``file:///path`` or a plain path      a directory, local or on a shared file system
``s3://bucket/prefix``                S3 and stores that speak its protocol
``r2://account/bucket/prefix``        Cloudflare R2
``minio://host:port/bucket/prefix``   MinIO (``?tls=false`` for plain HTTP)
``ceph://host:port/bucket/prefix``    Ceph's object gateway, likewise
``hf://namespace/bucket/prefix``      Hugging Face Storage Buckets
``gs://bucket/prefix``                Google Cloud Storage
``az://container/prefix``             Azure Blob Storage
====================================  ==============================================================

Object stores take settings as a query, such as ``?endpoint_url=https://host&region=eu-west-1``, for Azure
``?account=name``; ``backend`` picks a client where several are installed (``obstore``, and ``s3fs`` or ``fsspec``).
Credentials come from the environment or the store's own configuration files, never from a URL.
"""

import os
import re
import threading
from urllib.parse import unquote, urlsplit

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.mailbox.base import Mailbox
from gradientmail_core.mailbox.directory import DirectoryMailbox
from gradientmail_core.mailbox.memory import MemoryMailbox

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_MISTYPED_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_memory: dict[str, MemoryMailbox] = {}
_memory_lock = threading.Lock()


def open_mailbox(url: str | os.PathLike[str], *, must_exist: bool = False) -> Mailbox:
    """The mailbox at ``url``. A missing directory is made, unless ``must_exist``.

    Raises :class:`ConfigurationError` for a URL that cannot work or a library that is not installed, and
    :class:`MailboxDenied` for a directory without permission.
    """
    text = os.fspath(url)
    scheme = _SCHEME.match(text)
    match scheme and scheme[1].lower():
        case None:
            return DirectoryMailbox(_plain_path(text), must_exist=must_exist)
        case "file":
            return DirectoryMailbox(_file_path(text), must_exist=must_exist)
        case "memory":
            return _shared_memory(text)
        case _:
            from gradientmail_core.mailbox.objectstore import open_object_store

            return open_object_store(text)


def _plain_path(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ConfigurationError(
            f"The mailbox {text!r} names no place.", "Give a directory or a URL such as s3://bucket/run."
        )
    if _MISTYPED_SCHEME.match(text):
        raise ConfigurationError(f"{text!r} is neither a path nor a URL.", "A URL has '//' after its scheme.")
    return text


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigurationError(
            f"{url!r} names another machine or no absolute path.", "Write file:///absolute/path, or just the path."
        )
    return unquote(parts.path)


def _shared_memory(url: str) -> MemoryMailbox:
    name = url.split("://", 1)[1].strip("/")
    if not name:
        raise ConfigurationError(f"{url!r} has no name.", "Write memory://name.")
    with _memory_lock:
        return _memory.setdefault(name, MemoryMailbox(name))
