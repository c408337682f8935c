"""`status` of real runs: one line says it, the rest explains it, and nothing is written."""

import json
from pathlib import Path

import pytest

from gradientmail_core import MemoryMailbox, Session
from gradientmail_core.cli.status import main
from gradientmail_core.errors import ConfigurationError, MailboxDenied, RunMismatch
from gradientmail_core.mailbox import open_mailbox
from gradientmail_core.sim.world import ToyModel
from tests.core.cli.runs import DILOCO, GOSSIP, train
from tests.core.mailbox.servers import ACCESS_KEY, SECRET_KEY, S3Server


def stamps(place: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in place.rglob("*")}


def test_a_run_in_training_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, report = tmp_path / "run", tmp_path / "status.json"
    model = ToyModel()
    with Session(model, mailbox=str(place), algorithm=DILOCO, node="a") as session:
        for _ in range(15):
            model._flat -= 1e-3
            session.step(8)
        before = stamps(place)
        assert main([str(place), "--json", str(report)]) == 0
    said = capsys.readouterr().out
    assert "training: 1 node, version 3, 0 s ago" in said or "training: 1 node, version 3, 1 s ago" in said
    assert before and "a  training, step 15" in said and "fragment 0, step 12: a (5 steps)" in said
    found = json.loads(report.read_text())
    assert found["verdict"].startswith("training: 1 node") and found["parameters"] == 128
    assert found["requests"] <= 20 and f"{found['requests']} requests" in said
    before = stamps(place)
    assert main([str(place)]) == 0
    assert "nobody is training: version 3" in capsys.readouterr().out
    assert stamps(place) == before


def test_a_gossip_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(str(tmp_path), 30, algorithm=GOSSIP)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "factored_gossip" in said and "nobody is training: mean of round" in said


def test_what_nodes_train_with_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(4, 4)
    with Session(model, mailbox=str(tmp_path), algorithm=DILOCO, node="a") as session:
        session.step(8)
        main([str(tmp_path)])
    assert "with torch" in capsys.readouterr().out


def test_a_run_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(open_mailbox("memory://status-of"), MemoryMailbox)
    train("memory://status-of")
    assert main(["memory://status-of"]) == 0
    assert "nobody is training: version 3" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["obstore", "s3fs"])
def test_a_run_in_a_bucket(
    moto_server: S3Server, backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    url = moto_server.url(f"status-{backend}", "s3fs" if backend == "s3fs" else "obstore")
    train(url)
    assert main([url]) == 0
    said = capsys.readouterr().out
    assert "nobody is training: version 3" in said and "s ago" in said and "unknown" not in said
    assert SECRET_KEY not in said and ACCESS_KEY not in said
    with pytest.raises(MailboxDenied, match="NoSuchBucket"):
        main([S3Server(moto_server.endpoint_url, "nosuchbucket").url("run", "obstore")])


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunMismatch, match="There is no run at"):
        main([str(tmp_path)])
    with pytest.raises(ConfigurationError, match="no directory"):
        main([str(tmp_path / "typo")])
    with pytest.raises(ConfigurationError, match="neither a path nor a URL"):
        main(["s3:/bucket/run"])
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(RunMismatch, match=r"photo\.jpg"):
        main([str(tmp_path)])
