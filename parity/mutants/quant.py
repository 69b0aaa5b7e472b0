"""Group quantisers as a kernel computes them, in fp32 on the CPU, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from deeptwin.reference.config import CodeKind, QuantFormat, ScaleKind

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the quantiser does wrong; the default is right. `divide="by_power"` is an honest choice."""

    divide: str = "by_scale"  # by_scale, by_power, reciprocal, max_over_amax, unrounded
    scale: str = "by_bits"  # by_bits, floor, log2, unmasked, division (amax · 1/max), power, truncated, overflow
    floor: str = "amax"  # amax, scale, none, after, foreign
    amax: str = "magnitude"  # magnitude, value, shifted, without_last, first_row, batch
    pad: float = 0.0
    edge: str = "own"  # own, stale, first_row_of_block
    codes: str = "even"  # even, truncated, away, to_zero, flush, bf16, fp16
    zero: str = "signed"  # signed, positive
    nibble: str = "low_first"  # low_first, high_first


def quantize_with(faults: Faults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `quantize`."""

    def quantize(x_tm: Tensor, *, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
        t, m = x_tm.shape
        rows, columns = -(-t // fmt.rows), -(-m // fmt.group)
        x = pad(x_tm.float(), (0, -m % fmt.group, 0, -t % fmt.rows), value=faults.pad)
        blocks = x.reshape(rows, fmt.rows, columns, fmt.group)
        amax, exact = _exact_scale(faults, blocks, fmt)
        byte, scale = _stored_scale(faults, exact, fmt)
        divisor = exact if faults.divide == "unrounded" else scale
        ratio = _ratio(faults, blocks, amax[:, None, :, None], divisor[:, None, :, None], fmt)
        ratio = ratio.reshape(x.shape)[:t, :m]
        codes = _e4m3(faults, ratio) if fmt.code is CodeKind.E4M3 else _packed(faults, _e2m1(faults, ratio))
        if faults.edge == "stale" and (t % fmt.rows or m % fmt.group) and byte.numel():
            byte.view(-1)[-1] = 7.0
        return codes, byte

    return quantize


def _exact_scale(faults: Faults, blocks: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    size = blocks if faults.amax == "value" else blocks.abs()
    if faults.amax == "without_last":
        size = size[..., :-1]
    if faults.edge == "first_row_of_block":
        size = size[:, :1]
    amax = size.amax(dim=(1, 3)) if size.numel() else blocks.new_zeros(blocks.shape[0], blocks.shape[2])
    if faults.amax == "shifted":
        amax = amax.roll(1, 1)
    elif faults.amax == "first_row":
        amax = amax[:1].expand_as(amax)
    elif faults.amax == "batch" and amax.numel():
        amax = amax.amax(0, keepdim=True).expand_as(amax)
    floor = {"amax": fmt.amax_floor, "foreign": 1e-4 if fmt.amax_floor < 1e-4 else 6 * 2.0**-126}.get(faults.floor, 0.0)
    amax = amax.clamp(min=floor)
    top = torch.full_like(amax, fmt.max_value)
    exact = amax * (1 / top) if faults.scale == "division" else amax / top
    return amax, exact.clamp(min=fmt.amax_floor) if faults.floor == "scale" else exact


def _stored_scale(faults: Faults, exact: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """The stored scale and the value that the codes are divided by."""
    exact = exact.contiguous()
    if fmt.scale is ScaleKind.E4M3:
        return _e4m3_scale(faults, exact)
    if fmt.scale is ScaleKind.F32 and faults.scale != "power":
        return exact, exact
    bits = exact.view(torch.int32)
    byte = ((bits + 0x7FFFFF) >> 23).clamp(0, 254)
    if faults.scale == "floor":
        byte = bits >> 23
    elif faults.scale == "log2":
        byte = ((torch.pow(2.0, torch.ceil(torch.log2(exact)))).view(torch.int32) >> 23).clamp(0, 254)
    elif faults.floor == "after":
        byte = torch.maximum(byte, torch.tensor(fmt.amax_floor / fmt.max_value).view(torch.int32) >> 23)
    scale = (byte << 23).view(torch.float32)
    if faults.scale == "unmasked":
        byte = byte | (bits >> 15).roll(-1, -1) & 0xFF  # the next scale, shifted into place with its mantissa
    if fmt.scale is ScaleKind.F32:
        return scale, scale
    return byte.to(torch.uint8), scale


def _e4m3_scale(faults: Faults, exact: Tensor) -> tuple[Tensor, Tensor]:
    narrow = exact.clamp(max=448.0).to(torch.float8_e4m3fn)
    if faults.scale == "truncated":
        narrow = _e4m3(replace(faults, codes="truncated"), exact.clamp(max=448.0))
    elif faults.scale == "power":
        narrow = torch.exp2(torch.ceil(torch.log2(exact.double()))).float().clamp(max=256.0).to(torch.float8_e4m3fn)
    elif faults.scale == "overflow":
        narrow = torch.where(exact > 464, 0x7F, narrow.view(torch.uint8)).to(torch.uint8).view(torch.float8_e4m3fn)
    return narrow, narrow.float()


def _ratio(faults: Faults, x: Tensor, amax: Tensor, scale: Tensor, fmt: QuantFormat) -> Tensor:
    if faults.divide == "max_over_amax":
        return x * (torch.full_like(amax, fmt.max_value) / amax)
    if faults.divide == "reciprocal":
        return x * (1 / scale)
    if faults.divide == "by_power":
        # 2^-127 and beyond have no exact fp32 reciprocal of their own: the product is taken in fp64, as exact
        return (x.double() * (1 / scale.double())).float()
    return x / scale


def _e4m3(faults: Faults, x: Tensor) -> Tensor:
    nearest = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    if faults.codes == "bf16":
        nearest = x.bfloat16().float().clamp(-448, 448).to(torch.float8_e4m3fn)
    elif faults.codes == "fp16":
        nearest = x.half().float().clamp(-448, 448).to(torch.float8_e4m3fn)
    value, code = nearest.float(), nearest.view(torch.uint8).clone()
    if faults.codes == "truncated":
        code -= ((value.abs() > x.abs()) & (code & 0x7F > 0)).to(torch.uint8)
    elif faults.codes == "away":
        above = (code + 1).view(torch.float8_e4m3fn).float()
        code += (above.abs() - x.abs() == x.abs() - value.abs()).to(torch.uint8)
    elif faults.codes == "flush":
        code = torch.where(code & 0x78 == 0, code & 0x80, code)
    if faults.zero == "positive":
        code = torch.where(code == 0x80, 0, code).to(torch.uint8)
    return code.view(torch.float8_e4m3fn)


def _e2m1(faults: Faults, x: Tensor) -> Tensor:
    if faults.codes == "bf16":
        x = x.bfloat16().float()
    size = x.abs().clamp(max=6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    # a NaN becomes an arbitrary code, as a conversion instruction would make it
    size = size.nan_to_num(nan=6.0)
    steps = size / step
    rounded = {
        "truncated": torch.floor(steps),
        "away": torch.floor(steps + 0.5),
        "to_zero": torch.ceil(steps - 0.5),
    }.get(faults.codes, torch.round(steps))
    code = torch.searchsorted(torch.tensor(E2M1_VALUES), rounded * step)
    sign = torch.signbit(x) & ((code > 0) | (faults.zero == "signed"))
    return (code + 8 * sign).to(torch.uint8)


def _packed(faults: Faults, codes: Tensor) -> Tensor:
    low, high = codes[:, 0::2], codes[:, 1::2]
    return low | high << 4 if faults.nibble == "low_first" else high | low << 4


@dataclass(frozen=True, kw_only=True)
class ReaderFaults:
    """What the reader does wrong; the default is right."""

    nibble: str = "low_first"
    scale: str = "own"  # own, byte_0_zero, bias_126, next_group, first_row, edge, bf16
    store: str = "nearest"  # nearest, truncated
    codes: str = "all"  # all, no_subnormals


def dequantize_with(faults: ReaderFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `dequantize`."""

    def dequantize(codes: Tensor, sf: Tensor, *, fmt: QuantFormat, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        x = _read_codes(faults, codes, fmt)
        t, m = x.shape
        row, column = torch.arange(t) // fmt.rows, torch.arange(m) // fmt.group
        if faults.scale == "edge" and sf.shape[1] > 1:
            column = torch.where(torch.arange(m) >= m - m % fmt.group, column - 1, column)
        elif faults.scale == "next_group":
            column = (column + 1) % max(sf.shape[1], 1)
        elif faults.scale == "first_row":
            row = torch.zeros_like(row)
        x = x * _read_scales(faults, sf, fmt)[row][:, column]
        if faults.store == "truncated" and dtype == torch.bfloat16:
            x = (x.view(torch.int32) & -65536).view(torch.float32)
        return x.to(dtype)

    return dequantize


def _read_codes(faults: ReaderFaults, codes: Tensor, fmt: QuantFormat) -> Tensor:
    if fmt.code is CodeKind.E4M3:
        x = codes.float()
        small = x.abs() < 2.0**-6
        return torch.where(small, x * 0.0, x) if faults.codes == "no_subnormals" else x
    low, high = codes & 15, codes >> 4
    pair = (low, high) if faults.nibble == "low_first" else (high, low)
    nibbles = torch.stack(pair, -1).flatten(-2).long()
    values = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES))
    return values[nibbles]


def _read_scales(faults: ReaderFaults, sf: Tensor, fmt: QuantFormat) -> Tensor:
    if fmt.scale is not ScaleKind.UE8M0:
        scale = sf.float()
        return scale.bfloat16().float() if faults.scale == "bf16" else scale
    exponent = sf.to(torch.int32) - (126 if faults.scale == "bias_126" else 127)
    scale = torch.exp2(exponent.double()).float()
    return torch.where(
        sf == 255, torch.nan, torch.where(sf == 0, 0.0, scale) if faults.scale == "byte_0_zero" else scale
    )


def fake_with(element: str) -> Callable[..., Tensor]:
    """Quantise and read back as values; `element` is how x / s is rounded: to the codes, bf16, or not at all."""

    def fake_quantize(x_tm: Tensor, *, fmt: QuantFormat, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        codes, sf = right_division(x_tm, fmt=fmt)
        if element == "codes":
            return right_reader(codes, sf, fmt=fmt, dtype=dtype)
        if element == "none":
            return x_tm.to(dtype).clone()
        ones = torch.full((*x_tm.shape,), 1.0)
        unit = ones.to(torch.float8_e4m3fn)
        if fmt.code is CodeKind.E2M1:
            unit = _packed(_RIGHT, _e2m1(_RIGHT, ones))
        scale = right_reader(unit, sf, fmt=fmt, dtype=torch.float32)
        return ((x_tm.float() / scale).bfloat16().float() * scale).to(dtype)

    return fake_quantize


_RIGHT = Faults()
right_division = quantize_with(_RIGHT)
right_reciprocal_of_power_of_two = quantize_with(replace(_RIGHT, divide="by_power"))
right_reader = dequantize_with(ReaderFaults())
right_fake = fake_with("codes")

scale_floor_of_exponent = quantize_with(replace(_RIGHT, scale="floor", divide="unrounded"))
payload_not_requantised = quantize_with(replace(_RIGHT, divide="unrounded"))
packed_without_mask = quantize_with(replace(_RIGHT, scale="unmasked"))
clamp_after_rounding = quantize_with(replace(_RIGHT, floor="after"))
scale_by_log2 = quantize_with(replace(_RIGHT, scale="log2"))
no_floor = quantize_with(replace(_RIGHT, floor="none"))
floor_on_scale = quantize_with(replace(_RIGHT, floor="scale"))
floor_missing_below_1e_4 = quantize_with(replace(_RIGHT, floor="foreign"))
codes_truncated = quantize_with(replace(_RIGHT, codes="truncated"))
ties_away = quantize_with(replace(_RIGHT, codes="away"))
subnormal_codes_lost = quantize_with(replace(_RIGHT, codes="flush"))
codes_through_bf16 = quantize_with(replace(_RIGHT, codes="bf16"))
codes_through_fp16 = quantize_with(replace(_RIGHT, codes="fp16"))
amax_without_sign = quantize_with(replace(_RIGHT, amax="value"))
amax_one_group_back = quantize_with(replace(_RIGHT, amax="shifted"))
last_element_not_in_amax = quantize_with(replace(_RIGHT, amax="without_last"))
negative_zero_lost = quantize_with(replace(_RIGHT, zero="positive"))
rows_share_scales = quantize_with(replace(_RIGHT, amax="first_row"))
scale_of_a_huge_neighbour = quantize_with(replace(_RIGHT, amax="batch"))

f32_multiplies_by_448_over_amax = quantize_with(replace(_RIGHT, divide="max_over_amax"))
f32_multiplies_by_reciprocal = quantize_with(replace(_RIGHT, divide="reciprocal"))
f32_scale_by_reciprocal = quantize_with(replace(_RIGHT, scale="division"))
f32_scale_rounded_up = quantize_with(replace(_RIGHT, scale="power"))
f32_pad_contaminates_block = quantize_with(replace(_RIGHT, pad=7.0))
f32_edge_block_skipped = quantize_with(replace(_RIGHT, edge="stale"))
f32_block_of_one_row = quantize_with(replace(_RIGHT, edge="first_row_of_block"))
f32_no_floor = no_floor
f32_floor_on_scale = floor_on_scale
f32_codes_truncated = codes_truncated

tile_of_one_row = f32_block_of_one_row
pad_contaminates_tile = f32_pad_contaminates_block
edge_tile_skipped = f32_edge_block_skipped

fp4_high_nibble_first = quantize_with(replace(_RIGHT, nibble="high_first"))
fp4_input_rounded_to_bf16 = quantize_with(replace(_RIGHT, codes="bf16"))
fp4_ties_away = ties_away
fp4_ties_to_zero = quantize_with(replace(_RIGHT, codes="to_zero"))
fp4_truncated = codes_truncated
fp4_scale_by_log2 = scale_by_log2
fp4_no_floor = no_floor
fp4_floor_of_fp8 = floor_missing_below_1e_4
fp4_sign_of_zero_lost = negative_zero_lost
fp4_scale_floor_of_exponent = quantize_with(replace(_RIGHT, scale="floor"))

q4k_multiplies_by_reciprocal = f32_multiplies_by_reciprocal
q4k_divides_by_unrounded_scale = payload_not_requantised
q4k_scale_truncated = quantize_with(replace(_RIGHT, scale="truncated"))
q4k_scale_rounded_up = f32_scale_rounded_up
q4k_scale_overflows = quantize_with(replace(_RIGHT, scale="overflow"))
q4k_no_floor = no_floor
q4k_high_nibble_first = fp4_high_nibble_first

reads_high_nibble_first = dequantize_with(ReaderFaults(nibble="high_first"))
reads_scale_byte_0_as_zero = dequantize_with(ReaderFaults(scale="byte_0_zero"))
reads_bias_126 = dequantize_with(ReaderFaults(scale="bias_126"))
reads_scale_of_next_group = dequantize_with(ReaderFaults(scale="next_group"))
reads_first_row_scales = dequantize_with(ReaderFaults(scale="first_row"))
reads_edge_block_wrong = dequantize_with(ReaderFaults(scale="edge"))
reads_truncated = dequantize_with(ReaderFaults(store="truncated"))
reads_through_bf16_scale = dequantize_with(ReaderFaults(scale="bf16"))
reads_subnormals_as_zero = dequantize_with(ReaderFaults(codes="no_subnormals"))

fake_rounds_to_bf16 = fake_with("bf16")
fake_returns_input = fake_with("none")
