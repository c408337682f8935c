"""A gossip node as a process of its own: ``gossip_node.py NAME DIRECTORY STEPS``; prints a line of JSON at its end."""

import json
import sys
import time

import numpy as np

import gradientmail_core as gm
from gradientmail_core.events import RoundMixed
from gradientmail_core.sim.gossip import Bowl

SETTINGS = gm.FactoredGossip(sync_every=10, fragments=2, mix2=gm.Pair(), timeout=2.0)
LEASE_SECONDS = 3.0


def main(name: str, directory: str, steps: int) -> None:
    model, noise, partners = Bowl(), np.random.default_rng(sum(name.encode())), set[str]()

    def note(event: gm.Event) -> None:
        if isinstance(event, RoundMixed):
            partners.update(event.partners)

    with gm.Session(
        model, mailbox=directory, algorithm=SETTINGS, node=name, lease_timeout=LEASE_SECONDS, callbacks=[note]
    ) as session:
        for _ in range(steps):
            model.train(noise)
            session.step(8)
            time.sleep(0.02)
        rounds = session.rounds_seen
    apart = float(np.abs(model.flat() - model.bottom).max())
    print(json.dumps({"rounds": rounds, "partners": sorted(partners), "apart": apart}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
