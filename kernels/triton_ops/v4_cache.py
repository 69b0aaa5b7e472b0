"""Norm, RoPE and store of V4's records in one launch: 448 channels as e4m3 codes in groups of 64, the last 64 as bf16.

Eight groups make a row; the last one is the tail: it is copied, and the zero byte stands where its scale would be. So
every load and store is a run of 64 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import require_runnable
from .kv_cache import _e4m3_byte, _place, _scale_byte, _store_tap, fused_launch, normed_row
from .quant import e4m3_value, quotient, ue8m0_value
from .split_softmax import arch_of
from .wide_records import E4M3_MAX, WideRecord, wide_views


@triton.jit
def _norm_rope_store_v4(
    x_ptr,
    weight_ptr,
    table_ptr,
    positions_ptr,
    slots_ptr,
    cache_ptr,
    tail_ptr,
    tap_ptr,
    num_entries,
    num_positions,
    stride_xt,
    stride_xd,
    stride_w,
    stride_ts,
    stride_tr,
    stride_p,
    stride_s,
    stride_page,
    code_step,
    scale_start,
    scale_step,
    tail_start,
    eps,
    floor,
    PAGE_SLOTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    LINE: tl.constexpr,
    TAP: tl.constexpr,
    BITS: tl.constexpr,
):
    # 1. where the record goes
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row * stride_p).to(tl.int64)
    slot = tl.load(slots_ptr + row * stride_s).to(tl.int64)
    is_stored = (slot >= 0) & (slot < num_entries)
    page_at, slot = _place(slot, is_stored, PAGE_SLOTS, stride_page)
    record = page_at + slot * code_step
    # 2. the row, normalised, and its tail, rotated
    own, turned = normed_row(
        x_ptr + row * stride_xt,
        weight_ptr,
        table_ptr,
        position,
        num_positions,
        stride_xd,
        stride_w,
        stride_ts,
        stride_tr,
        CHANNELS,
        eps,
        CHANNELS,
        LINE,
        LINE,
    )
    # 3. codes and scales of seven lines, the zero byte behind them
    part = tl.arange(0, CHANNELS // LINE)
    groups = tl.reshape(own.to(tl.float32), [CHANNELS // LINE, LINE])
    is_coded = part < CHANNELS // LINE - 1
    byte = tl.where(is_coded, _scale_byte(tl.max(tl.abs(groups), axis=1), floor, E4M3_MAX, False, BITS), 0)
    mask = is_stored & (part >= 0)
    tl.store(cache_ptr + page_at + scale_start + slot * scale_step + part, byte.to(tl.uint8), mask=mask)
    scale = ue8m0_value(byte)[:, None]
    codes = _e4m3_byte(quotient(groups, scale, "ue8m0", 0), BITS)
    code_ptrs = cache_ptr + record + part[:, None] * LINE + tl.arange(0, LINE)[None, :]
    tl.store(code_ptrs, codes.to(tl.uint8), mask=(is_stored & is_coded)[:, None])
    # 4. the tail as it is
    channel = tl.arange(0, LINE)
    tail_ptrs = tail_ptr + (record + tail_start) // 2 + channel
    tl.store(tail_ptrs, turned, mask=is_stored & (channel >= 0))
    # 5. the row on its way
    tap_ptr += row * CHANNELS
    if TAP == "norm":
        _store_tap(tap_ptr, own, own, CHANNELS, 0)
    elif TAP == "rope":
        _store_tap(tap_ptr, own, turned, CHANNELS, LINE)
    elif TAP == "cast_back":
        stored = tl.reshape(e4m3_value(codes, BITS) * scale, [CHANNELS])
        _store_tap(tap_ptr, stored, turned, CHANNELS, LINE)


def norm_rope_store_v4(
    cache_pow_: torch.Tensor,
    x_td: torch.Tensor,
    weight_d: torch.Tensor,
    table_sr: torch.Tensor,
    positions_t: torch.Tensor,
    slots_t: torch.Tensor,
    *,
    eps: float,
    tap: str,
    record: WideRecord,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm, RoPE of the tail, quantiser and store, a row to a program; returns the cache and the rows that `tap` names.

    Raises:
        NotImplementedError: the table does not turn exactly the tail; pages are not aligned as the record asks.
        RuntimeError: x_td is on the CPU and kernels are not interpreted.
    """
    if table_sr.shape[1] != record.tail:
        raise NotImplementedError(f"table_sr: expected a width of {record.tail}, got {table_sr.shape[1]}")
    (t, d), slots = x_td.shape, max(cache_pow_.shape[1], 1)
    tap_td = x_td.new_empty((t, 0 if tap == "none" else d), dtype=torch.bfloat16)
    if not t:
        return cache_pow_, tap_td
    byte_pw, _, tail_pw = wide_views("cache_pow_", cache_pow_, align=record.align)
    require_runnable("x_td", x_td)
    launch = fused_launch(arch_of(x_td.device))
    _norm_rope_store_v4[(t,)](
        x_td,
        weight_d,
        table_sr,
        positions_t,
        slots_t,
        byte_pw,
        tail_pw,
        tap_td,
        cache_pow_.shape[0] * cache_pow_.shape[1],
        table_sr.shape[0],
        *x_td.stride(),
        weight_d.stride(0),
        *table_sr.stride(),
        positions_t.stride(0),
        slots_t.stride(0),
        byte_pw.stride(0),
        *record.places(slots),
        eps,
        record.amax_floor,
        PAGE_SLOTS=slots,
        CHANNELS=d,
        LINE=record.group,
        TAP=tap,
        BITS=launch.e4m3_bits,
        num_warps=launch.num_warps,
    )
    return cache_pow_, tap_td
