"""`gc` on real stores: says first, removes then, and leaves what is not a run's."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from gradientmail_core.cli.gc import main
from gradientmail_core.errors import ConfigurationError, MailboxDenied, RunMismatch
from gradientmail_core.protocol.keys import DeltaKey, blob_key
from tests.core.cli.runs import GOSSIP, train
from tests.core.mailbox.servers import ACCESS_KEY, SECRET_KEY, S3Server, client

ORPHAN, SNAPSHOT = blob_key(2, "dead", "ab" * 32), DeltaKey(3, "dead").path
BODY = b"x" * 1000
PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def aged(place: Path, seconds: float = 7200.0) -> None:
    """Make every file of a directory that much older."""
    for path in place.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - seconds,) * 2)


def left_in(place: Path) -> None:
    for key in (ORPHAN, SNAPSHOT):
        (place / key).parent.mkdir(parents=True, exist_ok=True)
        (place / key).write_bytes(BODY)
    (place / "blobs" / f".{'0' * 16}.tmp").write_bytes(BODY)
    (place / "mine.txt").write_bytes(b"mine")


def files(place: Path) -> set[str]:
    found = os.walk(place)  # which passes over what a cleaner removes meanwhile
    return {os.path.relpath(os.path.join(folder, name), place) for folder, _, names in found for name in names}


def test_a_dry_run_says_and_the_next_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, report = tmp_path / "run", tmp_path / "out" / "gc.json"
    train(str(place))
    left_in(place)
    before = files(place)
    assert main([str(place), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "Clean." in said and "more are left for now" in said and files(place) == before
    aged(place)
    assert main([str(place), "--dry-run", "--json", str(report)]) == 0
    said = capsys.readouterr().out
    assert "would be removed" in said and files(place) == before
    found = json.loads(report.read_text())
    assert found["removed"]["payloads"] == found["removed"]["snapshots"] == {"objects": 1, "bytes": 1000}
    assert found["removed"]["unfinished uploads"] == {"objects": 1, "bytes": 1000}
    assert main([str(place), "--json", str(report)]) == 0
    assert json.loads(report.read_text())["removed"] == found["removed"]
    gone = before - files(place)
    assert {ORPHAN, SNAPSHOT} < gone and all(name.startswith(("blobs/", "live/", "creation/")) for name in gone)
    assert main([str(place)]) == 0
    assert "Clean." in capsys.readouterr().out
    train(str(place), node="b")


def test_beside_a_node_that_lives_open_rounds_and_young_uploads_stay(tmp_path: Path) -> None:
    place = tmp_path / "run"
    train(str(place))
    left_in(place)
    aged(place)
    (place / "live/leases/b").mkdir()
    (place / f"live/leases/b/0000000000-t0-{'0' * 16}").write_bytes(b"{}")
    assert main([str(place)]) == 0
    assert ORPHAN not in files(place) and (place / "blobs" / f".{'0' * 16}.tmp").exists()


def test_a_gossip_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "run"
    train(str(place), 60, algorithm=GOSSIP)
    (place / "live/gossip/0000000001").mkdir(exist_ok=True)
    (place / "live/gossip/0000000001/start-0-000-dead").write_bytes(BODY)
    aged(place)
    assert main([str(place)]) == 0
    assert "shares" in capsys.readouterr().out
    train(str(place), 20, node="b", algorithm=GOSSIP)


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunMismatch, match="There is no run at"):
        main([str(tmp_path)])
    with pytest.raises(ConfigurationError, match="no directory"):
        main([str(tmp_path / "typo")])
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(RunMismatch, match=r"photo\.jpg"):
        main([str(tmp_path)])
    assert files(tmp_path) == {"photo.jpg"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
def test_a_place_that_may_not_be_written_is_said(tmp_path: Path) -> None:
    train(str(tmp_path))
    tmp_path.chmod(0o500)
    with pytest.raises(MailboxDenied, match="permission"):
        main([str(tmp_path)])
    tmp_path.chmod(0o700)


def test_a_cleaner_killed_in_the_middle_is_begun_again(tmp_path: Path) -> None:
    place = tmp_path / "run"
    train(str(place))
    for node in range(300):
        (place / DeltaKey(3, f"dead-{node}").path).parent.mkdir(parents=True, exist_ok=True)
        (place / DeltaKey(3, f"dead-{node}").path).write_bytes(BODY)
    aged(place)
    program = "import sys; from gradientmail_core.cli.gc import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", program, str(place)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as cleaner:
        before = len(files(place))
        while len(files(place)) == before and cleaner.poll() is None:
            time.sleep(0.005)
        cleaner.send_signal(signal.SIGKILL)
    assert cleaner.returncode == -signal.SIGKILL and (place / "live/deltas/0000000003").exists()
    assert main([str(place)]) == 0
    assert not (place / "live/deltas/0000000003").exists()
    train(str(place), node="b")


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.mark.parametrize("backend", ["obstore", "s3fs"])
def test_a_bucket_with_unfinished_uploads_and_old_versions(
    moto_server: S3Server, keys: None, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    s3, bucket, prefix = client(moto_server.endpoint_url), f"versioned-{backend}", "run"
    s3.create_bucket(Bucket=bucket)
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    url = S3Server(moto_server.endpoint_url, bucket).url(prefix, "s3fs" if backend == "s3fs" else "obstore")
    train(url)
    s3.put_object(Bucket=bucket, Key=f"{prefix}/{ORPHAN}", Body=BODY)
    upload = s3.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/{SNAPSHOT}")["UploadId"]
    s3.upload_part(Bucket=bucket, Key=f"{prefix}/{SNAPSHOT}", UploadId=upload, PartNumber=1, Body=BODY)
    time.sleep(1.1)  # times of S3 are whole seconds
    assert main([url, "--older-than", "1ms", "--json", str(tmp_path / "gc.json")]) == 0
    removed = json.loads((tmp_path / "gc.json").read_text())["removed"]
    assert removed["payloads"] == removed["unfinished uploads"] == {"objects": 1, "bytes": 1000}
    said = capsys.readouterr().out
    assert "keeps old versions" in said and SECRET_KEY not in said and ACCESS_KEY not in said
    left = s3.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/{ORPHAN}")
    assert "Contents" not in left and not s3.list_multipart_uploads(Bucket=bucket).get("Uploads")


def test_a_bucket_that_refuses_is_said(seaweedfs_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(MailboxDenied, match="refused") as caught:
        main([seaweedfs_server.url("gc", "obstore")])
    assert "wrong" not in str(caught.value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with pytest.raises(MailboxDenied, match="NoSuchBucket"):
        main([S3Server(seaweedfs_server.endpoint_url, "nosuchbucket").url("gc", "obstore")])


def test_it_is_installed() -> None:
    commands = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["gradientmail.commands"]
    assert all(commands[name] == f"gradientmail_core.cli.{name}:main" for name in ("gc", "status"))
