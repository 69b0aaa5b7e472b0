"""Rotary embedding as a kernel computes it, in fp32 on the CPU, with faults that can be switched on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import Pairing, RopeConfig, RopeSpan


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the rotation does wrong; the default is right. `products` other than bf16 are honest choices."""

    products: str = "plain"  # plain, fused, wide, bf16, by_batch
    pairing: str = "asked"  # asked, other, interleaved
    output: str = "in_order"  # in_order, deinterleaved
    span: str = "asked"  # asked, other, last
    shift: int = 0  # rows of the table away from the right one
    position: str = "own"  # own, first
    turn: str = "asked"  # asked, forward, flipped
    row: str = "halves"  # halves, swapped, interleaved, neighbour, bf16, with_stale
    rest: str = "copied"  # copied, rotated, unwritten, e4m3
    second: str = "rotated"  # rotated, kept, from_first
    store: str = "nearest"  # nearest, truncated
    last_head: bool = True
    counter: bool = False


_calls = 0


def rope_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `rope`."""

    def rope(
        x_thd: Tensor,
        table_sr: Tensor,
        positions_t: Tensor,
        *,
        pairing: Pairing,
        span: RopeSpan,
        inverse: bool,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        global _calls
        cos, sin = _rows(faults, table_sr, positions_t, inverse)
        r, (t, _, d) = table_sr.shape[1], x_thd.shape
        x = x_thd.float()
        y = x.clone()
        if faults.rest == "unwritten":
            y[:] = torch.nan
        elif faults.rest == "e4m3":
            y = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        for start in _starts(faults, span, r, d):
            first, second = _slices(faults, pairing, start, r)
            u, v = x[..., first], x[..., second]
            a = _difference(faults, u, cos, v, sin, t)
            source = a if faults.second == "from_first" else u
            b = _difference(faults, source, sin, -v, cos, t) if faults.second != "kept" else v
            y[..., first], y[..., second] = a, b
            if faults.output == "deinterleaved":
                y[..., start : start + r] = torch.cat([a, b], -1)
        stored = _stored(faults, y, dtype)
        if not faults.last_head:
            stored[:, -1:] = torch.nan
        if faults.counter and stored.numel():
            _calls += 1
            stored.view(-1)[0] += _calls * 2.0**-7
        return stored

    return rope


def _rows(faults: Faults, table_sr: Tensor, positions_t: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    index = (positions_t.long() + faults.shift).clamp(0, len(table_sr) - 1)
    if faults.position == "first":
        index = index[:1].expand_as(index)
    row = table_sr[index][:, None, :]
    if faults.row == "with_stale":
        row = row + 0.0 * table_sr[:1]
    elif faults.row == "bf16":
        row = row.bfloat16().float()
    half = row.shape[-1] // 2
    cos, sin = row[..., :half], row[..., half:]
    if faults.row == "swapped":
        cos, sin = sin, cos
    elif faults.row == "interleaved":
        cos, sin = row[..., 0::2], row[..., 1::2]
    elif faults.row == "neighbour":
        cos, sin = cos.roll(1, -1), sin.roll(1, -1)
    backwards = {"forward": False, "flipped": not inverse}.get(faults.turn, inverse)
    return cos, -sin if backwards else sin


def _starts(faults: Faults, span: RopeSpan, r: int, d: int) -> list[int]:
    first = (span is RopeSpan.FIRST) != (faults.span == "other")
    start = 0 if first and faults.span != "last" else d - r
    others = [s for s in range(start % r, d - r + 1, r) if s != start] if faults.rest == "rotated" else []
    return [start, *others]


def _slices(faults: Faults, pairing: Pairing, start: int, r: int) -> tuple[slice, slice]:
    interleaved = (pairing is Pairing.INTERLEAVED) != (faults.pairing == "other")
    if interleaved or faults.pairing == "interleaved":
        return slice(start, start + r, 2), slice(start + 1, start + r, 2)
    return slice(start, start + r // 2), slice(start + r // 2, start + r)


def _difference(faults: Faults, a: Tensor, b: Tensor, c: Tensor, d: Tensor, tokens: int) -> Tensor:
    """a · b − c · d."""
    products = faults.products
    if products == "by_batch":
        products = "plain" if tokens % 2 else "fused"
    if products == "wide":
        return (a.double() * b.double() - c.double() * d.double()).float()
    if products == "fused":
        return (a.double() * b.double() - (c * d).double()).float()
    if products == "bf16":
        return (a * b).bfloat16().float() - (c * d).bfloat16().float()
    return a * b - c * d


def _stored(faults: Faults, y: Tensor, dtype: torch.dtype) -> Tensor:
    if faults.store == "truncated" and dtype == torch.bfloat16:
        y = (y.view(torch.int32) & -65536).view(torch.float32)
    return y.to(dtype)


@dataclass(frozen=True, kw_only=True)
class TableFaults:
    """What the table does wrong; the default is right."""

    angle: str = "fp32"  # fp32, fp64, bf16
    position: str = "own"  # own, next, bf16, wrapped, absolute
    cosine: str = "fp64"  # fp64, fp32_reduced
    order: str = "cos_sin"  # cos_sin, sin_cos, interleaved
    magnitude: bool = True
    frequency: str = "own"  # own, one_ulp


def table_with(faults: TableFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `rope_table`."""

    def rope_table(positions_s: Tensor, freq_i: Tensor, *, magnitude: float = 1.0) -> Tensor:
        p = positions_s.double()
        if faults.position == "next":
            p = p + 1
        elif faults.position == "bf16":
            p = p.bfloat16().double()
        elif faults.position == "wrapped":
            p = torch.remainder(p, 65536.0)
        elif faults.position == "absolute":
            p = p.abs()
        freq = freq_i.clone()
        if faults.frequency == "one_ulp":
            freq[len(freq) // 3] = torch.nextafter(freq[len(freq) // 3], torch.tensor(2.0))
        angle = p[:, None] * freq.double()
        if faults.angle != "fp64":
            angle = angle.float().double()
        if faults.angle == "bf16":
            angle = angle.bfloat16().double()
        if faults.cosine == "fp32_reduced":
            turn = torch.tensor(2 * math.pi)
            short = angle.float()
            angle = (short - turn * torch.round(short / turn)).double()
        cos, sin = torch.cos(angle).float(), torch.sin(angle).float()
        if faults.order == "sin_cos":
            cos, sin = sin, cos
        table = torch.stack([cos, sin], -1).flatten(-2) if faults.order == "interleaved" else torch.cat([cos, sin], -1)
        return table * magnitude if faults.magnitude else table

    return rope_table


@dataclass(frozen=True, kw_only=True)
class FrequencyFaults:
    """What the frequencies do wrong; the default is right."""

    yarn: bool = True
    theta: float = 0.0  # 0: as asked
    high: str = "ceil"  # ceil, floor
    clamped: bool = True
    power: str = "reciprocal"  # reciprocal, negative
    divided: str = "slow"  # slow, fast


def frequencies_with(faults: FrequencyFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `rope_frequencies`."""

    def rope_frequencies(config: RopeConfig) -> Tensor:
        one, theta = np.float32(1), faults.theta or config.theta
        exponents = np.arange(0, config.rope_dim, 2).astype(np.float32) / np.float32(config.rope_dim)
        if faults.power == "negative":
            freq = np.power(theta, -exponents.astype(np.float64)).astype(np.float32)
        else:
            freq = one / np.power(theta, exponents.astype(np.float64)).astype(np.float32)
        if config.yarn is None or not faults.yarn:
            return torch.from_numpy(freq)
        low, high = _ramp(config, theta, faults)
        ramp = (np.arange(len(freq)).astype(np.float32) - np.float32(low)) / np.float32(high - low)
        ramp = np.clip(ramp, 0, 1).astype(np.float32) if faults.clamped else ramp
        keep = one - ramp if faults.divided == "slow" else ramp
        return torch.from_numpy(freq / np.float32(config.yarn.factor) * (one - keep) + freq * keep)

    return rope_frequencies


def _ramp(config: RopeConfig, theta: float, faults: FrequencyFaults) -> tuple[float, float]:
    yarn = config.yarn
    assert yarn is not None

    def pair(turns: float) -> float:
        return config.rope_dim * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(yarn.beta_fast)), 0)
    end = math.ceil(pair(yarn.beta_slow)) if faults.high == "ceil" else math.floor(pair(yarn.beta_slow))
    high = min(end, config.rope_dim - 1)
    return low, high if high != low else high + 0.001


_RIGHT = Faults()
right_plain = rope_with(_RIGHT)
right_fused = rope_with(replace(_RIGHT, products="fused"))
right_wide = rope_with(replace(_RIGHT, products="wide"))

other_pairing = rope_with(replace(_RIGHT, pairing="other"))
pairing_ignored = rope_with(replace(_RIGHT, pairing="interleaved"))
deinterleaved_output = rope_with(replace(_RIGHT, output="deinterleaved"))
span_ignored = rope_with(replace(_RIGHT, span="last"))
other_span = rope_with(replace(_RIGHT, span="other"))
next_position = rope_with(replace(_RIGHT, shift=1))
previous_position = rope_with(replace(_RIGHT, shift=-1))
first_position_for_all = rope_with(replace(_RIGHT, position="first"))
inverse_ignored = rope_with(replace(_RIGHT, turn="forward"))
always_inverse = rope_with(replace(_RIGHT, turn="flipped"))
cos_and_sin_swapped = rope_with(replace(_RIGHT, row="swapped"))
table_interleaved = rope_with(replace(_RIGHT, row="interleaved"))
one_frequency_off = rope_with(replace(_RIGHT, row="neighbour"))
all_channels_rotated = rope_with(replace(_RIGHT, rest="rotated"))
slice_only_written = rope_with(replace(_RIGHT, rest="unwritten"))
second_half_unrotated = rope_with(replace(_RIGHT, second="kept"))
in_place_pair = rope_with(replace(_RIGHT, second="from_first"))
table_bf16 = rope_with(replace(_RIGHT, row="bf16"))
products_bf16 = rope_with(replace(_RIGHT, products="bf16"))
truncated = rope_with(replace(_RIGHT, store="truncated"))
rest_rounded_to_e4m3 = rope_with(replace(_RIGHT, rest="e4m3"))
last_head_unwritten = rope_with(replace(_RIGHT, last_head=False))
stale_row_mixed_in = rope_with(replace(_RIGHT, row="with_stale"))
not_deterministic = rope_with(replace(_RIGHT, counter=True))
depends_on_batch = rope_with(replace(_RIGHT, products="by_batch"))

_TABLE = TableFaults()
right_table = table_with(_TABLE)
table_angles_fp64 = table_with(replace(_TABLE, angle="fp64"))
table_next_position = table_with(replace(_TABLE, position="next"))
table_cos_fp32 = table_with(replace(_TABLE, cosine="fp32_reduced"))
table_position_bf16 = table_with(replace(_TABLE, position="bf16"))
table_angle_bf16 = table_with(replace(_TABLE, angle="bf16"))
table_sin_first = table_with(replace(_TABLE, order="sin_cos"))
table_interleaved_entries = table_with(replace(_TABLE, order="interleaved"))
table_magnitude_ignored = table_with(replace(_TABLE, magnitude=False))
table_position_wraps = table_with(replace(_TABLE, position="wrapped"))
table_negative_as_positive = table_with(replace(_TABLE, position="absolute"))
table_frequency_ulp = table_with(replace(_TABLE, frequency="one_ulp"))

_FREQUENCIES = FrequencyFaults()
right_frequencies = frequencies_with(_FREQUENCIES)
yarn_left_out = frequencies_with(replace(_FREQUENCIES, yarn=False))
base_of_plain_layers = frequencies_with(replace(_FREQUENCIES, theta=10000.0))
ramp_truncated_twice = frequencies_with(replace(_FREQUENCIES, high="floor"))
ramp_not_clamped = frequencies_with(replace(_FREQUENCIES, clamped=False))
one_power = frequencies_with(replace(_FREQUENCIES, power="negative"))
factor_on_fast_pairs = frequencies_with(replace(_FREQUENCIES, divided="fast"))
