"""Wire formats of a fragment: how ``n`` fp32 values become bytes whose every size is known beforehand.

A codec names its parts for a given element count (``parts``), so a payload's header follows from the
layout and the codec alone and a received one is compared, not trusted. ``decode`` works on any range
that starts at a multiple of :data:`BLOCK`, so a merge decodes contributions block by block and never
holds them whole.
"""

from collections.abc import Mapping

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.codec_float import BF16, F16, F32
from gradientmail_core.tensors.kernels import BLOCK
from gradientmail_core.tensors.parts import Codec, PartSpec

__all__ = ["BF16", "BLOCK", "F16", "F32", "Codec", "PartSpec", "codec_named"]

NAMED: Mapping[str, Codec] = {codec.name: codec for codec in (F32(), F16(), BF16())}


def codec_named(name: str) -> Codec:
    """The codec of that canonical name, upper or lower case.

    Raises :class:`ConfigurationError` for a name that is not one of :data:`NAMED`.
    """
    codec = NAMED.get(name.upper())
    if codec is None:
        raise ConfigurationError(f"Unknown codec {name!r}.", f"Known are: {', '.join(NAMED)}.")
    return codec
