"""A node as a process of its own: a small torch model, a plain loop, a session. Prints one JSON line at its end.

python plain_node.py NAME MAILBOX STEPS [--min-nodes N] [--step-seconds S] [--quorum N]
"""

import argparse
import hashlib
import json
import time
import zlib

import torch

import gradientmail_core as gm
from gradientmail_core.events import RoundCommitted, RoundTakenOver

LEASE_SECONDS = 6.0


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))


def parameters_digest(module: torch.nn.Module) -> str:
    parts = [value.detach().numpy().tobytes() for _, value in sorted(module.named_parameters())]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("mailbox")
    parser.add_argument("steps", type=int)
    parser.add_argument("--min-nodes", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    parser.add_argument("--quorum", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    noise = torch.Generator().manual_seed(zlib.crc32(options.name.encode()))
    target = torch.linspace(-1, 1, 32 * 32).reshape(32, 32)
    algorithm = gm.DiLoCo(sync_every=20, fragments=4, quorum_size=options.quorum, grace_seconds=1.0)
    started = time.time()

    def report(event: gm.Event) -> None:
        if isinstance(event, RoundCommitted | RoundTakenOver):
            kind, when = type(event).__name__, round(time.time() - started, 2)
            print(json.dumps({"event": kind, "round": event.round, "at": when}), flush=True)

    with gm.Session(
        module,
        mailbox=options.mailbox,
        algorithm=algorithm,
        node=options.name,
        min_nodes=options.min_nodes,
        lease_timeout=LEASE_SECONDS,
        callbacks=[report, gm.log_event],
    ) as session:
        print(json.dumps({"joined": options.name}), flush=True)
        for _ in range(options.steps):
            inputs = torch.randn(16, 32, generator=noise)
            loss = (module(inputs) - inputs @ target).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(options.step_seconds)
            session.step(len(inputs))
    print(json.dumps({"digest": parameters_digest(module), "versions": session.versions}), flush=True)


if __name__ == "__main__":
    main()
