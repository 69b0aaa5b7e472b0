"""Records of V3.2 (fp32 scales, a bf16 tail) as a kernel keeps them, on the CPU, with faults to switch on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import KV_V32_DEMO, PageLayout, RecordFormat, ScaleKind

_calls = 0


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a store or a load does wrong; the default is right."""

    layout: str = "own"  # own, other, sections_of_64
    order: str = "own"  # own, tail_first
    stride: str = "own"  # own, ignored
    hole: str = "skip"  # skip, wraps, times_zero, unwritten
    beyond: str = "skip"  # skip, clamped
    floor: str = "own"  # own, other_writer, none
    scale: str = "own"  # own, unrounded, rounded, logarithm, big_endian, exponent, first_group
    codes: str = "nearest"  # nearest, truncated
    tail: str = "kept"  # kept, quantised, unwritten, truncated
    rows: str = "own"  # own, first, backwards
    counter: bool = False


def _scales(faults: Faults, groups: Tensor, fmt: RecordFormat) -> Tensor:
    floor = fmt.quant.amax_floor
    if faults.floor == "other_writer":
        floor = {1e-4: 448e-4, 448e-4: 1e-4}[floor]
    amax = groups.abs().amax(-1)
    scale = (amax if faults.floor == "none" else amax.clamp(min=floor)) / 448.0
    pow2 = fmt.quant.scale is ScaleKind.POW2_F32
    pow2 = {"unrounded": False, "rounded": True}.get(faults.scale, pow2)
    if not pow2:
        return scale
    if faults.scale == "logarithm":
        return torch.pow(2.0, torch.ceil(torch.log2(scale)))
    mantissa, exponent = torch.frexp(scale)
    return torch.exp2((exponent - (mantissa == 0.5).int()).double()).float()


def _packed(faults: Faults, x: Tensor, fmt: RecordFormat) -> Tensor:
    groups = x[:, : fmt.channels].float().unflatten(1, (-1, 128))
    scale = _scales(faults, groups, fmt)
    ratio = (groups / scale[..., None]).clamp(-448, 448)
    if faults.codes == "truncated":
        near = ratio.to(torch.float8_e4m3fn)
        below = near.view(torch.uint8) - (near.float().abs() > ratio.abs()).to(torch.uint8)
        codes = below.flatten(1)
    else:
        codes = ratio.to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    sf = scale.contiguous().view(torch.uint8)
    if faults.scale == "big_endian":
        sf = sf.unflatten(1, (-1, 4)).flip(2).flatten(1)
    tail = x[:, fmt.channels :].contiguous()
    if faults.tail == "quantised":
        tail = tail.float().clamp(-448, 448).to(torch.float8_e4m3fn).bfloat16()
    elif faults.tail == "truncated":
        tail = (tail.float().view(torch.int32) & -65536).view(torch.float32)
    parts = [codes, sf, tail.bfloat16().contiguous().view(torch.uint8)]
    return torch.cat([parts[0], parts[2], parts[1]] if faults.order == "tail_first" else parts, 1)


def _places(faults: Faults, cache: Tensor, slots: Tensor, fmt: RecordFormat, layout: PageLayout) -> Tensor:
    """The byte of the storage that every byte of the records is at."""
    _, size, width = cache.shape
    base = (slots // size) * (size * width if faults.stride == "ignored" else cache.stride(0))
    offset, byte = slots % size, torch.arange(width)
    sectioned = (layout is PageLayout.SECTIONED) != (faults.layout == "other")
    if not sectioned:
        return (base + offset * width)[:, None] + byte
    scales, main = fmt.scale_bytes, width - fmt.scale_bytes
    entries = 64 if faults.layout == "sections_of_64" else size
    codes = offset[:, None] * main + torch.arange(fmt.data_bytes)
    sf = entries * main + offset[:, None] * scales + torch.arange(scales)
    tail = offset[:, None] * main + fmt.data_bytes + torch.arange(2 * fmt.tail)
    return base[:, None] + torch.cat([codes, sf, tail], 1)


def _named(faults: Faults, slots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    slots = slots.long()
    there = (slots >= 0) & (slots < count)
    if faults.hole == "wraps":
        slots, there = torch.where(slots == -1, count - 1, slots), there | (slots == -1)
    if faults.beyond == "clamped":
        slots, there = slots.clamp(max=count - 1), there | (slots >= count)
    return slots, there


def _memory(cache: Tensor) -> Tensor:
    length = cache.untyped_storage().nbytes() - cache.storage_offset()
    return cache.as_strided((length,), (1,))


def store_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `store_records`."""

    def store_records(
        cache_pow_: Tensor, x_td: Tensor, slots_t: Tensor, *, layout: PageLayout, fmt: RecordFormat | None = None
    ) -> Tensor:
        global _calls
        assert fmt is not None
        slots, there = _named(faults, slots_t, cache_pow_.shape[0] * cache_pow_.shape[1])
        if not there.any():
            return cache_pow_
        rows = x_td[there]
        rows = rows[:1].expand_as(rows) if faults.rows == "first" else rows
        rows = rows.flip(0) if faults.rows == "backwards" else rows
        records, places = _packed(faults, rows, fmt), _places(faults, cache_pow_, slots[there], fmt, layout)
        memory = _memory(cache_pow_)
        inside = places < memory.numel()
        if faults.tail == "unwritten":
            inside = inside & (torch.arange(places.shape[1]) < fmt.data_bytes + fmt.scale_bytes)
        memory[places[inside]] = records[inside]
        if faults.counter:
            _calls += 1
            memory[places[0, 0]] ^= _calls % 2
        return cache_pow_

    return store_records


def load_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `load_records`."""

    def load_records(
        cache_pow: Tensor, slots_t: Tensor, *, layout: PageLayout, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        global _calls
        wide = cache_pow.shape[2] == KV_V32_DEMO.record_bytes
        channels, tail = (512, 64) if wide else (128, 0)
        fmt = replace(KV_V32_DEMO, channels=channels, tail=tail)
        x = torch.full((len(slots_t), fmt.width), torch.nan if faults.hole == "unwritten" else 0.0)
        slots, there = _named(faults, slots_t, cache_pow.shape[0] * cache_pow.shape[1])
        if faults.rows == "first" and there.any():
            slots = torch.where(there, slots[there][0], slots)
        if faults.hole == "times_zero":
            slots, there = torch.where(there, slots, 0), torch.ones_like(there)
        if there.any():
            places = _places(faults, cache_pow, slots[there], fmt, layout)
            x[there] = _values(faults, _memory(cache_pow)[places.clamp(max=_memory(cache_pow).numel() - 1)], fmt)
        if faults.hole == "times_zero":
            x = x * ((slots_t >= 0) & (slots_t < cache_pow.shape[0] * cache_pow.shape[1]))[:, None]
        if faults.codes == "truncated":
            x = (x.view(torch.int32) & -65536).view(torch.float32)
        y = x.to(dtype)
        if faults.counter and y.numel():
            _calls += 1
            y.view(-1)[:1].view(torch.uint8)[0] ^= _calls % 2
        return y

    return load_records


def _values(faults: Faults, records: Tensor, fmt: RecordFormat) -> Tensor:
    parts = [fmt.data_bytes, fmt.scale_bytes, 2 * fmt.tail]
    if faults.order == "tail_first":
        codes, tail, sf = records.split([parts[0], parts[2], parts[1]], 1)
    else:
        codes, sf, tail = records.split(parts, 1)
    if faults.scale == "big_endian":
        sf = sf.unflatten(1, (-1, 4)).flip(2).flatten(1)
    scale = sf.contiguous().view(torch.float32)
    if faults.scale == "exponent":
        scale = (scale.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)
    elif faults.scale == "first_group":
        scale = scale[:, :1].expand_as(scale)
    values = codes.contiguous().view(torch.float8_e4m3fn).float() * scale.repeat_interleave(128, 1)
    rest = tail.contiguous().view(torch.bfloat16).float()
    return torch.cat([values, torch.zeros_like(rest) if faults.tail == "unwritten" else rest], 1)


_RIGHT = Faults()
right_store = store_with(_RIGHT)
store_other_layout = store_with(replace(_RIGHT, layout="other"))
store_sections_of_64 = store_with(replace(_RIGHT, layout="sections_of_64"))
store_planes_swapped = store_with(replace(_RIGHT, order="tail_first"))
store_stride_ignored = store_with(replace(_RIGHT, stride="ignored"))
store_hole_wraps = store_with(replace(_RIGHT, hole="wraps"))
store_beyond_clamped = store_with(replace(_RIGHT, beyond="clamped"))
store_floor_of_other_writer = store_with(replace(_RIGHT, floor="other_writer"))
store_no_floor = store_with(replace(_RIGHT, floor="none"))
store_scale_unrounded = store_with(replace(_RIGHT, scale="unrounded"))
store_scale_rounded = store_with(replace(_RIGHT, scale="rounded"))
store_scale_by_logarithm = store_with(replace(_RIGHT, scale="logarithm"))
store_scale_big_endian = store_with(replace(_RIGHT, scale="big_endian"))
store_codes_truncated = store_with(replace(_RIGHT, codes="truncated"))
store_tail_quantised = store_with(replace(_RIGHT, tail="quantised"))
store_tail_unwritten = store_with(replace(_RIGHT, tail="unwritten"))
store_tail_truncated = store_with(replace(_RIGHT, tail="truncated"))
store_first_row_for_all = store_with(replace(_RIGHT, rows="first"))
store_rows_backwards = store_with(replace(_RIGHT, rows="backwards"))
store_not_deterministic = store_with(replace(_RIGHT, counter=True))

right_load = load_with(_RIGHT)
load_other_layout = load_with(replace(_RIGHT, layout="other"))
load_sections_of_64 = load_with(replace(_RIGHT, layout="sections_of_64"))
load_planes_swapped = load_with(replace(_RIGHT, order="tail_first"))
load_stride_ignored = load_with(replace(_RIGHT, stride="ignored"))
load_hole_wraps = load_with(replace(_RIGHT, hole="wraps"))
load_hole_times_zero = load_with(replace(_RIGHT, hole="times_zero"))
load_hole_unwritten = load_with(replace(_RIGHT, hole="unwritten"))
load_beyond_clamped = load_with(replace(_RIGHT, beyond="clamped"))
load_scale_big_endian = load_with(replace(_RIGHT, scale="big_endian"))
load_scale_exponent = load_with(replace(_RIGHT, scale="exponent"))
load_one_scale_a_record = load_with(replace(_RIGHT, scale="first_group"))
load_tail_dropped = load_with(replace(_RIGHT, tail="unwritten"))
load_first_slot_for_all = load_with(replace(_RIGHT, rows="first"))
load_truncated = load_with(replace(_RIGHT, codes="truncated"))
load_not_deterministic = load_with(replace(_RIGHT, counter=True))
