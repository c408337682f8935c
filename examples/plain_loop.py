"""A training loop of your own, joined to a run: a ``with`` around it and one call in it.

python examples/plain_loop.py file:///shared/run
"""

import sys

import torch

import gradientmail_core as gm

STEPS, BATCH = 300, 32


def main(mailbox: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with gm.Session(model, mailbox=mailbox, algorithm=gm.DiLoCo(sync_every=20, fragments=2)) as session:
        for step in range(STEPS):
            inputs = torch.randn(BATCH, 16)
            loss = (model(inputs) - inputs.sin().sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.step(BATCH)
            if step % 100 == 0:
                print(f"step {session.global_step}: loss {loss.item():.3f}, {session.rounds_seen} rounds")
    print(f"left after {session.rounds_seen} rounds; the model is the newest commit")


if __name__ == "__main__":
    main(sys.argv[1])
