"""Projection, gate and layer of the n-gram memory as a kernel computes them, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.weights import EngramWeights

from .engram import RowFaults, ValueFaults, lookup_with, values_of

BF16 = torch.bfloat16


def _stored(x: Tensor, truncated: bool = False) -> Tensor:
    x = x.float()
    return ((x.view(torch.int32) & -65536).view(torch.float32) if truncated else x).to(BF16)


# projection


@dataclass(frozen=True, kw_only=True)
class ProjectFaults:
    """What the projection does wrong; the default is right. `backwards` is an honest choice of order."""

    backwards: bool = False
    requantised: bool = False
    weight_scales: str = "own"  # own, transposed, first
    token_scales: bool = True
    dropped: int = 0
    accumulator: torch.dtype = torch.float32
    truncated: bool = False
    nan: str = "own"  # own, tile, hidden
    normalised: bool = False
    split_by_batch: bool = False


def _quantised_again(x: Tensor) -> Tensor:
    groups = x.to(BF16).double().unflatten(1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    scale = torch.exp2(torch.ceil(torch.log2(largest)))
    return ((groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale).flatten(1)


def _weight(faults: ProjectFaults, w_um: Tensor, w_sf_ig: Tensor) -> Tensor:
    i, g = w_sf_ig.shape
    scales = w_sf_ig
    if faults.weight_scales == "transposed":
        scales = w_sf_ig.t().reshape(i, g)
    elif faults.weight_scales == "first":
        scales = w_sf_ig[:1, :1].expand(i, g)
    rows = scales.contiguous().repeat_interleave(32, 0)[: w_um.shape[0]]
    return values_of(ValueFaults(), w_um.contiguous().view(torch.uint8), rows)


def project_with(faults: ProjectFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `engram_project`."""

    def engram_project(codes_tm: Tensor, sf_tg: Tensor, w_um: Tensor, w_sf_ig: Tensor) -> Tensor:
        codes = codes_tm.contiguous().view(torch.uint8)
        if faults.nan == "hidden":
            codes = torch.where((codes & 127) == 127, codes - 1, codes)
        scales = sf_tg if faults.token_scales else torch.full_like(sf_tg, 121)
        e = values_of(ValueFaults(), codes, scales)
        if faults.requantised:
            e = _quantised_again(e)
        largest = torch.ones(len(e), 1, dtype=torch.float64)
        if faults.normalised:
            largest = e.abs().amax(-1, keepdim=True)
            e = e / largest
        w = _weight(faults, w_um, w_sf_ig)
        kept = e.shape[1] - faults.dropped
        step = 32
        starts = list(range(0, kept, step))
        acc = torch.zeros(len(e), len(w), dtype=torch.float32)
        for start in reversed(starts) if faults.backwards else starts:
            block = slice(start, min(start + step, kept))
            part = (e[:, None, block] * w[None, :, block]).sum(-1) if len(e) else acc.double()
            acc = (acc + part.float()).to(faults.accumulator).float()
            if faults.split_by_batch and len(e) == 1:  # one token alone: splits whose partial sums are stored in bf16
                acc = acc.to(BF16).float()
        kv = acc.double() * largest
        if faults.nan == "tile":
            kv = kv + 0 * e.sum()
        return _stored(kv, faults.truncated)

    return engram_project


_PROJECT = ProjectFaults()
right_project = project_with(_PROJECT)
right_project_backwards = project_with(replace(_PROJECT, backwards=True))
quantised_again = project_with(replace(_PROJECT, requantised=True))
weight_scales_transposed = project_with(replace(_PROJECT, weight_scales="transposed"))
weight_scale_of_first_tile = project_with(replace(_PROJECT, weight_scales="first"))
token_scales_ignored = project_with(replace(_PROJECT, token_scales=False))
last_channels_dropped = project_with(replace(_PROJECT, dropped=32))
accumulator_bf16 = project_with(replace(_PROJECT, accumulator=BF16))
projection_truncated = project_with(replace(_PROJECT, truncated=True))
nan_spreads_over_tile = project_with(replace(_PROJECT, nan="tile"))
nan_hidden = project_with(replace(_PROJECT, nan="hidden"))
zero_over_zero = project_with(replace(_PROJECT, normalised=True))
split_by_batch = project_with(replace(_PROJECT, split_by_batch=True))


# gate


@dataclass(frozen=True, kw_only=True)
class GateFaults:
    """What the gate does wrong; the default is right. `backwards` is an honest choice of order."""

    backwards: bool = False
    split_by_batch: bool = False
    sign: str = "copied"  # copied, sign, lost
    clamp: str = "inside"  # inside, missing, on_root
    root: bool = True
    eps: str = "asked"  # asked, or a number
    norm: str = "stream"  # stream, token, first_token
    value: str = "last"  # last, first
    keys: str = "own"  # own, first
    weights: str = "both"  # both, q, bf16
    scale: bool = True
    width: str = "own"  # own, padded
    residual: str = "added"  # added, missing, after_rounding
    gate: torch.dtype = torch.float32
    truncated: bool = False
    memory: bool = True
    image: str = "kept"  # kept, updated, multiplied
    unwritten: bool = False
    counter: bool = False


_calls = 0


def _sum(faults: GateFaults, x: Tensor) -> Tensor:
    """fp32 partial sums of 64 lanes, then one wide sum; for one token alone they may be stored in bf16."""
    lanes = 64
    steps = torch.nn.functional.pad(x, (0, -x.shape[-1] % lanes)).unflatten(-1, (-1, lanes))
    if faults.backwards:
        steps = steps.flip(-2)
    total = torch.zeros(*x.shape[:-1], lanes)
    for step in range(steps.shape[-2]):
        total = total + steps[..., step, :]
    if faults.split_by_batch and len(x) == 1:
        total = total.to(BF16).float()
    return total.double().sum(-1).float()


def _strength(faults: GateFaults, r: Tensor, key: Tensor, weight: Tensor, eps: float) -> Tensor:
    width = r.shape[-1]
    count = 1 << max(width - 1, 0).bit_length() if faults.width == "padded" else width
    added = eps if faults.eps == "asked" else float(faults.eps)
    squares = _sum(faults, r * r)
    if faults.norm == "token":
        squares = squares.mean(-1, keepdim=True).expand_as(squares)
    elif faults.norm == "first_token" and len(squares):
        squares = squares[:1].expand_as(squares)
    rx = (squares / count + added).double().rsqrt().float()
    rk = (_sum(faults, key * key) / count + added).double().rsqrt().float()
    d = _sum(faults, r * weight * key) * rx * rk
    return d * width**-0.5 if faults.scale else d


def _gate_of(faults: GateFaults, d: Tensor) -> Tensor:
    if not faults.root:
        return torch.sigmoid(d.double()).float()
    size = d.abs().double()
    if faults.clamp == "inside":
        size = torch.where(size < 1e-6, 1e-6, size)
    root = size.sqrt()
    if faults.clamp == "on_root":
        root = torch.where(root < 1e-6, 1e-6, root)
    if faults.sign == "copied":
        root = torch.copysign(root, d.double())
    elif faults.sign == "sign":
        root = root * d.sign()
    return torch.sigmoid(root).float()


def gate_with(faults: GateFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `engram_gate`."""

    def engram_gate(
        r_tnm: Tensor, kv_tjm: Tensor, q_weight_nm: Tensor, k_weight_nm: Tensor, image_t: Tensor, *, eps: float
    ) -> Tensor:
        global _calls
        if not faults.memory:
            return r_tnm.clone()
        r, kv = r_tnm.float(), kv_tjm.float()
        key, value = (kv[:, 1:], kv[:, 0]) if faults.value == "first" else (kv[:, :-1], kv[:, -1])
        if faults.keys == "first":
            key = key[:, :1].expand_as(key)
        weight = q_weight_nm.float() * k_weight_nm.float()
        if faults.weights == "q":
            weight = q_weight_nm.float()
        elif faults.weights == "bf16":
            weight = weight.to(BF16).float()
        gate = _gate_of(faults, _strength(faults, r, key, weight, eps)).to(faults.gate).double()
        brought = gate[..., None] * value.double()[:, None]
        if faults.residual == "after_rounding":
            brought = brought.float().to(BF16).double()
        image = image_t[:, None, None]
        if faults.image == "multiplied":
            brought = brought * (~image).double()
        gated = _stored(brought if faults.residual == "missing" else r.double() + brought, faults.truncated)
        if faults.image == "kept":
            gated = torch.where(image, r_tnm, gated)
        elif faults.image == "updated":
            gated = torch.where(image, _stored(r.double() + 0.5 * value.double().nan_to_num(1.0)[:, None]), gated)
        if faults.unwritten:
            gated[-1:] = torch.nan
        if faults.counter and gated.numel():
            _calls += 1
            gated.view(-1)[0] += _calls * 2.0**-7
        return gated

    return engram_gate


_GATE = GateFaults()
right_gate = gate_with(_GATE)
right_gate_backwards = gate_with(replace(_GATE, backwards=True))
sign_instead_of_copysign = gate_with(replace(_GATE, sign="sign"))
clamp_missing = gate_with(replace(_GATE, clamp="missing"))
clamp_on_root = gate_with(replace(_GATE, clamp="on_root"))
root_missing = gate_with(replace(_GATE, root=False))
root_of_sum_unsigned = gate_with(replace(_GATE, sign="lost"))
eps_missing = gate_with(replace(_GATE, eps="0"))
eps_1e_6 = gate_with(replace(_GATE, eps="1e-6"))
norm_over_streams = gate_with(replace(_GATE, norm="token"))
value_first = gate_with(replace(_GATE, value="first"))
key_of_first_stream = gate_with(replace(_GATE, keys="first"))
q_weight_alone = gate_with(replace(_GATE, weights="q"))
weights_bf16_product = gate_with(replace(_GATE, weights="bf16"))
width_scale_missing = gate_with(replace(_GATE, scale=False))
mean_over_padded_width = gate_with(replace(_GATE, width="padded"))
residual_missing = gate_with(replace(_GATE, residual="missing"))
value_rounded_first = gate_with(replace(_GATE, residual="after_rounding"))
gate_bf16 = gate_with(replace(_GATE, gate=BF16))
gate_truncated = gate_with(replace(_GATE, truncated=True))
memory_not_added = gate_with(replace(_GATE, memory=False))
image_updated = gate_with(replace(_GATE, image="updated"))
image_nan_leaks = gate_with(replace(_GATE, image="multiplied"))
last_token_unwritten = gate_with(replace(_GATE, unwritten=True))
statistics_of_first_token = gate_with(replace(_GATE, norm="first_token"))
statistics_split_by_batch = gate_with(replace(_GATE, split_by_batch=True))
not_deterministic = gate_with(replace(_GATE, counter=True))


# the whole layer


def layer_with(
    gate: GateFaults, project: ProjectFaults, *, reversed_rows: bool = False, narrow: bool = False
) -> Callable[..., Tensor]:
    """The emulation with the signature of `engram`."""
    look_up, product, gated = lookup_with(RowFaults()), project_with(project), gate_with(gate)

    def engram(
        r_tnm: Tensor, row_tz: Tensor, table_rd: Tensor, table_sf_rg: Tensor, weights: EngramWeights, *, eps: float
    ) -> Tensor:
        codes, scales = look_up(table_rd, table_sf_rg, row_tz.flip(1) if reversed_rows else row_tz)
        kv = product(codes, scales, weights.wkv_um, weights.wkv_sf_ig)
        if narrow:
            kv = kv.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(BF16)
        kv = kv.unflatten(1, (-1, r_tnm.shape[-1]))
        return gated(r_tnm, kv, weights.q_weight_nm, weights.k_weight_nm, (row_tz < 0).all(-1), eps=eps)

    return engram


right_layer = layer_with(_GATE, _PROJECT)
layer_rows_reversed = layer_with(_GATE, _PROJECT, reversed_rows=True)
layer_value_first = layer_with(replace(_GATE, value="first"), _PROJECT)
layer_keys_of_first_stream = layer_with(replace(_GATE, keys="first"), _PROJECT)
layer_not_added = layer_with(replace(_GATE, memory=False), _PROJECT)
layer_scales_ignored = layer_with(_GATE, replace(_PROJECT, token_scales=False))
layer_values_e4m3 = layer_with(_GATE, _PROJECT, narrow=True)
