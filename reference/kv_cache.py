"""Caches as bytes: records of quantised rows, and the pages and rings that hold them.

A record is one cached row: its element codes, then the scale of every group, group 0 first, then a tail of bf16 values.
Formats are told apart by their width in bytes: 528 (512 e4m3 codes, 16 UE8M0 scales), 288 (512 e2m1 codes, the even
channel in the low nibble, 32 e4m3 scales) and 68 (128 e2m1 codes, 4 UE8M0 scales); of V3.2, 656 (512 e4m3 codes, 4 fp32
scales, 64 rotary channels in bf16) and 132 (128 e4m3 codes, an fp32 scale). Writers of the last two disagree about the
scale (`RECORD_WRITERS`), so a store is told the format; every reader multiplies by what stands there.

A page holds the records of `o` entries. INTERLEAVED puts one record after the other, SECTIONED the codes (and tails) of
all entries before the scales of all entries. The bytes of a page are the same in number either way, so nothing but the
argument `layout` tells them apart. A cache is uint8 [p, o, w]: pages, slots, bytes of a record. Pages may lie further
apart than they are long, because the caches of several layers share one block (`cache_plan.py` says where each begins).
Slot page * o + offset names an entry; a slot of -1, or one outside the cache, names none. A ring is a page of a cache
whose pages are states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_records, expect_shape, expect_writer
from .config import (
    CodeKind,
    FusedStore,
    PageLayout,
    Pairing,
    RecordFormat,
    RecordTap,
    RopeSpan,
    ScaleKind,
    WeightCast,
)
from .numerics import CONTRACT, Numerics
from .quant import dequantize, fake_quantize, quantize
from .rms_norm import rms_norm
from .rope import rope


def pack_records(x_td: Tensor, *, fmt: RecordFormat, num: Numerics = CONTRACT) -> Tensor:
    """The records of rows: codes, then scales, then the tail.

    Shapes:
        x_td: [t, fmt.width]; returns uint8 [t, fmt.record_bytes].

    Rounding:
        as `quantize`, and the tail to bf16: bytes under every numerics.

    Raises:
        TypeError: x_td is not floating.
        ValueError: x_td is not 2-D, has another width than the format, or holds NaN or infinity.

    Source:
        v41-attention.md section 7.1, v3-v32-v4.md section 4.4
    """
    expect_shape("x_td", x_td, "td", {"d": fmt.width})
    codes, sf = quantize(x_td[:, : fmt.channels], fmt=fmt.quant, num=num)
    parts = [codes.view(torch.uint8), sf.view(torch.uint8)]
    if fmt.tail:
        tail_tr = x_td[:, fmt.channels :]
        parts.append(torch.empty_like(tail_tr, dtype=torch.bfloat16).copy_(num.bf16(tail_tr)).view(torch.uint8))
    return torch.cat(parts, dim=1)


def unpack_records(
    records_tw: Tensor,
    *,
    fmt: RecordFormat | None = None,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The values of records: code × scale, then the tail.

    Shapes:
        records_tw: uint8 [t, w], w names the format unless `fmt` does; returns [t, d].

    Rounding:
        one, to `dtype`; exact in bf16 unless the scale is any fp32 number.

    Raises:
        TypeError: records_tw is not uint8; dtype is no storage dtype.
        ValueError: records_tw is not 2-D, no format has records of w bytes, or `fmt` has others.
    """
    expect_shape("records_tw", records_tw, "tw", {} if fmt is None else {"w": fmt.record_bytes})
    fmt = fmt or expect_records("records_tw", records_tw[None], {})
    expect_dtype("records_tw", records_tw, torch.uint8)
    codes, sf, tail = records_tw.split([fmt.data_bytes, fmt.scale_bytes, 2 * fmt.tail], dim=1)
    codes = codes.view(torch.float8_e4m3fn) if fmt.quant.code is CodeKind.E4M3 else codes
    held = {ScaleKind.UE8M0: torch.uint8, ScaleKind.E4M3: torch.float8_e4m3fn}.get(fmt.quant.scale, torch.float32)
    x_td = dequantize(codes, sf.contiguous().view(held), fmt=fmt.quant, dtype=dtype, num=num)
    if not fmt.tail:
        return x_td
    return torch.cat([x_td, num.store(num.wide(tail.contiguous().view(torch.bfloat16)), dtype)], dim=1)


def store_records(
    cache_pow_: Tensor,
    x_td: Tensor,
    slots_t: Tensor,
    *,
    layout: PageLayout,
    fmt: RecordFormat | None = None,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Quantise rows and write their records into a paged cache, in place.

    Shapes:
        cache_pow_: uint8 [p, o, w]; x_td: [t, d]; slots_t: int32 or int64 [t]; `fmt` is one of `RECORD_WRITERS` where
        these know w, otherwise None; returns cache_pow_.

    Rounding:
        as `quantize`.

    Edges:
        A slot of -1, or any other outside the cache, writes nothing, and its row may hold NaN. Every byte that no slot
        names keeps its value, those between pages too.

    Raises:
        TypeError: the cache is not uint8, x_td is not floating, slots are no integers.
        ValueError: shapes disagree; no format has records of w bytes; `fmt` is no writer of w bytes; two rows share a
            slot; a row that is stored holds NaN or infinity.

    Source:
        v41-attention.md sections 7.1, 7.3; v3-v32-v4.md sections 2.2, 4.4
    """
    fmt = expect_writer("cache_pow_", cache_pow_, fmt)
    inside_t = _check_rows(cache_pow_, x_td, slots_t, fmt)
    _write(cache_pow_, pack_records(x_td[inside_t], fmt=fmt, num=num), slots_t[inside_t], fmt, layout)
    return cache_pow_


def load_records(
    cache_pow: Tensor,
    slots_t: Tensor,
    *,
    layout: PageLayout,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Gather entries of a paged cache as values.

    Shapes:
        cache_pow: uint8 [p, o, w]; slots_t: int32 or int64 [t], repeats allowed; returns [t, d].

    Rounding:
        one, to `dtype`; exact in bf16.

    Edges:
        A slot of -1, or any other outside the cache, reads nothing and gives zeros. A NaN code or scale gives NaN, but
        only in the entry that holds it.

    Raises:
        TypeError: the cache is not uint8, slots are no integers, dtype is no storage dtype.
        ValueError: shapes disagree; no format has records of w bytes.

    Source:
        v41-attention.md section 7.3
    """
    dims: dict[str, int] = {}
    fmt = expect_records("cache_pow", cache_pow, dims)
    inside_t = _check_slots(slots_t, dims)
    page_y1, byte_yw = _addresses(slots_t[inside_t], dims["o"], fmt, layout)
    records_yw = cache_pow.view(dims["p"], dims["o"] * dims["w"])[page_y1, byte_yw]
    x_td = torch.zeros(len(slots_t), fmt.width, dtype=num.carrier, device=cache_pow.device)
    x_td[inside_t] = unpack_records(records_yw, dtype=dtype, num=num)
    return x_td


def norm_rope_store(
    cache_pow_: Tensor,
    x_td: Tensor,
    weight_d: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    slots_t: Tensor,
    *,
    store: FusedStore,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """Normalise rows, rotate their last channels, quantise all channels, write the records, in place.

    Math:
        `rms_norm` over all d channels; `rope` on the last r, in pairs (2i, 2i + 1); `store_records`: the rotated
        channels are quantised like the others.

    Shapes:
        cache_pow_: uint8 [p, o, w]; x_td: [t, d]; weight_d: [d]; table_sr: float32 [s, r]; positions_t, slots_t:
        integer [t]; returns cache_pow_ and the tap: [t, d], or [t, 0] for RecordTap.NONE.

    Rounding:
        to bf16 after the norm (one rounding, behind the weight) and again after RoPE; then as `quantize`.

    Edges:
        slots as in `store_records`; the tap has every row, stored or not. An all-zero row stays zero.

    Raises:
        TypeError: the cache is not uint8, x_td or weight_d is not floating, table_sr is not float32, positions or slots
            are no integers.
        ValueError: shapes disagree; no format has records of w bytes, or several writers have; r is odd or above d; a
            position is no row of the table; two rows share a slot; a row that is quantised holds NaN or infinity.

    Source:
        v41-attention.md sections 2.1, 2.5, 3.1, 4.1
    """
    fmt = expect_writer("cache_pow_", cache_pow_, None)
    inside_t = _check_rows(cache_pow_, x_td, slots_t, fmt)
    normed_td = rms_norm(x_td, weight_d, eps=store.eps, cast=WeightCast.AFTER_WEIGHT, num=num)
    turned_td = rope(
        normed_td[:, None],
        table_sr,
        positions_t,
        pairing=Pairing.INTERLEAVED,
        span=RopeSpan.LAST,
        inverse=False,
        num=num,
    )[:, 0]
    _write(cache_pow_, pack_records(turned_td[inside_t], fmt=fmt, num=num), slots_t[inside_t], fmt, store.layout)
    if store.tap is RecordTap.CAST_BACK:
        return cache_pow_, fake_quantize(turned_td, fmt=fmt.quant, num=num)
    taps = {RecordTap.NONE: turned_td[:, :0], RecordTap.NORM: normed_td, RecordTap.ROPE: turned_td}
    return cache_pow_, taps[store.tap]


def _addresses(slots_y: Tensor, num_slots: int, fmt: RecordFormat, layout: PageLayout) -> tuple[Tensor, Tensor]:
    """Page [y, 1] of every slot and the places of its record's bytes in that page [y, w]."""
    slots_y = slots_y.long()
    page_y1, slot_y1 = slots_y[:, None] // max(num_slots, 1), slots_y[:, None] % max(num_slots, 1)
    byte_w = torch.arange(fmt.record_bytes, device=slots_y.device)
    if layout is PageLayout.INTERLEAVED:
        return page_y1, slot_y1 * fmt.record_bytes + byte_w
    scales_at, tail_at = fmt.data_bytes, fmt.data_bytes + fmt.scale_bytes
    in_scales_w = (byte_w >= scales_at) & (byte_w < tail_at)
    main = fmt.record_bytes - fmt.scale_bytes  # codes and tail of an entry stay together
    in_part_w = torch.where(
        in_scales_w, byte_w - scales_at, torch.where(byte_w < scales_at, byte_w, byte_w - fmt.scale_bytes)
    )
    start_w = in_part_w + torch.where(in_scales_w, num_slots * main, 0)
    return page_y1, start_w + slot_y1 * torch.where(in_scales_w, fmt.scale_bytes, main)


def _write(cache_pow: Tensor, records_yw: Tensor, slots_y: Tensor, fmt: RecordFormat, layout: PageLayout) -> None:
    page_y1, byte_yw = _addresses(slots_y, cache_pow.shape[1], fmt, layout)
    cache_pow.view(cache_pow.shape[0], -1)[page_y1, byte_yw] = records_yw


def _check_rows(cache_pow: Tensor, x_td: Tensor, slots_t: Tensor, fmt: RecordFormat) -> Tensor:
    """Which rows name an entry of the cache."""
    dims = dict(zip("pow", cache_pow.shape, strict=True)) | {"d": fmt.width}
    expect_shape("x_td", x_td, "td", dims)
    inside_t = _check_slots(slots_t, dims)
    if slots_t[inside_t].unique().numel() < int(inside_t.sum(dtype=torch.int64)):
        raise ValueError(f"slots_t: expected distinct slots, got {slots_t.tolist()}")
    return inside_t


def _check_slots(slots_t: Tensor, dims: dict[str, int]) -> Tensor:
    """Which slots name an entry of the cache."""
    expect_shape("slots_t", slots_t, "t", dims)
    expect_dtype("slots_t", slots_t, torch.int32, torch.int64)
    return (slots_t >= 0) & (slots_t < dims["p"] * dims["o"])
