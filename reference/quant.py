"""Element formats and group quantisers: which bytes stand for which numbers.

A group of neighbours shares one scale. The scale comes from the largest magnitude of the group, rounded as the format
says; each element is divided by the scale and rounded to an 8-bit or 4-bit code. `QuantFormat` names the group, the
element format, the scale format and the floor on the magnitude.

The element formats are small enough to be written down: a code book lists the magnitude of every code in ascending
order, and encoding is "the nearest one, a tie goes to the even code". The marks of `num` round values; the functions
here turn values into bytes and back.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import inf, nan

import torch
from torch import Tensor
from torch.nn.functional import pad

from .checks import expect_dtype, expect_finite, expect_multiple, expect_shape
from .config import CodeKind, QuantFormat, ScaleKind
from .numerics import CONTRACT, Numerics


def _magnitudes(exponent_bits: int, mantissa_bits: int, bias: int) -> tuple[float, ...]:
    """The magnitude of every code without its sign bit, as if no code were set aside for NaN or infinity."""
    steps = 2**mantissa_bits
    subnormal = [m / steps * 2.0 ** (1 - bias) for m in range(steps)]
    normal = [(1 + m / steps) * 2.0 ** (e - bias) for e in range(1, 2**exponent_bits) for m in range(steps)]
    return (*subnormal, *normal)


E4M3 = (*_magnitudes(4, 3, 7)[:127], nan)  # finite only: 0x7f is NaN, the largest number is 448
E5M2 = (*_magnitudes(5, 2, 15)[:124], inf, nan, nan, nan)  # IEEE-like: the largest number is 57344
E2M1 = _magnitudes(2, 1, 1)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6: no NaN, no infinity
UE8M0 = (*(2.0 ** (b - 127) for b in range(255)), nan)  # powers of two: no sign, no zero
# the value of every code
BOOKS = {name: (*half, *(-value for value in half)) for name, half in (("e4m3", E4M3), ("e5m2", E5M2), ("e2m1", E2M1))}
BOOKS["ue8m0"] = UE8M0


def encode_e4m3(x: Tensor) -> Tensor:
    """The nearest e4m3fn code (float8_e4m3fn), ties to even, saturating at ±448; zero and NaN keep their sign."""
    code = torch.where(x.isnan(), 0x7F, _nearest(x, "e4m3"))
    return (code + 0x80 * torch.signbit(x)).to(torch.uint8).view(torch.float8_e4m3fn)


def encode_e5m2(x: Tensor) -> Tensor:
    """The nearest e5m2 code (float8_e5m2), ties to even, saturating at ±57344; zero and NaN keep their sign."""
    code = torch.where(x.isnan(), 0x7F, _nearest(x, "e5m2"))
    return (code + 0x80 * torch.signbit(x)).to(torch.uint8).view(torch.float8_e5m2)


def encode_e2m1(x: Tensor) -> Tensor:
    """The nearest e2m1 code as uint8 0 … 15, ties to even, saturating at ±6 (NaN too); zero keeps its sign."""
    return (_nearest(x, "e2m1") + 8 * torch.signbit(x)).to(torch.uint8)


def encode_ue8m0(x: Tensor) -> Tensor:
    """The byte of the smallest power of two ≥ x; 0 for x ≤ 2^-127, 255 (NaN) for NaN or beyond 2^127."""
    return torch.bucketize(x.contiguous(), _book("ue8m0", x.dtype, x.device)[:255]).to(torch.uint8)


def decode_e4m3(codes: Tensor, *, num: Numerics = CONTRACT) -> Tensor:
    """The values of float8_e4m3fn codes, in the carrier of `num`."""
    return _looked_up(codes, "e4m3", num)


def decode_e5m2(codes: Tensor, *, num: Numerics = CONTRACT) -> Tensor:
    """The values of float8_e5m2 codes, in the carrier of `num`."""
    return _looked_up(codes, "e5m2", num)


def decode_e2m1(codes: Tensor, *, num: Numerics = CONTRACT) -> Tensor:
    """The values of unpacked e2m1 codes 0 … 15, in the carrier of `num`."""
    return _looked_up(codes, "e2m1", num)


def decode_ue8m0(sf: Tensor, *, num: Numerics = CONTRACT) -> Tensor:
    """The values 2^(byte - 127) of scale bytes, in the carrier of `num`; byte 255 is NaN, byte 0 is 2^-127 (OCP)."""
    return _looked_up(sf, "ue8m0", num)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Two 4-bit codes to a byte along the last axis, the even index in the low nibble.

    Raises:
        ValueError: the last axis is odd.
    """
    expect_multiple("codes (last axis)", codes.shape[-1], 2)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: Tensor) -> Tensor:
    """The inverse of `pack_e2m1`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def quantize(x_tm: Tensor, *, fmt: QuantFormat, num: Numerics = CONTRACT) -> tuple[Tensor, Tensor]:
    """Codes and scales of `x_tm`, one scale for each `fmt.rows` × `fmt.group` block.

    Math:
        amax = max(max |x|, fmt.amax_floor) over the block
        s    = scale format(amax / fmt.max_value)
        code = element format(x / s), ties to even, saturating

    Shapes:
        x_tm: [t, m]; codes: float8_e4m3fn [t, m] or uint8 [t, m / 2] (e2m1, packed); sf: [t / rows, m / group],
        both rounded up, uint8 exponent + 127 (UE8M0), float8_e4m3fn (E4M3) or float32 (F32, POW2_F32).

    Rounding:
        x, amax, amax / max_value and x / s each to fp32 (a bf16 or fp32 x and its amax are fp32 already, so the first
        two only round the floor); the scale to its format; the codes to theirs. Under SEMANTIC the marks do nothing,
        but bytes are bytes: scale and codes are still encoded, and the codes refer to the encoded scale.

    Edges:
        t = 0 gives empty tensors. An all-zero block gets the scale of the floor and zero codes. The sign of zero is
        kept. The floor is on amax, never on the scale. For fmt.rows > 1 blocks at the edges are filled with zeros.

    Raises:
        TypeError: x_tm is not floating.
        ValueError: x_tm is not 2-D; it holds NaN or infinity; fmt.rows is 1 and m no multiple of fmt.group.

    Source:
        v41-attention.md section 0, v41-blocks.md section 5.5, v3-v32-v4.md sections 2.2, 2.3
    """
    _check_input(x_tm, fmt)
    x_tm = num.f32(num.wide(x_tm))
    sf = _encode_scale(_block_scale(x_tm, fmt, num), fmt)
    s_tm = _spread(_decode_scale(sf, fmt, num), fmt, x_tm.shape)
    return _encode(_round_to_element(num.f32(x_tm / s_tm), fmt, num), fmt), sf


def dequantize(
    codes: Tensor, sf: Tensor, *, fmt: QuantFormat, dtype: torch.dtype = torch.bfloat16, num: Numerics = CONTRACT
) -> Tensor:
    """The values of quantised blocks: code × scale.

    Shapes:
        codes and sf as `quantize` returns them; returns [t, m].

    Rounding:
        one, to `dtype` (through fp32). Exact in bf16 unless the scale is F32.

    Edges:
        a NaN code gives NaN; a UE8M0 scale byte 255 makes its block NaN, byte 0 is 2^-127.

    Raises:
        TypeError: codes or sf have another dtype than `fmt` says; dtype is no storage dtype.
        ValueError: codes or sf are not 2-D; sf has not one scale for each block; fmt.rows is 1 and m no multiple of
            fmt.group.
    """
    return num.store(block_values(codes, sf, fmt=fmt, num=num), dtype)


def block_values(codes: Tensor, sf: Tensor, *, fmt: QuantFormat, num: Numerics = CONTRACT) -> Tensor:
    """`dequantize` before its rounding: code × scale in the carrier of `num`, for products that scale once.

    Raises:
        TypeError: codes or sf have another dtype than `fmt` says.
        ValueError: as `dequantize`.
    """
    _check_quantized(codes, sf, fmt)
    x_tm = decode_e4m3(codes, num=num) if fmt.code is CodeKind.E4M3 else decode_e2m1(unpack_e2m1(codes), num=num)
    return x_tm * _spread(_decode_scale(sf, fmt, num), fmt, x_tm.shape)


def fake_quantize(
    x_tm: Tensor, *, fmt: QuantFormat, dtype: torch.dtype = torch.bfloat16, num: Numerics = CONTRACT
) -> Tensor:
    """What the model computes with where a kernel stores codes: `dequantize(*quantize(x))` as values.

    Shapes:
        x_tm: [t, m]; returns [t, m].

    Rounding:
        as `quantize`, then as `dequantize`. Under SEMANTIC all of them vanish: x comes back, up to an fp64 rounding.

    Raises:
        TypeError: x_tm is not floating; dtype is no storage dtype.
        ValueError: as `quantize`.
    """
    _check_input(x_tm, fmt)
    x_tm = num.f32(num.wide(x_tm))
    s_tm = _spread(_block_scale(x_tm, fmt, num), fmt, x_tm.shape)
    return num.store(_round_to_element(num.f32(x_tm / s_tm), fmt, num) * s_tm, dtype)


def _nearest(x: Tensor, book: str) -> Tensor:
    midpoints, size = _midpoints(book, x.dtype, x.device), x.abs().contiguous()
    lower = torch.bucketize(size, midpoints, out_int32=True)
    # on a midpoint this is the lower neighbour: an odd one gives way to the next
    is_tie = size == midpoints[lower.clamp(max=len(midpoints) - 1)]
    return lower + (is_tie & (lower & 1 == 1))


@cache
def _midpoints(book: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Between the magnitudes of neighbouring codes, those of NaN and infinity aside."""
    finite = [value for value in BOOKS[book][: len(BOOKS[book]) // 2] if value < inf]
    return torch.tensor([(low + high) / 2 for low, high in pairwise(finite)], dtype=dtype, device=device)


def _looked_up(codes: Tensor, book: str, num: Numerics) -> Tensor:
    index = codes.view(torch.uint8).reshape(-1).to(torch.int32)
    return _book(book, num.carrier, codes.device).index_select(0, index).view(codes.shape)


@cache
def _book(name: str, carrier: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(BOOKS[name], dtype=carrier, device=device)


def _block_scale(x_tm: Tensor, fmt: QuantFormat, num: Numerics) -> Tensor:
    """The scale value of every block, [t / rows, m / group] rounded up."""
    t, m = x_tm.shape
    x_tm = pad(x_tm, (0, -m % fmt.group, 0, -t % fmt.rows))
    blocks = x_tm.reshape(-(-t // fmt.rows), fmt.rows, -(-m // fmt.group), fmt.group)
    amax = num.f32(blocks.abs().amax(dim=(1, 3)).clamp(min=fmt.amax_floor))
    scale = num.f32(amax / fmt.max_value)
    if fmt.scale in (ScaleKind.UE8M0, ScaleKind.POW2_F32):
        return num.ue8m0(scale)
    # the mark saturates: an e4m3 scale is at most 448, and codes of larger blocks saturate too
    return num.e4m3(scale) if fmt.scale is ScaleKind.E4M3 else scale


def _spread(s: Tensor, fmt: QuantFormat, shape: torch.Size) -> Tensor:
    n, g = s.shape
    wide = s[:, None, :, None].expand(n, fmt.rows, g, fmt.group).reshape(n * fmt.rows, g * fmt.group)
    return wide[: shape[0], : shape[1]]


def _round_to_element(x_tm: Tensor, fmt: QuantFormat, num: Numerics) -> Tensor:
    return num.e4m3(x_tm) if fmt.code is CodeKind.E4M3 else num.e2m1(x_tm)


def _encode(x_tm: Tensor, fmt: QuantFormat) -> Tensor:
    return encode_e4m3(x_tm) if fmt.code is CodeKind.E4M3 else pack_e2m1(encode_e2m1(x_tm))


def _encode_scale(s: Tensor, fmt: QuantFormat) -> Tensor:
    if fmt.scale is ScaleKind.UE8M0:
        return encode_ue8m0(s)
    if fmt.scale is ScaleKind.POW2_F32:
        s = decode_ue8m0(encode_ue8m0(s))  # a power of two under every numerics
    # an fp32 scale is a value already: only the container changes
    return encode_e4m3(s) if fmt.scale is ScaleKind.E4M3 else torch.empty_like(s, dtype=torch.float32).copy_(s)


def _decode_scale(sf: Tensor, fmt: QuantFormat, num: Numerics) -> Tensor:
    if fmt.scale is ScaleKind.UE8M0:
        return decode_ue8m0(sf, num=num)
    return decode_e4m3(sf, num=num) if fmt.scale is ScaleKind.E4M3 else num.wide(sf)


def _check_input(x_tm: Tensor, fmt: QuantFormat) -> None:
    expect_shape("x_tm", x_tm, "tm", {})
    expect_dtype("x_tm", x_tm, torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if fmt.rows == 1:
        expect_multiple("x_tm (last axis)", x_tm.shape[1], fmt.group)
    expect_finite("x_tm", x_tm)


def _check_quantized(codes: Tensor, sf: Tensor, fmt: QuantFormat) -> None:
    expect_dtype("codes", codes, torch.float8_e4m3fn if fmt.code is CodeKind.E4M3 else torch.uint8)
    scale_dtypes = {ScaleKind.UE8M0: torch.uint8, ScaleKind.E4M3: torch.float8_e4m3fn}
    expect_dtype("sf", sf, scale_dtypes.get(fmt.scale, torch.float32))
    expect_shape("codes", codes, "tm", {})
    t, m = codes.shape[0], codes.shape[1] * (2 if fmt.code is CodeKind.E2M1 else 1)
    if fmt.rows == 1:
        expect_multiple("codes (last axis, in elements)", m, fmt.group)
    expect_shape("sf", sf, "tg", {"t": -(-t // fmt.rows), "g": -(-m // fmt.group)})
