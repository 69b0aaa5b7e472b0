"""Sparse attention over two caches in one softmax: rows or records of the window, then records of the main cache.

A program owns one query token and one tile of heads and walks both lists in blocks; nothing is split, so a row has the
same bits alone or in any batch, and the same from bf16 rows as from the records that hold them. Records are decoded in
registers: no dequantised copy is ever written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import e4m3_value, ue8m0_value
from .split_softmax import LOG2_E, LOWEST, arch_of, finish_rows, online_step, require_rows
from .wide_records import wide_views


@dataclass(frozen=True, kw_only=True)
class TwoCacheLaunch:
    """`block_keys` fixes the order of summation; `e4m3_bits` takes codes apart where the chip cannot convert them."""

    block_heads: int
    block_keys: int
    num_warps: int
    num_stages: int
    e4m3_bits: bool = False


def two_cache_launch(num_heads: int, arch: str) -> TwoCacheLaunch:
    """The launch for a number of heads and an architecture; it never looks at the batch or the lists."""
    heads = min(64, max(16, triton.next_power_of_2(num_heads)))
    if arch == "ascend950":  # a decoded block of keys stands in the unified buffer beside the accumulator
        return TwoCacheLaunch(block_heads=16, block_keys=16, num_warps=8, num_stages=1, e4m3_bits=True)
    # decoded keys pass through registers, which the accumulator fills: larger blocks spill by the hundred
    return TwoCacheLaunch(block_heads=heads, block_keys=16 if arch == "sm100" else 32, num_warps=8, num_stages=1)


@triton.jit
def e2m1_value(nibble):
    """The fp32 value of e2m1 codes 0 … 15."""
    size = nibble & 7
    # exponent and mantissa bit of an fp32 number, right from code 2 on; codes 0 and 1 come out as 0.5 and 0.75
    normal = ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, normal * 2.0 - 1.0, normal)
    return tl.where(nibble > 7, value * -1.0, value)


@triton.jit
def load_entries(
    cache_ptr,
    tail_ptr,
    idx,
    valid,
    page_slots,
    page_stride,
    row_stride,
    KIND: tl.constexpr,
    SECTIONED: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    BITS: tl.constexpr,
):
    """The listed entries as bf16 rows; a hole reads nothing and is zero."""
    entry = tl.where(valid, idx, 0)
    page = entry // page_slots
    slot = (entry - page * page_slots).to(tl.int64)
    page_at = cache_ptr + page.to(tl.int64) * page_stride
    if KIND == "rows":
        at = page_at + slot * row_stride
        keys = tl.load(at[:, None] + tl.arange(0, CHANNELS)[None, :], mask=valid[:, None], other=0.0)
    elif KIND == "v4":
        # the last group is bf16, eight scale bytes of which the last is none
        CODED: tl.constexpr = CHANNELS - GROUP
        LINES: tl.constexpr = CHANNELS // GROUP
        ROW: tl.constexpr = CODED + 2 * GROUP
        if SECTIONED:
            data_at = page.to(tl.int64) * page_stride + slot * ROW
            scale_at = page_at + tl.cast(page_slots, tl.int64) * ROW + slot * LINES
            tail = data_at + CODED
        else:
            data_at = page.to(tl.int64) * page_stride + slot * (ROW + LINES)
            scale_at = cache_ptr + data_at + CODED
            tail = data_at + CODED + LINES
        channel = tl.arange(0, CHANNELS)
        is_coded = channel < CODED
        mask = valid[:, None] & is_coded[None, :]
        code = tl.load((cache_ptr + data_at)[:, None] + channel[None, :], mask=mask, other=0)
        raw = tl.load(scale_at[:, None] + tl.arange(0, LINES)[None, :], mask=valid[:, None], other=0)
        value = e4m3_value(tl.reshape(code, [KEYS, LINES, GROUP]), BITS) * ue8m0_value(raw)[:, :, None]
        coded = tl.reshape(value.to(tl.bfloat16), [KEYS, CHANNELS])
        tail_at = (tail_ptr + tail // 2)[:, None] + (channel - CODED)[None, :]
        kept = tl.load(tail_at, mask=valid[:, None] & (channel >= CODED)[None, :], other=0.0)
        keys = tl.where(is_coded[None, :], coded, kept)
    else:
        GROUPS: tl.constexpr = CHANNELS // GROUP
        DATA: tl.constexpr = CHANNELS if KIND == "e4m3" else CHANNELS // 2
        if SECTIONED:
            data_at = page_at + slot * DATA
            scale_at = page_at + tl.cast(page_slots, tl.int64) * DATA + slot * GROUPS
        else:
            data_at = page_at + slot * (DATA + GROUPS)
            scale_at = data_at + DATA
        code = tl.load(data_at[:, None] + tl.arange(0, DATA)[None, :], mask=valid[:, None], other=0)
        raw = tl.load(scale_at[:, None] + tl.arange(0, GROUPS)[None, :], mask=valid[:, None], other=0)
        # a code times its scale has at most six significant bits: exact in bf16
        if KIND == "e4m3":
            value = e4m3_value(tl.reshape(code, [KEYS, GROUPS, GROUP]), BITS)
            keys = tl.reshape((value * ue8m0_value(raw)[:, :, None]).to(tl.bfloat16), [KEYS, CHANNELS])
        else:
            pair = tl.reshape(code, [KEYS, GROUPS, GROUP // 2]).to(tl.int32)
            scale = e4m3_value(raw, BITS)[:, :, None]
            low = (e2m1_value(pair & 15) * scale).to(tl.bfloat16)
            high = (e2m1_value(pair >> 4) * scale).to(tl.bfloat16)
            keys = tl.reshape(tl.join(low, high), [KEYS, CHANNELS])
    return keys


@triton.jit
def _attend_two_caches(
    q_ptr,
    window_ptr,
    window_tail_ptr,
    window_idx_ptr,
    main_ptr,
    main_tail_ptr,
    main_idx_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    num_heads,
    head_tiles,
    window_entries,
    window_rows,
    window_slots,
    main_entries,
    main_rows,
    main_slots,
    stride_qt,
    stride_qh,
    stride_wp,
    stride_wo,
    stride_mp,
    stride_wi,
    stride_mi,
    HAS_SINK: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_GROUP: tl.constexpr,
    MAIN: tl.constexpr,
    MAIN_GROUP: tl.constexpr,
    SECTIONED: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BITS: tl.constexpr,
):
    # 1. which token and heads this program owns
    pid = tl.program_id(0).to(tl.int64)
    token = pid // head_tiles
    heads = (pid % head_tiles).to(tl.int32) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    in_heads = heads < num_heads
    q_at = q_ptr + token * stride_qt + heads.to(tl.int64)[:, None] * stride_qh
    q = tl.load(q_at + tl.arange(0, CHANNELS)[None, :], mask=in_heads[:, None], other=0.0)

    # 2. online softmax: the blocks of the window, then those of the main cache; one loop, because the accumulator of
    # a second one would spill
    top = tl.full([BLOCK_HEADS], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, CHANNELS], tl.float32)
    window_blocks = tl.cdiv(window_entries, BLOCK_KEYS)
    for block in range(0, window_blocks + tl.cdiv(main_entries, BLOCK_KEYS)):
        if block < window_blocks:
            entries = block * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
            idx = tl.load(window_idx_ptr + token * stride_wi + entries, mask=entries < window_entries, other=-1)
            valid = (idx >= 0) & (idx < window_rows)
            keys = load_entries(
                window_ptr,
                window_tail_ptr,
                idx,
                valid,
                window_slots,
                stride_wp,
                stride_wo,
                WINDOW,
                SECTIONED,
                CHANNELS,
                WINDOW_GROUP,
                BLOCK_KEYS,
                BITS,
            )
        else:
            entries = (block - window_blocks) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
            idx = tl.load(main_idx_ptr + token * stride_mi + entries, mask=entries < main_entries, other=-1)
            valid = (idx >= 0) & (idx < main_rows)
            keys = load_entries(
                main_ptr,
                main_tail_ptr,
                idx,
                valid,
                main_slots,
                stride_mp,
                0,
                MAIN,
                SECTIONED,
                CHANNELS,
                MAIN_GROUP,
                BLOCK_KEYS,
                BITS,
            )
        scores = tl.where(valid[None, :], tl.dot(q, tl.trans(keys)) * scale_log2, float("-inf"))
        top, total, acc = online_step(scores, keys, top, total, acc)

    # 3. divide by the row sum plus the sink, once, and store
    rows = token * num_heads + heads
    finish_rows(acc, total, top, rows, heads, in_heads, sink_ptr, out_ptr, lse_ptr, HAS_SINK, CHANNELS)


def two_cache_attn(
    q_thd: torch.Tensor,
    window: torch.Tensor,
    window_idx_tk: torch.Tensor,
    main_pow: torch.Tensor,
    main_idx_tk: torch.Tensor,
    sink_h: torch.Tensor | None,
    *,
    kinds: tuple[str, str],
    groups: tuple[int, int],
    sectioned: bool,
    scale: float,
    dtype: torch.dtype,
    launch: TwoCacheLaunch | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch: `kinds` of window and main are "rows" (bf16 [s, d]), "e4m3" or "e2m1" (record pages), "v4"
    (records with a bf16 tail), with their groups.

    Raises:
        NotImplementedError: the channels are no power of two from 32 up, rows or pages are not contiguous, or a page
            with tails begins at an odd byte.
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
    """
    num_tokens, num_heads, width = q_thd.shape
    if width < 32 or width & (width - 1):
        raise NotImplementedError(f"q_thd: expected a power of two of channels from 32 up, got {width}")
    window_name = "window_sd" if kinds[0] == "rows" else "window_pow"
    window = window.unsqueeze(0) if kinds[0] == "rows" else window
    require_rows("q_thd", q_thd)
    require_rows(window_name, window)
    for name, idx in (("window_idx_tk", window_idx_tk), ("main_idx_tk", main_idx_tk)):
        require_rows(name, idx)
    if kinds[0] != "rows":
        require_page(window_name, window)
    require_page("main_pow", main_pow)
    out_thu, lse_th = _outputs(out, q_thd, dtype)
    require_runnable("q_thd", q_thd)
    if num_tokens == 0:
        return out_thu, lse_th
    launch = launch or two_cache_launch(num_heads, arch_of(q_thd.device))
    head_tiles = triton.cdiv(num_heads, launch.block_heads)
    _attend_two_caches[(num_tokens * head_tiles,)](
        q_thd,
        window,
        _tails(window_name, window, kinds[0]),
        window_idx_tk,
        main_pow,
        _tails("main_pow", main_pow, kinds[1]),
        main_idx_tk,
        out_thu if sink_h is None else sink_h.contiguous(),
        out_thu,
        lse_th,
        scale * LOG2_E.value,
        num_heads,
        head_tiles,
        window_idx_tk.shape[1],
        window.shape[0] * window.shape[1],
        max(window.shape[1], 1),
        main_idx_tk.shape[1],
        main_pow.shape[0] * main_pow.shape[1],
        max(main_pow.shape[1], 1),
        *q_thd.stride()[:2],
        *window.stride()[:2],
        main_pow.stride(0),
        window_idx_tk.stride(0),
        main_idx_tk.stride(0),
        HAS_SINK=sink_h is not None,
        WINDOW=kinds[0],
        WINDOW_GROUP=groups[0],
        MAIN=kinds[1],
        MAIN_GROUP=groups[1],
        SECTIONED=sectioned,
        CHANNELS=width,
        BLOCK_HEADS=launch.block_heads,
        BLOCK_KEYS=launch.block_keys,
        BITS=launch.e4m3_bits,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out_thu, lse_th


def _tails(name: str, pages: torch.Tensor, kind: str) -> torch.Tensor:
    """A bf16 view of pages with tails; any others stand for themselves and are not read."""
    return wide_views(name, pages, align=2)[2] if kind == "v4" else pages


def require_page(name: str, pages: torch.Tensor) -> None:
    """Decline pages whose bytes are apart in memory; pages themselves may be."""
    if pages.numel() and not pages[0].is_contiguous():
        raise NotImplementedError(f"{name}: expected pages of contiguous bytes, got strides {pages.stride()}")


def _outputs(
    out: tuple[torch.Tensor, torch.Tensor] | None, q_thd: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    if out is None:
        lse_th = torch.empty(q_thd.shape[:2], dtype=torch.float32, device=q_thd.device)
        return torch.empty(q_thd.shape, dtype=dtype, device=q_thd.device), lse_th
    for part, shape, wanted in zip(out, (q_thd.shape, q_thd.shape[:2]), (dtype, torch.float32), strict=True):
        if part.shape != shape or not part.is_contiguous():
            raise ValueError(f"out: expected contiguous {tuple(shape)}, got {tuple(part.shape)}, {part.stride()}")
        if part.dtype != wanted:
            raise TypeError(f"out: expected {wanted}, got {part.dtype}")
    return out
