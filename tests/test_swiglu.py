"""SwiGLU, alone and followed by the quantiser of the down projection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.swiglu import (
    swiglu_quant_tile_kernels,
    swiglu_quant_triton,
    swiglu_tile_kernels,
    swiglu_triton,
)
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.reference.config import FP8_1X128, FP8_32X32, MXFP4, Q4K, Q8
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics
from deeptwin.reference.quant import quantize
from deeptwin.reference.swiglu import swiglu, swiglu_quant

CARD = load_card("swiglu")
every_num = pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def row(*values: float) -> Tensor:
    return torch.tensor([values])


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


# properties of the reference


@every_num
def test_the_limit_holds_the_gate_from_above_and_up_on_either_side(num: Numerics) -> None:
    # U50: gate 50, up ±50, limit 10 give 10 · sigma(10) · (±10)
    for up in (50.0, -50.0):
        y = swiglu(row(50.0, up), limit=10.0, dtype=torch.float32, num=num)
        assert y.item() == pytest.approx(math.copysign(10 * silu(10.0), up), rel=1e-6)
    # the gate has no lower limit
    assert swiglu(row(-12.0, 3.0), limit=10.0, dtype=torch.float32, num=num).item() == pytest.approx(
        3 * silu(-12.0), rel=1e-6
    )
    assert swiglu(row(50.0, 50.0), limit=None, dtype=torch.float32, num=num).item() == pytest.approx(2500, rel=1e-6)


def test_gate_and_up_are_not_interchangeable() -> None:
    # w1 and w3 swapped, or the limit on the wrong side: gate 20, up -20
    assert swiglu(row(20.0, -20.0), limit=10.0, num=SEMANTIC).item() == pytest.approx(-10 * silu(10.0), rel=1e-12)
    assert swiglu(row(-20.0, 20.0), limit=10.0, num=SEMANTIC).item() == pytest.approx(10 * silu(-20.0), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.floats(-80, 80, width=32), st.floats(-50, 50, width=32), st.floats(2.0**-7, 2, width=32))
def test_semantic_is_the_formula(gate: float, up: float, weight: float) -> None:
    y = swiglu(row(gate, up), torch.tensor([weight]), limit=10.0, num=SEMANTIC)
    expected = silu(min(gate, 10.0)) * max(min(up, 10.0), -10.0) * weight
    assert y.item() == pytest.approx(expected, rel=1e-12, abs=1e-300)


@every_num
def test_gates_far_below_zero_give_a_zero(num: Numerics) -> None:
    h = row(-89.0, -100.0, -1e4, 3.0, 3.0, -3.0)
    y = swiglu(h, limit=None, dtype=torch.float32, num=num)
    if num is not SEMANTIC:
        # exp(89) is beyond fp32: -89 / inf is -0
        assert y.tolist() == [[0.0, 0.0, 0.0]]
        assert torch.signbit(y).tolist() == [[True, True, False]]
    else:
        assert y.abs().max().item() < 1e-36


def test_a_gate_of_minus_infinity_is_no_number() -> None:
    assert swiglu(row(-math.inf, 1.0), limit=10.0).isnan().item()
    assert swiglu(row(math.inf, 1.0), limit=10.0).isfinite().item()


def test_the_limit_may_come_before_or_after_bf16() -> None:
    h = normal(64, 64, dtype=torch.float32) * 8
    assert torch.equal(swiglu(h.bfloat16(), limit=10.0), swiglu(h.clamp(-1e3, 1e3).bfloat16(), limit=10.0))
    limited = torch.cat([h[:, :32].clamp(max=10), h[:, 32:].clamp(-10, 10)], 1)
    assert torch.equal(swiglu(h.bfloat16(), limit=10.0), swiglu(limited.bfloat16(), limit=None))


def test_one_rounding_in_all() -> None:
    h = normal(64, 512) * 4
    weight = torch.from_numpy(np.random.Generator(np.random.Philox(1)).uniform(0.1, 1.5, 64))
    exact = swiglu(h, weight, limit=10.0, num=SEMANTIC)
    assert (swiglu(h, weight, limit=10.0) == exact.to(torch.bfloat16)).double().mean() > 0.9999
    twice = swiglu(h, limit=10.0).bfloat16() * weight[:, None]
    assert (twice.bfloat16() != exact.to(torch.bfloat16)).double().mean() > 0.1


def test_the_quantiser_sees_the_unrounded_value() -> None:
    h, weight = normal(16, 512) * 4, torch.full((16,), 0.3)
    codes, sf = swiglu_quant(h, weight, limit=10.0, fmt=Q8)
    value = swiglu(h, weight, limit=10.0, dtype=torch.float32)
    expected = quantize(value, fmt=Q8)
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(sf, expected[1])
    rounded, _ = quantize(swiglu(h, weight, limit=10.0).bfloat16(), fmt=Q8)
    assert not torch.equal(codes.view(torch.uint8), rounded.view(torch.uint8))


def test_powers_of_two_pass_through_the_quantiser_and_three_does_not() -> None:
    h = normal(8, 128) * 4
    codes, sf = swiglu_quant(h, torch.ones(8), limit=10.0, fmt=Q8)
    half_codes, half_sf = swiglu_quant(h, torch.full((8,), 0.5), limit=10.0, fmt=Q8)
    assert torch.equal(half_codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(half_sf, sf - 1)
    third, _ = swiglu_quant(h, torch.full((8,), 3.0), limit=10.0, fmt=Q8)
    assert not torch.equal(third.view(torch.uint8), codes.view(torch.uint8))


def test_a_row_of_weight_zero_has_the_scale_of_the_floor() -> None:
    codes, sf = swiglu_quant(normal(2, 64), torch.zeros(2), limit=10.0, fmt=Q8)
    assert set(sf.flatten().tolist()) == {105}
    assert codes.to(torch.float32).abs().max().item() == 0


def test_no_rows() -> None:
    assert swiglu(torch.zeros(0, 8), torch.zeros(0), limit=None).shape == (0, 4)
    codes, sf = swiglu_quant(torch.zeros(0, 64), limit=10.0, fmt=Q8)
    assert (codes.shape, sf.shape) == ((0, 32), (0, 1))


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("swiglu") == []


def test_the_adapters_of_tile_kernels_agree_with_the_reference(tile_kernels_faults) -> None:
    assert tile_kernels_faults("swiglu") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged) -> None:
    assert judged.without("swiglu", "batch_invariant") == []


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


@pytest.mark.parametrize("op", [swiglu, swiglu_triton, swiglu_tile_kernels])
def test_bad_input_of_swiglu_is_refused(op: Callable[..., Tensor]) -> None:
    h = torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"h_ti \(last axis\): expected a multiple of 2, got 7"):
        op(torch.ones(2, 7), limit=10.0)
    with pytest.raises(ValueError, match="h_ti: expected 2 dims"):
        op(torch.ones(8), limit=10.0)
    with pytest.raises(ValueError, match="weight_t: expected t=2, got t=3"):
        op(h, torch.ones(3), limit=10.0)
    for limit in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="limit: expected a positive number"):
            op(h, limit=limit)
    with pytest.raises(TypeError, match="h_ti: expected"):
        op(torch.ones(2, 8, dtype=torch.int32), limit=10.0)
    with pytest.raises(TypeError, match="weight_t: expected"):
        op(h, torch.ones(2, dtype=torch.int64), limit=10.0)
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16 or float16"):
        op(h, limit=10.0, dtype=torch.float64)


@pytest.mark.parametrize("op", [swiglu_quant, swiglu_quant_triton, swiglu_quant_tile_kernels])
def test_bad_input_of_swiglu_quant_is_refused(op: Callable[..., tuple[Tensor, Tensor]]) -> None:
    with pytest.raises(ValueError, match=r"expected a multiple of 32, got 24"):
        op(torch.ones(2, 48), limit=10.0, fmt=Q8)
    with pytest.raises(ValueError, match="limit: expected a positive number"):
        op(torch.ones(2, 64), limit=0.0, fmt=Q8)
    with pytest.raises(TypeError, match="h_ti: expected"):
        op(torch.ones(2, 64, dtype=torch.int32), limit=10.0, fmt=Q8)


def test_values_that_are_not_finite_are_refused_by_the_reference() -> None:
    h = torch.ones(1, 64)
    h[0, 40] = math.inf
    with pytest.raises(ValueError, match="x_tm: expected finite values"):
        swiglu_quant(h, limit=None, fmt=Q8)
    assert swiglu_quant(h, limit=10.0, fmt=Q8)[1].shape == (1, 1)


def test_what_the_triton_kernels_decline_and_buffers_that_do_not_fit() -> None:
    pytest.importorskip("triton")
    h = torch.ones(2, 64)
    for fmt in (MXFP4, Q4K, FP8_32X32):
        with pytest.raises(NotImplementedError, match="fmt: expected e4m3 codes with UE8M0 or fp32 scales of rows"):
            swiglu_quant_triton(h, limit=10.0, fmt=fmt)
    for strided in (swiglu_triton, swiglu_quant_triton):
        extra = {"fmt": FP8_1X128} if strided is swiglu_quant_triton else {}
        with pytest.raises(NotImplementedError, match="h_ti: expected contiguous rows"):
            strided(torch.ones(256, 2).T, limit=10.0, **extra)
    with pytest.raises(ValueError, match="out: expected contiguous"):
        swiglu_triton(h, limit=10.0, out=torch.empty(2, 31, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="out: expected torch.bfloat16"):
        swiglu_triton(h, limit=10.0, out=torch.empty(2, 32))
    with pytest.raises(TypeError, match="out: expected torch.uint8"):
        swiglu_quant_triton(
            h, limit=10.0, fmt=Q8, out=(torch.empty(2, 32, dtype=torch.float8_e4m3fn), torch.empty(2, 1))
        )


def test_what_tile_kernels_declines(tile_kernels_faults) -> None:
    h = torch.ones(2, 128)
    for bad in (h.half(), h[:, :64]):
        with pytest.raises(NotImplementedError, match="h_ti: expected halves of 64·n columns in bf16 or fp32, got"):
            swiglu_tile_kernels(bad, limit=10.0)
        with pytest.raises(NotImplementedError, match="h_ti: expected halves of 64·n columns in bf16 or fp32, got"):
            swiglu_quant_tile_kernels(bad, limit=10.0, fmt=Q8)
    with pytest.raises(NotImplementedError, match="dtype: expected bf16 or fp32, got torch.float16"):
        swiglu_tile_kernels(h, limit=10.0, dtype=torch.float16)
    for fmt in (MXFP4, Q4K, FP8_32X32, replace(Q8, amax_floor=0.5)):
        with pytest.raises(NotImplementedError, match="fmt: expected e4m3 codes in groups of 32 or 128, floor 0.0001"):
            swiglu_quant_tile_kernels(h, limit=10.0, fmt=fmt)
