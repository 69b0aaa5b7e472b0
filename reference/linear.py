"""Linear layers: products of bf16 rows, and products of quantised bytes whose blocks share a scale.

Weights stand as checkpoints store them, one row for each output feature. A quantised operand is a pair of codes and
scales in a `QuantFormat`: rows of activations in Q8 (V4.1) or FP8_1X128 (V3), weights in FP8_32X32 (V4.1),
FP8_128X128 (V3) or MXFP4 (routed experts). Scales belong to the operands, so a product of bytes is one sum of exact
terms and one rounding, whatever the blocks are.

`linear` with dtype bfloat16 is the "lin16" of the papers, with float32 their "lin32"; `linear_quant` is their "lin8".
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_multiple, expect_shape
from .config import CodeKind, QuantFormat, ScaleKind
from .numerics import CONTRACT, Numerics
from .quant import block_values, encode_e4m3, quantize, unpack_e2m1

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WIDEST_SPREAD = 14  # scale exponents of e2m1 blocks that one e4m3 block can hold: 2^-8 … 2^6 times every e2m1 value


def linear(
    x_tm: Tensor,
    w_fm: Tensor,
    bias_f: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Rows times the transposed weight, plus a bias.

    Math:
        y[t, f] = Σ_m x[t, m] · w[f, m] + bias[f]

    Shapes:
        x_tm: [t, m]; w_fm: [f, m]; bias_f: [f] or None; returns [t, f].

    Rounding:
        one, to `dtype`, at return (the sum through fp32); the bias is added before it.

    Edges:
        t = 0 gives an empty tensor; m = 0 gives the bias, or zeros.

    Raises:
        TypeError: an operand is not floating; dtype is no storage dtype.
        ValueError: shapes disagree.

    Source:
        v41-blocks.md sections 4.2, 6.2
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("w_fm", w_fm, "fm", dims)
    expect_dtype("x_tm", x_tm, *FLOATING)
    expect_dtype("w_fm", w_fm, *FLOATING)
    y_tf = num.einsum("tm,fm->tf", num.wide(x_tm), num.wide(w_fm))
    if bias_f is not None:
        expect_shape("bias_f", bias_f, "f", dims)
        expect_dtype("bias_f", bias_f, *FLOATING)
        y_tf = y_tf + num.wide(bias_f)
    return num.store(y_tf, dtype)


def linear_codes(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    add_tf: Tensor | None = None,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The product of quantised rows and a quantised weight, from their bytes; `add_tf` is added to it.

    Math:
        y[t, f] = Σ_m (x_q · x_s)[t, m] · (w_q · w_s)[f, m] + add[t, f], where _s is the scale of the element's block

    Shapes:
        x_q, x_sf: [t, m] in x_fmt; w_q, w_sf: [f, m] in w_fmt, both as `quantize` returns them; add_tf: [t, f] or
        None; returns [t, f].

    Rounding:
        one, to `dtype`, at return (the sum through fp32); `add_tf` is added before it.

    Edges:
        t = 0 gives an empty tensor. A NaN code or scale makes its row or feature NaN.

    Raises:
        TypeError: codes or scales have another dtype than their format says; add_tf is not floating; dtype is no
            storage dtype.
        ValueError: x_fmt has blocks of several rows; codes and scales do not fit their format or each other.

    Source:
        v41-blocks.md section 4.2, v3-v32-v4.md sections 2.4, 7.5
    """
    if x_fmt.rows != 1:
        raise ValueError(f"x_fmt: expected groups of one row, got {x_fmt.name} with {x_fmt.rows} rows")
    dims: dict[str, int] = {}
    x_tm = block_values(x_q, x_sf, fmt=x_fmt, num=num)
    w_fm = block_values(w_q, w_sf, fmt=w_fmt, num=num)
    expect_shape("x_q (in elements)", x_tm, "tm", dims)
    expect_shape("w_q (in elements)", w_fm, "fm", dims)
    y_tf = num.einsum("tm,fm->tf", x_tm, w_fm)
    if add_tf is not None:
        expect_shape("add_tf", add_tf, "tf", dims)
        expect_dtype("add_tf", add_tf, *FLOATING)
        y_tf = y_tf + num.wide(add_tf)
    return num.store(y_tf, dtype)


def linear_quant(
    x_tm: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Quantise rows, then multiply: `linear_codes(*quantize(x_tm), w_q, w_sf)`.

    Shapes:
        x_tm: [t, m]; w_q, w_sf: [f, m] in w_fmt; returns [t, f].

    Rounding:
        as `quantize`, then as `linear_codes`. The codes are part of what the model is trained with: they are taken
        under every numerics.

    Raises:
        TypeError: x_tm is not floating; w_q or w_sf has another dtype than w_fmt says; dtype is no storage dtype.
        ValueError: x_tm holds NaN or infinity; otherwise as `linear_codes`.

    Source:
        v41-attention.md section 0.2, v41-blocks.md section 4.2
    """
    x_q, x_sf = quantize(x_tm, fmt=x_fmt, num=num)
    return linear_codes(x_q, x_sf, w_q, w_sf, x_fmt=x_fmt, w_fmt=w_fmt, dtype=dtype, num=num)


def linear_grouped(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    group_sizes_e: Tensor,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """One product for each expert: rows lie in the order of the experts, `group_sizes_e[e]` of them for expert e.

    Shapes:
        x_q, x_sf: [y, m] in x_fmt; w_q, w_sf: [e, f, m] in w_fmt, expert by expert; group_sizes_e: [e], int32 or int64;
        returns [y, f].

    Rounding:
        as `linear_codes`.

    Edges:
        a group may be empty or hold every row; y = 0 gives an empty tensor.

    Raises:
        TypeError: group_sizes_e is neither int32 nor int64; otherwise as `linear_codes`.
        ValueError: a size is negative, or the sizes do not add up to y; w_q, w_sf and group_sizes_e differ in e;
            otherwise as `linear_codes`.

    Source:
        v41-blocks.md sections 1.1, 1.4, kernel-libraries.md section 4.2
    """
    dims: dict[str, int] = {}
    expect_shape("x_q", x_q, "yi", dims)
    expect_shape("w_q", w_q, "efj", dims)
    expect_shape("w_sf", w_sf, "eng", dims)
    expect_shape("group_sizes_e", group_sizes_e, "e", dims)
    expect_dtype("group_sizes_e", group_sizes_e, torch.int32, torch.int64)
    sizes = group_sizes_e.tolist()
    if min(sizes, default=0) < 0 or sum(sizes) != dims["y"]:
        raise ValueError(f"group_sizes_e: expected sizes from 0 up that add up to y={dims['y']}, got {sizes}")
    if x_fmt.rows != 1:
        raise ValueError(f"x_fmt: expected groups of one row, got {x_fmt.name} with {x_fmt.rows} rows")
    inner: dict[str, int] = {}
    x_ym = block_values(x_q, x_sf, fmt=x_fmt, num=num)
    expect_shape("x_q (in elements)", x_ym, "ym", inner)
    y_yf = torch.zeros(dims["y"], dims["f"], dtype=num.carrier, device=x_q.device)
    for rows_ym, out_yf, *weight in zip(x_ym.split(sizes), y_yf.split(sizes), w_q, w_sf, strict=True):
        if len(rows_ym):
            w_fm = block_values(*weight, fmt=w_fmt, num=num)
            expect_shape("w_q (in elements)", w_fm, "fm", inner)
            out_yf.copy_(num.einsum("ym,fm->yf", rows_ym, w_fm))
    return num.store(y_yf, dtype)


def widen_fp4(w_q: Tensor, w_sf: Tensor, *, fmt: QuantFormat, out_fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """The same values with e4m3 codes and coarser blocks: nothing is rounded.

    Math:
        b_out = max(0, max b - 6) over the scale bytes b inside an output block
        code  = e4m3(e2m1 value · 2^(b - b_out)), exact: the largest, 6 · 2^6, stays below 448

    Shapes:
        w_q: uint8 [f, m / 2], w_sf: uint8 [f, m / 32] in `fmt`; codes: float8_e4m3fn [f, m], sf: uint8, one for each
        block of `out_fmt`.

    Rounding:
        none.

    Edges:
        input blocks whose codes are all zero do not limit the spread. Zeros keep their sign. Partial output blocks
        at the edges count the blocks that they have.

    Raises:
        TypeError: w_q or w_sf is not uint8.
        ValueError: shapes do not fit `fmt`; the formats are no e2m1 rows and e4m3 blocks of whole groups, both with
            UE8M0 scales; non-zero blocks with scales further apart than 2^14 meet in one output block; a scale is 255.

    Source:
        v41-blocks.md section 5.6, v3-v32-v4.md section 7.5
    """
    _check_widening(w_q, w_sf, fmt, out_fmt)
    f, groups = w_sf.shape
    across = out_fmt.group // fmt.group
    byte = w_sf.to(torch.int64)
    rows, columns = -(-f // out_fmt.rows), -(-groups // across)
    padded = byte.new_zeros(rows * out_fmt.rows, columns * across)
    padded[:f, :groups] = byte
    largest = padded.reshape(rows, out_fmt.rows, columns, across).amax(dim=(1, 3))
    sf = (largest - 6).clamp(min=0)
    shift = byte - sf.repeat_interleave(out_fmt.rows, 0).repeat_interleave(across, 1)[:f, :groups]
    codes = unpack_e2m1(w_q).reshape(f, groups, fmt.group)
    lost = ((codes & 7) != 0).any(-1) & (shift < 6 - WIDEST_SPREAD)
    if lost.any():
        where = tuple(int(i) for i in lost.nonzero()[0])
        raise ValueError(
            f"w_sf: expected scales at most 2^{WIDEST_SPREAD} apart inside one {out_fmt.name} block, "
            f"got {6 - int(shift[where])} exponents below the largest at {where}"
        )
    value = _e2m1_steps(codes) * torch.exp2(shift.clamp(min=-9)[..., None] - 1.0)
    return encode_e4m3(value.reshape(f, -1)), sf.to(torch.uint8)


def _e2m1_steps(codes: Tensor) -> Tensor:
    """Unpacked e2m1 codes as multiples of one half, with the sign of zero."""
    steps = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
    return torch.tensor((*steps, *(-step for step in steps)), device=codes.device)[codes.long()]


def _check_widening(w_q: Tensor, w_sf: Tensor, fmt: QuantFormat, out_fmt: QuantFormat) -> None:
    if fmt.code is not CodeKind.E2M1 or fmt.scale is not ScaleKind.UE8M0 or fmt.rows != 1:
        raise ValueError(f"fmt: expected rows of e2m1 codes with UE8M0 scales, got {fmt.name}")
    if out_fmt.code is not CodeKind.E4M3 or out_fmt.scale is not ScaleKind.UE8M0 or out_fmt.group % fmt.group:
        raise ValueError(f"out_fmt: expected e4m3 blocks of whole {fmt.name} groups with UE8M0 scales, got {out_fmt}")
    expect_dtype("w_q", w_q, torch.uint8)
    expect_dtype("w_sf", w_sf, torch.uint8)
    expect_shape("w_q", w_q, "fi", {})
    expect_multiple("w_q (last axis, in elements)", 2 * w_q.shape[1], fmt.group)
    expect_shape("w_sf", w_sf, "fg", {"f": w_q.shape[0], "g": 2 * w_q.shape[1] // fmt.group})
    if (w_sf == 255).any():
        raise ValueError(f"w_sf: expected bytes 0 to 254, got 255 (NaN) at {(w_sf == 255).nonzero()[0].tolist()}")
