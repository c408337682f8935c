"""Equal frozen values have equal fingerprints, however they are kept; anything else has another."""

import torch

from gradientmail_core.adapters.fingerprint import fingerprint


def test_nothing_has_none():
    assert fingerprint([]) is None


def test_order_and_memory_layout_do_not_matter():
    a, b = torch.randn(8, 4), torch.randn(3)
    expected = fingerprint([("a", a), ("b", b)])
    assert fingerprint([("b", b), ("a", a.t().contiguous().t())]) == expected
    assert fingerprint([("a", a[:, :]), ("b", torch.stack([b, b], 1)[:, 0])]) == expected


def test_names_shapes_and_every_value_matter():
    a = torch.zeros(8, 4)
    changed = a.clone()
    changed[7, 3] = 1
    expected = fingerprint([("a", a)])
    others = [fingerprint([("b", a)]), fingerprint([("a", a.view(4, 8))]), fingerprint([("a", changed)])]
    assert expected not in others
    assert len(set(others)) == 3


def test_half_precision_counts_by_value():
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.randn(100).to(dtype)
        assert fingerprint([("a", values)]) == fingerprint([("a", values.float())])
    assert fingerprint([("a", torch.tensor([1 + 2**-20]))]) != fingerprint([("a", torch.tensor([1.0]))])


def test_values_beyond_one_chunk_count(monkeypatch):
    monkeypatch.setattr("gradientmail_core.adapters.fingerprint._CHUNK_ELEMENTS", 16)
    values = torch.arange(40.0)
    expected = fingerprint([("a", values)])
    values[39] = 0
    assert fingerprint([("a", values)]) != expected


def test_any_dtype_can_be_frozen():
    seen = set()
    for dtype in (torch.uint8, torch.int32, torch.bool, torch.float64, torch.complex64, torch.float8_e5m2):
        ones = torch.ones(5).to(dtype)
        seen |= {fingerprint([("a", ones)]), fingerprint([("a", torch.zeros_like(ones))])}
    assert len(seen) > 6
    assert fingerprint([("empty", torch.zeros(0)), ("scalar", torch.tensor(2.0))]) is not None
