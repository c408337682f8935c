"""``gradientmail syncer URL``: close a run's rounds, so that the machines that train need not.

It needs numpy and no training framework, and learns the run's settings from its manifest. SIGTERM or Ctrl-C end it
cleanly: what it is closing is committed, its fragments go to others. Exit code 0 then, whatever it saw.
"""

import argparse
import asyncio
import logging
import signal
from collections.abc import Sequence

from gradientmail_core.mailbox import open_mailbox
from gradientmail_core.protocol.keys import checked_node
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.session.arguments import default_node
from gradientmail_core.session.syncing import serve

LEASE_SECONDS = Timeouts().lease


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop. Raises :class:`GradientMailError` for a bad URL or a store that refuses."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(_served(options.url, checked_node(options.node or default_node()), options.lease_timeout))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradientmail syncer",
        description="Close the rounds of a run, so that the machines that train need not. Needs no training framework.",
    )
    parser.add_argument("url", metavar="URL", help="the run's mailbox")
    parser.add_argument("--node", metavar="NAME", help="this node's name in the run (default: from the host's)")
    parser.add_argument(
        "--lease-timeout",
        type=float,
        default=LEASE_SECONDS,
        metavar="SECONDS",
        help="as on the run's other nodes (default: %(default)s)",
    )
    return parser


async def _served(url: str, node: str, lease: float) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    mailbox = open_mailbox(url, must_exist=True)
    try:
        await serve(mailbox, node=node, stopping=stopping, timeouts=Timeouts(lease))
    finally:
        await mailbox.close()
