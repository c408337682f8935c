"""Patience: neither time alone nor looks alone tell that an object is lost."""

from gradientmail_core.engine.patience import MISSES_LEAST, Patience
from tests.core.engine.parts import TIMEOUTS, Place, virtually

UNTIL = 12.0


def looks(*began: float) -> Patience:
    """Patience until ``UNTIL`` after looks in vain that began then."""
    patience = Patience(UNTIL)
    for at in began:
        patience = patience.missed(at)
    return patience


def test_it_lasts_for_the_lease_time_out() -> None:
    async def main(place: Place) -> None:
        host = place.host()
        assert Patience.starting(host).until == host.clock.now() + TIMEOUTS.lease

    virtually(main)


def test_many_looks_before_the_time_out_are_not_enough() -> None:
    assert not looks(*(UNTIL * look / 100 for look in range(100))).is_over


def test_few_looks_after_the_time_out_are_not_enough() -> None:
    began = [UNTIL + look for look in range(MISSES_LEAST)]
    assert not looks(*began[:-1]).is_over
    assert looks(*began).is_over


def test_a_look_that_began_in_time_does_not_count_as_one_after_it() -> None:
    began = [0.0] * MISSES_LEAST
    assert not looks(*began).is_over
    assert looks(*began, UNTIL).is_over
