"""Stores, loads and fused stores of 584-byte records, byte by byte in torch, with faults to switch on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import FusedStore, PageLayout, RecordFormat, RecordTap

from .v4_layers import _rms, turn


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What is wrong; the default is right."""

    floor: str = "given"  # given, other, none
    tail: str = "bf16"  # bf16, e4m3, truncated
    order: str = "codes_first"  # codes_first, tail_first
    pad: int = 0
    layout: str = "given"  # given, other
    minus_one: str = "skipped"  # skipped, wraps
    stride: str = "given"  # given, dense
    groups: int = 64
    turned: str = "last"  # last, none, back


RIGHT = Faults()


def packed(faults: Faults, x: Tensor, fmt: RecordFormat) -> Tensor:
    """Records as codes | scales, pad | tail."""
    g = x[:, :448].float().unflatten(1, (-1, faults.groups)).double()
    floor = fmt.quant.amax_floor
    if faults.floor == "other":
        floor = 448e-4 if floor < 1e-3 else 1e-4
    amax = g.abs().amax(-1, keepdim=True)
    amax = amax if faults.floor == "none" else amax.clamp(min=float(torch.tensor(floor).float()))
    mantissa, exponent = torch.frexp((amax.float() / 448).double())
    byte = (exponent - (mantissa == 0.5).int()).clamp(min=-126)
    codes = (g / torch.exp2(byte.double())).float().clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    sf = (byte[..., 0] + 127).to(torch.uint8).repeat_interleave(faults.groups // 64, 1)
    tail = x[:, 448:].float()
    if faults.tail == "e4m3":
        s = torch.exp2(torch.ceil(torch.log2(tail.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
        tail = (tail / s).to(torch.float8_e4m3fn).float() * s
    if faults.tail == "truncated":
        tail = (tail.contiguous().view(torch.int32) & -65536).view(torch.float32)
    pad = torch.full((len(x), 1), faults.pad, dtype=torch.uint8)
    return torch.cat([codes.view(torch.uint8), sf, pad, tail.bfloat16().contiguous().view(torch.uint8)], 1)


def _places(faults: Faults, slots: int, layout: PageLayout) -> Callable[[int], list[int]]:
    """The byte in its page of every byte of a slot's record."""
    interleaved = (layout is PageLayout.INTERLEAVED) != (faults.layout == "other")

    def of(slot: int) -> list[int]:
        if interleaved:
            return list(range(slot * 584, slot * 584 + 584))
        data, sf = slot * 576, slots * 576 + slot * 8
        codes, tail = range(data, data + 448), range(data + 448, data + 576)
        if faults.order == "tail_first":
            codes, tail = range(data + 128, data + 576), range(data, data + 128)
        return [*codes, *range(sf, sf + 8), *tail]

    return of


def _flat(faults: Faults, cache: Tensor) -> tuple[Tensor, int]:
    stride = cache.shape[1] * 584 if faults.stride == "dense" else cache.stride(0)
    size = (len(cache) - 1) * cache.stride(0) + cache.shape[1] * 584
    return cache.as_strided((size,), (1,)), stride


def _write(faults: Faults, cache: Tensor, rows: Tensor, slots: Tensor, layout: PageLayout) -> None:
    flat, stride = _flat(faults, cache)
    total, of = cache.shape[0] * cache.shape[1], _places(faults, cache.shape[1], layout)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot == -1 and faults.minus_one == "wraps":
            slot = total - 1
        if 0 <= slot < total:
            page, at = divmod(slot, cache.shape[1])
            flat[torch.tensor(of(at)) + page * stride] = row


def _store(faults: Faults) -> Callable[..., Tensor]:
    def store_records(
        cache_pow_: Tensor, x_td: Tensor, slots_t: Tensor, *, layout: PageLayout, fmt: RecordFormat | None = None
    ) -> Tensor:
        assert fmt is not None
        _write(faults, cache_pow_, packed(faults, x_td.nan_to_num(0), fmt), slots_t, layout)
        return cache_pow_

    return store_records


def _load(faults: Faults) -> Callable[..., Tensor]:
    def load_records(
        cache_pow: Tensor, slots_t: Tensor, *, layout: PageLayout, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        flat, stride = _flat(faults, cache_pow)
        total, of = cache_pow.shape[0] * cache_pow.shape[1], _places(faults, cache_pow.shape[1], layout)
        x = torch.zeros(len(slots_t), 512)
        for row, slot in enumerate(slots_t.tolist()):
            if slot == -1 and faults.minus_one == "wraps":
                slot = total - 1
            if 0 <= slot < total:
                page, at = divmod(slot, cache_pow.shape[1])
                record = flat[torch.tensor(of(at)) + page * stride]
                scale = torch.exp2(record[448:455].float() - 127).repeat_interleave(64)
                x[row, :448] = record[:448].contiguous().view(torch.float8_e4m3fn).float() * scale
                tail = record[456:].contiguous().view(torch.bfloat16).float()
                if faults.tail == "e4m3":
                    tail = tail.clamp(-448, 448).to(torch.float8_e4m3fn).float()
                x[row, 448:] = tail
        return x.to(dtype)

    return load_records


def _fused(faults: Faults) -> Callable[..., tuple[Tensor, Tensor]]:
    def norm_rope_store(
        cache_pow_: Tensor,
        x_td: Tensor,
        weight_d: Tensor,
        table_sr: Tensor,
        positions_t: Tensor,
        slots_t: Tensor,
        *,
        store: FusedStore,
    ) -> tuple[Tensor, Tensor]:
        normed = _rms(x_td.float(), weight_d, store.eps)
        turned = normed
        if faults.turned != "none":
            turned = turn(normed, table_sr[positions_t.long()], back=faults.turned == "back")
        turned = turned.bfloat16()
        assert store.fmt is not None
        records = packed(faults, turned, store.fmt)
        _write(faults, cache_pow_, records, slots_t, store.layout)
        if store.tap is RecordTap.CAST_BACK:
            scale = torch.exp2(records[:, 448:455].float() - 127).repeat_interleave(64, 1)
            coded = records[:, :448].contiguous().view(torch.float8_e4m3fn).float() * scale
            return cache_pow_, torch.cat([coded.bfloat16(), turned[:, 448:]], 1)
        return cache_pow_, turned

    return norm_rope_store


right_store = _store(RIGHT)
store_other_floor = _store(replace(RIGHT, floor="other"))
store_no_floor = _store(replace(RIGHT, floor="none"))
store_tail_quantised = _store(replace(RIGHT, tail="e4m3"))
store_tail_truncated = _store(replace(RIGHT, tail="truncated"))
store_tail_in_front = _store(replace(RIGHT, order="tail_first"))
store_pad_is_one = _store(replace(RIGHT, pad=127))
store_other_layout = _store(replace(RIGHT, layout="other"))
store_minus_one_wraps = _store(replace(RIGHT, minus_one="wraps"))
store_ignores_page_stride = _store(replace(RIGHT, stride="dense"))

right_load = _load(RIGHT)
load_tail_through_e4m3 = _load(replace(RIGHT, tail="e4m3"))
load_tail_in_front = _load(replace(RIGHT, order="tail_first"))
load_other_layout = _load(replace(RIGHT, layout="other"))
load_minus_one_wraps = _load(replace(RIGHT, minus_one="wraps"))
load_ignores_page_stride = _load(replace(RIGHT, stride="dense"))

right_fused = _fused(RIGHT)
fused_tail_quantised = _fused(replace(RIGHT, tail="e4m3"))
fused_not_turned = _fused(replace(RIGHT, turned="none"))
fused_turned_back = _fused(replace(RIGHT, turned="back"))
fused_other_layout = _fused(replace(RIGHT, layout="other"))
