"""Committed payloads that a store lost: asked for by who needs them, written again by who holds them.

A node that finds a committed payload missing or corrupt, and no newer version, leaves a small object that says so
(``live/wanted/{round}``). Every node sees it with its next listing of ``live/``. One that holds values whose canonical
bytes have the digest that the record names writes them under the same key: the key says what belongs there, so writing
twice, or by several, is harmless, and nothing that does not match is ever written. What nobody can write again, such
as a decoded change, is made good by the next version, which its closer then commits whole.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from gradientmail_core.engine.closing import OuterState, outer_layout
from gradientmail_core.engine.run import Host, Run
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import PayloadRestored
from gradientmail_core.protocol.exchange import encode_section
from gradientmail_core.protocol.keys import WantedKey
from gradientmail_core.protocol.records import Section
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout


async def ask(host: Host, round: int) -> None:
    """Say that a payload of ``round`` could not be read."""
    await host.mailbox.put(WantedKey(round).path, b"{}")


async def written_again(
    host: Host, run: Run, round: int, sections: Sequence[Section], theta: Flat, outer: OuterState | None
) -> bool:
    """Write again what ``round`` names and this node holds; whether that is all of it.

    ``theta`` are the fragment's parameters at that round, ``outer`` the outer state if it is here.
    """
    layout, whole = run.layouts[round % run.fragments], True
    for section in sections:
        held = dict(_held(run, layout, theta, outer)).get(section.name)
        if held is None or not await _put_again(host, section, *held):
            whole = False
        else:
            host.emit(PayloadRestored(layout.fragment, round, section.key))
    return whole


def _held(
    run: Run, layout: FragmentLayout, theta: Flat, outer: OuterState | None
) -> Iterator[tuple[str, tuple[FragmentLayout, Flat]]]:
    yield "theta", (layout, theta)
    if outer is not None and outer.arrays:
        yield "outer", (outer_layout(layout, run.settings.outer.state_names()), np.concatenate(outer.arrays))
    if outer is not None and outer.residual is not None:
        yield "residual", (layout, outer.residual)


async def _put_again(host: Host, section: Section, layout: FragmentLayout, values: Flat) -> bool:
    """Write ``values`` under the section's key if their bytes have its digest."""
    try:
        codec = codec_named(section.codec)
    except ConfigurationError:
        return False
    body, data = await host.clock.compute(partial(encode_section, section.name, layout, codec, values))
    if data != section.sha256:
        return False
    await host.link.put(host.mailbox, host.clock, section.key, body)
    return True
