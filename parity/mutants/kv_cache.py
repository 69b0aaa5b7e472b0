"""Caches as a kernel keeps them, in fp32 and bytes on the CPU, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deeptwin.reference.config import INDEX_FP4, KV_FP4, KV_FP8, FusedStore, PageLayout, RecordFormat, RecordTap

from .quant import Faults as QuantFaults
from .quant import ReaderFaults, dequantize_with, quantize_with
from .rms_norm import Faults as NormFaults
from .rms_norm import unrounded


@dataclass(frozen=True, kw_only=True)
class Places:
    """How slots become addresses; the default is right."""

    layout: str = "own"  # own, other, interleaved, sections_of_64
    page: str = "own"  # own, no_stride, twice, exchanged
    hole: str = "skip"  # skip, wraps, slot_0, stop
    beyond: str = "skip"  # skip, clamp, wraps


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a store does wrong; the default is right."""

    places: Places = Places()
    quant: QuantFaults = QuantFaults()
    record: str = "whole"  # whole, last_code_lost, spill, scales_reversed
    rows: str = "own"  # own, backwards
    again: str = "no"  # no, values (quantised twice), stages (the second time with a floor on the scale)
    sectioned: str = "written"  # written, lost
    counter: bool = False


@dataclass(frozen=True, kw_only=True)
class ReadFaults:
    """What a load does wrong; the default is right."""

    places: Places = Places()
    reader: ReaderFaults = ReaderFaults()
    hole: str = "zero"  # zero, times_zero, unwritten
    scales: str = "own"  # own, entry_before, reversed
    rows: str = "own"  # own, first
    small_scales: str = "kept"  # kept, flushed
    counter: bool = False


_calls = 0


def _count() -> bool:
    """Whether this is a second, fourth, … launch."""
    global _calls
    _calls += 1
    return _calls % 2 == 0


def _format(cache: Tensor) -> RecordFormat:
    return {528: KV_FP8, 288: KV_FP4, 68: INDEX_FP4}[cache.shape[2]]


def _data(fmt: RecordFormat) -> int:
    return {"kv_fp8": 512, "kv_fp4": 256, "index_fp4": 64}[fmt.name]


def _slots(places: Places, slots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Slots as they are taken, and which rows have one."""
    slots = slots.to(torch.int64)
    there = (slots >= 0) & (slots < count)
    if places.hole == "stop":
        there = there & (torch.cumsum((slots < 0).to(torch.int64), 0) == 0)
    if places.hole in ("wraps", "slot_0"):
        taken = slots == -1
        slots = torch.where(taken, count - 1 if places.hole == "wraps" else 0, slots)
        there = there | taken
    if places.beyond != "skip":
        taken = slots >= count
        slots = torch.where(taken, count - 1 if places.beyond == "clamp" else slots % max(count, 1), slots)
        there = there | taken
    return slots, there


def _addresses(places: Places, cache: Tensor, slots: Tensor, layout: PageLayout) -> Tensor:
    """The byte of the storage that every byte of the records in `slots` is at."""
    pages, size, width = cache.shape
    data = _data(_format(cache))
    page, offset = slots // size, slots % size
    if places.page == "twice":
        page, offset = slots // (2 * size), slots % (2 * size)
    elif places.page == "exchanged":
        page, offset = slots % pages, slots // pages
    base = page * (size * width if places.page == "no_stride" else cache.stride(0))
    sectioned = (layout is PageLayout.SECTIONED) != (places.layout == "other")
    byte = torch.arange(width)[None, :]
    if not sectioned or places.layout == "interleaved":
        return (base + offset * width)[:, None] + byte
    entries = 64 if places.layout == "sections_of_64" else size
    codes = offset[:, None] * data + byte[:, :data]
    scales = entries * data + offset[:, None] * (width - data) + byte[:, : width - data]
    return base[:, None] + torch.cat([codes, scales], 1)


def _memory(cache: Tensor) -> Tensor:
    """All bytes of the storage from the cache's first on."""
    length = cache.untyped_storage().nbytes() - cache.storage_offset()
    return cache.as_strided((length,), (1,))


def _records(faults: Faults, x: Tensor, fmt: RecordFormat) -> Tensor:
    codes, sf = quantize_with(faults.quant)(x, fmt=fmt.quant)
    if faults.again != "no":
        values = dequantize_with(ReaderFaults())(codes, sf, fmt=fmt.quant)
        quant = faults.quant
        if faults.again == "stages":
            # the second stage floors the scale at 1e-4, whatever amax is
            again = replace(fmt.quant, amax_floor=1e-4 * fmt.quant.max_value)
            codes, sf = quantize_with(quant)(values, fmt=again)
        else:
            codes, sf = quantize_with(quant)(values, fmt=fmt.quant)
    sf = sf.view(torch.uint8)
    if faults.record == "scales_reversed":
        sf = sf.unflatten(1, (-1, 4)).flip(2).flatten(1)
    return torch.cat([codes.view(torch.uint8), sf], 1)


def _write(faults: Faults, cache: Tensor, x: Tensor, slots_t: Tensor, layout: PageLayout) -> None:
    fmt = _format(cache)
    slots, there = _slots(faults.places, slots_t, cache.shape[0] * cache.shape[1])
    if faults.sectioned == "lost" and layout is PageLayout.SECTIONED:
        return
    # a NaN row that is stored by mistake leaves some bytes, whatever they are
    records = _records(faults, x[there].nan_to_num(nan=0.0), fmt)
    if faults.rows == "backwards":
        records = records.flip(0)
    address = _addresses(faults.places, cache, slots[there], layout)
    memory = _memory(cache)
    if faults.record == "last_code_lost":
        keep = torch.arange(records.shape[1]) != _data(fmt) - 1
        address, records = address[:, keep], records[:, keep]
    elif faults.record == "spill":
        address = torch.cat([address, address[:, -1:] + 1], 1)
        records = torch.cat([records, torch.zeros_like(records[:, :1])], 1)
    if faults.counter and _count() and len(records):
        records[0, 0] ^= 1
    held = address < memory.numel()
    memory[address[held]] = records[held]


def store_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `store_records`."""

    def store_records(
        cache_pow_: Tensor, x_td: Tensor, slots_t: Tensor, *, layout: PageLayout, fmt: RecordFormat | None = None
    ) -> Tensor:
        _write(faults, cache_pow_, x_td, slots_t, layout)
        return cache_pow_

    return store_records


def load_with(faults: ReadFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `load_records`."""

    def load_records(cache_pow: Tensor, slots_t: Tensor, *, layout: PageLayout, dtype: torch.dtype) -> Tensor:
        fmt, data = _format(cache_pow), _data(_format(cache_pow))
        asked = slots_t[:1].expand_as(slots_t) if faults.rows == "first" else slots_t
        slots, there = _slots(faults.places, asked, cache_pow.shape[0] * cache_pow.shape[1])
        memory = _memory(cache_pow)
        address = _addresses(faults.places, cache_pow, torch.where(there, slots, 0), layout)
        records = memory[address.clamp(max=memory.numel() - 1)]
        codes, sf = records[:, :data].contiguous(), records[:, data:].contiguous()
        if faults.scales == "entry_before":
            before = _addresses(faults.places, cache_pow, (torch.where(there, slots, 0) - 1).clamp(min=0), layout)
            sf = memory[before][:, data:].contiguous()
        elif faults.scales == "reversed":
            sf = sf.unflatten(1, (-1, 4)).flip(2).flatten(1)
        if faults.small_scales == "flushed" and fmt is KV_FP4:
            sf = torch.where(sf < 8, 0, sf)
        typed = codes.view(torch.float8_e4m3fn) if fmt is KV_FP8 else codes
        sf = sf.view(torch.float8_e4m3fn) if fmt is KV_FP4 else sf
        x = dequantize_with(faults.reader)(typed, sf, fmt=fmt.quant, dtype=dtype)
        if faults.hole == "zero":
            x = torch.where(there[:, None], x, 0.0)
        elif faults.hole == "times_zero":
            x = x * there[:, None].to(x.dtype)
        else:
            x = torch.where(there[:, None], x, torch.nan)
        if faults.counter and _count() and x.numel():
            x[0, 0] = torch.nextafter(x[0, 0], torch.tensor(torch.inf, dtype=x.dtype))
        return x

    return load_records


@dataclass(frozen=True, kw_only=True)
class FusedFaults:
    """What the fused store does wrong; the default is right."""

    store: Faults = Faults()
    norm: NormFaults = field(default_factory=NormFaults)
    normed: str = "bf16"  # bf16, missing, unrounded, truncated, twice, without_tail
    turn: str = "own"  # own, none, half_split, first, backwards
    position: str = "own"  # own, first_row, next
    table: float = 0.0  # error of its entries
    turned: str = "bf16"  # bf16, unrounded
    tail: str = "own"  # own, unquantised, scale_before
    tap: str = "own"  # own, input, turned, stored_only, uncoded


def fused_with(faults: FusedFaults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `norm_rope_store`."""

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
        normed = _normed(faults, x_td, weight_d, store.eps, table_sr.shape[1])
        turned = _turned(faults, normed, table_sr + faults.table, positions_t)
        if faults.turned == "bf16":
            turned = turned.bfloat16().float()
        fmt, stored = _format(cache_pow_), turned
        if faults.tail == "scale_before":
            stored = turned.clone()
            # the group before the tail is as large as the tail is allowed to be
            group, start = fmt.quant.group, turned.shape[1] - table_sr.shape[1]
            limit = turned[:, start - group : start].abs().amax(1, keepdim=True)
            stored[:, start:] = torch.maximum(torch.minimum(stored[:, start:], limit), -limit)
        _write(faults.store, cache_pow_, stored, slots_t, store.layout)
        tap = _tap(faults, store.tap, x_td, normed, turned, fmt, table_sr.shape[1])
        if faults.tap == "stored_only" and tap.numel():
            _, there = _slots(Places(), slots_t, cache_pow_.shape[0] * cache_pow_.shape[1])
            tap = torch.where(there[:, None], tap, torch.nan)
        return cache_pow_, tap.bfloat16()

    return norm_rope_store


def _normed(faults: FusedFaults, x: Tensor, weight: Tensor, eps: float, rotary: int) -> Tensor:
    if faults.normed == "missing":
        return x.float()
    if faults.normed == "without_tail":
        mean = x[:, :-rotary].double().square().mean(-1, keepdim=True)
        unit, weight = (x.double() * torch.rsqrt(mean + eps)).float(), weight.float()
    else:
        unit, weight = unrounded(faults.norm, x, weight, eps)
    if faults.normed == "twice":
        unit = unit.bfloat16().float()
    y = unit * weight
    if faults.normed == "unrounded":
        return y
    if faults.normed == "truncated":
        return (y.view(torch.int32) & -65536).view(torch.float32)
    return y.bfloat16().float()


def _turned(faults: FusedFaults, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    positions = positions.to(torch.int64)
    if faults.position == "first_row":
        positions = positions[:1].expand_as(positions)
    elif faults.position == "next":
        positions = (positions + 1) % len(table)
    half = table.shape[1] // 2
    cos, sin = table[positions].double().split(half, 1)
    if faults.turn == "none":
        return x
    if faults.turn == "backwards":
        sin = -sin
    start = 0 if faults.turn == "first" else x.shape[1] - 2 * half
    even, odd = slice(start, start + 2 * half, 2), slice(start + 1, start + 2 * half, 2)
    if faults.turn == "half_split":
        even, odd = slice(start, start + half), slice(start + half, start + 2 * half)
    u, v, y = x[:, even].double(), x[:, odd].double(), x.clone()
    y[:, even], y[:, odd] = (u * cos - v * sin).float(), (u * sin + v * cos).float()
    return y


def _tap(
    faults: FusedFaults, tap: RecordTap, x: Tensor, normed: Tensor, turned: Tensor, fmt: RecordFormat, rotary: int
) -> Tensor:
    if tap is RecordTap.NONE:
        return x[:, :0]
    if faults.tap == "input":
        return x.float()
    if tap is RecordTap.NORM:
        return turned if faults.tap == "turned" else normed
    if tap is RecordTap.ROPE or faults.tap == "uncoded":
        return turned
    codes, sf = quantize_with(faults.store.quant)(turned, fmt=fmt.quant)
    values = dequantize_with(ReaderFaults())(codes, sf, fmt=fmt.quant).float()
    if faults.tail == "unquantised":
        values[:, -rotary:] = turned[:, -rotary:]
    return values


_STORE, _READ, _FUSED = Faults(), ReadFaults(), FusedFaults()


def _placed(**changes: str) -> Faults:
    return replace(_STORE, places=replace(_STORE.places, **changes))


def _quantised(**changes: str) -> Faults:
    return replace(_STORE, quant=replace(_STORE.quant, **changes))  # type: ignore[arg-type]


def _read(**changes: str) -> ReadFaults:
    return replace(_READ, places=replace(_READ.places, **changes))


right_store = store_with(_STORE)
store_layout_ignored = store_with(_placed(layout="other"))
store_always_interleaved = store_with(_placed(layout="interleaved"))
store_sections_of_64 = store_with(_placed(layout="sections_of_64"))
store_ignores_page_stride = store_with(_placed(page="no_stride"))
store_pages_of_twice_the_size = store_with(_placed(page="twice"))
store_page_and_offset_exchanged = store_with(_placed(page="exchanged"))
store_minus_one_wraps = store_with(_placed(hole="wraps"))
store_slot_beyond_clamped = store_with(_placed(beyond="clamp"))
store_slot_beyond_wraps = store_with(_placed(beyond="wraps"))
store_stops_at_a_hole = store_with(_placed(hole="stop"))
store_nan_rows_written_to_slot_0 = store_with(_placed(hole="slot_0"))
store_sectioned_never_written = store_with(replace(_STORE, sectioned="lost"))
store_last_code_lost = store_with(replace(_STORE, record="last_code_lost"))
store_spills_into_the_next = store_with(replace(_STORE, record="spill"))
store_scale_bytes_reversed = store_with(replace(_STORE, record="scales_reversed"))
store_scales_of_first_row = store_with(_quantised(amax="first_row"))
store_scale_of_a_huge_neighbour = store_with(_quantised(amax="batch"))
store_floor_on_scale = store_with(_quantised(floor="scale"))
store_no_floor = store_with(_quantised(floor="none"))
store_high_nibble_first = store_with(_quantised(nibble="high_first"))
store_quantised_twice = store_with(replace(_STORE, again="values"))
store_index_in_two_stages = store_with(replace(_STORE, again="stages"))
store_multiplies_by_reciprocal = store_with(_quantised(divide="reciprocal"))
store_codes_truncated = store_with(_quantised(codes="truncated"))
store_rows_backwards = store_with(replace(_STORE, rows="backwards"))
store_not_deterministic = store_with(replace(_STORE, counter=True))

right_load = load_with(_READ)
load_layout_ignored = load_with(_read(layout="other"))
load_always_interleaved = load_with(_read(layout="interleaved"))
load_ignores_page_stride = load_with(_read(page="no_stride"))
load_pages_of_twice_the_size = load_with(_read(page="twice"))
load_hole_reads_entry_0 = load_with(replace(_READ, hole="times_zero"))
load_hole_unwritten = load_with(replace(_READ, hole="unwritten"))
load_hole_wraps = load_with(_read(hole="wraps"))
load_upper_bound_unchecked = load_with(_read(beyond="clamp"))
load_first_slot_for_all = load_with(replace(_READ, rows="first"))
load_scale_of_next_entry = load_with(replace(_READ, scales="entry_before"))
load_scale_bytes_reversed = load_with(replace(_READ, scales="reversed"))
load_high_nibble_first = load_with(replace(_READ, reader=ReaderFaults(nibble="high_first")))
load_truncated = load_with(replace(_READ, reader=ReaderFaults(store="truncated")))
load_subnormals_as_zero = load_with(replace(_READ, reader=ReaderFaults(codes="no_subnormals"), small_scales="flushed"))
load_scale_byte_0_as_zero = load_with(replace(_READ, reader=ReaderFaults(scale="byte_0_zero")))
load_not_deterministic = load_with(replace(_READ, counter=True))

right_fused = fused_with(_FUSED)
right_fused_backwards = fused_with(replace(_FUSED, norm=NormFaults(lanes=128, backwards=True)))
fused_norm_missing = fused_with(replace(_FUSED, normed="missing"))
fused_eps_1e_6 = fused_with(replace(_FUSED, norm=NormFaults(eps="1e-6")))
fused_norm_without_the_tail = fused_with(replace(_FUSED, normed="without_tail"))
fused_weight_before_rounding_twice = fused_with(replace(_FUSED, normed="twice"))
fused_norm_unrounded = fused_with(replace(_FUSED, normed="unrounded"))
fused_rope_unrounded = fused_with(replace(_FUSED, turned="unrounded"))
fused_norm_truncated = fused_with(replace(_FUSED, normed="truncated"))
fused_statistics_of_first_row = fused_with(replace(_FUSED, norm=NormFaults(mean="first_row")))
fused_statistics_over_batch = fused_with(replace(_FUSED, norm=NormFaults(mean="batch")))
fused_half_split = fused_with(replace(_FUSED, turn="half_split"))
fused_first_channels_turned = fused_with(replace(_FUSED, turn="first"))
fused_not_turned = fused_with(replace(_FUSED, turn="none"))
fused_turned_backwards = fused_with(replace(_FUSED, turn="backwards"))
fused_position_of_first_row = fused_with(replace(_FUSED, position="first_row"))
fused_next_position = fused_with(replace(_FUSED, position="next"))
fused_table_of_the_device = fused_with(replace(_FUSED, table=2.4e-4))
fused_tail_not_quantised = fused_with(replace(_FUSED, tail="unquantised"))
fused_tail_without_scale = fused_with(replace(_FUSED, tail="scale_before"))
fused_tap_before_norm = fused_with(replace(_FUSED, tap="input"))
fused_tap_after_rope = fused_with(replace(_FUSED, tap="turned"))
fused_tap_of_stored_rows_only = fused_with(replace(_FUSED, tap="stored_only"))
fused_tap_unrounded_codes = fused_with(replace(_FUSED, tap="uncoded"))
fused_minus_one_wraps = fused_with(replace(_FUSED, store=_placed(hole="wraps")))
fused_ignores_page_stride = fused_with(replace(_FUSED, store=_placed(page="no_stride")))
fused_layout_ignored = fused_with(replace(_FUSED, store=_placed(layout="other")))
fused_floor_on_scale = fused_with(replace(_FUSED, store=_quantised(floor="scale")))
fused_not_deterministic = fused_with(replace(_FUSED, store=replace(_STORE, counter=True)))
