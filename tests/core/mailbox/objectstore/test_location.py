"""URLs become the settings each store needs, and credentials in them are refused unread."""

import pytest

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.mailbox.objectstore.location import S3Location, location_from_url, parsed_url, s3_location


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)


def test_amazon() -> None:
    assert location_from_url("s3://bucket/some/run") == S3Location("bucket", "some/run")
    assert location_from_url("s3://bucket?region=eu-west-1") == S3Location("bucket", "", region="eu-west-1")
    assert location_from_url("s3://dotted.bucket/run").path_style, "a wildcard certificate does not cover the dot"


def test_another_endpoint_is_spoken_to_plainly() -> None:
    assert location_from_url("s3://bucket/run/?endpoint_url=https://host:9000/&max_concurrency=4") == S3Location(
        "bucket", "run", "https://host:9000", "us-east-1", "when_required", path_style=True, max_concurrency=4
    )


def test_presets() -> None:
    assert location_from_url("hf://me/bucket/runs/1") == S3Location(
        "bucket", "runs/1", "https://s3.hf.co/me", "us-east-1", "when_required", path_style=True
    )
    assert location_from_url("r2://account/bucket/run") == S3Location(
        "bucket",
        "run",
        "https://account.r2.cloudflarestorage.com",
        "auto",
        "when_required",
        path_style=True,
        equal_parts=True,
    )
    plain = S3Location("bucket", "run", "http://host:9000", "us-east-1", "when_required", path_style=True)
    assert location_from_url("minio://host:9000/bucket/run?tls=false") == plain
    assert location_from_url("ceph://host/bucket").endpoint_url == "https://host"


def test_the_variables_of_aws_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://other:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    assert s3_location("bucket").endpoint_url == "http://other:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3:2")
    location = s3_location("bucket")
    assert (location.endpoint_url, location.region) == ("http://s3:2", "eu-north-1")
    assert s3_location("bucket", region="here", endpoint_url="http://given:3").endpoint_url == "http://given:3"


def test_what_is_given_wins() -> None:
    location = s3_location("bucket", endpoint_url="http://host", request_checksums="when_supported", region="x")
    assert (location.request_checksums, location.region) == ("when_supported", "x")


@pytest.mark.parametrize("url", ["s3://bucket/run", "s3://bucket", "s3://bucket/run?endpoint_url=http://host:1"])
def test_the_url_opens_the_same_location_again(url: str) -> None:
    location = location_from_url(url)
    assert location_from_url(location.url) == location
    assert location.url == url


@pytest.mark.parametrize(
    "url",
    [
        "s3:///run",
        "s3://bucket/a/../b",
        "s3://bucket/.hidden",
        "s3://bu cket/run",
        "s3://bucket/run?regoin=x",
        "s3://bucket/run?backend=boto3",
        "s3://bucket/run?request_checksums=never",
        "s3://bucket/run?max_concurrency=0",
        "s3://bucket/run?max_concurrency=many",
        "s3://bucket/run?endpoint_url=host:9000",
        "s3://bucket/run?endpoint_url=ftp://host",
        "s3://bucket/run?endpoint_url=http://host?x=1",
        "r2://account",
        "hf://me",
        "minio://host:9000",
        "minio://host/bucket?tls=maybe",
    ],
)
def test_a_url_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        location_from_url(url)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "url",
    ["s3://AKIACANARY:canary-secret@bucket/run", "s3://bucket/run?endpoint_url=http://AKIACANARY:canary-secret@host"],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        location_from_url(url)
    assert "canary" not in str(caught.value).lower()


def test_parts_of_a_url() -> None:
    parts = parsed_url("GS://bucket//a/b/?account=x")
    assert (parts.scheme, parts.host, parts.path, parts.query) == ("gs", "bucket", ("a", "b"), {"account": "x"})
