"""Caches as bytes, fast: store, load, and norm + RoPE + quantise + store in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_records, expect_shape, expect_writer
from deeptwin.reference.config import CodeKind, FusedStore, PageLayout, RecordFormat, ScaleKind

if TYPE_CHECKING:
    from deeptwin.kernels.triton_ops.kv_cache import Record
    from deeptwin.kernels.triton_ops.wide_records import WideRecord

WIDE = (ScaleKind.F32, ScaleKind.POW2_F32)  # scales of four bytes
STORAGE = (torch.bfloat16, torch.float16, torch.float32)


def store_records_triton(
    cache_pow_: Tensor, x_td: Tensor, slots_t: Tensor, *, layout: PageLayout, fmt: RecordFormat | None = None
) -> Tensor:
    """`reference.kv_cache.store_records`. Values and slots are not inspected: NaN gives meaningless bytes in its own
    record, and of two rows with the same slot either stays.

    Raises:
        TypeError: the cache is not uint8, x_td is not bf16, fp16 or fp32, slots are no integers.
        ValueError: shapes disagree; no format has records of w bytes; `fmt` is no writer of w bytes.
        NotImplementedError: records have fp32 scales, or a tail alone, and pages do not begin at multiples of four
            bytes, or of two.
    """
    fmt = expect_writer("cache_pow_", cache_pow_, fmt)
    _check_rows(cache_pow_, x_td, slots_t, fmt, {})
    if fmt.tail or fmt.quant.scale in WIDE:
        from deeptwin.kernels.triton_ops import wide_records

        return wide_records.store_wide(cache_pow_, x_td, slots_t, record=_wide_record(fmt, layout))
    from deeptwin.kernels.triton_ops import kv_cache

    return kv_cache.store_records(cache_pow_, x_td, slots_t, record=_record(fmt, layout))


def load_records_triton(
    cache_pow: Tensor,
    slots_t: Tensor,
    *,
    layout: PageLayout,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.kv_cache.load_records`.

    Raises:
        TypeError: the cache is not uint8, slots are no integers, dtype is not bf16, fp16 or fp32, `out` has another.
        ValueError: shapes disagree; no format has records of w bytes; `out` does not fit.
        NotImplementedError: records have fp32 scales, or a tail alone, and pages do not begin at multiples of four
            bytes, or of two.
    """
    fmt = expect_records("cache_pow", cache_pow, {})
    _check_integers("slots_t", slots_t, {})
    if dtype not in STORAGE:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    if fmt.tail or fmt.quant.scale in WIDE:
        from deeptwin.kernels.triton_ops import wide_records

        return wide_records.load_wide(cache_pow, slots_t, record=_wide_record(fmt, layout), dtype=dtype, out=out)
    from deeptwin.kernels.triton_ops import kv_cache

    return kv_cache.load_records(cache_pow, slots_t, record=_record(fmt, layout), dtype=dtype, out=out)


def norm_rope_store_triton(
    cache_pow_: Tensor,
    x_td: Tensor,
    weight_d: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    slots_t: Tensor,
    *,
    store: FusedStore,
) -> tuple[Tensor, Tensor]:
    """`reference.kv_cache.norm_rope_store`. Values, slots and positions are not inspected: a position that is no row of
    the table gives meaningless bytes in its own record.

    Raises:
        TypeError: the cache is not uint8, x_td or weight_d is not bf16, fp16 or fp32, table_sr is not float32,
            positions or slots are no integers.
        ValueError: shapes disagree; no format has records of w bytes, or `store.fmt` is no writer of them; r is odd or
            above d.
        NotImplementedError: records have fp32 scales; they have a tail, and the table does not turn exactly that or
            pages do not begin at multiples of two bytes.
    """
    dims: dict[str, int] = {}
    fmt = expect_writer("cache_pow_", cache_pow_, store.fmt)
    if fmt.quant.scale in WIDE:
        raise NotImplementedError(f"cache_pow_: expected records with scales of one byte, got those of {fmt.name}")
    _check_rows(cache_pow_, x_td, slots_t, fmt, dims)
    expect_shape("weight_d", weight_d, "d", dims)
    expect_dtype("weight_d", weight_d, *STORAGE)
    expect_shape("table_sr", table_sr, "sr", dims)
    expect_dtype("table_sr", table_sr, torch.float32)
    _check_integers("positions_t", positions_t, dims)
    if dims["r"] % 2 or dims["r"] > dims["d"]:
        raise ValueError(f"table_sr: expected an even width up to d={dims['d']}, got r={dims['r']}")
    if fmt.tail:
        from deeptwin.kernels.triton_ops import v4_cache

        return v4_cache.norm_rope_store_v4(
            cache_pow_,
            x_td,
            weight_d,
            table_sr,
            positions_t,
            slots_t,
            eps=store.eps,
            tap=store.tap.value,
            record=_wide_record(fmt, store.layout),
        )
    from deeptwin.kernels.triton_ops import kv_cache

    return kv_cache.norm_rope_store(
        cache_pow_,
        x_td,
        weight_d,
        table_sr,
        positions_t,
        slots_t,
        eps=store.eps,
        tap=store.tap.value,
        record=_record(fmt, store.layout),
    )


def _record(fmt: RecordFormat, layout: PageLayout) -> Record:
    from deeptwin.kernels.triton_ops.kv_cache import Record

    return Record(
        channels=fmt.channels,
        group=fmt.quant.group,
        packed=fmt.quant.code is CodeKind.E2M1,
        e4m3_scale=fmt.quant.scale is ScaleKind.E4M3,
        max_value=fmt.quant.max_value,
        amax_floor=fmt.quant.amax_floor,
        sectioned=layout is PageLayout.SECTIONED,
    )


def _wide_record(fmt: RecordFormat, layout: PageLayout) -> WideRecord:
    """What the kernels have to know of records with fp32 scales or a tail."""
    from deeptwin.kernels.triton_ops.wide_records import WideRecord

    return WideRecord(
        channels=fmt.channels,
        group=fmt.quant.group,
        tail=fmt.tail,
        pad=fmt.pad,
        scale=fmt.quant.scale.value,
        amax_floor=fmt.quant.amax_floor,
        sectioned=layout is PageLayout.SECTIONED,
    )


def _check_rows(cache_pow: Tensor, x_td: Tensor, slots_t: Tensor, fmt: RecordFormat, dims: dict[str, int]) -> None:
    dims |= zip("pow", cache_pow.shape, strict=True)
    dims["d"] = fmt.width
    expect_shape("x_td", x_td, "td", dims)
    expect_dtype("x_td", x_td, *STORAGE)
    _check_integers("slots_t", slots_t, dims)


def _check_integers(name: str, x_t: Tensor, dims: dict[str, int]) -> None:
    expect_shape(name, x_t, "t", dims)
    expect_dtype(name, x_t, torch.int32, torch.int64)
