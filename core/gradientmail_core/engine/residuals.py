"""What error feedback has left over, in a checkpoint: the values as text, with the commit they belong to.

A residual belongs to what was merged up to a commit of its fragment and to the codec that left it out. A restored
node takes it up only at that very commit; elsewhere it starts from zero, as any joiner does.
"""

import base64
import binascii
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.protocol.fields import SHA256, FieldRefused, Fields
from gradientmail_core.tensors.error_feedback import Feedback, Residual

TEXT_LONGEST = 2**36
WIDTHS = {"F32": 4, "BF16": 2}


@dataclass(frozen=True, slots=True, eq=False)
class LeftOver:
    """A fragment's settled residual at the commit whose record has the digest ``record``."""

    record: str
    codec: str
    residual: Residual


def left_over(feedback: Feedback | None, record: str) -> LeftOver | None:
    """What a checkpoint keeps of a fragment's error feedback at a commit; None for zeros and without any."""
    if feedback is None or feedback.settled.values is None:
        return None
    return LeftOver(record, feedback.codec, feedback.settled)


def taken_up(kept: LeftOver | None, feedback: Feedback, record: str, size: int) -> Feedback:
    """The feedback of a restored fragment of ``size`` elements at the commit ``record``."""
    if kept is None or kept.record != record or kept.codec != feedback.codec:
        return feedback
    values = kept.residual.values
    return feedback if values is None or values.size != size else Feedback(feedback.codec, kept.residual)


def left_over_json(kept: LeftOver | None) -> dict[str, object] | None:
    """As plain JSON; the values in base64."""
    if kept is None or kept.residual.values is None:
        return None
    values = kept.residual.values
    dtype = "BF16" if values.dtype == np.uint16 else "F32"
    text = base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()
    return {"record": kept.record, "codec": kept.codec, "dtype": dtype, "values": text}


def parse_left_over(raw: object) -> LeftOver | None:
    """One of :func:`left_over_json`'s; raises FieldRefused for anything else."""
    if raw is None:
        return None
    fields = Fields(raw, "residual")
    dtype = fields.text("dtype", longest=8)
    if dtype not in WIDTHS:
        raise FieldRefused("a residual has a dtype that is not known")
    try:
        body = base64.b64decode(fields.text("values", longest=TEXT_LONGEST), validate=True)
    except binascii.Error:
        raise FieldRefused("a residual is no base64") from None
    if len(body) % WIDTHS[dtype]:
        raise FieldRefused("a residual ends within a value")
    values = np.frombuffer(body, "<f4").astype(np.float32) if dtype == "F32" else _patterns(body)
    residual = Residual(values)
    return LeftOver(fields.text("record", SHA256), fields.text("codec", longest=64), residual)


def _patterns(body: bytes) -> NDArray[np.uint16]:
    return np.frombuffer(body, "<u2").astype(np.uint16)
