"""Wire formats of a fragment: how ``n`` fp32 values become bytes whose every size is known beforehand.

A codec names its parts for a given element count (``parts``), so a payload's header follows from the
layout and the codec alone and a received one is compared, not trusted. ``decode`` works on any range
that starts at a multiple of :data:`BLOCK`, so a merge decodes contributions block by block and never
holds them whole.
"""

from collections.abc import Mapping

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.codec_float import BF16, F16, F32
from gradientmail_core.tensors.codec_groups import Coder, GroupedCodec
from gradientmail_core.tensors.codec_integer import INT2, INT4, INT8
from gradientmail_core.tensors.codec_minifloat import F4, F4_E3M0, F8_E4M3
from gradientmail_core.tensors.codec_topk import CHUNK, FORM, Plain, TopK
from gradientmail_core.tensors.kernels import BLOCK
from gradientmail_core.tensors.parts import Codec, PartSpec

__all__ = ["BF16", "BLOCK", "F16", "F32", "Codec", "PartSpec", "codec_named"]

NAMED: Mapping[str, Codec] = {
    codec.name: codec for codec in (F32(), F16(), BF16(), F8_E4M3, F4, F4_E3M0, INT8, INT4, INT2)
}


def codec_named(name: str) -> Codec:
    """The codec of that name, in upper or lower case.

    Names are those in :data:`NAMED`, and ``TOPK(64/4096,INT2)`` or ``TOPK(0.0156,INT2)`` with any of them for
    the kept values; a density is rounded to a multiple of 4/4096. Raises :class:`ConfigurationError` otherwise.
    """
    upper = name.upper()
    if upper in NAMED:
        return NAMED[upper]
    sparse = FORM.fullmatch(upper)
    if sparse is None or sparse[3] not in NAMED:
        raise ConfigurationError(f"Unknown codec {name!r}.", f"Known are: {', '.join(NAMED)}, TOPK(64/4096,INT2).")
    kept = int(sparse[1]) if sparse[1] else max(round(float(sparse[2]) * CHUNK / 4), 1) * 4
    return TopK(kept, sparse[3], _coder(NAMED[sparse[3]]))


def _coder(codec: Codec) -> Coder:
    return codec.coder if isinstance(codec, GroupedCodec) else Plain(codec)
