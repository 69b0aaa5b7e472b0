"""RMSNorm as a kernel computes it, in fp32 on the CPU, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import QuantFormat, WeightCast

from .quant import Faults as QuantFaults
from .quant import quantize_with


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the norm does wrong; the default is right. `lanes` and `backwards` are honest choices of order."""

    lanes: int = 0  # partial sums side by side, added up one after the other; 0: one wide sum
    backwards: bool = False
    lanes_by_batch: bool = False
    eps: str = "inside"  # inside, outside, missing, on_sum, or a number
    mean: str = "width"  # width, padded, without_last, first_row, batch
    squares: torch.dtype = torch.float32
    accumulator: torch.dtype = torch.float32
    mean_dtype: torch.dtype = torch.float32
    rstd: str = "nearest"  # nearest, bf16, 12_bits
    centred: bool = False
    weight: str = "own"  # own, plus_one
    cast: str = "asked"  # asked, other, before, after, fp16_first
    store: str = "nearest"  # nearest, truncated
    unwritten: str = "none"  # none, tail, last_row
    counter: bool = False


_calls = 0


def unrounded(faults: Faults, x_tm: Tensor, weight_m: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised row and the weight, in fp32."""
    x, weight = x_tm.float(), weight_m.float()
    if faults.centred:
        x = x - _exact(x.double().mean(-1, keepdim=True))
    counted = x[:, :-1] if faults.mean == "without_last" else x
    total = _sum_of_squares(faults, counted)
    width = x.shape[1]
    if faults.mean == "padded":
        width = 1 << max(width - 1, 0).bit_length()
    if faults.eps == "on_sum":
        total = total + eps
    mean = (total / width).to(faults.mean_dtype).float()
    if faults.mean == "first_row":
        mean = mean[:1].expand_as(mean)
    elif faults.mean == "batch" and len(mean):
        mean = mean.mean(0, keepdim=True).expand_as(mean)
    added = {"inside": eps, "outside": 0.0, "missing": 0.0, "on_sum": 0.0}
    inside = (mean + added.get(faults.eps, float(faults.eps) if faults.eps not in added else 0.0)).double()
    root = torch.sqrt(inside) + (eps if faults.eps == "outside" else 0.0)
    rstd = _exact(1 / root)
    if faults.rstd == "bf16":
        rstd = rstd.bfloat16().float()
    elif faults.rstd == "12_bits":
        rstd = (rstd.view(torch.int32) & -2048).view(torch.float32)
    return x * rstd, weight + 1 if faults.weight == "plus_one" else weight


def _exact(x: Tensor) -> Tensor:
    # fp64 and one rounding: torch's fp32 roots and sums give other bits in the vector body than in its tail
    return x.float()


def _sum_of_squares(faults: Faults, x: Tensor) -> Tensor:
    squares = (x * x).to(faults.squares).float()
    lanes = 8 * max(len(x), 1) if faults.lanes_by_batch else faults.lanes
    if not lanes:
        return _exact(squares.double().sum(-1, keepdim=True))
    steps = torch.nn.functional.pad(squares, (0, -squares.shape[1] % lanes)).unflatten(-1, (-1, lanes))
    if faults.backwards:
        steps = steps.flip(1)
    total = torch.zeros(len(x), lanes)
    for step in range(steps.shape[1]):
        total = (total + steps[:, step]).to(faults.accumulator).float()
    return _exact(total.double().sum(-1, keepdim=True))


def _before(faults: Faults, cast: WeightCast) -> bool:
    asked = cast is WeightCast.BEFORE_WEIGHT
    return {"other": not asked, "before": True, "after": False}.get(faults.cast, asked)


def _rounded(faults: Faults, x: Tensor, dtype: torch.dtype) -> Tensor:
    if faults.store == "truncated" and dtype == torch.bfloat16:
        x = (x.view(torch.int32) & -65536).view(torch.float32)
    return x.to(dtype)


def norm_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `rms_norm`."""

    def rms_norm(
        x_tm: Tensor, weight_m: Tensor, *, eps: float, cast: WeightCast, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        global _calls
        unit, weight = unrounded(faults, x_tm, weight_m, eps)
        if faults.cast == "fp16_first":
            unit = unit.half().float()
        if _before(faults, cast):
            unit = _rounded(faults, unit, dtype).float()
        y_tm = _rounded(faults, unit * weight, dtype)
        if faults.unwritten == "tail":
            y_tm[:, y_tm.shape[1] // 128 * 128 :] = torch.nan
        elif faults.unwritten == "last_row":
            y_tm[-1:] = torch.nan
        if faults.counter and y_tm.numel():
            _calls += 1
            y_tm.view(-1)[0] += _calls * 2.0**-7
        return y_tm

    return rms_norm


def norm_quant_with(
    faults: Faults, quant: QuantFaults, *, codes_of: str = "rounded", amax_of: str = "group"
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The emulation with the signature of `rms_norm_quant`."""
    norm, quantize = norm_with(faults), quantize_with(quant)

    def rms_norm_quant(
        x_tm: Tensor, weight_m: Tensor, *, eps: float, cast: WeightCast, fmt: QuantFormat
    ) -> tuple[Tensor, Tensor, Tensor]:
        y_tm = norm(x_tm, weight_m, eps=eps, cast=cast)
        unit, weight = unrounded(faults, x_tm, weight_m, eps)
        unit = unit.bfloat16().float() if cast is WeightCast.BEFORE_WEIGHT else unit
        wide = unit * weight
        if codes_of == "unrounded":
            return (y_tm, *quantize(wide, fmt=fmt))
        codes, sf = quantize(y_tm, fmt=fmt)
        if amax_of == "group" or not y_tm.numel():
            return y_tm, codes, sf
        # other scales: quantise rows whose first group element is raised to the foreign amax, then take its scales
        foreign = {"row": y_tm.float(), "unrounded": wide, "before_weight": unit}[amax_of]
        if amax_of == "row":
            foreign = foreign.abs().amax(-1, keepdim=True).expand_as(foreign)
        _, sf = quantize(foreign.contiguous(), fmt=fmt)
        if amax_of != "row":
            return y_tm, codes, sf
        return y_tm, _codes_under(y_tm, sf, fmt), sf

    return rms_norm_quant


def _codes_under(y_tm: Tensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    scale = sf if sf.dtype == torch.float32 else torch.exp2(sf.double() - 127).float()
    return (y_tm.float() / scale.repeat_interleave(fmt.group, -1)).clamp(-448, 448).to(torch.float8_e4m3fn)


def next_power(x_tm: Tensor, weight_m: Tensor, *, eps: float, cast: WeightCast, fmt: QuantFormat) -> tuple[Tensor, ...]:
    """Scales one step too large, with the codes that belong to them."""
    y_tm, _, sf = right_quant_wide_sum(x_tm, weight_m, eps=eps, cast=cast, fmt=fmt)
    sf = sf * 2 if sf.dtype == torch.float32 else sf + 1
    return y_tm, _codes_under(y_tm, sf, fmt), sf


_RIGHT = Faults()
_QUANT = QuantFaults()
right_wide_sum = norm_with(_RIGHT)
right_blocks_of_512 = norm_with(replace(_RIGHT, lanes=512))
right_lanes_of_128_backwards = norm_with(replace(_RIGHT, lanes=128, backwards=True))
right_quant_wide_sum = norm_quant_with(_RIGHT, _QUANT)
right_quant_lanes_of_128_backwards = norm_quant_with(replace(_RIGHT, lanes=128, backwards=True), _QUANT)

truncated = norm_with(replace(_RIGHT, store="truncated"))
rounded_twice = norm_with(replace(_RIGHT, cast="before"))
rounded_once = norm_with(replace(_RIGHT, cast="after"))
rounded_through_fp16 = norm_with(replace(_RIGHT, cast="fp16_first"))
eps_outside_sqrt = norm_with(replace(_RIGHT, eps="outside"))
eps_missing = norm_with(replace(_RIGHT, eps="missing"))
eps_1e_6 = norm_with(replace(_RIGHT, eps="1e-6"))
eps_1e_5 = norm_with(replace(_RIGHT, eps="1e-5"))
eps_on_sum = norm_with(replace(_RIGHT, eps="on_sum"))
mean_over_padded_width = norm_with(replace(_RIGHT, mean="padded"))
last_channel_not_counted = norm_with(replace(_RIGHT, mean="without_last"))
tail_unwritten = norm_with(replace(_RIGHT, unwritten="tail"))
statistics_bf16 = norm_with(replace(_RIGHT, squares=torch.bfloat16))
mean_bf16 = norm_with(replace(_RIGHT, mean_dtype=torch.bfloat16))
inverse_rms_bf16 = norm_with(replace(_RIGHT, rstd="bf16"))
accumulator_bf16 = norm_with(replace(_RIGHT, lanes=128, accumulator=torch.bfloat16))
approximate_rsqrt = norm_with(replace(_RIGHT, rstd="12_bits"))
mean_subtracted = norm_with(replace(_RIGHT, centred=True))
weight_plus_one = norm_with(replace(_RIGHT, weight="plus_one"))
weight_bf16_product = norm_with(replace(_RIGHT, cast="other"))
statistics_of_first_row = norm_with(replace(_RIGHT, mean="first_row"))
statistics_over_batch = norm_with(replace(_RIGHT, mean="batch"))
last_row_stale = norm_with(replace(_RIGHT, unwritten="last_row"))
split_depends_on_batch = norm_with(replace(_RIGHT, lanes_by_batch=True))
not_deterministic = norm_with(replace(_RIGHT, counter=True))

codes_of_unrounded_norm = norm_quant_with(_RIGHT, _QUANT, codes_of="unrounded")
amax_of_unrounded_norm = norm_quant_with(_RIGHT, _QUANT, amax_of="unrounded")
quant_truncated = norm_quant_with(replace(_RIGHT, store="truncated"), _QUANT)
quant_codes_truncated = norm_quant_with(_RIGHT, replace(_QUANT, codes="truncated"))
quant_scale_floor_on_scale = norm_quant_with(_RIGHT, replace(_QUANT, floor="scale"))
quant_amax_of_row = norm_quant_with(_RIGHT, _QUANT, amax_of="row")
quant_amax_before_weight = norm_quant_with(_RIGHT, _QUANT, amax_of="before_weight")
quant_scale_next_power = next_power
quant_other_cast = norm_quant_with(replace(_RIGHT, cast="other"), _QUANT)
