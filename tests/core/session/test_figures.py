"""The figures of a session: always the same names, and a round's own once there was one."""

from gradientmail_core.events import FragmentAligned
from gradientmail_core.mailbox.metered import Usage
from gradientmail_core.session.figures import figures

USAGE = Usage(gets=3, puts=2, bytes_up=40, bytes_down=50)


def test_a_rounds_own_figures_come_with_the_first_round() -> None:
    before = figures(usage=USAGE, live=2, rounds=0, tokens=0, step=7, stalled=0.5, merged=0, aligned=None)
    assert before["requests"] == 5 and before["stall_seconds"] == 0.5 and "participants" not in before
    aligned = FragmentAligned(0, 4, 20, participants=3, tokens=90, merged=True, cosine=None)
    after = figures(usage=USAGE, live=2, rounds=1, tokens=90, step=20, stalled=0.5, merged=1, aligned=aligned)
    assert after["participants"] == 3 and "cosine" not in after and after.keys() > before.keys()
