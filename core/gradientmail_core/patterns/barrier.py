"""A named point at which nodes are held until enough have arrived.

Arrivals of nodes that died meanwhile do not count. The first who sees enough opens the barrier with one create-once
object; it stays open, so a latecomer, or a node that was restarted, passes at once. Names are used once in a run.
"""

from gradientmail_core.errors import ConfigurationError, WaitTimeout
from gradientmail_core.events import RunWaited
from gradientmail_core.patterns.party import Party
from gradientmail_core.protocol.exchange import create_once
from gradientmail_core.protocol.recipes import arrival_key, arrived_node, checked_name, open_key

FIRST_GAP_SECONDS = 0.1
GAP_GROWTH = 1.5
GAP_MOST_SECONDS = 2.0
REPORT_SECONDS = 10.0


async def pass_barrier(party: Party, name: str, count: int, timeout: float | None = None) -> None:
    """Wait at barrier ``name`` until ``count`` living nodes have arrived, this one included.

    Raises :class:`WaitTimeout` after ``timeout`` seconds; this node then counts as not arrived.
    """
    if count < 1:
        raise ConfigurationError(f"A barrier for {count!r} nodes never makes sense.", "Use 1 or more.")
    own = arrival_key(checked_name(name, "barrier"), party.node)
    started = party.clock.now()
    report_at, gap = started, FIRST_GAP_SECONDS
    await party.mailbox.put(own, party.claim().encoded())
    while True:
        keys = [entry.key async for entry in party.mailbox.list(f"barriers/{name}/")]
        here = sorted(node for key in keys if (node := arrived_node(key)) and party.alive(node, started))
        if open_key(name) in keys:
            return
        if len(here) >= count:
            await create_once(party.mailbox, party.clock, open_key(name), party.claim().encoded())
            return
        now = party.clock.now()
        if timeout is not None and now - started >= timeout:
            await party.mailbox.delete(own)
            raise WaitTimeout(
                f"Only {len(here)} of {count} nodes came to barrier {name!r} in {timeout:.0f} s: {', '.join(here)}.",
                "Start the missing nodes, or ask for fewer.",
            )
        if now >= report_at:
            party.emit(RunWaited(f"barrier {name!r}: waiting for {count - len(here)} more (here: {', '.join(here)})"))
            report_at = now + max(REPORT_SECONDS, now - started)
        await party.clock.sleep(gap)
        gap = min(gap * GAP_GROWTH, GAP_MOST_SECONDS)
