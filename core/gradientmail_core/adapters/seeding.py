"""Seeds that nodes do not share: those that were seeded alike would otherwise read the same data in the same order."""

import hashlib


def node_seed(node: str, seed: int) -> int:
    """A seed in 0 … 2³¹−1 that two nodes do not share, the same at each start with the same ``seed``."""
    digest = hashlib.sha256(f"{node}/{seed}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF
