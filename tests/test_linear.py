"""Linear layers: floating products, products of quantised bytes, experts, widened weights, byte layouts."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.linear import (
    linear_codes_deep_gemm,
    linear_codes_tilelang,
    linear_codes_triton,
    linear_codes_triton_native,
    linear_deep_gemm,
    linear_grouped_deep_gemm,
    linear_grouped_deep_gemm_masked,
    linear_grouped_tilelang,
    linear_grouped_triton,
    linear_quant_triton,
    linear_slots_deep_gemm,
    linear_slots_deep_gemm_masked,
    linear_slots_triton,
    linear_triton,
    widen_fp4_triton,
)
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.parity.cards.linear import (
    CODES,
    F32_PRODUCT,
    FP8_CODES,
    SLOTS,
    CodesCase,
    SlotsCase,
    codes_by_unit,
    draw_codes,
    draw_slots,
)
from deeptwin.parity.fp8_unit import fp8_unit_dots
from deeptwin.parity.house import HOUSE
from deeptwin.parity.judge import judge
from deeptwin.parity.oracles import OracleSet
from deeptwin.parity.outcome import Outcome, Status
from deeptwin.reference import layouts
from deeptwin.reference.config import (
    FP8_1X128,
    FP8_1X128_UE8M0,
    FP8_32X32,
    FP8_128X128,
    FP8_128X128_UE8M0,
    MXFP4,
    Q4K,
    Q8,
    QuantFormat,
)
from deeptwin.reference.linear import linear, linear_codes, linear_grouped, linear_quant, widen_fp4
from deeptwin.reference.linear_slots import linear_slots
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics
from deeptwin.reference.quant import block_values, dequantize, pack_e2m1, quantize, unpack_e2m1

CARD = load_card("linear")
Judged = Callable[[str], list[Outcome]]
every_num = pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def as_bytes(x: Tensor) -> list[int]:
    return x.contiguous().view(torch.uint8).flatten().tolist()


# properties of the reference


def test_worked_product() -> None:
    x, w = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 0.0, -1.0], [0.5, 0.25, 2.0]])
    assert linear(x, w, num=SEMANTIC).tolist() == [[-2.0, 7.0]]
    assert linear(x, w, torch.tensor([10.0, 0.25]), num=SEMANTIC).tolist() == [[8.0, 7.25]]
    # one rounding: the neighbours of 7.27 in bf16 are 29/4 and 233/32
    assert linear(x, w, torch.tensor([0.0, 0.27])).tolist() == [[-2.0, 7.28125]]


def test_the_bias_is_added_before_the_only_rounding() -> None:
    # 256 + 1 + 1: either addition alone is lost in bf16, both together are not
    x, w, bias = torch.tensor([[256.0, 1.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([1.0])
    assert linear(x, w, bias).tolist() == [[258.0]]
    assert linear(x, w, dtype=torch.float32).tolist() == [[257.0]]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=150))
def test_sums_are_exact_whatever_their_order(pairs: list[tuple[int, int]]) -> None:
    x, w = (torch.tensor([[float(pair[i]) for pair in pairs]]) for i in (0, 1))
    exact = float(sum(Fraction(a) * Fraction(b) for a, b in pairs))
    for num in (SEMANTIC, CONTRACT, RIVAL):
        assert linear(x, w, dtype=torch.float32, num=num).item() == exact


def test_worked_product_of_bytes() -> None:
    # codes 1 and 3 under scales 2 and 2^-1; the weight 2 and 1 under 4: 1·2·2·4 + 3·(1/2)·1·4 = 22
    x_q, w_q = torch.zeros(1, 64).to(torch.float8_e4m3fn), torch.zeros(1, 64).to(torch.float8_e4m3fn)
    x_q[0, 0], x_q[0, 40], w_q[0, 0], w_q[0, 40] = 1.0, 3.0, 2.0, 1.0
    x_sf, w_sf = torch.tensor([[128, 126]], dtype=torch.uint8), torch.tensor([[129, 129]], dtype=torch.uint8)
    assert linear_codes(x_q, x_sf, w_q, w_sf, x_fmt=Q8, w_fmt=FP8_32X32).item() == 22.0
    add = torch.tensor([[0.5]])
    assert linear_codes(x_q, x_sf, w_q, w_sf, add, x_fmt=Q8, w_fmt=FP8_32X32).item() == 22.5
    # the scales of the groups are not interchangeable
    assert linear_codes(x_q, x_sf.flip(1), w_q, w_sf, x_fmt=Q8, w_fmt=FP8_32X32).item() == 4 + 24


def test_the_low_nibble_is_the_even_element() -> None:
    # 0x71: element 0 is code 1 (0.5), element 1 is code 7 (6.0)
    w_q = torch.zeros(1, 16, dtype=torch.uint8)
    w_q[0, 0] = 0x71
    one = torch.tensor([[127]], dtype=torch.uint8)
    x_q = torch.zeros(2, 32).to(torch.float8_e4m3fn)
    x_q[0, 0], x_q[1, 1] = 1.0, 1.0
    y = linear_codes(x_q, one.expand(2, 1), w_q, one, x_fmt=Q8, w_fmt=MXFP4)
    assert y.flatten().tolist() == [0.5, 6.0]


def test_a_scale_that_is_no_power_of_two_multiplies_as_it_is() -> None:
    # U53: payload 1 under scale 1.5·2^k stays 1.5·2^k
    x_q = torch.zeros(1, 128).to(torch.float8_e4m3fn)
    x_q[0, 0] = 1.0
    w_q, one = x_q.clone(), torch.ones(1, 1)
    for k in (-20, 0, 5):
        y = linear_codes(x_q, one * 1.5 * 2.0**k, w_q, one, x_fmt=FP8_1X128, w_fmt=FP8_128X128, dtype=torch.float32)
        assert y.item() == 1.5 * 2.0**k


@pytest.mark.parametrize("x_fmt", [Q8, FP8_1X128, FP8_1X128_UE8M0], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("w_fmt", [FP8_32X32, MXFP4, FP8_128X128, FP8_128X128_UE8M0], ids=lambda fmt: fmt.name)
@every_num
def test_a_product_of_bytes_is_the_product_of_their_values(
    x_fmt: QuantFormat, w_fmt: QuantFormat, num: Numerics
) -> None:
    x, w = normal(3, 256), normal(130, 256, seed=1)
    x_q, x_sf = quantize(x, fmt=x_fmt)
    w_q, w_sf = quantize(w, fmt=w_fmt)
    y = linear_codes(x_q, x_sf, w_q, w_sf, x_fmt=x_fmt, w_fmt=w_fmt, num=num)
    values = block_values(x_q, x_sf, fmt=x_fmt, num=num), block_values(w_q, w_sf, fmt=w_fmt, num=num)
    assert torch.equal(y, linear(*values, num=num))
    assert torch.equal(y, linear_quant(x, w_q, w_sf, x_fmt=x_fmt, w_fmt=w_fmt, num=num))
    # 2^-4 of each operand, of which the errors mostly cancel
    exact = linear(x, w, num=SEMANTIC)
    assert ((y - exact).norm() / exact.norm()).item() < (0.2 if w_fmt is MXFP4 else 0.06)


def test_scaling_rows_by_powers_of_two_scales_the_result() -> None:
    x, (w_q, w_sf) = normal(4, 64), quantize(normal(40, 64, seed=1), fmt=FP8_32X32)
    y = linear_quant(x, w_q, w_sf, x_fmt=Q8, w_fmt=FP8_32X32)
    for factor in (2.0**-6, 2.0**9):
        scaled = linear_quant(x * factor, w_q, w_sf, x_fmt=Q8, w_fmt=FP8_32X32)
        assert torch.equal(scaled, y * factor)


def test_experts_see_their_own_rows() -> None:
    x_q, x_sf = quantize(normal(6, 64), fmt=Q8)
    each = [quantize(normal(8, 64, seed=s), fmt=MXFP4) for s in range(4)]
    w_q, w_sf = torch.stack([q for q, _ in each]), torch.stack([s for _, s in each])
    sizes = torch.tensor([2, 0, 1, 3])
    y = linear_grouped(x_q, x_sf, w_q, w_sf, sizes, x_fmt=Q8, w_fmt=MXFP4)
    spans = ((0, slice(0, 2)), (2, slice(2, 3)), (3, slice(3, 6)))
    for expert, rows in spans:
        alone = linear_codes(x_q[rows], x_sf[rows], *each[expert], x_fmt=Q8, w_fmt=MXFP4)
        assert torch.equal(y[rows], alone)
    assert linear_grouped(x_q[:0], x_sf[:0], w_q, w_sf, sizes * 0, x_fmt=Q8, w_fmt=MXFP4).shape == (0, 8)
    none = linear_grouped(x_q[:0], x_sf[:0], w_q[:0], w_sf[:0], sizes[:0], x_fmt=Q8, w_fmt=MXFP4)
    assert none.shape == (0, 8)


def test_no_rows_and_no_width() -> None:
    assert linear(torch.zeros(0, 4), torch.zeros(3, 4)).shape == (0, 3)
    assert linear(torch.zeros(2, 0), torch.zeros(3, 0), torch.ones(3)).tolist() == [[1.0] * 3] * 2


def test_widening_keeps_every_value() -> None:
    rng = np.random.Generator(np.random.Philox(3))
    codes = torch.from_numpy(rng.integers(0, 256, (64, 64), dtype=np.uint8))
    for spread in (0, 11, 14):
        sf = torch.from_numpy(rng.integers(125 - spread, 126, (64, 4), dtype=np.uint8))
        wide, wide_sf = widen_fp4(codes, sf, fmt=MXFP4, out_fmt=FP8_32X32)
        before = dequantize(codes, sf, fmt=MXFP4, dtype=torch.float32)
        assert torch.equal(before, dequantize(wide, wide_sf, fmt=FP8_32X32, dtype=torch.float32))
        assert torch.equal(torch.signbit(before), torch.signbit(wide.to(torch.float32)))


def test_widening_by_the_worked_numbers() -> None:
    # largest byte 127 gives 121; 6 · 2^6 = 384 is code 0x7c, and 0.5 · 2^-8 the smallest subnormal
    codes = pack_e2m1(torch.tensor([[7, 1] + [0] * 30, [1, 3] + [0] * 30], dtype=torch.uint8))
    sf = torch.tensor([[127], [113]], dtype=torch.uint8)
    wide, wide_sf = widen_fp4(codes, sf, fmt=MXFP4, out_fmt=FP8_32X32)
    assert wide_sf.tolist() == [[121]]
    assert as_bytes(wide)[:2] == [0x7C, 0x60]
    assert as_bytes(wide)[32:34] == [0x01, 0x03]
    # below 6 the subtraction saturates
    _, low_sf = widen_fp4(codes[:1], torch.tensor([[3]], dtype=torch.uint8), fmt=MXFP4, out_fmt=FP8_32X32)
    assert low_sf.tolist() == [[0]]


def test_empty_blocks_do_not_limit_the_spread() -> None:
    codes = pack_e2m1(torch.tensor([[7] * 32, [8] * 32], dtype=torch.uint8))
    sf = torch.tensor([[127], [1]], dtype=torch.uint8)
    wide, _ = widen_fp4(codes, sf, fmt=MXFP4, out_fmt=FP8_32X32)
    assert set(as_bytes(wide)[32:]) == {0x80}


def test_widened_weights_read_the_same_by_tile_kernels() -> None:
    pytest.importorskip("tile_kernels")
    from deeptwin.parity.peers.quant import tile_kernels_cast_back

    w_q, w_sf = quantize(normal(64, 128), fmt=MXFP4)
    wide = widen_fp4(w_q, w_sf, fmt=MXFP4, out_fmt=FP8_32X32)
    values = (
        tile_kernels_cast_back(*wide, fmt=FP8_32X32, dtype=torch.float32),
        tile_kernels_cast_back(w_q, w_sf, fmt=MXFP4, dtype=torch.float32),
    )
    assert torch.equal(*values)


@pytest.mark.parametrize("fmt", [MXFP4, FP8_32X32, FP8_128X128], ids=lambda fmt: fmt.name)
def test_checkpoint_bytes_round_trip(fmt: QuantFormat) -> None:
    codes, sf = quantize(normal(70, 96), fmt=fmt)
    w, scale = layouts.to_checkpoint(codes, sf, fmt=fmt)
    assert w.dtype == (torch.int8 if fmt is MXFP4 else torch.float8_e4m3fn)
    assert scale.dtype == (torch.float32 if fmt is FP8_128X128 else torch.float8_e8m0fnu)
    back = layouts.from_checkpoint(w, scale, fmt=fmt)
    assert [as_bytes(x) for x in back] == [as_bytes(codes), as_bytes(sf)]
    assert [x.dtype for x in back] == [codes.dtype, sf.dtype]


def test_scales_pack_into_words() -> None:
    sf = torch.tensor([[119, 120, 121, 122, 123]], dtype=torch.uint8)
    words = layouts.pack_scales(sf, word=torch.int32)
    assert [w & 0xFFFFFFFF for w in words[0].tolist()] == [0x7A797877, 0x0000007B]
    assert layouts.pack_scales(sf, word=torch.int16)[0].tolist() == [0x7877, 0x7A79, 0x007B]
    for word in (torch.int32, torch.int16):
        assert torch.equal(layouts.unpack_scales(layouts.pack_scales(sf, word=word), groups=5), sf)
    columns = layouts.column_major(words.expand(5, 2), align=4)
    assert columns.stride() == (1, 8)
    assert torch.equal(columns, words.expand(5, 2))
    expanded = layouts.expand_scales(torch.tensor([[1], [2]], dtype=torch.uint8), fmt=FP8_32X32, rows=40)
    assert expanded.flatten().tolist() == [1] * 32 + [2] * 8


def test_permutations_of_rows_round_trip() -> None:
    rows = torch.arange(256)[:, None].expand(256, 3)
    mixed = layouts.interleave_gate_up(rows)
    # g0 … g7, u0 … u7, g8 …
    assert mixed[:24, 0].tolist() == [*range(8), *range(128, 136), *range(8, 16)]
    assert torch.equal(layouts.deinterleave_gate_up(mixed), rows)
    tiled = layouts.tile_scales(rows)
    where = [tiled[:, 0].tolist().index(r) for r in (0, 1, 32, 127, 128)]
    assert where == [0, 4, 1, 127, 128]
    assert torch.equal(layouts.untile_scales(tiled), rows)
    experts = torch.arange(2 * 128 * 2).reshape(2, 128, 2)
    assert torch.equal(layouts.untile_scales(layouts.tile_scales(experts)), experts)
    assert torch.equal(layouts.interleave_gate_up(experts)[1], layouts.interleave_gate_up(experts[1]))


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged: Judged) -> None:
    outcomes = judged("linear")
    promised = {(op.name, row.name) for op in CARD.ops for row in op.candidates if row.name == "triton"}
    assert promised <= {(o.op, o.candidate) for o in outcomes if o.status is Status.PASSED}
    assert not [o.id for o in outcomes if o.status in (Status.MISMATCH, Status.ERROR)]


CHILD = """
import dataclasses, sys
import torch
from deeptwin.kernels.triton_ops import linear as kernels
from deeptwin.parity.card import case_rng
from deeptwin.parity.cards.linear import CODES, CodesCase
from deeptwin.optimized.linear import linear_codes_triton_native

every_code = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
one, w = torch.full((2, 4), 127, dtype=torch.uint8), torch.eye(128).to(torch.float8_e4m3fn)
w_sf = torch.full((4, 4), 127, dtype=torch.uint8)
expected = every_code.view(torch.float8_e4m3fn).to(torch.float32)
launch = dataclasses.replace(kernels.codes_launch(0, "ascend950"), block_rows=16)
options = dict(x_group=32, w_block=(32, 32), dtype=torch.float32)
for how in (launch, None):
    got = kernels.linear_codes(every_code.view(torch.float8_e4m3fn), one, w, w_sf, None, launch=how, **options)
    # a NaN times zero is NaN: the rows with the codes 0x7f and 0xff are NaN throughout
    kept = torch.arange(128) != 127
    clean = torch.where(kept, every_code, 0).to(torch.uint8)
    got = kernels.linear_codes(clean.view(torch.float8_e4m3fn), one, w, w_sf, None, launch=how, **options)
    assert torch.equal(got[:, kept], expected[:, kept]), how
for w_fmt in ("fp8_32x32", "mxfp4"):
    case = CodesCase(tokens=3, features=40, width=128, w=w_fmt, out="fp32")
    inputs = CODES.draw(case, case_rng("linear", "linear_codes", case.id, 0))
    native = linear_codes_triton_native(**inputs)
    del inputs["x_fmt"], inputs["w_fmt"]
    emulated = kernels.linear_codes(**inputs, x_group=32, w_block=(32 if w_fmt == "fp8_32x32" else 1, 32))
    assert torch.allclose(native, emulated, rtol=0, atol=1e-5 * emulated.abs().max().item())
sys.stdout.write("agree")
"""


def test_both_ways_to_read_codes_agree() -> None:
    pytest.importorskip("triton")
    import subprocess
    import sys

    from deeptwin.parity.house import worker_environment

    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(
        command, env=worker_environment("cpu"), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "agree", done.stderr


def test_the_fp32_limits_see_lower_precision() -> None:
    case = CodesCase(tokens=4, features=64, width=2560, out="fp32", regime="mean1")
    inputs = draw_codes(case, np.random.Generator(np.random.Philox(1)))
    oracles = OracleSet(CODES, inputs).of(CODES.outputs[0])
    right = oracles.contract.to(torch.float32)
    assert F32_PRODUCT.judge(right, oracles).ok
    # ten mantissa bits, as TF32 keeps, and eight
    assert not F32_PRODUCT.judge(((right.view(torch.int32) + 4096) & -8192).view(torch.float32), oracles).ok
    assert not F32_PRODUCT.judge(right.bfloat16().float(), oracles).ok


# batch invariance


def test_every_candidate_is_batch_invariant(judged: Judged) -> None:
    outcomes = [o for o in judged("linear") if o.check.endswith("_invariant") and o.status is Status.PASSED]
    promised = {(op.name, "triton") for op in CARD.ops if op.name != "widen_fp4"}
    assert promised <= {(o.op, o.candidate) for o in outcomes}


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


def quantized(fmt: QuantFormat, rows: int, width: int) -> tuple[Tensor, Tensor]:
    return quantize(torch.zeros(rows, width), fmt=fmt)


@pytest.mark.parametrize("op", [linear, linear_triton])
def test_bad_input_of_linear_is_refused(op: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match="w_fm: expected m=8, got m=7"):
        op(torch.ones(1, 8), torch.ones(3, 7))
    with pytest.raises(ValueError, match="bias_f: expected f=3, got f=2"):
        op(torch.ones(1, 8), torch.ones(3, 8), torch.ones(2))
    with pytest.raises(TypeError, match="x_tm: expected"):
        op(torch.ones(1, 8, dtype=torch.int32), torch.ones(3, 8))
    with pytest.raises(TypeError, match="w_fm: expected"):
        op(torch.ones(1, 8), torch.ones(3, 8, dtype=torch.int8))
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16 or float16"):
        op(torch.ones(1, 8), torch.ones(3, 8), dtype=torch.float64)


@pytest.mark.parametrize("op", [linear_codes, linear_codes_triton, linear_codes_triton_native])
def test_bad_input_of_linear_codes_is_refused(op: Callable[..., Tensor]) -> None:
    x, w = quantized(Q8, 2, 128), quantized(FP8_32X32, 40, 128)
    formats: dict[str, Any] = {"x_fmt": Q8, "w_fmt": FP8_32X32}
    with pytest.raises(ValueError, match="x_fmt: expected groups of one row, got fp8_32x32"):
        op(*x, *w, x_fmt=FP8_32X32, w_fmt=FP8_32X32)
    with pytest.raises(ValueError, match="sf: expected g=4, got g=3"):
        op(x[0], x[1][:, :3], *w, **formats)
    with pytest.raises(ValueError, match="sf: expected [tn]=2, got [tn]=1"):
        op(*x, w[0], w[1][:1], **formats)
    with pytest.raises(ValueError, match="add_tf: expected f=40, got f=41"):
        op(*x, *w, torch.ones(2, 41), **formats)
    with pytest.raises(ValueError, match=r"w_q.*: expected [mj]=128, got [mj]=96"):
        op(*x, *quantized(FP8_32X32, 40, 96), **formats)
    # U52: scales that are no powers of two never reach a consumer of UE8M0
    with pytest.raises(TypeError, match="sf: expected torch.uint8, got torch.float32"):
        op(x[0], torch.ones(2, 4), *w, **formats)
    with pytest.raises(TypeError, match=r"(codes|w_q): expected torch.float8_e4m3fn, got torch.uint8"):
        op(*x, *quantized(MXFP4, 40, 128), **formats)
    with pytest.raises(TypeError, match="add_tf: expected"):
        op(*x, *w, torch.ones(2, 40, dtype=torch.int32), **formats)
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16 or float16"):
        op(*x, *w, dtype=torch.int8, **formats)


V3: dict[str, Any] = {"x_fmt": FP8_1X128, "w_fmt": FP8_128X128}


def columns_first(sf: Tensor) -> Tensor:
    return sf.transpose(-1, -2).contiguous().transpose(-1, -2)


class DeepGemm:
    """A stand-in for the library: it writes to the tensor that it is given, and to all rows of a tile."""

    utils = SimpleNamespace(layout=SimpleNamespace(get_mn_major_tma_aligned_tensor=columns_first))

    @staticmethod
    def fp8_gemm_nt(a: Any, b: Any, d: Tensor, c: Tensor | None = None, recipe: Any = None) -> None:
        assert a[1].stride(0) == 1  # scales lie column by column
        if recipe is None:
            d.copy_(linear_codes(*a, *b, **V3))
        else:
            assert recipe == (1, 1, 128)
            assert b[1].stride(0) == 1
            d.copy_(linear_codes(*a, *b, c, x_fmt=FP8_1X128, w_fmt=FP8_1X128, dtype=torch.float32))

    @staticmethod
    def bf16_gemm_nt(a: Tensor, b: Tensor, d: Tensor) -> None:
        d.copy_(linear(a, b, dtype=d.dtype))

    @staticmethod
    def m_grouped_fp8_gemm_nt_contiguous(a: Any, b: Any, d: Tensor, expert: Tensor) -> None:
        for row in range(0, len(d), 128):
            e, tile = int(expert[row]), slice(row, row + 128)
            if e >= 0:
                d[tile] = linear_codes(a[0][tile], a[1][tile], b[0][e], b[1][e], **V3)

    @staticmethod
    def m_grouped_fp8_gemm_nt_masked(a: Any, b: Any, d: Tensor, count: Tensor, expected: int) -> None:
        assert expected > 0
        assert a[0].is_contiguous()
        for e, rows in enumerate(count.tolist()):
            tiles = slice(0, -(-rows // 64) * 64)
            d[e, tiles] = linear_codes(a[0][e, tiles], a[1][e, tiles], b[0][e], b[1][e], **V3)


@pytest.fixture
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setitem(sys.modules, "deep_gemm", DeepGemm)
    return monkeypatch


def test_the_adapter_of_deep_gemm_passes_pairs_and_declines_the_rest(deep_gemm: pytest.MonkeyPatch) -> None:
    x, w = quantize(normal(33, 256), fmt=FP8_1X128), quantize(normal(40, 256, seed=1), fmt=FP8_128X128)
    assert torch.equal(linear_codes_deep_gemm(*x, *w, **V3), linear_codes(*x, *w, **V3).bfloat16())
    add = normal(33, 40, dtype=torch.float32)
    for added in (None, add):
        wide = linear_codes_deep_gemm(*x, *w, added, dtype=torch.float32, **V3)
        assert torch.equal(wide, linear_codes(*x, *w, added, dtype=torch.float32, **V3).float())
    with pytest.raises(ValueError, match="sf: expected"):
        linear_codes_deep_gemm(x[0], x[1][:, :1], *w, **V3)
    with pytest.raises(TypeError, match="sf: expected"):
        linear_codes_deep_gemm(x[0], x[1].to(torch.float64), *w, **V3)
    with pytest.raises(NotImplementedError, match="add_tf, dtype: expected None and bfloat16, or float32"):
        linear_codes_deep_gemm(*x, *w, add, **V3)
    with pytest.raises(NotImplementedError, match="x_q: expected more than 32 rows to fp32, got 2"):
        linear_codes_deep_gemm(x[0][:2], x[1][:2], *w, dtype=torch.float32, **V3)
    with pytest.raises(NotImplementedError, match="x_q, w_q: expected rows and 8·n features, got 33 and 4"):
        linear_codes_deep_gemm(*x, *quantized(FP8_128X128, 4, 256), **V3)
    with pytest.raises(NotImplementedError, match="x_fmt, w_fmt: expected fp8_1x128, fp8_128x128, got q8, fp8_32x32"):
        linear_codes_deep_gemm(*quantized(Q8, 2, 128), *quantized(FP8_32X32, 8, 128), x_fmt=Q8, w_fmt=FP8_32X32)
    deep_gemm.setitem(sys.modules, "deep_gemm", SimpleNamespace())  # the placeholder of February 2025
    with pytest.raises(NotImplementedError, match="deep_gemm: expected fp8_gemm_nt, got an unknown distribution"):
        linear_codes_deep_gemm(*x, *w, **V3)


def test_deep_gemm_multiplies_aligned_bf16_rows(deep_gemm: pytest.MonkeyPatch) -> None:
    x, w = normal(3, 16), normal(8, 16, seed=1)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(linear_deep_gemm(x, w, dtype=dtype), linear(x, w, dtype=dtype).to(dtype))
    with pytest.raises(NotImplementedError, match="x_tm, w_fm, bias_f, dtype: expected bf16, no bias"):
        linear_deep_gemm(x, w, normal(8))
    with pytest.raises(NotImplementedError, match="expected rows, 8·n features and 8·n columns"):
        linear_deep_gemm(x, w[:7])
    with pytest.raises(NotImplementedError, match="x_tm: expected rows at multiples of 16 bytes"):
        linear_deep_gemm(normal(3, 20)[:, :16], w)
    with pytest.raises(ValueError, match="w_fm: expected m=16, got m=8"):
        linear_deep_gemm(x, w[:, :8])
    with pytest.raises(TypeError, match="x_tm: expected"):
        linear_deep_gemm(x.int(), w)


@pytest.mark.parametrize("op", [linear_grouped_deep_gemm, linear_grouped_deep_gemm_masked])
@pytest.mark.parametrize("sizes", [(3, 0, 130), (128, 256, 0), (5,)])
def test_deep_gemm_takes_experts_at_tiles_of_their_own(
    deep_gemm: pytest.MonkeyPatch, op: Callable[..., Tensor], sizes: tuple[int, ...]
) -> None:
    x = quantize(normal(sum(sizes), 256, seed=9), fmt=FP8_1X128)
    each = [quantize(normal(40, 256, seed=e), fmt=FP8_128X128) for e in range(len(sizes))]
    w_q = torch.stack([codes.view(torch.uint8) for codes, _ in each]).view(torch.float8_e4m3fn)
    operands = (*x, w_q, torch.stack([sf for _, sf in each]), torch.tensor(sizes))
    right = linear_grouped(*operands, **V3).bfloat16()
    assert torch.equal(op(*operands, **V3), right)
    assert torch.equal(op(*operands, sizes=sizes, **V3), right)
    with pytest.raises(ValueError, match="group_sizes_e: expected sizes from 0 up that add up"):
        op(*operands[:4], operands[4] + 1, **V3)
    with pytest.raises(TypeError, match="group_sizes_e: expected"):
        op(*operands[:4], operands[4].float(), **V3)
    with pytest.raises(NotImplementedError, match="x_fmt, w_fmt: expected fp8_1x128, fp8_128x128"):
        op(*quantized(Q8, 3, 64), *(p[None] for p in quantized(MXFP4, 8, 64)), torch.tensor([3]), x_fmt=Q8, w_fmt=MXFP4)


@pytest.mark.parametrize("op", [linear_slots_deep_gemm, linear_slots_deep_gemm_masked])
def test_the_gate_sees_rows_of_a_tile_that_no_expert_has(
    deep_gemm: pytest.MonkeyPatch, op: Callable[..., Tensor]
) -> None:
    case = SlotsCase(counts=(3, 0, 70), features=8)
    inputs = draw_slots(case, np.random.Generator(np.random.Philox(1)))
    y = op(**inputs)
    (verdict,) = judge({"y_yf": y}, OracleSet(SLOTS, inputs))
    assert verdict.status is Status.MISMATCH
    named = inputs["expert_y"] >= 0
    right = linear_slots(**inputs).bfloat16()
    assert torch.equal(y[named], right[named])
    assert torch.equal(y[128:256], right[128:256])  # no tile of an expert without rows
    with pytest.raises(NotImplementedError, match="x_q: expected 128·n rows"):
        op(**(inputs | {n: inputs[n][:5] for n in ("x_q", "x_sf", "expert_y", "before_yf")}))
    with pytest.raises(ValueError, match="expert_y: expected y=384, got y=5"):
        op(**(inputs | {"expert_y": inputs["expert_y"][:5]}))
    with pytest.raises(TypeError, match="before_yf: expected torch.bfloat16"):
        op(**(inputs | {"before_yf": inputs["before_yf"].float()}))


def test_the_masked_product_takes_first_rows_only(deep_gemm: pytest.MonkeyPatch) -> None:
    inputs = draw_slots(SlotsCase(counts=(3, 1), features=8), np.random.Generator(np.random.Philox(1)))
    with pytest.raises(NotImplementedError, match="expert_y: expected the first rows of every expert's share"):
        linear_slots_deep_gemm_masked(**(inputs | {"expert_y": inputs["expert_y"].flip(0)}))


def test_the_model_of_the_fp8_unit_has_the_bits_of_a_device() -> None:
    for found in json.loads((HOUSE / "golden/records/sm90/fp8-dots.json").read_text())["sets"].values():
        a, b = (
            torch.tensor([list(bytes.fromhex(row)) for row in found[side]], dtype=torch.uint8).view(torch.float8_e4m3fn)
            for side in ("a", "b")
        )
        assert torch.equal(fp8_unit_dots(a.double(), b.double()), torch.tensor(found["dots"], dtype=torch.float64))
    nothing = torch.zeros(1, 64, dtype=torch.float64)
    assert fp8_unit_dots(nothing, nothing).tolist() == [[0.0]]


def test_products_by_the_fp8_unit_are_held_to_its_bits() -> None:
    inputs = draw_codes(
        CodesCase(tokens=33, features=40, width=256, x="fp8_1x128", w="fp8_128x128"),
        np.random.Generator(np.random.Philox(1)),
    )
    oracles = OracleSet(CODES, inputs)
    right = codes_by_unit(inputs, torch.arange(40)).bfloat16()
    assert not torch.equal(right, linear_codes(**inputs).bfloat16())
    off = right.clone()
    off[32, 39] = torch.nextafter(off[32, 39], torch.tensor(torch.inf, dtype=torch.bfloat16))
    far = right * 1.01
    verdicts = [judge({"y_tf": y}, oracles, dict(FP8_CODES))[0] for y in (right, off, far)]
    assert [v.status for v in verdicts] == [Status.PASSED, Status.MISMATCH, Status.MISMATCH]
    assert verdicts[1].message == "1 of 1320 elements have not the bits of the FP8 unit"


def test_the_kernel_with_specialised_warps_takes_one_chip_and_two_pairs_of_formats() -> None:
    x, w = quantized(FP8_1X128, 2, 256), quantized(FP8_128X128, 40, 256)
    formats: dict[str, Any] = {"x_fmt": FP8_1X128, "w_fmt": FP8_128X128}
    with pytest.raises(NotImplementedError, match="x_q: expected a tensor on SM90, got one on cpu"):
        linear_codes_tilelang(*x, *w, **formats)
    with pytest.raises(NotImplementedError, match="add_tf, dtype: expected None and bfloat16"):
        linear_codes_tilelang(*x, *w, dtype=torch.float32, **formats)
    with pytest.raises(NotImplementedError, match="x_fmt, w_fmt: expected e4m3 blocks of 128 or of 32, got q8, mxfp4"):
        linear_codes_tilelang(*quantized(Q8, 2, 128), *quantized(MXFP4, 8, 128), x_fmt=Q8, w_fmt=MXFP4)
    with pytest.raises(ValueError, match="sf: expected"):
        linear_codes_tilelang(x[0], x[1][:, :1], *w, **formats)
    with pytest.raises(TypeError, match="sf: expected"):
        linear_codes_tilelang(x[0], x[1].to(torch.float64), *w, **formats)


def test_the_grouped_kernel_with_specialised_warps_takes_one_chip_and_two_pairs_of_formats() -> None:
    x, w = quantized(FP8_1X128, 2, 256), [part[None] for part in quantized(FP8_128X128, 40, 256)]
    with pytest.raises(NotImplementedError, match="x_q: expected a tensor on SM90, got one on cpu"):
        linear_grouped_tilelang(*x, *w, torch.tensor([2]), **V3)
    with pytest.raises(NotImplementedError, match="w_q: expected experts, got none"):
        linear_grouped_tilelang(*(p[:0] for p in x), *(p[:0] for p in w), torch.zeros(0, dtype=torch.int32), **V3)
    packed = [part[None] for part in quantized(MXFP4, 8, 128)]
    with pytest.raises(NotImplementedError, match="x_fmt, w_fmt: expected e4m3 blocks of 128 or of 32, got q8, mxfp4"):
        linear_grouped_tilelang(*quantized(Q8, 2, 128), *packed, torch.tensor([2]), x_fmt=Q8, w_fmt=MXFP4)
    with pytest.raises(ValueError, match="group_sizes_e: expected sizes from 0 up that add up to y=2"):
        linear_grouped_tilelang(*x, *w, torch.tensor([1]), **V3)
    with pytest.raises(TypeError, match="group_sizes_e: expected"):
        linear_grouped_tilelang(*x, *w, torch.tensor([2.0]), **V3)


@pytest.mark.parametrize("op", [linear_quant, linear_quant_triton])
def test_bad_input_of_linear_quant_is_refused(op: Callable[..., Tensor]) -> None:
    w = quantized(FP8_32X32, 40, 128)
    with pytest.raises(ValueError, match="x_tm .*: expected a multiple of 32, got 100"):
        op(torch.ones(2, 100), *w, x_fmt=Q8, w_fmt=FP8_32X32)
    with pytest.raises(ValueError, match=r"w_q.*: expected [mj]=64, got [mj]=128"):
        op(torch.ones(2, 64), *w, x_fmt=Q8, w_fmt=FP8_32X32)
    with pytest.raises(TypeError, match="x_tm: expected"):
        op(torch.ones(2, 128, dtype=torch.int32), *w, x_fmt=Q8, w_fmt=FP8_32X32)
    with pytest.raises(TypeError, match=r"(codes|w_q): expected torch.uint8"):
        op(torch.ones(2, 128), *w, x_fmt=Q8, w_fmt=MXFP4)


def test_rows_that_are_not_finite_are_refused_by_the_reference() -> None:
    w = quantized(FP8_32X32, 40, 64)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="x_tm: expected finite values"):
            linear_quant(torch.full((1, 64), bad), *w, x_fmt=Q8, w_fmt=FP8_32X32)


@pytest.mark.parametrize("op", [linear_grouped, linear_grouped_triton])
def test_bad_input_of_linear_grouped_is_refused(op: Callable[..., Tensor]) -> None:
    x = quantized(Q8, 5, 64)
    w_q, w_sf = (part[None].expand(3, *part.shape) for part in quantized(MXFP4, 8, 64))
    formats: dict[str, Any] = {"x_fmt": Q8, "w_fmt": MXFP4}
    for sizes in ([2, 2, 2], [1, 1, 1], [6, -1, 0]):
        with pytest.raises(ValueError, match="group_sizes_e: expected sizes from 0 up that add up to y=5"):
            op(*x, w_q, w_sf, torch.tensor(sizes), **formats)
    with pytest.raises(ValueError, match="group_sizes_e: expected e=3, got e=2"):
        op(*x, w_q, w_sf, torch.tensor([2, 3]), **formats)
    with pytest.raises(ValueError, match="w_sf: expected e=3, got e=2"):
        op(*x, w_q, w_sf[:2], torch.tensor([2, 3, 0]), **formats)
    with pytest.raises(TypeError, match="group_sizes_e: expected torch.int32 or torch.int64"):
        op(*x, w_q, w_sf, torch.tensor([2.0, 3.0, 0.0]), **formats)


@pytest.mark.parametrize("op", [linear_slots, linear_slots_triton])
def test_bad_input_of_linear_slots_is_refused(op: Callable[..., Tensor]) -> None:
    inputs = draw_slots(SlotsCase(counts=(3, 1), features=8), np.random.Generator(np.random.Philox(1)))
    with pytest.raises(ValueError, match="before_yf: expected f=8, got f=7"):
        op(**(inputs | {"before_yf": inputs["before_yf"][:, :7]}))
    with pytest.raises(TypeError, match="expert_y: expected torch.int32"):
        op(**(inputs | {"expert_y": inputs["expert_y"].long()}))
    with pytest.raises(TypeError, match="before_yf: expected torch.bfloat16"):
        op(**(inputs | {"before_yf": inputs["before_yf"].float()}))


def test_the_slots_of_the_triton_kernel_take_what_its_other_products_take() -> None:
    inputs = draw_slots(SlotsCase(counts=(3, 1), features=8), np.random.Generator(np.random.Philox(1)))
    strided = torch.zeros(256, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, ::2]
    with pytest.raises(NotImplementedError, match="x_q: expected contiguous rows"):
        linear_slots_triton(**(inputs | {"x_q": strided}))


def test_rows_of_a_tile_name_one_expert_or_none() -> None:
    inputs = draw_slots(SlotsCase(counts=(3, 1), features=8), np.random.Generator(np.random.Philox(1)))
    for expert, row in ((1, 0), (2, 128), (-2, 5)):
        named = inputs["expert_y"].clone()
        named[row] = expert
        with pytest.raises(ValueError, match="expert_y: expected one of 2 experts or -1 in 128 rows, got"):
            linear_slots(**(inputs | {"expert_y": named}))


@pytest.mark.parametrize("op", [widen_fp4, widen_fp4_triton])
def test_bad_input_of_widen_fp4_is_refused(op: Callable[..., Any]) -> None:
    codes = pack_e2m1(torch.full((2, 32), 7, dtype=torch.uint8))
    sf = torch.tensor([[127], [112]], dtype=torch.uint8)
    formats: dict[str, Any] = {"fmt": MXFP4, "out_fmt": FP8_32X32}
    with pytest.raises(ValueError, match=r"w_sf: expected scales at most 2\^14 apart inside one fp8_32x32 block"):
        op(codes, sf, **formats)
    with pytest.raises(ValueError, match="w_sf: expected bytes 0 to 254, got 255"):
        op(codes, torch.full_like(sf, 255), **formats)
    with pytest.raises(ValueError, match="w_sf: expected [fn]=2, got [fn]=1"):
        op(codes, sf[:1], **formats)
    with pytest.raises(ValueError, match="fmt: expected rows of e2m1 codes with UE8M0 scales, got q4k"):
        op(codes, sf, fmt=Q4K, out_fmt=FP8_32X32)
    with pytest.raises(ValueError, match="out_fmt: expected e4m3 blocks of whole mxfp4 groups"):
        op(codes, sf, fmt=MXFP4, out_fmt=FP8_128X128)
    with pytest.raises(ValueError, match=r"w_q \(last axis, in elements\): expected a multiple of 32, got 16"):
        op(codes[:, :8], sf, **formats)
    with pytest.raises(TypeError, match="w_q: expected torch.uint8, got torch.int8"):
        op(codes.view(torch.int8), sf, **formats)


def test_bad_weights_of_a_checkpoint_are_refused() -> None:
    w, scale = layouts.to_checkpoint(*quantized(MXFP4, 2, 64), fmt=MXFP4)
    with pytest.raises(TypeError, match="w: expected torch.int8, got torch.uint8"):
        layouts.from_checkpoint(w.view(torch.uint8), scale, fmt=MXFP4)
    with pytest.raises(TypeError, match="scale: expected torch.float8_e8m0fnu, got torch.float32"):
        layouts.from_checkpoint(w, torch.ones(2, 2), fmt=MXFP4)
    with pytest.raises(ValueError, match="scale: expected n=2, got n=1"):
        layouts.from_checkpoint(w, scale[:1], fmt=MXFP4)
    spoiled = scale.view(torch.uint8).clone()
    spoiled[1, 0] = 255
    with pytest.raises(ValueError, match=r"scale: expected bytes 0 to 254, got 255 \(NaN\) at \[1, 0\]"):
        layouts.from_checkpoint(w, spoiled.view(torch.float8_e8m0fnu), fmt=MXFP4)
    spoiled[1, 0] = 0
    with pytest.warns(UserWarning, match="scale: 1 bytes are 0"):
        layouts.from_checkpoint(w, spoiled.view(torch.float8_e8m0fnu), fmt=MXFP4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layouts.from_checkpoint(w, scale, fmt=MXFP4)


def test_bad_layouts_are_refused() -> None:
    # U54: scales with a mantissa cannot be packed
    with pytest.raises(TypeError, match="sf_tg: expected torch.uint8, got torch.float32"):
        layouts.pack_scales(torch.tensor([[1.5, 1.0, 1.0, 1.0]]), word=torch.int32)
    with pytest.raises(TypeError, match="word: expected int32 or int16"):
        layouts.pack_scales(torch.zeros(1, 4, dtype=torch.uint8), word=torch.int64)
    with pytest.raises(ValueError, match=r"w13 \(rows\): expected a multiple of 16, got 24"):
        layouts.interleave_gate_up(torch.zeros(24, 2))
    with pytest.raises(ValueError, match=r"sf \(rows\): expected a multiple of 128, got 64"):
        layouts.tile_scales(torch.zeros(64, 2))
    with pytest.raises(ValueError, match=r"codes \(last axis\): expected a multiple of 2, got 3"):
        pack_e2m1(torch.zeros(1, 3, dtype=torch.uint8))
    assert unpack_e2m1(torch.tensor([[0x71]], dtype=torch.uint8)).tolist() == [[1, 7]]


def test_what_the_triton_kernels_decline_and_buffers_that_do_not_fit() -> None:
    pytest.importorskip("triton")
    x, w = quantized(Q8, 2, 128), quantized(FP8_32X32, 8, 128)
    formats: dict[str, Any] = {"x_fmt": Q8, "w_fmt": FP8_32X32}
    with pytest.raises(NotImplementedError, match="w_fm: expected torch.float32 as x_tm, got torch.bfloat16"):
        linear_triton(torch.ones(1, 8), torch.ones(2, 8).bfloat16())
    with pytest.raises(NotImplementedError, match="x_tm: expected contiguous rows"):
        linear_triton(torch.ones(8, 2).T, torch.ones(2, 8))
    with pytest.raises(ValueError, match="out: expected contiguous"):
        linear_triton(torch.ones(1, 8), torch.ones(2, 8), out=torch.empty(1, 3, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="out: expected torch.bfloat16"):
        linear_triton(torch.ones(1, 8), torch.ones(2, 8), out=torch.empty(1, 2))
    odd = replace(Q8, group=8)
    for op in (linear_codes_triton, linear_quant_triton):
        rows = quantized(odd, 2, 128) if op is linear_codes_triton else (torch.ones(2, 128),)
        with pytest.raises(NotImplementedError, match="x_sf: expected groups of a power of two from 16 up, got 8"):
            op(*rows, *w, x_fmt=odd, w_fmt=FP8_32X32)
        rows = quantized(MXFP4, 2, 128) if op is linear_codes_triton else (torch.ones(2, 128),)
        with pytest.raises(NotImplementedError, match="x_fmt: expected e4m3 codes with UE8M0 or fp32 scales"):
            op(*rows, *w, x_fmt=MXFP4, w_fmt=FP8_32X32)
    with pytest.raises(NotImplementedError, match="x_fmt: expected e4m3 codes"):
        linear_grouped_triton(
            *quantized(MXFP4, 2, 128), w[0][None], w[1][None], torch.tensor([2]), x_fmt=MXFP4, w_fmt=FP8_32X32
        )
    half = replace(MXFP4, group=96)
    with pytest.raises(NotImplementedError, match="w_sf: expected groups of a power of two from 16 up, got 96"):
        widen_fp4_triton(*quantized(half, 2, 96), fmt=half, out_fmt=replace(FP8_32X32, group=96))
    with pytest.raises(ValueError, match="out: expected contiguous"):
        widen_fp4_triton(
            *quantized(MXFP4, 2, 64),
            fmt=MXFP4,
            out_fmt=FP8_32X32,
            out=(torch.empty(2, 32, dtype=torch.float8_e4m3fn), torch.empty(1, 2, dtype=torch.uint8)),
        )
    with pytest.raises(TypeError, match="out: expected torch.float32"):
        linear_codes_triton(*x, *w, dtype=torch.float32, out=torch.empty(2, 8, dtype=torch.bfloat16), **formats)
    v3 = quantized(FP8_1X128, 2, 128)
    with pytest.raises(NotImplementedError, match="x_sf: expected UE8M0 scales of groups of 32·n"):
        linear_codes_triton_native(*v3, *w, x_fmt=FP8_1X128, w_fmt=FP8_32X32)
    narrow = quantized(Q8, 2, 96), quantized(FP8_32X32, 8, 96)
    with pytest.raises(NotImplementedError, match="x_q: expected rows of a multiple of 128, got 96"):
        linear_codes_triton_native(*narrow[0], *narrow[1], **formats)
