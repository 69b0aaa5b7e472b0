"""Root-mean-square normalisation, alone and followed by a quantiser."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.rms_norm import (
    rms_norm_quant_tile_kernels,
    rms_norm_quant_triton,
    rms_norm_tile_kernels,
    rms_norm_triton,
)
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.reference.config import FP8_1X128, FP8_128X128, Q4I, Q8, QuantFormat, WeightCast
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics
from deeptwin.reference.quant import quantize
from deeptwin.reference.rms_norm import project_norm, rms_norm, rms_norm_quant

AFTER, BEFORE = WeightCast.AFTER_WEIGHT, WeightCast.BEFORE_WEIGHT
both_casts = pytest.mark.parametrize("cast", WeightCast, ids=lambda cast: cast.value)
both_eps = pytest.mark.parametrize("eps", [1e-20, 1e-6])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def bits(x: Tensor) -> list[int]:
    return x.contiguous().view(torch.uint8).flatten().tolist()


CARD = load_card("rms_norm")


# properties of the reference


@both_casts
def test_worked_row(cast: WeightCast) -> None:
    # mean of squares 12.5: 3 / sqrt(12.5) = 0.8485, 4 / sqrt(12.5) = 1.1314
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    y = rms_norm(x, weight, eps=1e-20, cast=cast, num=SEMANTIC)
    torch.testing.assert_close(y, torch.tensor([[0.848528137423857, 2.262741699796952]], dtype=torch.float64))
    # the neighbours of 0.8485 and 1.1314 in bf16
    rounded = rms_norm(x, weight, eps=1e-20, cast=cast)
    assert rounded.tolist() == [[217 / 256, 2 * 145 / 128]]


@both_casts
@both_eps
def test_zero_rows_stay_zero(cast: WeightCast, eps: float) -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    for num in (SEMANTIC, CONTRACT, RIVAL):
        assert rms_norm(x, torch.ones(64), eps=eps, cast=cast, num=num).abs().max() == 0


@pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)
def test_eps_decides_tiny_rows(num: Numerics) -> None:
    x = torch.full((1, 64), 1e-12)
    unit = torch.ones(64)
    with_small = rms_norm(x, unit, eps=1e-20, cast=AFTER, dtype=torch.float32, num=num)
    with_large = rms_norm(x, unit, eps=1e-6, cast=AFTER, dtype=torch.float32, num=num)
    assert with_small[0, 0].item() == pytest.approx(1e-12 / math.sqrt(1e-24 + 1e-20), rel=1e-6)
    assert with_large[0, 0].item() == pytest.approx(1e-9, rel=1e-6)
    # the squares underflow in fp32, the row does not
    lost = rms_norm(torch.full((1, 64), 1e-30), unit, eps=1e-20, cast=AFTER, dtype=torch.float32, num=num)
    assert lost[0, 0].item() == pytest.approx(1e-20, rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
    st.sampled_from([1e-20, 1e-6]),
)
def test_semantic_is_the_formula(row: list[float], eps: float) -> None:
    weight = [0.5 + i / 8 for i in range(len(row))]
    y = rms_norm(torch.tensor([row]), torch.tensor(weight), eps=eps, cast=BEFORE, num=SEMANTIC)
    rms = math.sqrt(math.fsum(v * v for v in torch.tensor(row).tolist()) / len(row) + eps)
    assert y[0].tolist() == pytest.approx([w * v / rms for v, w in zip(row, weight, strict=True)], rel=1e-12, abs=1e-30)


def test_after_weight_rounds_once_and_before_weight_twice() -> None:
    x, weight = normal(64, 512), normal(512, seed=1, dtype=torch.float32) + 1
    exact = rms_norm(x, weight, eps=1e-6, cast=AFTER, num=SEMANTIC)
    once = rms_norm(x, weight, eps=1e-6, cast=AFTER)
    twice = rms_norm(x, weight, eps=1e-6, cast=BEFORE)
    assert (once == exact.to(torch.bfloat16)).double().mean() > 0.9999
    assert 0.15 < (once != twice).double().mean() < 0.45
    # the inner rounding is visible alone when the weight is one
    unit = torch.ones(512)
    assert torch.equal(
        rms_norm(x, unit, eps=1e-6, cast=AFTER),
        rms_norm(x, unit, eps=1e-6, cast=BEFORE),
    )


def test_rounding_has_no_bias() -> None:
    x = normal(256, 512, seed=2)
    exact = rms_norm(x, torch.ones(512), eps=1e-20, cast=AFTER, num=SEMANTIC)
    rounded = rms_norm(x, torch.ones(512), eps=1e-20, cast=AFTER)
    below = (rounded < exact).double().mean() + (rounded == exact).double().mean() / 2
    assert abs(below - 0.5) < 10 / math.sqrt(x.numel())


def test_scaling_the_row_changes_nothing() -> None:
    x = normal(4, 128)
    weight = normal(128, seed=1)
    y = rms_norm(x, weight, eps=1e-20, cast=AFTER, num=SEMANTIC)
    for factor in (2.0**-20, 2.0**20):
        scaled = rms_norm(x * factor, weight, eps=1e-20, cast=AFTER, num=SEMANTIC)
        torch.testing.assert_close(scaled, y, rtol=1e-6, atol=0)


def test_a_sum_of_squares_beyond_fp32_gives_zeros_as_in_a_kernel() -> None:
    x = torch.full((1, 64), 1e20)
    assert rms_norm(x, torch.ones(64), eps=1e-20, cast=AFTER).abs().max() == 0
    assert rms_norm(x, torch.ones(64), eps=1e-20, cast=AFTER, num=SEMANTIC)[0, 0].item() == pytest.approx(1)


@both_casts
@pytest.mark.parametrize("fmt", [Q8, Q4I, FP8_1X128, FP8_128X128], ids=lambda fmt: fmt.name)
def test_codes_are_those_of_the_rounded_rows(cast: WeightCast, fmt: QuantFormat) -> None:
    x, weight = normal(33, 256), normal(256, seed=1)
    for num in (CONTRACT, RIVAL):
        y, codes, sf = rms_norm_quant(x, weight, eps=1e-20, cast=cast, fmt=fmt, num=num)
        assert torch.equal(y, rms_norm(x, weight, eps=1e-20, cast=cast, num=num))
        separate = quantize(y.to(torch.bfloat16), fmt=fmt, num=num)
        assert (bits(codes), bits(sf)) == (bits(separate[0]), bits(separate[1]))
    unrounded = rms_norm(x, weight, eps=1e-20, cast=AFTER, dtype=torch.float32)
    assert bits(quantize(unrounded, fmt=fmt)[0]) != bits(codes)


def test_no_tokens() -> None:
    y, codes, sf = rms_norm_quant(torch.zeros(0, 64), torch.ones(64), eps=1e-20, cast=AFTER, fmt=Q8)
    assert (y.shape, codes.shape, sf.shape) == ((0, 64), (0, 64), (0, 2))


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("rms_norm") == []


def test_the_adapters_of_tile_kernels_agree_with_the_reference(tile_kernels_faults) -> None:
    assert tile_kernels_faults("rms_norm") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged) -> None:
    assert judged.without("rms_norm", "batch_invariant") == []


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


@pytest.mark.parametrize("op", [rms_norm, rms_norm_triton, rms_norm_tile_kernels])
def test_bad_input_of_rms_norm_is_refused(op) -> None:
    with pytest.raises(ValueError, match="weight_m: expected m=8, got m=7"):
        op(torch.ones(1, 8), torch.ones(7), eps=1e-6, cast=AFTER)
    with pytest.raises(ValueError, match="x_tm: expected 2 dims"):
        op(torch.ones(8), torch.ones(8), eps=1e-6, cast=AFTER)
    with pytest.raises(ValueError, match="eps: expected a positive number, got 0"):
        op(torch.ones(1, 8), torch.ones(8), eps=0.0, cast=AFTER)
    with pytest.raises(TypeError, match="x_tm: expected"):
        op(torch.ones(1, 8, dtype=torch.int32), torch.ones(8), eps=1e-6, cast=AFTER)
    with pytest.raises(TypeError, match="weight_m: expected"):
        op(torch.ones(1, 8), torch.ones(8, dtype=torch.int32), eps=1e-6, cast=AFTER)
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16 or float16"):
        op(torch.ones(1, 8), torch.ones(8), eps=1e-6, cast=AFTER, dtype=torch.float64)


@pytest.mark.parametrize("op", [rms_norm_quant, rms_norm_quant_triton, rms_norm_quant_tile_kernels])
def test_bad_input_of_rms_norm_quant_is_refused(op) -> None:
    with pytest.raises(ValueError, match="x_tm .*: expected a multiple of 32, got 8"):
        op(torch.ones(1, 8), torch.ones(8), eps=1e-6, cast=AFTER, fmt=Q8)
    with pytest.raises(ValueError, match="weight_m: expected m=32, got m=7"):
        op(torch.ones(1, 32), torch.ones(7), eps=1e-6, cast=AFTER, fmt=Q8)
    with pytest.raises(TypeError, match="x_tm: expected"):
        op(torch.ones(1, 32, dtype=torch.int32), torch.ones(32), eps=1e-6, cast=AFTER, fmt=Q8)


def test_what_the_triton_kernels_decline_and_buffers_that_do_not_fit() -> None:
    pytest.importorskip("triton")
    x, weight = torch.ones(1, 128), torch.ones(128)
    with pytest.raises(NotImplementedError, match="fmt: expected e4m3 codes and rows=1, got e2m1"):
        rms_norm_quant_triton(x, weight, eps=1e-6, cast=AFTER, fmt=Q4I)
    with pytest.raises(NotImplementedError, match="fmt: expected e4m3 codes and rows=1, got e4m3, rows=128"):
        rms_norm_quant_triton(x, weight, eps=1e-6, cast=AFTER, fmt=FP8_128X128)
    odd = dataclasses.replace(Q8, group=48)
    with pytest.raises(NotImplementedError, match="fmt: expected powers of two"):
        rms_norm_quant_triton(torch.ones(1, 48), torch.ones(48), eps=1e-6, cast=AFTER, fmt=odd)
    with pytest.raises(ValueError, match="out: expected contiguous"):
        rms_norm_triton(x, weight, eps=1e-6, cast=AFTER, out=torch.empty(2, 128, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="out: expected torch.bfloat16"):
        rms_norm_triton(x, weight, eps=1e-6, cast=AFTER, out=torch.empty(1, 128))


def test_what_tile_kernels_declines(tile_kernels_faults) -> None:
    x, weight = torch.ones(2, 64), torch.ones(64)
    for op, extra in ((rms_norm_tile_kernels, {}), (rms_norm_quant_tile_kernels, {"fmt": Q8})):
        for bad in (x[:, :32].half(), torch.ones(1, 8224)):
            with pytest.raises(NotImplementedError, match="x_tm: expected 16·n columns up to 8192 in bf16 or fp32"):
                op(bad, torch.ones(bad.shape[1]), eps=1e-6, cast=AFTER, **extra)
        with pytest.raises(NotImplementedError, match="weight_m: expected torch.float32 as x_tm, got torch.bfloat16"):
            op(x, weight.bfloat16(), eps=1e-6, cast=AFTER, **extra)
        with pytest.raises(NotImplementedError, match="cast: expected WeightCast.AFTER_WEIGHT, got WeightCast.BEFORE"):
            op(x, weight, eps=1e-6, cast=WeightCast.BEFORE_WEIGHT, **extra)
    with pytest.raises(NotImplementedError, match="dtype: expected torch.float32 as x_tm, got torch.bfloat16"):
        rms_norm_tile_kernels(x, weight, eps=1e-6, cast=AFTER)
    with pytest.raises(NotImplementedError, match="x_tm: expected torch.bfloat16, got torch.float32"):
        rms_norm_quant_tile_kernels(x, weight, eps=1e-6, cast=AFTER, fmt=Q8)
    for fmt in (dataclasses.replace(Q8, group=16), Q4I, dataclasses.replace(Q8, amax_floor=0.5)):
        with pytest.raises(NotImplementedError, match="fmt: expected e4m3 codes, UE8M0 scales of 32, floor 0.0001"):
            rms_norm_quant_tile_kernels(x.bfloat16(), weight.bfloat16(), eps=1e-6, cast=AFTER, fmt=fmt)


def test_projected_latents_are_refused() -> None:
    x, w, norm = torch.zeros(2, 8), torch.zeros(3, 8), torch.ones(3)
    with pytest.raises(ValueError, match="^w_am: "):
        project_norm(x, w[:, :7], norm, eps=1e-6, cast=WeightCast.AFTER_WEIGHT)
    with pytest.raises(TypeError, match="^weight_m: "):
        project_norm(x, w, norm.to(torch.int32), eps=1e-6, cast=WeightCast.AFTER_WEIGHT)
