"""Requests signed by hand: the published example, addresses, objects, and what is kept of a refusal."""

from datetime import UTC, datetime

import pytest

from gradientmail_core.mailbox.objectstore import Credentials
from gradientmail_core.mailbox.objectstore.location import S3Location
from gradientmail_core.mailbox.objectstore.signed import Refused, asked, bucket_address, signed_request
from tests.core.mailbox.objectstore.scripted import CANARIES, Reply, given_credentials, in_turn, scripted


def test_the_signature_is_that_of_amazons_example() -> None:
    """'GET Bucket (List Objects)' in the S3 API reference, Signature Calculations for the Authorization Header."""
    location = S3Location("examplebucket", region="us-east-1", endpoint_url="https://s3.amazonaws.com")
    keys = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    now = datetime(2013, 5, 24, tzinfo=UTC)
    request = signed_request(location, keys, {"max-keys": "2", "prefix": "J"}, now)
    assert request.full_url == "https://examplebucket.s3.amazonaws.com/?max-keys=2&prefix=J"
    expected = "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    assert (request.get_header("Authorization") or "").endswith(f"Signature={expected}")


@pytest.mark.parametrize(
    ("location", "address"),
    [
        (S3Location("b"), "https://b.s3.us-east-1.amazonaws.com/"),
        (S3Location("b", region="cn-north-1"), "https://b.s3.cn-north-1.amazonaws.com.cn/"),
        (S3Location("b.c", region="eu-west-1", path_style=True), "https://s3.eu-west-1.amazonaws.com/b.c"),
        (S3Location("b", endpoint_url="https://s3.hf.co/me", path_style=True), "https://s3.hf.co/me/b"),
    ],
)
def test_addresses(location: S3Location, address: str) -> None:
    assert bucket_address(location) == address


def test_a_refusal_keeps_status_and_code() -> None:
    with scripted(in_turn(Reply(403, "AccessDenied"), Reply(503, body=b"busy"))) as endpoint:
        location = S3Location("bucket", endpoint_url=endpoint.url, path_style=True)
        for status, code in ((403, "AccessDenied"), (503, "")):
            with pytest.raises(Refused) as caught:
                asked(location, given_credentials(), {})
            assert (caught.value.answer.status, caught.value.answer.code) == (status, code)
            assert not any(canary in str(caught.value) for canary in CANARIES)


def test_an_object_is_asked_for_by_method_and_key() -> None:
    date = "Mon, 30 Nov 2026 01:02:03 GMT"
    with scripted(in_turn(Reply(204, headers={"date": date}))) as endpoint:
        location = S3Location("bucket", endpoint_url=endpoint.url, path_style=True)
        found = asked(location, given_credentials(), {"uploadId": "a b"}, method="DELETE", key="run/a b")
    assert found.body == b"" and found.date
    (request,) = endpoint.requests
    assert (request.method, request.path, request.query) == ("DELETE", "/bucket/run/a%20b", {"uploadId": "a b"})
