"""A node in a loop of its own, without any handling of signals: ``terminated_node.py MAILBOX with|joined|own|off``."""

import signal
import sys
import time

import gradientmail_core as gm
from gradientmail_core.sim.world import ToyModel


def main() -> None:
    mailbox, kind = sys.argv[1:]
    if kind == "own":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    session = gm.Session(
        ToyModel(), mailbox=mailbox, algorithm=gm.DiLoCo(sync_every=5), node="a", callbacks=[], sigterm=kind != "off"
    )
    if kind == "with":
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
