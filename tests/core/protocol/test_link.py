"""Payloads travel compressed where that pays or was asked for, and are read either way within their known size."""

from typing import Any

import numpy as np
import pytest

from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.protocol.exchange import get_section, put_section
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import is_blob_key
from gradientmail_core.protocol.link import MEASURED_BYTES_LEAST, SMALL_BYTES, Compression, Link
from gradientmail_core.sim.loop import VirtualClock, run_virtually
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.compression import compress, is_compressed, opened
from gradientmail_core.tensors.payload import Malformed, encode_payload
from gradientmail_core.tensors.schema import FragmentLayout, Piece

LAYOUT = FragmentLayout(0, (Piece("w", (300, 512), 0),))
VALUES = np.random.default_rng(0).standard_normal(LAYOUT.size).astype(np.float32) * np.float32(1e-3)
BF16 = codec_named("BF16")
BODY = encode_payload(LAYOUT, BF16, VALUES, lambda data: {})


@pytest.mark.parametrize(
    ("compression", "speed", "squeezed"),
    [
        (None, None, False),
        ("zstd", 1e12, True),
        ("auto", None, True),
        ("auto", 1e7, True),
        ("auto", 1e10, False),
    ],
)
def test_auto_goes_by_the_measured_speed(compression: Compression | None, speed: float | None, squeezed: bool) -> None:
    link = Link()
    link.speed = speed
    packed = link.packed(BODY, BF16, compression)
    assert is_compressed(packed) == squeezed
    assert (packed is BODY) == (not squeezed)
    plain = opened(packed, len(BODY))
    assert not isinstance(plain, Malformed) and bytes(plain) == bytes(BODY)


def test_codes_of_a_few_bits_are_squeezed_on_slow_links_only() -> None:
    link, codec = Link(), codec_named("INT8")
    body = encode_payload(LAYOUT, codec, VALUES, lambda data: {})
    for speed, squeezed in ((1e7, True), (1e8, False)):
        link.speed = speed
        assert is_compressed(link.packed(body, codec, "auto")) == squeezed


def test_small_bodies_and_those_that_would_grow_stay_as_they_are() -> None:
    link = Link()
    assert link.packed(BODY[: SMALL_BYTES - 1], BF16, "auto") is not BODY
    assert not is_compressed(link.packed(BODY[: SMALL_BYTES - 1], BF16, "auto"))
    noise = np.random.default_rng(1).bytes(2 * SMALL_BYTES)
    assert link.packed(noise, codec_named("INT8"), "zstd") is noise


def test_the_speed_is_smoothed_over_large_uploads() -> None:
    link = Link()
    link.measured(MEASURED_BYTES_LEAST - 1, 1.0)
    link.measured(10**9, 0.0)
    assert link.speed is None
    link.measured(10**6, 1.0)
    assert link.speed == 1e6
    link.measured(2 * 10**6, 1.0)
    assert link.speed == pytest.approx(1.3e6)


def test_an_upload_is_timed_on_the_nodes_clock() -> None:
    async def main(loop: Any) -> None:
        link, clock = Link(), VirtualClock(loop)

        class Slow(MemoryMailbox):
            async def put(self, key: str, body: Any) -> None:
                await clock.sleep(2.0)
                await super().put(key, body)

        await link.put(Slow("slow"), clock, "blobs/x", bytes(2**20))
        assert link.speed == pytest.approx(2**19)

    run_virtually(main)


@pytest.mark.parametrize("codec", ["F32", "BF16", "INT4"])
def test_a_section_comes_back_whoever_compressed_it(codec: str) -> None:
    async def main(loop: Any) -> None:
        mailbox, clock = MemoryMailbox("run"), VirtualClock(loop)
        found = []
        for compression in (None, "zstd"):
            section = await put_section(
                mailbox, clock, "theta", 3, "a", LAYOUT, VALUES, codec=codec, compression=compression  # type: ignore[arg-type]  # names of settings, as given
            )  # fmt: skip
            assert section.key.endswith(".zst") == (compression is not None) and is_blob_key(section.key)
            values = await get_section(mailbox, clock, section, LAYOUT)
            assert not isinstance(values, Rejected)
            found.append((values.tobytes(), section.sha256))
        assert found[0] == found[1]

    run_virtually(main)


def test_what_unpacks_to_more_than_the_layout_has_is_refused() -> None:
    async def main(loop: Any) -> None:
        mailbox, clock = MemoryMailbox("run"), VirtualClock(loop)
        section = await put_section(mailbox, clock, "theta", 3, "a", LAYOUT, VALUES, codec="BF16", compression="zstd")
        await mailbox.put(section.key, compress(bytes(2**26), 2))
        found = await get_section(mailbox, clock, section, LAYOUT)
        assert isinstance(found, Rejected) and "are allowed" in found.reason
        await mailbox.put(section.key, bytes(memoryview(compress(BODY, 2))[:-3]))
        assert isinstance(await get_section(mailbox, clock, section, LAYOUT), Rejected)

    run_virtually(main)
