"""A node's claims are fresh, and an earlier process of the same node is told apart from this one."""

from gradientmail_core.protocol.records import Claim, parse_claim
from tests.core.patterns.party import RUN, Town, in_town


def test_claims_are_fresh_and_an_older_self_is_known() -> None:
    async def main(town: Town) -> None:
        before, now, other = town.party("a"), town.party("a"), town.party("b")
        first, second = now.claim(), now.claim()
        assert first.nonce != second.nonce and isinstance(parse_claim(first.encoded(), RUN), Claim)
        assert now.is_older_self(before.claim())
        assert not now.is_older_self(first) and not now.is_older_self(other.claim())

    in_town(main)
