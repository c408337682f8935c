"""LIST by hand: what is asked, what is parsed, and what is refused."""

import io
from typing import ClassVar

import pytest

from gradientmail_core.mailbox import Entry
from gradientmail_core.mailbox.objectstore.listing import listing_page, parsed_page
from gradientmail_core.mailbox.objectstore.location import S3Location
from gradientmail_core.mailbox.objectstore.signed import Refused
from tests.core.mailbox.objectstore.scripted import Reply, given_credentials, in_turn, listing_document, scripted


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
    with pytest.raises(Refused) as caught:
        parsed_page(document)
    assert caught.value.answer.status is None


def test_an_endless_answer_is_cut_off() -> None:
    class Endless(io.RawIOBase):
        asked = 0
        headers: ClassVar[dict[str, str]] = {}

        def read(self, size: int = -1) -> bytes:
            Endless.asked = size
            return b"<a>" + b" " * 1000

    with pytest.raises(Refused):
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
