import numpy as np
import pytest

from gradientmail_core.tensors.codecs import BLOCK, codec_named
from gradientmail_core.tensors.error_feedback import (
    Feedback,
    Residual,
    compensated,
    for_codec,
    forgotten,
    published,
    residual_after,
    resolved,
)

LOSSY = ["F16", "BF16", "F8_E4M3", "F4", "F4_E3M0", "INT8", "INT4", "INT2", "TOPK(64/4096,INT2)", "TOPK(412/4096,F4)"]


def normal(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def sent(codec, values):
    parts = [np.zeros(part.nbytes, np.uint8) for part in codec.parts(values.size)]
    codec.encode(values, parts)
    return lambda start, stop, out: codec.decode(parts, start, stop, out)


def mean_error(name, rounds, dtype, feedback=True):
    """Relative distance between what was meant and what was decoded, both summed over the rounds."""
    codec, size = codec_named(name), 5000
    residual, meant, got = Residual(), np.zeros(size), np.zeros(size)
    decoded = np.empty(size, np.float32)
    for _ in range(rounds):
        delta = normal(size)
        values = delta.copy()
        compensated(values, residual, values)
        decode = sent(codec, values)
        decode(0, size, decoded)
        residual = residual_after(values, decode, dtype) if feedback else Residual()
        meant += delta
        got += decoded
    return float(np.linalg.norm(meant - got) / np.linalg.norm(meant))


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("name", LOSSY)
def test_the_mean_error_of_a_codec_goes_to_zero_with_feedback_and_stays_without(name, dtype):
    alone = mean_error(name, 1, dtype)
    assert alone > 0
    sparse = name.startswith("TOPK")
    few, many = mean_error(name, 40, dtype), mean_error(name, 240 if sparse else 120, dtype)
    assert many < max(few / 1.8, alone / 60)
    assert many < (0.2 if sparse else alone / 12)
    assert mean_error(name, 40, dtype, feedback=False) > alone * 0.99


def test_the_sum_sent_and_one_residual_are_the_sum_meant():
    codec, size = codec_named("INT4"), 3 * BLOCK + 5
    residual, meant, got, decoded = Residual(), np.zeros(size), np.zeros(size), np.empty(size, np.float32)
    for round in range(5):
        delta, values = normal(size, round), np.empty(size, np.float32)
        compensated(delta, residual, values)
        decode = sent(codec, values)
        for start in range(0, size, BLOCK):
            decode(start, min(start + BLOCK, size), decoded[start : start + BLOCK])
        residual = residual_after(values, decode)
        meant, got = meant + delta, got + decoded
    assert np.allclose(got + residual.values, meant, atol=1e-5)


def test_decay_scales_what_is_carried():
    values, out = normal(100), np.empty(100, np.float32)
    compensated(values, Residual(np.full(100, 2, np.float32)), out, decay=0.5)
    assert np.array_equal(out, values + np.float32(1))


def test_a_bfloat16_residual_takes_half_the_room():
    residual = residual_after(normal(1000), lambda start, stop, out: out.fill(0), "BF16")
    assert residual.values.nbytes == 2000
    out = np.zeros(1000, np.float32)
    compensated(out, residual, out)
    assert np.allclose(out, normal(1000), rtol=2**-8)


OLD, NEW = Residual(np.zeros(1, np.float32)), Residual(np.ones(1, np.float32))


def test_the_new_residual_holds_if_the_record_lists_the_snapshot_and_the_old_one_if_not():
    waiting = published(Feedback("INT2", OLD), "abc", NEW)
    assert waiting.settled is OLD
    merged = resolved(waiting, {"abc", "def"})
    assert merged.settled is NEW and merged.pending is None
    refused = resolved(waiting, {"def"})
    assert refused.settled is OLD and refused.pending is None
    assert resolved(refused, {"abc"}).settled is OLD


def test_a_second_snapshot_before_an_answer_replaces_the_first():
    waiting = published(published(Feedback("INT2", OLD), "abc", Residual()), "def", NEW)
    assert resolved(waiting, {"abc"}).settled is OLD
    assert resolved(waiting, {"def"}).settled is NEW


def test_a_fresh_start_and_another_codec_forget_everything():
    waiting = published(Feedback("INT2", OLD), "abc", NEW)
    for cleared in (forgotten(waiting), for_codec(waiting, "F4")):
        assert cleared.settled.values is None and cleared.pending is None
        assert resolved(cleared, {"abc"}).settled.values is None
    assert for_codec(waiting, "F4").codec == "F4" and for_codec(waiting, "INT2") is waiting
