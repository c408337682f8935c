"""Credentials appear in nothing that a run leaves or says, whether its store takes them or not."""

import logging
import traceback
from pathlib import Path

import pytest

from gradientmail_core import DiLoCo, MailboxDenied, Session, open_mailbox
from gradientmail_core.cli import doctor, gc, status
from gradientmail_core.errors import GradientMailError
from gradientmail_core.events import Event, log_event
from gradientmail_core.mailbox.objectstore import Credentials, S3Mailbox
from gradientmail_core.sim.world import ToyModel
from tests.core.mailbox.servers import ACCESS_KEY, SECRET_KEY, S3Server, client

WRONG_SECRET = "a-secret-that-is-not-the-stores"
STRANGE_KEY = "AKIDNOBODYKNOWSTHISONE"
SETTINGS = DiLoCo(sync_every=5, fragments=1, overlap_steps=0, delta_codec="F32")


def run(url: str) -> tuple[Session, list[Event]]:
    """A whole node with the usual logging."""
    model, events = ToyModel(), list[Event]()
    callbacks = [events.append, log_event]
    with Session(model, mailbox=url, algorithm=SETTINGS, node="a", callbacks=callbacks) as session:
        for _ in range(15):
            model._flat -= 1e-3
            session.step(8)
    return session, events


def objects(server: S3Server, prefix: str) -> list[str]:
    """Every key and body that a run left, as text."""
    s3 = client(server.endpoint_url)
    keys = [found["Key"] for found in s3.list_objects_v2(Bucket=server.bucket, Prefix=prefix).get("Contents", [])]
    bodies = [s3.get_object(Bucket=server.bucket, Key=key)["Body"].read().decode("latin-1") for key in keys]
    return [*keys, *bodies]


@pytest.mark.parametrize("backend", ["obstore", "s3fs"])
def test_credentials_of_a_run_that_works_and_of_one_that_is_refused(
    seaweedfs_server: S3Server,
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, logger="gradientmail")
    prefix, report, said = f"secret-{backend}", tmp_path / "doctor.json", list[str]()
    url = f"s3://{seaweedfs_server.bucket}/{prefix}?endpoint_url={seaweedfs_server.endpoint_url}&backend={backend}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    session, events = run(url)
    assert session.rounds_seen >= 3
    said += [repr(session), repr(session.__dict__), *(f"{event} {event!r}" for event in events)]
    said += objects(seaweedfs_server, f"{prefix}/")
    assert doctor.main([url, "--mebibytes", "1", "--races", "1", "--json", str(report)]) == 0
    said.append(report.read_text())
    for command in (status.main, gc.main):
        assert command([url, "--json", str(report)]) == 0
        said.append(report.read_text())
    for access_key, secret in ((ACCESS_KEY, WRONG_SECRET), (STRANGE_KEY, SECRET_KEY)):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        with pytest.raises(MailboxDenied) as caught:
            run(url)
        said += [str(caught.value), repr(caught.value), *traceback.format_exception(caught.value)]
        assert doctor.main([url, "--json", str(report)]) == 1
        said.append(report.read_text())
        for command in (status.main, gc.main):
            with pytest.raises(MailboxDenied) as caught:
                command([url, "--json", str(report)])
            said += [str(caught.value), repr(caught.value), *traceback.format_exception(caught.value)]
        said += [repr(open_mailbox(url)), repr(open_mailbox(url).__dict__)]
    printed = capsys.readouterr()
    said += [printed.out, printed.err, caplog.text]
    text = "\n".join(said)
    assert "refused (403" in text and "closed round" in text and "tape/" in text and "is unfit" in text
    assert "nobody is training" in text and "requests." in text
    for canary in (ACCESS_KEY, SECRET_KEY, WRONG_SECRET, STRANGE_KEY):
        assert canary not in text


def test_credentials_in_a_url_are_refused_without_being_quoted() -> None:
    for url in (
        f"s3://{ACCESS_KEY}:{SECRET_KEY}@bucket/run",
        f"s3://bucket/run?endpoint_url=http://{ACCESS_KEY}:{SECRET_KEY}@host",
        f"s3://bucket/run?secret={SECRET_KEY}",
        f"az://container/run?account_key={SECRET_KEY}",
    ):
        with pytest.raises(GradientMailError) as caught:
            open_mailbox(url)
        text = f"{caught.value} {caught.value!r}"
        assert SECRET_KEY not in text and ACCESS_KEY not in text


def test_credentials_given_by_the_program_are_not_shown() -> None:
    mailbox = S3Mailbox(
        "bucket", "run", credential_provider=lambda: Credentials(ACCESS_KEY, SECRET_KEY, "token-canary")
    )
    text = repr(mailbox) + repr(Credentials(ACCESS_KEY, SECRET_KEY, "token-canary")) + str(mailbox.url)
    assert not any(canary in text for canary in (ACCESS_KEY, SECRET_KEY, "token-canary"))
