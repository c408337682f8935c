"""This node's way to the store: how payloads are packed for it, and how fast it has been.

Whether compressing pays depends on the link alone: below a certain speed the bytes saved are worth more than the time
to squeeze them. ``"auto"`` measures the speed on the node's own uploads and decides each time anew; a link of which
nothing is known counts as slow. What is written says itself whether it is compressed, so nodes need not agree.
"""

from typing import Literal, TypeAlias

from gradientmail_core.clock import Clock
from gradientmail_core.mailbox.base import Body, Mailbox
from gradientmail_core.tensors.compression import Speeds, compress, element_bytes, worth_compressing
from gradientmail_core.tensors.parts import Codec

Compression: TypeAlias = Literal["zstd", "auto"]

SMALL_BYTES = 2**16
"""Bodies below this are a request's latency and not its bytes: ``"auto"`` leaves them alone."""

MEASURED_BYTES_LEAST = 2**18
SMOOTHING = 0.3

WORDS = {4: Speeds(0.78, 2.1e9, 2.0e9), 2: Speeds(), 1: Speeds(0.93, 1.0e9, 1.5e9)}
"""What compressing values of so many bytes gains and costs: fp32, half precision, codes of a few bits."""


class Link:
    """Uploads of one node. ``speed`` is in bytes per second, None until a large enough body went up."""

    def __init__(self) -> None:
        self.speed: float | None = None

    def packed(self, body: Body, codec: Codec, compression: Compression | None) -> Body:
        """The body as it should travel: compressed where that was asked for, or pays, and makes it smaller."""
        if compression is None:
            return body
        width, plain = element_bytes(codec), memoryview(body).nbytes
        if compression == "auto" and (plain < SMALL_BYTES or not worth_compressing(self.speed, WORDS[width])):
            return body
        squeezed = compress(body, width)
        return squeezed if squeezed.nbytes < plain else body

    async def put(self, mailbox: Mailbox, clock: Clock, key: str, body: Body) -> None:
        """Write a packed body, and learn how long it took."""
        started = clock.now()
        await mailbox.put(key, body)
        self.measured(memoryview(body).nbytes, clock.now() - started)

    def measured(self, size: int, seconds: float) -> None:
        """``size`` bytes went up in ``seconds``."""
        if size < MEASURED_BYTES_LEAST or seconds <= 0:
            return
        speed = size / seconds
        self.speed = speed if self.speed is None else self.speed + SMOOTHING * (speed - self.speed)
