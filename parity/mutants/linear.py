"""Linear layers as a kernel computes them, in fp32 on the CPU, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import CodeKind, QuantFormat, ScaleKind

from ..fp8_unit import fp8_unit_sums
from .quant import Faults as QuantFaults
from .quant import quantize_with

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the product does wrong; the default is right. `order` is an honest choice, but for `by_batch`."""

    order: str = "wide"  # wide, blocks_backwards, truncating (a matrix unit that cuts its accumulator), by_batch
    accumulator: torch.dtype = torch.float32
    operands: str = "own"  # own, tf32, fp16, bf16
    tail: str = "summed"  # summed, dropped (columns beyond the last 64), swapped (pairs of columns of x)
    features: str = "all"  # all, tail_unwritten, shifted
    rows: str = "own"  # own, last_stale, many (another order beyond eight rows)
    cores: int = 0  # of a chip whose cores miss their turn when each of them has one tile of 32 x 32
    add: str = "before"  # before, after (rounded first), missing, twice
    store: str = "nearest"  # nearest, truncated, through_bf16
    counter: bool = False


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """How the bytes of quantised operands are read; the default is right."""

    nibble: str = "low_first"
    codes: str = "all"  # all, no_subnormals
    x_scale: str = "own"  # own, next_group, first_row, batch, exponent, rounded_up, unmasked, missing
    w_scale: str = "own"  # own, transposed, rows_of_128, row_tile, next_group, exponent, rounded_up, missing, bias_126
    partial: str = "fp32"  # fp32, bf16: the sum of each group before its scale; fp8_unit: by the unit of SM90


_calls = 0


def multiplied(faults: Faults, x: Tensor, w: Tensor, add: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x · wᵀ + add of fp32 values."""
    global _calls
    if faults.tail == "dropped":
        kept = x.shape[1] // 64 * 64
        x, w = x[:, :kept], w[:, :kept]
    elif faults.tail == "swapped":
        x = x.unflatten(1, (-1, 2)).flip(-1).flatten(1)
    acc = _summed(faults, _rounded(faults, x), _rounded(faults, w)).to(faults.accumulator).float()
    acc = _with_added(faults, acc, add, dtype)
    if faults.counter:
        acc = acc * (1 + 2.0**-21 * (_calls % 3))
        _calls += 1
    y = _stored(faults, acc, dtype)
    if faults.features == "tail_unwritten" and y.shape[1] % 16:
        y[:, y.shape[1] // 16 * 16 :] = 3.0
    elif faults.features == "shifted" and y.shape[1] > 64:
        y[:, 64:] = y[:, 64:].roll(1, 1)
    if faults.rows == "last_stale" and len(y):
        y[-1] = 7.0
    if faults.cores and -(-y.shape[0] // 32) * -(-y.shape[1] // 32) == faults.cores:
        half = len(y) // 2
        y[half:] = y[: len(y) - half].clone()
    return y


def _rounded(faults: Faults, x: Tensor) -> Tensor:
    if faults.operands == "tf32":
        return ((x.view(torch.int32) + 4096) & -8192).view(torch.float32)
    names = {"fp16": torch.float16, "bf16": torch.bfloat16}
    return x.to(names[faults.operands]).float() if faults.operands in names else x


def _summed(faults: Faults, x: Tensor, w: Tensor) -> Tensor:
    wide = x.double(), w.double()
    block = {"blocks_backwards": 64, "truncating": 16, "by_batch": 16 * max(len(x), 1)}.get(faults.order, 0)
    if faults.rows == "many" and len(x) > 8:
        block = 32
    if faults.accumulator is not torch.float32:
        block = block or 16
    if not block:
        return (wide[0] @ wide[1].T).float()
    parts = [a @ b.T for a, b in zip(wide[0].split(block, 1), wide[1].split(block, 1), strict=True)]
    total = torch.zeros(len(x), len(w), dtype=torch.float64)
    for part in reversed(parts) if faults.order == "blocks_backwards" else parts:
        if faults.order == "truncating":
            total = _cut(total + part)
        else:
            total = (total + part.float().double()).to(faults.accumulator).double()
    return total.float()


def _cut(x: Tensor) -> Tensor:
    """Towards zero to 24 bits."""
    near = x.float()
    beyond = near.double().abs() > x.abs()
    return torch.where(beyond, torch.nextafter(near, torch.zeros_like(near)), near).double()


def _with_added(faults: Faults, acc: Tensor, add: Tensor | None, dtype: torch.dtype) -> Tensor:
    if add is None or faults.add == "missing":
        return acc
    if faults.add == "after":
        acc = acc.to(dtype).float()
    return acc + add.float() * (2 if faults.add == "twice" else 1)


def _stored(faults: Faults, acc: Tensor, dtype: torch.dtype) -> Tensor:
    if faults.store == "truncated" and dtype == torch.bfloat16:
        acc = (acc.view(torch.int32) & -65536).view(torch.float32)
    elif faults.store == "through_bf16":
        acc = acc.bfloat16().float()
    return acc.to(dtype)


# operands from bytes


def _values(faults: Bytes, codes: Tensor, fmt: QuantFormat) -> Tensor:
    if fmt.code is CodeKind.E4M3:
        x = codes.float()
        return torch.where(x.abs() < 2.0**-6, x * 0.0, x) if faults.codes == "no_subnormals" else x
    pair = (codes & 15, codes >> 4) if faults.nibble == "low_first" else (codes >> 4, codes & 15)
    return torch.tensor(E2M1_VALUES)[torch.stack(pair, -1).flatten(-2).long()]


def _scales(how: str, sf: Tensor, fmt: QuantFormat) -> Tensor:
    if fmt.scale is ScaleKind.UE8M0:
        return torch.exp2(sf.double() - (126 if how == "bias_126" else 127)).float()
    bits = sf.contiguous().view(torch.int32)
    if how == "exponent":
        return (bits & 0x7F800000).view(torch.float32)
    if how == "rounded_up":
        return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    if how == "unmasked":
        # exponents of neighbours are shifted into one word together with their mantissas
        byte = (bits >> 23) | ((bits.roll(-1, -1) >> 15) & 0xFF)
        return ((byte & 0xFF) << 23).view(torch.float32)
    return sf


def _spread(how: str, sf: Tensor, fmt: QuantFormat, rows: int, width: int) -> Tensor:
    scale = _scales(how, sf, fmt)
    row, column = torch.arange(rows) // fmt.rows, torch.arange(width) // fmt.group
    if how == "missing":
        return torch.ones(rows, width)
    if how == "transposed":
        scale = scale.reshape(scale.shape[1], scale.shape[0]).T
    elif how == "rows_of_128":
        row = torch.arange(rows) // (128 if fmt.rows < 128 else 32) % len(scale)
    elif how == "row_tile":
        row = torch.arange(rows) % 128
        row = ((row % 32) * 4 + row // 32) % len(scale)
    elif how == "next_group":
        column = (column + 1) % scale.shape[1]
    elif how == "first_row":
        row = torch.zeros_like(row)
    elif how == "batch":
        scale = scale.amax(0, keepdim=True).expand_as(scale)
    return scale[row][:, column]


def codes_with(faults: Faults, reading: Bytes) -> Callable[..., Tensor]:
    """The emulation with the signature of `linear_codes`."""

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
    ) -> Tensor:
        x, w = _values(reading, x_q, x_fmt), _values(reading, w_q, w_fmt)
        x_s = _spread(reading.x_scale, x_sf, x_fmt, *x.shape)
        w_s = _spread(reading.w_scale, w_sf, w_fmt, *w.shape)
        if reading.partial == "bf16":
            groups = [
                (a.double() @ b.double().T).bfloat16().float() * s[:, :1] * t[:, 0]
                for a, b, s, t in zip(*(v.split(32, 1) for v in (x, w, x_s, w_s)), strict=True)
            ]
            total = torch.zeros(len(x), len(w))
            for group in groups:
                total = total + group
            return _stored(faults, _with_added(faults, total, add_tf, dtype), dtype)
        if reading.partial == "fp8_unit":
            total = fp8_unit_sums((x_q, x_sf), (w_q, w_sf), group=x_fmt.group, rows=w_fmt.rows)
            return _stored(faults, _with_added(faults, total, add_tf, dtype), dtype)
        # in fp64 and rounded: a code times an fp32 scale has 28 bits
        return multiplied_exactly(faults, x.double() * x_s.double(), w.double() * w_s.double(), add_tf, dtype)

    return linear_codes


def multiplied_exactly(faults: Faults, x: Tensor, w: Tensor, add: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`multiplied`, of fp64 operands where the order is not at fault."""
    if faults == Faults():
        return _stored(faults, _with_added(faults, (x @ w.T).float(), add, dtype), dtype)
    return multiplied(faults, x.float(), w.float(), add, dtype)


def quant_with(quantizer: QuantFaults | str, reading: Bytes = Bytes()) -> Callable[..., Tensor]:  # noqa: B008
    """The emulation with the signature of `linear_quant`; a name leaves the rows unquantised or groups them wrongly."""

    def linear_quant(
        x_tm: Tensor,
        w_q: Tensor,
        w_sf: Tensor,
        *,
        x_fmt: QuantFormat,
        w_fmt: QuantFormat,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        w = _values(reading, w_q, w_fmt).double()
        w = w * _spread(reading.w_scale, w_sf, w_fmt, *w.shape).double()
        if quantizer == "none":
            return multiplied_exactly(Faults(), x_tm.double(), w, None, dtype)
        if quantizer == "row":
            wide_fmt = replace(x_fmt, group=x_tm.shape[1])
        elif quantizer == "other_group":
            wide_fmt = replace(x_fmt, group=128 if x_fmt.group == 32 else 32)
        else:
            wide_fmt = x_fmt
        if x_tm.shape[1] % wide_fmt.group:
            wide_fmt = x_fmt
        faults = quantizer if isinstance(quantizer, QuantFaults) else QuantFaults()
        codes, sf = quantize_with(faults)(x_tm, fmt=wide_fmt)
        x = _values(Bytes(), codes, wide_fmt).double()
        x = x * _spread("own", sf, wide_fmt, *x.shape).double()
        if quantizer == "bf16_codes":
            scale = _spread("own", sf, wide_fmt, *x.shape).double()
            x = (x_tm.double() / scale).bfloat16().double() * scale
        return multiplied_exactly(Faults(), x, w, None, dtype)

    return linear_quant


def linear_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `linear`."""

    def linear(
        x_tm: Tensor, w_fm: Tensor, bias_f: Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        return multiplied(faults, x_tm.float(), w_fm.float(), bias_f, dtype)

    return linear


def grouped_with(owner: str) -> Callable[..., Tensor]:
    """The emulation with the signature of `linear_grouped`; `owner` says how a row finds its expert."""

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
    ) -> Tensor:
        sizes = group_sizes_e.long()
        y, experts = len(x_q), len(sizes)
        expert = torch.repeat_interleave(torch.arange(experts), sizes)
        filled = sizes.nonzero().flatten()
        if owner == "off_by_one":
            expert = (expert + 1) % experts
        elif owner == "empty_not_counted":
            expert = torch.searchsorted(filled, expert)
        elif owner == "boundary":
            expert = torch.cat([expert[:1], expert[:-1]])
        elif owner == "tile_of_first_row":
            expert = expert[torch.arange(y) // 4 * 4]
        elif owner == "tile_of_last_row" and y:
            expert = expert[(torch.arange(y) // 4 * 4 + 3).clamp(max=y - 1)]
        elif owner == "even_shares" and y:
            expert = (torch.arange(y) * experts // y).clamp(max=experts - 1)
        scale_of = torch.zeros_like(expert) if owner == "scales_of_first" else expert
        out = torch.zeros(y, w_q.shape[1]).to(dtype)
        product = codes_with(Faults(), Bytes())
        for pair in {(int(a), int(b)) for a, b in zip(expert, scale_of, strict=True)}:
            rows = ((expert == pair[0]) & (scale_of == pair[1])).nonzero().flatten()
            operands = (x_q[rows], x_sf[rows], w_q[pair[0]], w_sf[pair[1]])
            out[rows] = product(*operands, x_fmt=x_fmt, w_fmt=w_fmt, dtype=dtype)
        if owner == "last_unwritten" and len(filled):
            out[expert == filled[-1]] = 5.0
        elif owner == "single_rows_skipped":
            out[sizes[expert] == 1] = 0.0
        elif owner == "stale_beyond_64" and y:
            place = torch.cat([torch.arange(int(n)) for n in sizes])
            out[place >= 64] = 5.0
        return out

    return linear_grouped


def slots_with(fault: str) -> Callable[..., Tensor]:
    """The emulation with the signature of `linear_slots`."""

    def linear_slots(
        x_q: Tensor,
        x_sf: Tensor,
        w_q: Tensor,
        w_sf: Tensor,
        expert_y: Tensor,
        before_yf: Tensor,
        *,
        x_fmt: QuantFormat,
        w_fmt: QuantFormat,
    ) -> Tensor:
        named_y, y_yf = expert_y >= 0, before_yf.clone()
        share = torch.arange(len(expert_y)) // 128
        product = codes_with(Faults(), Bytes())
        for s in share[named_y].unique().tolist():
            rows = (share == s).nonzero()[:, 0]
            own = rows[named_y[rows]]
            e = {"first_expert": 0, "by_place": s % len(w_q)}.get(fault, int(expert_y[own[0]]))
            if fault == "tile_written":
                own = rows[: -(-len(own) // 64) * 64]
            elif fault == "last_row_kept":
                own = own[:-1]
            elif fault == "second_tile_kept":
                own = own[own < rows[0] + 64]
            bits = x_q.contiguous().view(torch.uint8)[own].view(x_q.dtype)
            y_yf[own] = product(bits, x_sf[own], w_q[e], w_sf[e], x_fmt=x_fmt, w_fmt=w_fmt)
        if fault == "zeroed":
            y_yf[~named_y] = 0.0
        elif fault == "nan_spreads" and not named_y.all():
            y_yf[named_y] += 0 * x_sf[~named_y].float().sum().bfloat16()
        return y_yf

    return linear_slots


def widen_with(how: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `widen_fp4`."""

    def widen_fp4(w_q: Tensor, w_sf: Tensor, *, fmt: QuantFormat, out_fmt: QuantFormat) -> tuple[Tensor, Tensor]:
        f, groups = w_sf.shape
        across = out_fmt.group // fmt.group
        rows, columns = -(-f // out_fmt.rows), -(-groups // across)
        blocks = torch.zeros(rows * out_fmt.rows, columns * across)
        blocks[:f, :groups] = w_sf.float()
        blocks = blocks.reshape(rows, out_fmt.rows, columns, across).transpose(1, 2).flatten(2)
        largest = {
            "smallest": blocks.amin(-1),
            "first_row": blocks[..., :across].amax(-1),
            "first_group": blocks[..., :: max(across, 1)].amax(-1),
        }.get(how, blocks.amax(-1))
        byte = largest - {"offset_7": 7, "offset_5": 5, "offset_0": 0}.get(how, 6)
        byte = byte % 256 if how == "wraps" else byte.clamp(min=0)
        out_s = byte.repeat_interleave(out_fmt.rows, 0).repeat_interleave(across, 1)[:f, :groups]
        shift = w_sf.float() - out_s
        if how == "cut_at_11":
            shift = shift.clamp(min=6.0 - 11)
        elif how == "own_scale_lost":
            shift = torch.full_like(shift, 6.0)
        nibble = "high_first" if how == "high_nibble_first" else "low_first"
        value = _values(Bytes(nibble=nibble), w_q, fmt).unflatten(-1, (groups, -1)) * torch.exp2(shift)[..., None]
        if how == "sign_of_zero_lost":
            value = value + 0.0
        elif how == "subnormals_lost":
            value = torch.where(value.abs() < 2.0**-6, value * 0.0, value)
        return value.flatten(1).clamp(-448, 448).to(torch.float8_e4m3fn), byte.to(torch.uint8)

    return widen_fp4


_RIGHT, _READ = Faults(), Bytes()

right_wide_sum = linear_with(_RIGHT)
right_blocks_backwards = linear_with(Faults(order="blocks_backwards"))
right_truncating_unit = linear_with(Faults(order="truncating"))
truncated = linear_with(Faults(store="truncated"))
accumulator_bf16 = linear_with(Faults(accumulator=torch.bfloat16))
accumulator_fp16 = linear_with(Faults(accumulator=torch.float16))
fp32_through_bf16 = linear_with(Faults(store="through_bf16"))
operands_tf32 = linear_with(Faults(operands="tf32"))
operands_bf16 = linear_with(Faults(operands="bf16"))
tail_dropped = linear_with(Faults(tail="dropped"))
pairs_swapped = linear_with(Faults(tail="swapped"))
features_tail_unwritten = linear_with(Faults(features="tail_unwritten"))
features_shifted = linear_with(Faults(features="shifted"))
bias_missing = linear_with(Faults(add="missing"))
bias_after_rounding = linear_with(Faults(add="after"))
last_row_stale = linear_with(Faults(rows="last_stale"))
one_tile_a_core = linear_with(Faults(cores=4))
split_depends_on_batch = linear_with(Faults(order="by_batch"))
other_order_beyond_8_rows = linear_with(Faults(rows="many", order="blocks_backwards"))
not_deterministic = linear_with(Faults(counter=True))

codes_right = codes_with(_RIGHT, _READ)
codes_right_backwards = codes_with(Faults(order="blocks_backwards"), _READ)
codes_right_truncating_unit = codes_with(Faults(order="truncating"), _READ)
codes_of_fp8_unit = codes_with(_RIGHT, Bytes(partial="fp8_unit"))
codes_truncated = codes_with(Faults(store="truncated"), _READ)
codes_accumulator_bf16 = codes_with(Faults(accumulator=torch.bfloat16), _READ)
codes_through_bf16 = codes_with(Faults(store="through_bf16"), _READ)
codes_partial_bf16 = codes_with(_RIGHT, Bytes(partial="bf16"))
codes_high_nibble_first = codes_with(_RIGHT, Bytes(nibble="high_first"))
codes_no_subnormals = codes_with(_RIGHT, Bytes(codes="no_subnormals"))
x_scale_exponent_only = codes_with(_RIGHT, Bytes(x_scale="exponent"))
x_scale_rounded_up = codes_with(_RIGHT, Bytes(x_scale="rounded_up"))
x_scale_unmasked = codes_with(_RIGHT, Bytes(x_scale="unmasked"))
x_scale_of_next_group = codes_with(_RIGHT, Bytes(x_scale="next_group"))
x_scale_of_first_row = codes_with(_RIGHT, Bytes(x_scale="first_row"))
x_scale_of_batch = codes_with(_RIGHT, Bytes(x_scale="batch"))
x_scale_missing = codes_with(_RIGHT, Bytes(x_scale="missing"))
w_scale_transposed = codes_with(_RIGHT, Bytes(w_scale="transposed"))
w_scale_rows_of_128 = codes_with(_RIGHT, Bytes(w_scale="rows_of_128"))
w_scale_rows_permuted = codes_with(_RIGHT, Bytes(w_scale="row_tile"))
w_scale_of_next_group = codes_with(_RIGHT, Bytes(w_scale="next_group"))
w_scale_exponent_only = codes_with(_RIGHT, Bytes(w_scale="exponent"))
w_scale_rounded_up = codes_with(_RIGHT, Bytes(w_scale="rounded_up"))
w_scale_missing = codes_with(_RIGHT, Bytes(w_scale="missing"))
w_scale_bias_126 = codes_with(_RIGHT, Bytes(w_scale="bias_126"))
codes_tail_dropped = codes_with(Faults(tail="dropped"), _READ)
codes_features_tail_unwritten = codes_with(Faults(features="tail_unwritten"), _READ)
codes_add_missing = codes_with(Faults(add="missing"), _READ)
codes_add_twice = codes_with(Faults(add="twice"), _READ)
codes_add_after_rounding = codes_with(Faults(add="after"), _READ)
codes_last_row_stale = codes_with(Faults(rows="last_stale"), _READ)
codes_split_depends_on_batch = codes_with(Faults(order="by_batch"), _READ)

quant_right = quant_with(QuantFaults())
quant_rows_unquantised = quant_with("none")
quant_one_scale_a_row = quant_with("row")
quant_other_group = quant_with("other_group")
quant_codes_bf16 = quant_with("bf16_codes")
quant_payload_not_requantised = quant_with(QuantFaults(divide="unrounded"))
quant_scale_floor_of_exponent = quant_with(QuantFaults(scale="floor", divide="unrounded"))
quant_floor_on_scale = quant_with(QuantFaults(floor="scale"))
quant_codes_truncated = quant_with(QuantFaults(codes="truncated"))
quant_scale_of_batch = quant_with(QuantFaults(amax="batch"))
quant_w_scale_transposed = quant_with(QuantFaults(), Bytes(w_scale="transposed"))
quant_w_high_nibble_first = quant_with(QuantFaults(), Bytes(nibble="high_first"))

grouped_right = grouped_with("own")
grouped_off_by_one = grouped_with("off_by_one")
grouped_empty_not_counted = grouped_with("empty_not_counted")
grouped_boundary_row = grouped_with("boundary")
grouped_tile_of_first_row = grouped_with("tile_of_first_row")
grouped_tile_of_last_row = grouped_with("tile_of_last_row")
grouped_even_shares = grouped_with("even_shares")
grouped_scales_of_first_expert = grouped_with("scales_of_first")
grouped_last_unwritten = grouped_with("last_unwritten")
grouped_single_rows_skipped = grouped_with("single_rows_skipped")
grouped_stale_beyond_a_tile = grouped_with("stale_beyond_64")

slots_right = slots_with("none")
slots_tile_written = slots_with("tile_written")
slots_zeroed = slots_with("zeroed")
slots_first_expert = slots_with("first_expert")
slots_expert_by_place = slots_with("by_place")
slots_last_row_kept = slots_with("last_row_kept")
slots_second_tile_kept = slots_with("second_tile_kept")
slots_nan_spreads = slots_with("nan_spreads")

widen_right = widen_with("right")
widen_smallest_scale = widen_with("smallest")
widen_scale_of_first_row = widen_with("first_row")
widen_offset_5 = widen_with("offset_5")
widen_offset_7 = widen_with("offset_7")
widen_unshifted = widen_with("offset_0")
widen_wraps_below_zero = widen_with("wraps")
widen_cut_at_11 = widen_with("cut_at_11")
widen_scales_of_rows_lost = widen_with("own_scale_lost")
widen_high_nibble_first = widen_with("high_nibble_first")
widen_sign_of_zero_lost = widen_with("sign_of_zero_lost")
widen_subnormals_lost = widen_with("subnormals_lost")
