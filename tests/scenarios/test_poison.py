"""One node of four sends what must not be merged, strangers litter the store: the clean nodes' round, bit for bit."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradientmail_core.events import ObjectIgnored
from gradientmail_core.protocol.exchange import get_section
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import DeltaKey, tape_key
from gradientmail_core.protocol.records import Estimates, RoundRecord
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


def played(poison: Any = None, *, litter: bool = False) -> tuple[RoundRecord, bytes, list[ObjectIgnored]]:
    """A round in which ``poison(found)`` gives the fourth node's body; None for a node that leaves without a word."""

    async def main(place: Place) -> tuple[RoundRecord, bytes, list[ObjectIgnored]]:
        found = await opened(place)
        if litter:
            await littered(found)
        if poison is None:
            found.live("d", state="x", beat=9)
        else:
            await place.mailbox.put(DeltaKey(found.chain.round, "d").path, poison(found))
        record, theta = await closed(found)
        return record, theta, place.events(ObjectIgnored)

    return virtually(main)


async def littered(found: Bench) -> None:
    """Junk under every prefix."""
    keys = (
        tape_key(found.chain.round, 0), "live/leases/e/0000000001-t0-nothex", "live/heads/000/readme",
        DeltaKey(found.chain.round, "e").path, f"live/claims/{found.chain.round:010d}/junk", "blobs/readme",
        "units/q/0/x", "ranks/x", "barriers/b/x", "creation/77", "syncer/x", "notes",
    )  # fmt: skip
    for key in keys:
        await found.place.mailbox.put(key, JUNK)
    await asyncio.sleep(0)


def body(delta: Any = 0.5, **changes: Any) -> Any:
    """The fourth node's snapshot with this delta and these fields."""
    return lambda found: snapshot_body(found.run, found.chain.head, found.others["d"], delta, **changes)


def with_tokens(text: str) -> Any:
    """A snapshot that claims its tokens in so many characters, of a digest that fits."""

    def forged(found: Bench) -> bytes:
        honest = body(tokens=160)(found)
        return honest.replace(b'\\"tokens\\":160', b'\\"tokens\\":' + text.encode().replace(b'"', b'\\"'))

    return forged


def with_another_shape(found: Bench) -> bytes:
    other = replace(found.chain.head, fragment=1)
    wrong = replace(found.run, layouts=(found.run.layouts[0], replace(found.run.layouts[1], pieces=())))
    assert wrong.fragments == 2
    return snapshot_body(found.run, other, found.others["d"])[:-64]


POISON = {
    "nan": (body(np.nan), {"nonfinite"}),
    "inf": (body(np.inf), {"nonfinite"}),
    "1e30": (body(1e30), {"outlier", "nonfinite"}),
    "10000 times the median": (body(5000.0), {"outlier"}),
    "another shape": (with_another_shape, {"corrupt", "schema"}),
    "truncated": (lambda found: body()(found)[:-7], {"corrupt"}),
    "no snapshot": (lambda found: JUNK, {"corrupt"}),
    "zero steps": (body(steps=0), {"zero_steps"}),
    "stale": (body(record="f" * 64), {"stale"}),
    "tokens -1": (with_tokens("-1 "), {"run", "corrupt"}),
    "tokens 10**200": (with_tokens(str(10**200)), {"run", "corrupt"}),
    "tokens as text": (with_tokens('"7"'), {"run", "corrupt"}),
}


@pytest.fixture(scope="module")
def clean() -> tuple[RoundRecord, bytes]:
    """The round of the three clean nodes alone."""
    record, theta, _ = played()
    assert [participant.node for participant in record.participants] == ["a", "b", "c"]
    return record, theta


@pytest.mark.parametrize("kind", sorted(POISON))
def test_poison_is_refused_once_with_its_reason_and_changes_no_bit(clean: tuple[RoundRecord, bytes], kind: str) -> None:
    poison, reasons = POISON[kind]
    record, theta, _ = played(poison)
    assert theta == clean[1]
    assert [participant.node for participant in record.participants] == ["a", "b", "c"]
    assert [refusal.node for refusal in record.refusals] == ["d"]
    assert record.refusals[0].reason in reasons


@pytest.mark.parametrize("tokens", [10**9, 2**53])
def test_lying_tokens_weigh_no_more_than_an_honest_claim(tokens: int) -> None:
    honest, honest_theta, _ = played(body(tokens=STEPS * HONEST.tokens_per_step_max))
    record, theta, _ = played(body(tokens=tokens))
    assert theta == honest_theta
    assert [one.weight for one in record.participants] == [one.weight for one in honest.participants]


def test_who_claims_no_tokens_has_next_to_no_weight() -> None:
    record, _, _ = played(body(tokens=0))
    weights = {participant.node: participant.weight for participant in record.participants}
    assert weights["d"] < 1e-3 < weights["a"]


def test_junk_under_every_prefix_costs_no_round_and_no_bit(clean: tuple[RoundRecord, bytes]) -> None:
    record, theta, ignored = played(litter=True)
    assert theta == clean[1] and len(record.participants) == 3
    assert len({event.key for event in ignored}) == len(ignored), "reported once each"
