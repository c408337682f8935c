"""Creators in processes of their own, racing for the same keys.

    python -m tests.core.mailbox.racers URL RACERS KEYS

One process imports the library and forks the racers, so they start within a moment of each other. Each
creates every key, all at once, with a body that names racer and key; standard output is one JSON object
per racer: {"racer": n, "won": [key, ...]}.
"""

import asyncio
import importlib
import json
import os
import random
import sys

from gradientmail_core.errors import MailboxUnavailable
from gradientmail_core.mailbox import CreateOutcome, open_mailbox

LIBRARIES = {
    "obstore": "gradientmail_core.mailbox.objectstore.obstore",
    "s3fs": "gradientmail_core.mailbox.objectstore.s3fs",
    "fsspec": "adlfs",
}


def raced_key(number: int) -> str:
    """The key of one race."""
    return f"races/{number:04d}"


def body_of(racer: int, key: str) -> bytes:
    """What a racer writes: of different lengths, so that a mixture would show."""
    return f"{racer} {key} ".encode() * (1 + racer * 37)


async def race(url: str, racer: int, keys: int) -> list[str]:
    """The keys that this racer won."""
    mailbox, won = open_mailbox(url), list[str]()

    async def attempt(key: str) -> None:
        while True:
            try:
                if await mailbox.create(key, body_of(racer, key)) is CreateOutcome.CREATED:
                    won.append(key)
                return
            except MailboxUnavailable:
                await asyncio.sleep(0.1)

    numbers = list(range(keys))
    random.Random(racer % 3).shuffle(numbers)
    await asyncio.gather(*(attempt(raced_key(number)) for number in numbers))
    await mailbox.close()
    return sorted(won)


def main(url: str, racers: int, keys: int) -> None:
    """Fork, race and report; exits 1 if a racer failed."""
    for backend, library in LIBRARIES.items():
        if f"backend={backend}" in url:
            importlib.import_module(library)
    children, (ready, start) = [], os.pipe()
    for racer in range(racers):
        if (child := os.fork()) == 0:
            os.close(start)
            os.read(ready, 1)  # until every racer is there
            report = {"racer": racer, "won": asyncio.run(race(url, racer, keys))}
            os.write(1, (json.dumps(report) + "\n").encode())
            os._exit(0)
        children.append(child)
    os.close(start)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
