"""What a bucket says of itself: every setting alone, and None for what it keeps to itself."""

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from gradientmail_core.mailbox import open_mailbox
from gradientmail_core.mailbox.objectstore.bucket import bucket_surroundings, clock_offset
from gradientmail_core.mailbox.objectstore.location import S3Location
from gradientmail_core.mailbox.surroundings import Described, Surroundings
from tests.core.mailbox.objectstore.scripted import Reply, Request, given_credentials, in_turn, scripted
from tests.core.mailbox.servers import S3Server, client


def said(**replies: Reply) -> Surroundings:
    """What a scripted bucket says, whose settings not named here may not be read."""

    def script(request: Request) -> Reply:
        (setting,) = request.query or {request.path: ""}
        return replies.get(setting.replace("-", "_"), Reply(403, "AccessDenied"))

    with scripted(script) as endpoint:
        location = S3Location("bucket", "runs/one", endpoint_url=endpoint.url, path_style=True)
        return bucket_surroundings(location, given_credentials())


def rules(*bodies: str) -> Reply:
    text = "".join(f"<Rule><ID>r</ID><Status>Enabled</Status>{body}</Rule>" for body in bodies)
    return Reply(body=f'<L xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{text}</L>'.encode())


def test_a_bucket_that_tells_nothing() -> None:
    assert said() == Surroundings()


def test_versioning_and_the_clock() -> None:
    ahead = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    on = Reply(body=b"<V><Status>Enabled</Status></V>", headers={"date": ahead})
    assert said(versioning=on).versioned is True
    assert said(versioning=Reply(body=b"<V/>")).versioned is False
    assert said(versioning=Reply(body=b"<V><Status>Suspended</Status></V>")).versioned is False
    assert said(versioning=Reply(body=b"not xml")).versioned is None


@pytest.mark.parametrize(
    ("rule", "expiring"),
    [
        ("<Filter/><Expiration><Days>7</Days></Expiration>", ("rule 'r' deletes objects after 7 days",)),
        ("<Prefix>runs/</Prefix><Expiration><Date>2027</Date></Expiration>", ("rule 'r' deletes objects on 2027",)),
        (
            "<Filter><And><Prefix>runs/one/blobs/</Prefix></And></Filter><Transition><Days>1</Days></Transition>",
            ("rule 'r' archives objects after 1 days",),
        ),
        ("<Filter><Prefix>logs/</Prefix></Filter><Expiration><Days>7</Days></Expiration>", ()),
        ("<Filter/><Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>", ()),
        ("<Filter/><NoncurrentVersionExpiration><NoncurrentDays>1</NoncurrentDays></NoncurrentVersionExpiration>", ()),
    ],
)
def test_lifecycle_rules_that_matter(rule: str, expiring: tuple[str, ...]) -> None:
    found = said(lifecycle=rules(rule))
    assert found.expiring == expiring
    assert found.old_versions_expire is ("Noncurrent" in rule)
    assert found.uploads_expire is False


def test_a_disabled_rule_and_none_at_all() -> None:
    off = Reply(body=b"<L><Rule><Status>Disabled</Status><Expiration><Days>1</Days></Expiration></Rule></L>")
    assert said(lifecycle=off).expiring == ()
    assert said(lifecycle=Reply(404, "NoSuchLifecycleConfiguration")).expiring == ()
    assert said(lifecycle=Reply(501, "NotImplemented")).expiring is None


def test_object_lock() -> None:
    on = Reply(body=b"<O><ObjectLockEnabled>Enabled</ObjectLockEnabled></O>")
    assert said(object_lock=on).locked is True
    assert said(object_lock=Reply(404, "ObjectLockConfigurationNotFoundError")).locked is False


def test_any_answer_tells_the_time() -> None:
    for status in (200, 403):
        with scripted(in_turn(Reply(status))) as endpoint:
            offset = clock_offset(endpoint.url)
        assert offset is not None and abs(offset) < 30.0
    assert clock_offset(endpoint.url) is None


@pytest.mark.parametrize("backend", ["s3fs", "obstore"])
def test_a_real_server_is_asked_whatever_the_client(
    moto_server: S3Server, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    bucket = f"described-{backend}"
    s3 = client(moto_server.endpoint_url)
    s3.create_bucket(Bucket=bucket)
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    rule = {"ID": "sweep", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 3}}
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [rule]})

    async def work() -> Surroundings:
        mailbox = open_mailbox(f"s3://{bucket}/run?endpoint_url={moto_server.endpoint_url}&backend={backend}")
        assert isinstance(mailbox, Described)
        found = await mailbox.surroundings()
        await mailbox.close()
        return found

    found = asyncio.run(work())
    assert found.versioned is True and found.expiring == ("rule 'sweep' deletes objects after 3 days",)
    assert found.clock_offset is not None and abs(found.clock_offset) < 30.0
