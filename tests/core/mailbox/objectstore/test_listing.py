"""LIST by hand: the signature of the published example, what is parsed, and what is refused."""

import io
from datetime import UTC, datetime

import pytest

from gradientmail_core.mailbox import Entry
from gradientmail_core.mailbox.objectstore import Credentials
from gradientmail_core.mailbox.objectstore.listing import (
    ListingRefused,
    bucket_address,
    listing_page,
    parsed_page,
    signed_request,
)
from gradientmail_core.mailbox.objectstore.location import S3Location
from tests.core.mailbox.objectstore.scripted import Reply, given_credentials, in_turn, listing_document, scripted


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


def test_a_page_with_escapes_and_strangers() -> None:
    document = listing_document(["run/a", "run//b", "run/%C3%A4", "run/a+b%2B", "run/..", "run/%01"], "next")
    page = parsed_page(document)
    assert [entry.key for entry in page.entries] == ["run/a", "run//b", "run/ä", "run/a b+", "run/..", "run/\x01"]
    assert page.entries[0] == Entry("run/a", 1)
    assert page.token == "next"
    assert parsed_page(listing_document([])).token == ""


def test_a_page_without_a_name_space() -> None:
    assert parsed_page(b"<R><Contents><Key>a</Key><Size>7</Size></Contents></R>").entries == (Entry("a", 7),)


BOMB = (
    b'<!DOCTYPE a [<!ENTITY a "'
    + b"x" * 1000
    + b'">'
    + b"".join(b'<!ENTITY %c "%s">' % (98 + n, b"&%c;" % (97 + n) * 20) for n in range(8))
    + b"]><a>&i;</a>"
)


@pytest.mark.parametrize(
    "document",
    [b"", b"not xml", b"<a>", b"\xff\xfe", b"<a><Contents><Key>k</Key><Size>many</Size></Contents></a>", BOMB],
    ids=["empty", "text", "unfinished", "binary", "size", "bomb"],
)
def test_what_is_no_listing_is_refused(document: bytes) -> None:
    with pytest.raises(ListingRefused) as caught:
        parsed_page(document)
    assert caught.value.answer.status is None


def test_an_endless_answer_is_cut_off() -> None:
    class Endless(io.RawIOBase):
        asked = 0

        def read(self, size: int = -1) -> bytes:
            Endless.asked = size
            return b"<a>" + b" " * 1000

    with pytest.raises(ListingRefused):
        listing_page(S3Location("b"), given_credentials(), "", "", "", lambda request, timeout: Endless())
    assert 0 < Endless.asked < 100 << 20


def test_a_page_is_asked_for_in_full() -> None:
    with scripted(in_turn(Reply(body=listing_document(["run/live/a"])))) as endpoint:
        location = S3Location("bucket", endpoint_url=endpoint.url, path_style=True)
        page = listing_page(location, given_credentials(), "run/live/", "run/live/0", "t +/=")
    assert page.entries == (Entry("run/live/a", 1),)
    request = endpoint.requests[0]
    assert (request.method, request.path) == ("GET", "/bucket")
    assert request.query == {
        "list-type": "2",
        "encoding-type": "url",
        "prefix": "run/live/",
        "start-after": "run/live/0",
        "continuation-token": "t +/=",
    }
    assert request.headers["x-amz-security-token"] == given_credentials().session_token


def test_a_refusal_keeps_status_and_code() -> None:
    with scripted(in_turn(Reply(403, "AccessDenied"), Reply(503, body=b"busy"))) as endpoint:
        location = S3Location("bucket", endpoint_url=endpoint.url, path_style=True)
        for status, code in ((403, "AccessDenied"), (503, "")):
            with pytest.raises(ListingRefused) as caught:
                listing_page(location, given_credentials(), "", "", "")
            assert (caught.value.answer.status, caught.value.answer.code) == (status, code)
