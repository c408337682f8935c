"""One node of four sends what must not be merged: the clean nodes' round, bit for bit, and the reason in the record."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradientmail_core.engine.closing import SNAPSHOT_METADATA
from gradientmail_core.protocol.exchange import get_section
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import DeltaKey
from gradientmail_core.protocol.records import Estimates, RoundRecord
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.payload import Malformed, encode_payload, parse_payload
from gradientmail_core.tensors.schema import FragmentLayout, Piece
from tests.core.engine.parts import SETTINGS, Bench, Place, snapshot_body, virtually

CLEAN = {"a": 0.5, "b": 0.4, "c": 0.6}
JUNK = b"\x00 nobody's object"
STEPS = 20
HONEST = replace(SETTINGS, tokens_per_step_max=8)


async def opened(place: Place) -> Bench:
    """A chain some rounds old, so that outliers are known, with three clean snapshots and all four nodes alive."""
    found = await Bench.of(place, "a", HONEST)
    found.chain.head = replace(found.chain.head, version=5, estimates=Estimates(norm=1.0))
    found.chain.theta = found.chain.theta.copy()
    found.board.open_rounds[0] = found.chain.round
    found.live(*"abcd")
    found.publish(CLEAN["a"])
    for node in "bc":
        await found.snapshot(node, CLEAN[node])
    return found


async def closed(found: Bench) -> tuple[RoundRecord, bytes]:
    """Close the open round; its record, and the bytes of the committed parameters."""
    head = await found.advanced(versions=1 - found.chain.head.version)
    assert head.record is not None
    section = head.section("theta")
    assert section is not None
    theta = await get_section(found.place.mailbox, found.host.clock, section, found.chain.layout)
    assert not isinstance(theta, Rejected)
    return head.record, theta.tobytes()


def played(poison: Any = None) -> tuple[RoundRecord, bytes]:
    """A round in which ``poison(found)`` gives the fourth node's body; None for a node that leaves without a word."""

    async def main(place: Place) -> tuple[RoundRecord, bytes]:
        found = await opened(place)
        if poison is None:
            found.live("d", state="x", beat=9)
        else:
            await place.mailbox.put(DeltaKey(found.chain.round, "d").path, poison(found))
        return await closed(found)

    return virtually(main)


def body(delta: Any = 0.5, **changes: Any) -> Any:
    """The fourth node's snapshot with this delta and these fields."""
    return lambda found: snapshot_body(found.run, found.chain.head, found.others["d"], delta, **changes)


def forged(found: Bench, layout: FragmentLayout, values: Any, tokens: str = "160") -> bytes:
    """The fourth node's snapshot in a sound file of another layout, or with its tokens in so many characters."""
    own, codec = found.chain.layout, codec_named("F32")
    honest = parse_payload(body(tokens=160)(found), own, codec)
    assert not isinstance(honest, Malformed)
    text = honest.metadata[SNAPSHOT_METADATA].replace('"tokens":160', f'"tokens":{tokens}')
    return bytes(encode_payload(layout, codec, values, lambda _: {SNAPSHOT_METADATA: text}))


def with_tokens(text: str) -> Any:
    """A snapshot that claims its tokens in so many characters, of a digest that fits."""
    return lambda found: forged(found, found.chain.layout, np.full(found.chain.layout.size, 0.5, np.float32), text)


def with_another_shape(found: Bench) -> bytes:
    return forged(found, FragmentLayout(0, (Piece("another", (3, 5), 0),)), np.ones(15, np.float32))


POISON = {
    "nan": (body(np.nan), {"nonfinite"}),
    "inf": (body(np.inf), {"nonfinite"}),
    "1e30": (body(1e30), {"outlier", "nonfinite"}),
    "10000 times the median": (body(5000.0), {"outlier"}),
    "another shape": (with_another_shape, {"schema"}),
    "truncated": (lambda found: body()(found)[:-7], {"corrupt"}),
    "no snapshot": (lambda found: JUNK, {"corrupt"}),
    "zero steps": (body(steps=0), {"zero_steps"}),
    "stale": (body(record="f" * 64), {"stale"}),
    "tokens -1": (with_tokens("-1"), {"run"}),
    "tokens 10**200": (with_tokens(str(10**200)), {"run"}),
    "tokens as text": (with_tokens('"7"'), {"run"}),
    "tokens NaN": (with_tokens("NaN"), {"run"}),
    "tokens 160.0": (with_tokens("160.0"), {"run"}),
}


@pytest.fixture(scope="module")
def clean() -> tuple[RoundRecord, bytes]:
    """The round of the three clean nodes alone."""
    record, theta = played()
    assert [participant.node for participant in record.participants] == ["a", "b", "c"]
    return record, theta


@pytest.mark.parametrize("kind", sorted(POISON))
def test_poison_is_refused_once_with_its_reason_and_changes_no_bit(clean: tuple[RoundRecord, bytes], kind: str) -> None:
    poison, reasons = POISON[kind]
    record, theta = played(poison)
    assert theta == clean[1]
    assert [participant.node for participant in record.participants] == ["a", "b", "c"]
    assert [refusal.node for refusal in record.refusals] == ["d"]
    assert record.refusals[0].reason in reasons


@pytest.mark.parametrize("tokens", [10**9, 2**53])
def test_lying_tokens_weigh_no_more_than_an_honest_claim(tokens: int) -> None:
    honest, honest_theta = played(body(tokens=STEPS * HONEST.tokens_per_step_max))
    record, theta = played(body(tokens=tokens))
    assert theta == honest_theta
    assert [one.weight for one in record.participants] == [one.weight for one in honest.participants]


def test_who_claims_no_tokens_has_next_to_no_weight() -> None:
    record, _ = played(body(tokens=0))
    weights = {participant.node: participant.weight for participant in record.participants}
    assert weights["d"] < 1e-3 < weights["a"]
