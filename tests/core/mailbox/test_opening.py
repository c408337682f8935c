"""URLs and paths open what they name, or say what is wrong and what to do."""

import asyncio
import builtins
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from gradientmail_core.errors import ConfigurationError, MailboxDenied
from gradientmail_core.mailbox import DirectoryMailbox, MemoryMailbox, open_mailbox


def test_equal_memory_names_share_objects() -> None:
    async def work() -> None:
        await open_mailbox("memory://shared-name").put("a", b"1")
        assert await open_mailbox("memory://shared-name").get("a") == b"1"
        assert await open_mailbox("MEMORY://shared-name/").get("a") == b"1"
        assert await open_mailbox("memory://another").get("a") is None

    assert isinstance(open_mailbox("memory://x"), MemoryMailbox)
    asyncio.run(work())


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}", "FILE://{}"])
def test_a_directory_by_path_or_url(form: str, tmp_path: Path) -> None:
    mailbox = open_mailbox(form.format(tmp_path / "new" / "mailbox"))
    assert isinstance(mailbox, DirectoryMailbox)
    assert mailbox.url == (tmp_path / "new" / "mailbox").as_uri()


def test_a_path_object_and_escapes(tmp_path: Path) -> None:
    assert open_mailbox(tmp_path).url == tmp_path.as_uri()
    assert open_mailbox(f"file://{tmp_path}/a%20b").url == (tmp_path / "a b").as_uri()
    assert (tmp_path / "a b").is_dir()


def test_a_relative_path_and_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_mailbox("run").url == (tmp_path / "run").as_uri()
    assert open_mailbox("~/run").url == (tmp_path / "home" / "run").as_uri()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "  ",
        "a\0b",
        "memory://",
        "file://host/path",
        "file://",
        "s3:/bucket/run",
        "nosuchscheme://x",
        "s3://",
        "gs://",
    ],
)
def test_a_bad_url_names_cause_and_remedy(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        open_mailbox(url)
    assert caught.value.cause and caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_mailbox(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match="not a directory"):
            open_mailbox(path)


def test_a_missing_directory_is_made_only_on_request(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no directory"):
        open_mailbox(tmp_path / "typo", must_exist=True)
    assert not (tmp_path / "typo").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_denied(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(MailboxDenied):
        open_mailbox(tmp_path / "new")
    with pytest.raises(MailboxDenied):
        open_mailbox(tmp_path)
    open_mailbox(tmp_path, must_exist=True)


def test_permission_is_asked_for_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(MailboxDenied, match="permission"):
        open_mailbox(tmp_path)
    open_mailbox(tmp_path, must_exist=True)


@pytest.mark.parametrize(
    ("url", "extra"),
    [
        ("s3://bucket/run", "gradientmail[obstore]"),
        ("s3://bucket/run?backend=s3fs", "gradientmail[s3]"),
        ("hf://me/bucket/run", "gradientmail[s3]"),
        ("gs://bucket/run", "gradientmail[gcs]"),
        ("az://container/run", "gradientmail[azure]"),
    ],
)
def test_a_missing_library_names_the_extra(url: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = {"s3fs", "obstore", "gcsfs", "adlfs", "botocore"}
    find, load = importlib.util.find_spec, builtins.__import__

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] in libraries else find(name, package)

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        assert name.partition(".")[0] not in libraries, f"{name} was imported"
        return load(name, *arguments, **options)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigurationError) as caught:
        open_mailbox(url)
    assert extra in caught.value.remedy
