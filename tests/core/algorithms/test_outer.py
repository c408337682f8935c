"""Outer optimizers equal torch's, warm up as said, and lose nothing that fp32 can hold."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.algorithms.outer import (
    SGD,
    STRETCH,
    Adam,
    HeavyBall,
    Nesterov,
    Outer,
    Reached,
    power,
    restated,
    scale,
    warmed,
    without_memory,
)
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.kernels import BLOCK, SPAN
from gradientmail_core.tensors.model import Flat

SIZE = BLOCK + 1001
FEW = 5001
STEPS = 50

TorchOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

TWINS: list[tuple[Outer, TorchOptimizer]] = [
    (Nesterov(0.7, 0.9, warmup=0.0), lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)),
    (HeavyBall(0.3, 0.8, warmup=0.0), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8)),
    (SGD(0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    (Adam(0.02, 0.9, 0.99, 1e-3), lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.9, 0.99), eps=1e-3)),
    (Adam(0.02, 0.9, 0.999, 1e-8), lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.9, 0.999), eps=1e-8)),
]


def flat(seed: int, size: int = SIZE, spread: float = 1.0) -> Flat:
    """Normal values."""
    return (spread * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


def zeros(outer: Outer, size: int = SIZE) -> tuple[Flat, ...]:
    """The state before the first step."""
    return tuple(np.zeros(size, np.float32) for _ in outer.state_names())


@pytest.mark.parametrize("outer", [outer for outer, _ in TWINS], ids=lambda outer: type(outer).__name__)
def test_a_step_into_other_arrays_leaves_its_inputs_and_may_use_up_the_delta(outer: Outer) -> None:
    theta, delta = flat(0), flat(1)
    state = tuple(abs(flat(2 + number)) for number in range(len(outer.state_names())))
    inputs = [part.tobytes() for part in (theta, *state)]
    there = Reached(delta.copy(), tuple(np.full_like(part, np.nan) for part in state))
    outer.step(theta, there.theta, state, 7, 3, into=there)
    assert [part.tobytes() for part in (theta, *state)] == inputs
    outer.step(theta, delta, state, 7, 3)
    assert [part.tobytes() for part in (there.theta, *there.state)] == [part.tobytes() for part in (theta, *state)]


@pytest.mark.parametrize(("outer", "optimizer"), TWINS, ids=lambda value: getattr(value, "__name__", repr(value)[:30]))
def test_fifty_steps_equal_torch_to_fp32_rounding(outer: Outer, optimizer: TorchOptimizer) -> None:
    theta, state = flat(0, FEW), zeros(outer, FEW)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    twin = optimizer([parameter])
    for version in range(1, STEPS + 1):
        delta = flat(version, FEW, spread=0.01)
        outer.step(theta, delta, state, version)
        parameter.grad = torch.from_numpy(delta)
        twin.step()
    moved = np.abs(theta - flat(0, FEW)).max()
    np.testing.assert_allclose(theta, parameter.detach().numpy(), rtol=0, atol=3e-6 * float(moved) + 2e-6)


@pytest.mark.parametrize("outer", [Nesterov(), HeavyBall()], ids=repr)
def test_the_first_commit_moves_by_lr_times_delta(outer: Outer) -> None:
    theta, delta = flat(0), flat(1)
    outer.step(theta, delta, zeros(outer), 1)
    np.testing.assert_array_equal(theta, flat(0) - np.float32(0.7) * delta)


@pytest.mark.parametrize("outer", [Nesterov(), HeavyBall(), SGD(0.3), Adam()], ids=repr)
def test_a_long_array_steps_as_its_parts_do(outer: Outer) -> None:
    size, cut = STRETCH + SPAN + 5, 1001
    whole, delta, state = flat(0, size), flat(1, size), zeros(outer, size)
    parts = [whole[:cut].copy(), whole[cut:].copy()]
    outer.step(whole, delta, state, 5)
    outer.step(parts[0], delta[:cut], zeros(outer, cut), 5)
    outer.step(parts[1], delta[cut:], zeros(outer, size - cut), 5)
    assert whole.tobytes() == np.concatenate(parts).tobytes()


def test_momentum_warms_up_to_its_value_and_stays() -> None:
    used = [warmed(0.9, version, 10.0) for version in range(1, 200)]
    assert used[:3] == [0.0, 1 / 11, 2 / 12]
    assert used == sorted(used)
    assert used[90:] == [0.9] * 109
    assert warmed(0.9, 1, 0.0) == 0.9


def test_steady_state_gain_of_nesterov_is_lr_over_one_minus_momentum() -> None:
    outer, theta, delta = Nesterov(), np.zeros(4, np.float32), np.ones(4, np.float32)
    state = zeros(outer, 4)
    for version in range(1, 400):
        before = theta.copy()
        outer.step(theta, delta, state, version)
    np.testing.assert_allclose(before - theta, 7.0, rtol=1e-4)


def test_the_rate_scales_with_participants_only_when_asked() -> None:
    plain, scaled = np.zeros(3, np.float32), np.zeros(3, np.float32)
    delta = np.ones(3, np.float32)
    SGD(0.5).step(plain, delta, (), 1, participants=4)
    SGD(0.5, scale_with_participants=0.5).step(scaled, delta, (), 1, participants=4)
    assert plain.tolist() == [-0.5] * 3
    assert scaled.tolist() == [-1.0] * 3


@settings(deadline=None)
@given(st.integers(1, 4096), st.floats(0.0, 2.0))
def test_scale_is_a_power(participants: int, exponent: float) -> None:
    assert scale(participants, exponent) == pytest.approx(participants**exponent, rel=2e-5)


@settings(deadline=None)
@given(st.floats(0.0, 1.0), st.integers(0, 5000))
def test_power_is_a_power(base: float, exponent: int) -> None:
    assert power(base, exponent) == pytest.approx(base**exponent, rel=1e-12, abs=1e-300)


def test_an_fp32_master_moves_where_a_bf16_master_stands_still() -> None:
    bf16 = codec_named("BF16")
    step = np.full(5, 1e-4, np.float32)
    masters = {"F32": np.ones(5, np.float32), "BF16": np.ones(5, np.float32)}
    for version in range(1, 201):
        for name, theta in masters.items():
            SGD(1.0).step(theta, step, (), version)
            restated(theta, codec_named(name))
    view = masters["F32"].copy()
    restated(view, bf16)
    np.testing.assert_allclose(masters["F32"], 0.98, atol=200 * 2**-24)
    assert (view < 1.0).all()
    assert (masters["BF16"] == 1.0).all()


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_a_restated_state_goes_on_from_what_was_stored(name: str) -> None:
    outer, codec = Nesterov(), codec_named(name)
    theta, state = flat(0), zeros(outer)
    outer.step(theta, flat(1), state, 1)
    stored = [np.empty(part.nbytes, np.uint8) for part in codec.parts(SIZE)]
    codec.encode(state[0], stored)
    restated(state[0], codec)

    loaded, reader_theta = np.empty(SIZE, np.float32), theta.copy()
    for start in range(0, SIZE, BLOCK):
        stop = min(start + BLOCK, SIZE)
        codec.decode(stored, start, stop, loaded[start:stop])
    outer.step(theta, flat(2), state, 2)
    outer.step(reader_theta, flat(2), (loaded,), 2)
    assert theta.tobytes() == reader_theta.tobytes()
    assert state[0].tobytes() == loaded.tobytes()


def test_a_lossless_restatement_changes_nothing() -> None:
    values = flat(0)
    restated(values, codec_named("F32"))
    assert values.tobytes() == flat(0).tobytes()


@pytest.mark.parametrize(
    ("outer", "rate"),
    [(Nesterov(0.7), 0.7), (HeavyBall(0.3), 0.3), (SGD(0.5, scale_with_participants=0.5), 1.0), (Adam(), 1.0)],
)
def test_without_memory_a_step_is_the_rate_times_the_delta(outer: Outer, rate: float) -> None:
    theta, delta = np.full(FEW, 2.0, np.float32), np.full(FEW, 0.5, np.float32)
    without_memory(outer).step(theta, delta, (), 7, participants=4)
    assert theta == pytest.approx(2.0 - rate * 0.5)
