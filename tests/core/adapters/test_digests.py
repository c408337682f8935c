"""Digests of tensors: order does not matter, names, shapes and every value do."""

import numpy as np

from gradientmail_core.adapters.digests import Hashed, combined_digest


def hashed(name, *chunks, shape=(4,)):
    return Hashed(name, shape, lambda: [np.float32(chunk) for chunk in chunks])


def test_nothing_has_none():
    assert combined_digest([]) is None


def test_order_and_chunks_do_not_matter():
    a, b = hashed("a", [1, 2, 3, 4]), hashed("b", [5, 6, 7, 8])
    assert combined_digest([a, b]) == combined_digest([b, hashed("a", [1], [2, 3], [4])])


def test_names_shapes_and_values_matter():
    digests = {
        combined_digest([hashed("a", [1, 2, 3, 4])]),
        combined_digest([hashed("b", [1, 2, 3, 4])]),
        combined_digest([hashed("a", [1, 2, 3, 5])]),
        combined_digest([hashed("a", [1, 2, 3, 4], shape=(2, 2))]),
    }
    assert len(digests) == 4


def test_a_scalar_has_bytes_too():
    assert combined_digest([hashed("a", 1.0, shape=())]) != combined_digest([hashed("a", 2.0, shape=())])
