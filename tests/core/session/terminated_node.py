"""A node in a loop of its own, without any handling of signals: ``terminated_node.py MAILBOX KIND``.

It trains ``with`` a session, or ``joined`` one, with a handler of its ``own`` or SIGTERM left ``off``; or it waits, for
another node in ``join`` or for a round that nobody closes in ``step``.
"""

import signal
import sys
import threading
import time

import gradientmail_core as gm
from gradientmail_core.sim.world import ToyModel


def main() -> None:
    mailbox, kind = sys.argv[1:]
    if kind == "own":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    session = gm.Session(
        ToyModel(), mailbox=mailbox, algorithm=gm.DiLoCo(sync_every=5, overlap_steps=0 if kind == "step" else None),
        node="a", callbacks=[], sigterm=kind != "off", min_nodes=2 if kind == "join" else 1,
        role="learner" if kind == "step" else "both",
    )  # fmt: skip
    if kind in ("join", "step"):
        threading.Timer(1.0, print, ("training",), {"flush": True}).start()
    if kind in ("with", "join", "step"):
        with session:
            train(session)
    else:
        session.join()
        train(session)


def train(session: gm.Session) -> None:
    for step in range(2000):
        session.step()
        time.sleep(0.01)
        if step == 10:
            print("training", flush=True)


if __name__ == "__main__":
    main()
