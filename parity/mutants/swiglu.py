"""SwiGLU as a kernel computes it, in fp32 on the CPU, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import QuantFormat

from .quant import Faults as QuantFaults
from .quant import quantize_with


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What SwiGLU does wrong; the default is right. `form="sigmoid"` and `order` are honest choices."""

    halves: str = "gate_first"  # gate_first, up_first, interleaved
    gate_limit: str = "above"  # above, none, both, after (of silu), below
    up_limit: str = "both"  # both, none, above, below
    form: str = "quotient"  # quotient, sigmoid (a · 1 / (1 + exp(-a))), unstable (exp(a) / (1 + exp(a))), tanh, relu
    weight: str = "last"  # last, missing, squared, on_gate, next_row, first (order only), after (of the quantiser)
    limit: str = "given"  # given, seven
    middle: torch.dtype | None = None  # silu(gate) is rounded to it
    store: str = "nearest"  # nearest, truncated, through_bf16
    rows: str = "own"  # own, last_stale, tail_unwritten


def value_of(faults: Faults, h: Tensor, weight: Tensor | None, limit: float | None) -> Tensor:
    """The unrounded value in fp32."""
    gate, up = h.float().chunk(2, 1)
    if faults.halves == "up_first":
        gate, up = up, gate
    elif faults.halves == "interleaved":
        gate, up = h.float()[:, 0::2], h.float()[:, 1::2]
    if limit is not None:
        bound = 7.0 if faults.limit == "seven" else limit
        if faults.gate_limit in ("above", "both"):
            gate = gate.clamp(max=bound)
        if faults.gate_limit in ("below", "both"):
            gate = gate.clamp(min=-bound)
        if faults.up_limit in ("both", "above"):
            up = up.clamp(max=bound)
        if faults.up_limit in ("both", "below"):
            up = up.clamp(min=-bound)
    if weight is not None and faults.weight == "on_gate":
        gate = gate * weight.float()[:, None]
    silu = _silu(faults.form, gate)
    if limit is not None and faults.gate_limit == "after":
        silu = silu.clamp(max=limit)
    if faults.middle is not None:
        silu = silu.to(faults.middle).float()
    if weight is None or faults.weight in ("missing", "on_gate", "after"):
        return silu * up
    factor = weight.float()
    if faults.weight == "squared":
        factor = factor * factor
    elif faults.weight == "next_row":
        factor = factor.roll(-1, 0)
    if faults.weight == "first":
        return silu * (up * factor[:, None])
    return silu * up * factor[:, None]


def _silu(form: str, gate: Tensor) -> Tensor:
    if form == "tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh")
    if form == "relu":
        return gate.clamp(min=0) * torch.sigmoid(gate)
    if form == "unstable":
        grown = torch.exp(gate)
        return gate * (grown / (1 + grown))
    if form == "sigmoid":
        return gate * (1 / (1 + _exp(-gate)))
    return gate / (1 + _exp(-gate))


def _exp(x: Tensor) -> Tensor:
    # in fp64 and rounded: torch's fp32 exp gives other bits in the vector body than in its tail
    return torch.exp(x.double()).float()


def swiglu_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `swiglu`."""

    def swiglu(
        h_ti: Tensor, weight_t: Tensor | None = None, *, limit: float | None, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        value = value_of(faults, h_ti, weight_t, limit)
        if faults.store == "truncated" and dtype == torch.bfloat16:
            value = (value.view(torch.int32) & -65536).view(torch.float32)
        elif faults.store == "through_bf16":
            value = value.bfloat16().float()
        y = value.to(dtype)
        if faults.rows == "last_stale" and len(y):
            y[-1] = 7.0
        elif faults.rows == "tail_unwritten":
            y[:, y.shape[1] // 128 * 128 :] = 7.0
        return y

    return swiglu


def quant_with(faults: Faults, quantizer: QuantFaults, amax_of: str = "value") -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `swiglu_quant`."""

    def swiglu_quant(
        h_ti: Tensor, weight_t: Tensor | None = None, *, limit: float | None, fmt: QuantFormat
    ) -> tuple[Tensor, Tensor]:
        value = value_of(faults, h_ti, weight_t, limit)
        if faults.store == "through_bf16":
            value = value.bfloat16().float()
        codes, sf = quantize_with(quantizer)(value, fmt=fmt)
        if amax_of == "unweighted" and weight_t is not None:
            bare = value_of(replace(faults, weight="missing"), h_ti, weight_t, limit)
            _, sf = quantize_with(quantizer)(bare, fmt=fmt)
            scale = torch.exp2(sf.double() - 127).float() if sf.dtype == torch.uint8 else sf
            ratio = value / scale.repeat_interleave(fmt.group, 1)
            codes = ratio.clamp(-448, 448).to(torch.float8_e4m3fn)
        if faults.weight == "after" and weight_t is not None:
            codes = (codes.float() * weight_t.float()[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes, sf

    return swiglu_quant


_RIGHT, _QUANT = Faults(), QuantFaults()

right_quotient = swiglu_with(_RIGHT)
right_sigmoid = swiglu_with(Faults(form="sigmoid"))
right_weight_first = swiglu_with(Faults(weight="first"))
truncated = swiglu_with(Faults(store="truncated"))
fp32_through_bf16 = swiglu_with(Faults(store="through_bf16"))
silu_rounded_to_bf16 = swiglu_with(Faults(middle=torch.bfloat16))
silu_rounded_to_fp16 = swiglu_with(Faults(middle=torch.float16))
halves_swapped = swiglu_with(Faults(halves="up_first"))
halves_interleaved = swiglu_with(Faults(halves="interleaved"))
limit_missing = swiglu_with(Faults(gate_limit="none", up_limit="none"))
gate_unlimited = swiglu_with(Faults(gate_limit="none"))
gate_limited_below_too = swiglu_with(Faults(gate_limit="both"))
gate_limited_below_only = swiglu_with(Faults(gate_limit="below"))
gate_limited_after_silu = swiglu_with(Faults(gate_limit="after"))
up_unlimited = swiglu_with(Faults(up_limit="none"))
up_limited_above_only = swiglu_with(Faults(up_limit="above"))
up_limited_below_only = swiglu_with(Faults(up_limit="below"))
limit_is_7 = swiglu_with(Faults(limit="seven"))
unstable_exp = swiglu_with(Faults(form="unstable"))
gelu = swiglu_with(Faults(form="tanh"))
negative_gates_cut = swiglu_with(Faults(form="relu"))
weight_missing = swiglu_with(Faults(weight="missing"))
weight_squared = swiglu_with(Faults(weight="squared"))
weight_on_gate = swiglu_with(Faults(weight="on_gate"))
weight_of_next_row = swiglu_with(Faults(weight="next_row"))
last_row_stale = swiglu_with(Faults(rows="last_stale"))
tail_unwritten = swiglu_with(Faults(rows="tail_unwritten"))

quant_right = quant_with(_RIGHT, _QUANT)
quant_right_sigmoid = quant_with(Faults(form="sigmoid"), _QUANT)
quant_of_rounded_value = quant_with(Faults(store="through_bf16"), _QUANT)
quant_weight_after = quant_with(Faults(weight="after"), _QUANT)
quant_weight_missing = quant_with(Faults(weight="missing"), _QUANT)
quant_amax_unweighted = quant_with(_RIGHT, _QUANT, "unweighted")
quant_limit_missing = quant_with(Faults(gate_limit="none", up_limit="none"), _QUANT)
quant_gate_limited_below_too = quant_with(Faults(gate_limit="both"), _QUANT)
quant_up_limited_above_only = quant_with(Faults(up_limit="above"), _QUANT)
quant_halves_swapped = quant_with(Faults(halves="up_first"), _QUANT)
quant_codes_truncated = quant_with(_RIGHT, QuantFaults(codes="truncated"))
quant_codes_through_bf16 = quant_with(_RIGHT, QuantFaults(codes="bf16"))
quant_floor_on_scale = quant_with(_RIGHT, QuantFaults(floor="scale"))
quant_no_floor = quant_with(_RIGHT, QuantFaults(floor="none"))
quant_scale_floor_of_exponent = quant_with(_RIGHT, QuantFaults(scale="floor", divide="unrounded"))
quant_payload_not_requantised = quant_with(_RIGHT, QuantFaults(divide="unrounded"))
quant_scale_of_batch = quant_with(_RIGHT, QuantFaults(amax="batch"))
