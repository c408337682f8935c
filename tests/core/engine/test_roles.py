"""Roles in a lease: who never closes says so, and nobody waits for it to close."""

import pytest

from gradientmail_core.engine.roles import CLOSES_NOTHING, checked_role, state_of
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.keys import LeaseKey, parse_live
from gradientmail_core.protocol.leases import Timeouts, live_closers, live_learners, observed


def test_every_role_says_what_it_does() -> None:
    assert [state_of("both", doing) for doing in "jtwedx"] == list("jtwedx")  # type: ignore[arg-type]  # letters of states
    assert [state_of("learner", doing) for doing in "jtwedx"] == list("jlvpdx")  # type: ignore[arg-type]  # letters of states
    assert [state_of("syncer", doing) for doing in "jtwedx"] == list("jsssdx")  # type: ignore[arg-type]  # letters of states


@pytest.mark.parametrize("state", sorted(CLOSES_NOTHING))
def test_a_learners_lease_counts_for_quorums_and_never_for_closing(state: str) -> None:
    lease = LeaseKey("a", 3, state, 7, "0a" * 8)  # type: ignore[arg-type]  # a letter of a state
    assert parse_live(lease.path) == lease
    roster = observed(_nobody(), [lease], 0.0, Timeouts())
    assert live_closers(roster, 1.0, Timeouts()) == ()
    assert live_learners(roster, 1.0, Timeouts()) == (() if state == "p" else ("a",))


def test_a_learner_that_stands_still_is_not_waited_for() -> None:
    roster = observed(_nobody(), [LeaseKey("a", 3, "l", 7, "0a" * 8)], 0.0, Timeouts(lease=1000))
    assert live_learners(roster, 299.0, Timeouts(lease=1000)) == ("a",)
    assert live_learners(roster, 301.0, Timeouts(lease=1000)) == ()


def test_other_roles_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="both, learner, either, syncer"):
        checked_role("boss")


def _nobody():
    from gradientmail_core.protocol.leases import Roster

    return Roster()
