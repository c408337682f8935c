"""Something to hand on, and how to compare it."""

from typing import Any

import numpy as np

from gradientmail_core.protocol.belongings import Belongings
from gradientmail_core.protocol.fields import Rejected


def things(value: float) -> Belongings:
    arrays: dict[str, Any] = {
        "weight": np.full((50, 3), value, np.float32),
        "step": np.array(7, np.int64),
        "none": np.zeros((0, 2)),
    }
    return Belongings(arrays, {"position": [1, 2], "rate": value})


def same(one: Belongings | Rejected | None, other: Belongings) -> bool:
    assert isinstance(one, Belongings)
    equal = all(np.array_equal(one.arrays[name], array) for name, array in other.arrays.items())
    kinds = {name: (array.dtype, array.shape) for name, array in one.arrays.items()}
    return equal and one.plain == other.plain and kinds == {n: (a.dtype, a.shape) for n, a in other.arrays.items()}
