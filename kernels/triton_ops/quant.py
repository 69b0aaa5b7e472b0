"""Group quantisers and their inverse, by exact or correctly rounded fp32 operations on whole groups.

Nothing is summed: bytes do not depend on the batch, the launch or the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable

SCALE_DTYPES = {"ue8m0": torch.uint8, "e4m3": torch.float8_e4m3fn, "f32": torch.float32, "pow2_f32": torch.float32}
CODE_DTYPES = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8}


@dataclass(frozen=True, kw_only=True)
class QuantLaunch:
    """The tile of a program: rows, and groups of each. It changes no result."""

    rows: int
    groups: int
    num_warps: int


def quant_launch(group: int, groups_per_row: int, *, elements: int = 1024, num_warps: int = 2) -> QuantLaunch:
    """About so many elements: as many groups of a row as divide it evenly, and rows."""
    most = max(1, elements // group)
    groups = min(most, groups_per_row & -groups_per_row)
    return QuantLaunch(rows=most // groups, groups=groups, num_warps=num_warps)


@triton.jit
def store_scale(amax, floor, sf_ptrs, mask, MAX: tl.constexpr, SCALE: tl.constexpr):
    """Write the scales of `amax`; return the fp32 values that the bytes stand for."""
    amax = tl.maximum(amax, floor)
    if SCALE == "ue8m0":
        byte = ue8m0_byte(amax, MAX)
        tl.store(sf_ptrs, byte.to(tl.uint8), mask=mask)
        scale = (byte << 23).to(tl.float32, bitcast=True)
    elif SCALE == "pow2_f32":
        scale = (ue8m0_byte(amax, MAX) << 23).to(tl.float32, bitcast=True)
        tl.store(sf_ptrs, scale, mask=mask)
    elif SCALE == "e4m3":
        narrow = tl.minimum(share_of(amax, MAX), 448.0).to(tl.float8e4nv)
        tl.store(sf_ptrs, narrow, mask=mask)
        scale = narrow.to(tl.float32)
    else:
        scale = share_of(amax, MAX)
        tl.store(sf_ptrs, scale, mask=mask)
    return scale


@triton.jit
def ue8m0_byte(amax, MAX: tl.constexpr):
    """The exponent of the least power of two that is amax / MAX or more; the floor keeps it normal.

    amax <= MAX · 2^k for whole bits of both, without a division: rounding its result to fp32 changes no comparison.
    """
    limit = tl.full(amax.shape, MAX, tl.float32).to(tl.int32, bitcast=True)
    return (amax.to(tl.int32, bitcast=True) - limit + 0x3FFFFFFF) >> 23


@triton.jit
def share_of(amax, MAX: tl.constexpr):
    """amax / MAX, correctly rounded: tried for every fp32 significand by 6 and by 448; from 2^-90 on, as `quotient`."""
    inverse = tl.full(amax.shape, 1.0 / MAX, tl.float32)
    divisor = tl.full(amax.shape, -MAX, tl.float32)
    value = amax * inverse
    value = tl.fma(tl.fma(value, divisor, amax), inverse, value)
    return tl.fma(tl.fma(value, divisor, amax), inverse, value)


@triton.jit
def quotient(x, scale, SCALE: tl.constexpr, CORRECTIONS: tl.constexpr):
    """x / scale, within two ulps, or correctly rounded after two corrections, which may lose the sign of a zero.

    A power of two, 2^-126 to 2^126 as floors make it, has an exact inverse. By any other scale, 2^-90 to 2^126, the
    product with the rounded inverse is corrected by its remainder, instead of one division for each element. Twice: the
    first correction leaves a faithful quotient, the second the nearest. An x that came from 16 bits needs the first
    alone: tried for every significand of 8 and 11 bits by every fp32 one. The four bits of an e4m3 scale do with an
    inverse that is off by two ulps, and so does a quotient that is not corrected.
    """
    if SCALE == "ue8m0" or SCALE == "pow2_f32":
        value = x * (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    else:
        one = tl.full(scale.shape, 1.0, tl.float32)
        inverse = tl.div_rn(one, scale) if CORRECTIONS and SCALE == "f32" else one / scale
        inverse = tl.zeros(x.shape, tl.float32) + inverse
        divisor = tl.zeros(x.shape, tl.float32) + scale * -1.0
        value = x * inverse
        for _ in tl.static_range(CORRECTIONS):
            value = tl.fma(tl.fma(value, divisor, x), inverse, value)
    return value


@triton.jit
def e4m3_value(byte, BITS: tl.constexpr):
    """The fp32 value of e4m3 codes given as integers; BITS: taken apart, for a chip that cannot widen them."""
    if BITS:
        wide = byte.to(tl.int32)
        size = wide & 0x7F
        # a normal code is the top of an fp32 mantissa and its exponent, 120 too low; below 8 codes count 2^-9
        bits = tl.where(size == 0x7F, 0x7FC00000, (size << 20) + (120 << 23))
        small = size.to(tl.float32) * 0.001953125
        value = tl.where(size < 8, small, bits.to(tl.float32, bitcast=True))
        value = tl.where(wide > 127, value * -1.0, value)
    else:
        value = byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return value


@triton.jit
def e4m3_codes(x, scale, SCALE: tl.constexpr, EXACT: tl.constexpr = True):
    """x / scale as e4m3, the quotient within two ulps unless it is to be exact.

    Only a scale that saturated leaves more than 448, which a cast makes NaN on some devices.
    """
    wide = x.to(tl.float32)
    value = quotient(wide, scale, SCALE, (2 if x.dtype == tl.float32 else 1) if EXACT else 0)
    if SCALE == "e4m3":
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
    if SCALE != "ue8m0" and SCALE != "pow2_f32" and EXACT:
        sign = wide.to(tl.int32, bitcast=True) & -0x80000000
        value = (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return value.to(tl.float8e4nv)


@triton.jit
def e2m1_codes(x, scale, SCALE: tl.constexpr):
    """x / scale as an e2m1 code 0 … 15: midpoints go to the code with an even mantissa bit, zero keeps its sign."""
    wide = x.to(tl.float32)
    size = quotient(tl.abs(wide), scale, SCALE, 2 if x.dtype == tl.float32 else 1)
    # codes ascend by 1 for 1/2 up to 2, for 1 up to 4, for 2 up to 6, ties to even. So do the last bits of a sum with
    # 2^23 - 2 up to 4, halves below 2^23 and ones above, and those of half the size and 2^23 beyond: the lower of both
    low = (size + 8388606.0).to(tl.int32, bitcast=True)
    high = (size * 0.5 + 8388608.0).to(tl.int32, bitcast=True)
    if SCALE != "ue8m0" and SCALE != "pow2_f32":
        high = tl.minimum(high, 0x4B000003)  # the scale was rounded, and may have been too small
    sign = (wide.to(tl.uint32, bitcast=True) >> 28).to(tl.int32, bitcast=True) & 8
    return ((tl.minimum(low, high) & 7) ^ 4) | sign


@triton.jit
def ue8m0_value(byte):
    """The fp32 value of a scale byte: 0 is the subnormal 2^-127 and 255 is NaN, neither is its exponent field."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_value(code):
    """The fp32 values of e2m1 codes given as int32."""
    size = code & 7
    # codes 0 and 1 are 0 and 0.5; from 2 on a code is exponent and mantissa bit of an fp32 number
    normal = (((size >> 1) + 126) << 23) | ((size & 1) << 22)
    bits = tl.where(size == 0, 0, tl.where(size == 1, 0x3F000000, normal)) | ((code >> 3) << 31)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _quantize_rows(
    x_ptr,
    codes_ptr,
    sf_ptr,
    num_rows,
    stride_xt,
    stride_xm,
    floor,
    GROUP: tl.constexpr,
    ROW_GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    MAX: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
):
    # 1. a group to a line; neighbouring programs take the same rows
    line, item = tl.arange(0, TILE_ROWS * TILE_GROUPS), tl.arange(0, GROUP)
    tiles: tl.constexpr = ROW_GROUPS // TILE_GROUPS
    row = (tl.program_id(0) // tiles).to(tl.int64) * TILE_ROWS + line // TILE_GROUPS
    in_row = (tl.program_id(0) % tiles) * TILE_GROUPS + line % TILE_GROUPS
    group = row * ROW_GROUPS + in_row
    in_range = row < num_rows
    x_ptrs = x_ptr + (row * stride_xt + in_row.to(tl.int64) * GROUP * stride_xm)[:, None]
    x_ptrs += item.to(tl.int64)[None, :] * stride_xm
    x = tl.load(x_ptrs, mask=in_range[:, None], other=0.0)
    # 2. scales
    scale = store_scale(tl.max(tl.abs(x.to(tl.float32)), axis=1), floor, sf_ptr + group, in_range, MAX, SCALE)
    if CODE == "e2m1":
        # 3. two elements share a byte, the even one in the low nibble; loads with a stride would part them too, but
        # the adapter of the Ascend chain makes a program of those that never loads
        code = e2m1_codes(x, scale[:, None], SCALE)
        even, odd = tl.split(tl.reshape(code, [TILE_ROWS * TILE_GROUPS, GROUP // 2, 2]))
        code_ptrs = codes_ptr + group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        tl.store(code_ptrs, (even | (odd << 4)).to(tl.uint8), mask=in_range[:, None])
    else:
        code_ptrs = codes_ptr + group[:, None] * GROUP + item[None, :]
        tl.store(code_ptrs, e4m3_codes(x, scale[:, None], SCALE), mask=in_range[:, None])


@triton.jit
def _quantize_blocks(
    x_ptr,
    codes_ptr,
    sf_ptr,
    num_rows,
    num_columns,
    stride_xt,
    stride_xm,
    floor,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX: tl.constexpr,
    SCALE: tl.constexpr,
):
    # one program a block; what hangs over the edge counts as zero
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    x_ptrs = x_ptr + row[:, None] * stride_xt + column[None, :] * stride_xm
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    amax = tl.max(tl.max(tl.abs(x.to(tl.float32)), axis=1, keep_dims=True), axis=0, keep_dims=True)
    block = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    sf_ptrs = sf_ptr + block + tl.zeros([1, 1], tl.int64)
    scale = store_scale(amax, floor, sf_ptrs, tl.full([1, 1], 1, tl.int1), MAX, SCALE)
    tl.store(codes_ptr + row[:, None] * num_columns + column[None, :], e4m3_codes(x, scale, SCALE), mask=mask)


@triton.jit
def _dequantize(
    codes_ptr,
    sf_ptr,
    x_ptr,
    num_rows,
    num_columns,
    stride_ct,
    stride_cm,
    stride_st,
    stride_sg,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    mask = (row < num_rows) & (column < num_columns)
    # 1. scales
    raw = tl.load(sf_ptr + (row // ROWS) * stride_st + (column // GROUP) * stride_sg, mask=mask, other=0.0)
    scale = ue8m0_value(raw) if SCALE == "ue8m0" else raw.to(tl.float32)
    # 2. elements
    if CODE == "e2m1":
        byte = tl.load(codes_ptr + row * stride_ct + (column // 2) * stride_cm, mask=mask, other=0).to(tl.int32)
        x = e2m1_value((byte >> ((column % 2) * 4).to(tl.int32)) & 15)
    else:
        x = tl.load(codes_ptr + row * stride_ct + column * stride_cm, mask=mask, other=0.0).to(tl.float32)
    # 3. the only rounding
    tl.store(x_ptr + row * num_columns + column, (x * scale).to(x_ptr.dtype.element_ty), mask=mask)


def quantize(
    x_tm: torch.Tensor,
    *,
    rows: int,
    group: int,
    code: str,
    scale: str,
    max_value: float,
    amax_floor: float,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of `rows` × `group` blocks; `code` and `scale` name the formats as `QuantFormat` does.

    Raises:
        NotImplementedError: rows or group is no power of two, e2m1 codes are asked for blocks of several rows, or the
            floor of fp32 scales is below 2^-80.
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: x_tm is on the CPU and kernels are not interpreted.
    """
    require_format(rows, group, scale, amax_floor)
    if rows > 1 and code == "e2m1":
        raise NotImplementedError(f"code: blocks of {rows} rows have e4m3 codes here, got {code!r}")
    t, m = x_tm.shape
    code_shape, sf_shape = (t, m // 2 if code == "e2m1" else m), (triton.cdiv(t, rows), triton.cdiv(m, group))
    codes_out, sf_out = out or (None, None)
    codes = output_buffer(codes_out, code_shape, CODE_DTYPES[code], x_tm)
    sf = output_buffer(sf_out, sf_shape, SCALE_DTYPES[scale], x_tm)
    if not x_tm.numel():
        return codes, sf
    require_runnable("x_tm", x_tm)
    strides = (x_tm.stride(0), x_tm.stride(1))
    if rows > 1:
        _quantize_blocks[sf_shape](
            x_tm,
            codes,
            sf,
            t,
            m,
            *strides,
            amax_floor,
            ROWS=rows,
            GROUP=group,
            MAX=max_value,
            SCALE=scale,
            num_warps=8 if rows * group > 4096 else 2,
        )
        return codes, sf
    launch = quant_launch(group, sf_shape[1])
    if code == "e2m1":
        launch = quant_launch(group, sf_shape[1], elements=2048, num_warps=1)
    _quantize_rows[(triton.cdiv(t, launch.rows) * (sf_shape[1] // launch.groups),)](
        x_tm,
        codes,
        sf,
        t,
        *strides,
        amax_floor,
        GROUP=group,
        ROW_GROUPS=sf_shape[1],
        TILE_ROWS=launch.rows,
        TILE_GROUPS=launch.groups,
        MAX=max_value,
        CODE=code,
        SCALE=scale,
        num_warps=launch.num_warps,
    )
    return codes, sf


def dequantize(
    codes: torch.Tensor,
    sf: torch.Tensor,
    *,
    rows: int,
    group: int,
    code: str,
    scale: str,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values of quantised blocks in `dtype`.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: codes are on the CPU and kernels are not interpreted.
    """
    t, m = codes.shape[0], codes.shape[1] * (2 if code == "e2m1" else 1)
    x_tm = output_buffer(out, (t, m), dtype, codes)
    if not x_tm.numel():
        return x_tm
    require_runnable("codes", codes)
    block_rows, block_columns = 4, 512
    _dequantize[(triton.cdiv(t, block_rows), triton.cdiv(m, block_columns))](
        codes,
        sf,
        x_tm,
        t,
        m,
        codes.stride(0),
        codes.stride(1),
        sf.stride(0),
        sf.stride(1),
        ROWS=rows,
        GROUP=group,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        CODE=code,
        SCALE=scale,
        num_warps=4,
    )
    return x_tm


def require_format(rows: int, group: int, scale: str, amax_floor: float) -> None:
    """Refuse blocks that no tile of the compiler can hold, and fp32 scales so small that a remainder is subnormal."""
    if rows & (rows - 1) or group & (group - 1):
        raise NotImplementedError(f"fmt: expected powers of two, got rows={rows}, group={group}")
    if scale == "f32" and amax_floor < 2.0**-80:
        raise NotImplementedError(f"fmt: expected amax_floor of at least 2^-80 for fp32 scales, got {amax_floor}")


def output_buffer(
    out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor
) -> torch.Tensor:
    """`out` if it fits, otherwise a new tensor."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    if out.dtype != dtype:
        raise TypeError(f"out: expected {dtype}, got {out.dtype}")
    if tuple(out.shape) != shape or not out.is_contiguous():
        raise ValueError(f"out: expected contiguous {shape}, got shape {tuple(out.shape)}, strides {out.stride()}")
    return out
