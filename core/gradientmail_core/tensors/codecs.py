"""Wire formats of a fragment: how ``n`` fp32 values become bytes whose every size is known beforehand.

A codec names its parts for a given element count (``parts``), so a payload's header follows from the
layout and the codec alone and a received one is compared, not trusted. ``decode`` works on any range
that starts at a multiple of :data:`BLOCK`, so a merge decodes contributions block by block and never
holds them whole.
"""
