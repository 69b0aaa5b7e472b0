"""From token ids to table rows and their bytes: windows of classes, n-gram hashes, gathered rows.

All of it is integer arithmetic and copies, so no launch changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import e4m3_value, output_buffer, ue8m0_value
from .split_softmax import arch_of


@dataclass(frozen=True, kw_only=True)
class EngramLaunch:
    """Tokens, requests and table rows that a program takes. It changes no result."""

    tokens: int = 64
    requests: int = 64
    rows: int = 16
    num_warps: int = 4


LAUNCH = EngramLaunch()


@dataclass(frozen=True, kw_only=True)
class EmbedLaunch:
    """Groups of 32 channels that a program of the embedding takes. It changes no result."""

    groups: int = 128
    e4m3_bits: bool = False  # take codes apart where the chip cannot convert them
    num_warps: int = 8


def embed_launch(arch: str) -> EmbedLaunch:
    """16 channels a thread; the Ascend chain takes the bits of a code apart itself."""
    return EmbedLaunch(e4m3_bits=arch == "ascend950")


@triton.jit
def _class_of(ids_ptr, image_ptr, class_ptr, place, mask, num_ids):
    """The class of the tokens at `place`; -1 for an image token and for an id that the vocabulary does not have."""
    # the Ascend adapter turns a scattered mask into a choice after the load: masked addresses have to exist too
    place = tl.where(mask, place, 0)
    token = tl.load(ids_ptr + place, mask=mask, other=0)
    image = tl.load(image_ptr + place, mask=mask, other=1)
    known = mask & (image == 0) & (token >= 0) & (token < num_ids)
    return tl.load(class_ptr + tl.where(known, token, 0).to(tl.int64), mask=known, other=-1)


@triton.jit
def _window(
    ids_ptr,
    image_ptr,
    bounds_ptr,
    history_ptr,
    class_ptr,
    window_ptr,
    image_out_ptr,
    num_tokens,
    num_requests,
    num_ids,
    pad_class,
    PLACES: tl.constexpr,
    PLACES_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
):
    # 1. the request of every token, and where its tokens begin
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_range = token < num_tokens
    begun = tl.zeros([BLOCK], tl.int32)
    first = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_requests, BLOCK_REQUESTS):
        request = start + tl.arange(0, BLOCK_REQUESTS)
        bound = tl.load(bounds_ptr + request, mask=request < num_requests, other=2147483647)
        has_begun = bound[None, :] <= token[:, None]
        begun += tl.sum(has_begun.to(tl.int32), axis=1)
        first = tl.maximum(first, tl.max(tl.where(has_begun, bound[None, :], 0), axis=1))
    # 2. classes from the own token backwards; behind an image token all is padding
    slot = tl.arange(0, PLACES_PAD)[None, :]
    window = tl.zeros([BLOCK, PLACES_PAD], tl.int32)
    broken = tl.zeros([BLOCK, PLACES_PAD], tl.int32)
    for back in tl.static_range(PLACES):
        place = token - back
        own = place >= first
        ours = _class_of(ids_ptr, image_ptr, class_ptr, place, in_range & own, num_ids)
        kept = (begun - 1).to(tl.int64) * (PLACES - 1) + PLACES - 1 + place - first
        before = in_range & (place < first)
        older = tl.load(history_ptr + tl.where(before, kept, 0), mask=before, other=-1)
        found = tl.where(own, ours, older)
        window = tl.where(slot == back, found[:, None], window)
        broken |= ((found == -1)[:, None] & (slot >= back)).to(tl.int32)
        if back == 0:
            tl.store(image_out_ptr + token, (found == -1).to(tl.uint8), mask=in_range)
    window = tl.where(broken != 0, pad_class, window)
    # 3. write
    tl.store(window_ptr + token[:, None] * PLACES + slot, window, mask=in_range[:, None] & (slot < PLACES))


@triton.jit
def _history(
    ids_ptr,
    image_ptr,
    bounds_ptr,
    kept_ptr,
    history_ptr,
    class_ptr,
    history_out_ptr,
    num_requests,
    num_ids,
    KEPT: tl.constexpr,
    KEPT_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # the last classes of a request after the tokens that stay, oldest first
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_range = request < num_requests
    start = tl.load(bounds_ptr + request, mask=in_range, other=0)[:, None]
    stays = tl.load(kept_ptr + request, mask=in_range, other=0)[:, None]
    item = tl.arange(0, KEPT_PAD)[None, :]
    mask = in_range[:, None] & (item < KEPT)
    since = stays - KEPT + item
    ours = _class_of(ids_ptr, image_ptr, class_ptr, start + since, mask & (since >= 0), num_ids)
    old = mask & (since < 0)
    older = tl.load(history_ptr + tl.where(old, request[:, None] * KEPT + stays + item, 0), mask=old, other=-1)
    tl.store(history_out_ptr + request[:, None] * KEPT + item, tl.where(since >= 0, ours, older), mask=mask)


@triton.jit
def _hash(
    window_ptr,
    image_ptr,
    multipliers_ptr,
    primes_ptr,
    offsets_ptr,
    rows_ptr,
    num_tokens,
    num_classes,
    stride_wt,
    HEADS: tl.constexpr,
    PLACES: tl.constexpr,
    PLACES_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMNS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. windows
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(1).to(tl.int64)
    in_range = token < num_tokens
    slot = tl.arange(0, PLACES_PAD)[None, :]
    inside = in_range[:, None] & (slot < PLACES)
    window = tl.load(window_ptr + token[:, None] * stride_wt + slot, mask=inside, other=0)
    strange = tl.max(((window < 0) | (window >= num_classes)).to(tl.int32), axis=1)
    image = tl.load(image_ptr + token, mask=in_range, other=1)
    # 2. xor of products, one more place for every n
    column = tl.arange(0, COLUMNS_PAD)
    mixed = tl.zeros([BLOCK], tl.int64)
    hashes = tl.zeros([BLOCK, COLUMNS_PAD], tl.int64)
    for back in tl.static_range(PLACES):
        # one place of the window; picked by a sum with zeros, because strided loads break the Ascend adapter
        place = tl.sum(tl.where(slot == back, window, 0), axis=1).to(tl.int64)
        mixed = mixed ^ (place * tl.load(multipliers_ptr + layer * PLACES + back))
        hashes = tl.where((column // HEADS == back - 1)[None, :], mixed[:, None], hashes)
    # 3. rows; classes that do not exist read nothing
    prime = tl.load(primes_ptr + layer * COLUMNS + column, mask=column < COLUMNS, other=1)
    offset = tl.load(offsets_ptr + layer * COLUMNS + column, mask=column < COLUMNS, other=0)
    row = (hashes % prime[None, :] + offset[None, :]).to(tl.int32)
    row = tl.where(((image != 0) | (strange != 0))[:, None], -1, row)
    place = (layer * num_tokens + token)[:, None] * COLUMNS + column[None, :]
    tl.store(rows_ptr + place, row, mask=in_range[:, None] & (column < COLUMNS)[None, :])


@triton.jit
def _lookup(
    table_ptr,
    table_sf_ptr,
    rows_ptr,
    codes_ptr,
    sf_ptr,
    num_entries,
    num_rows,
    columns,
    stride_tr,
    stride_sr,
    stride_rt,
    stride_rz,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. which rows; a row that the table does not have is a hole
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_range = entry < num_entries
    row_at = rows_ptr + (entry // columns) * stride_rt + (entry % columns) * stride_rz
    row = tl.load(row_at, mask=in_range, other=-1).to(tl.int64)[:, None]
    named = (row >= 0) & (row < num_rows)
    row = tl.where(named, row, 0)
    # 2. codes, then scales
    channel = tl.arange(0, DIM_PAD)[None, :]
    codes = tl.load(table_ptr + row * stride_tr + channel, mask=named & (channel < DIM), other=0)
    tl.store(codes_ptr + entry[:, None] * DIM + channel, codes, mask=in_range[:, None] & (channel < DIM))
    group = tl.arange(0, GROUPS_PAD)[None, :]
    scales = tl.load(table_sf_ptr + row * stride_sr + group, mask=named & (group < GROUPS), other=127)
    tl.store(sf_ptr + entry[:, None] * GROUPS + group, scales, mask=in_range[:, None] & (group < GROUPS))


@triton.jit
def _embed(
    table_ptr,
    table_sf_ptr,
    rows_ptr,
    values_ptr,
    num_groups,
    num_rows,
    stride_tr,
    stride_sr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    # 1. groups are numbered through all named rows; a group and its scale stay in one line
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_range = group < num_groups
    part = group % GROUPS
    row = tl.load(rows_ptr + group // GROUPS, mask=in_range, other=-1).to(tl.int64)
    named = (row >= 0) & (row < num_rows)
    row = tl.where(named, row, 0)
    # 2. values, the only rounding
    scale = ue8m0_value(tl.load(table_sf_ptr + row * stride_sr + part, mask=named, other=127))[:, None]
    item = tl.arange(0, 32)[None, :]
    code = tl.load(table_ptr + (row * stride_tr + part * 32)[:, None] + item, mask=named[:, None], other=0)
    value = (e4m3_value(code, BITS) * scale).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + (group.to(tl.int64) * 32)[:, None] + item, value, mask=in_range[:, None])


def engram_window(
    ids_t: torch.Tensor,
    image_t: torch.Tensor,
    bounds_j: torch.Tensor,
    kept_b: torch.Tensor,
    history_bi: torch.Tensor,
    class_v: torch.Tensor,
    *,
    pad_class: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Windows, image tokens and the histories to keep; ids outside the vocabulary are image tokens.

    Raises:
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: tensors are on the CPU and kernels are not interpreted.
    """
    (t,), (b, kept) = ids_t.shape, history_bi.shape
    window_out, image_out, history_out = out or (None, None, None)
    window_tw = output_buffer(window_out, (t, kept + 1), torch.int32, ids_t)
    images_t = output_buffer(image_out, (t,), torch.bool, ids_t)
    histories_bi = output_buffer(history_out, (b, kept), torch.int32, ids_t)
    if not t:
        histories_bi.copy_(history_bi)
        return window_tw, images_t, histories_bi
    require_runnable("ids_t", ids_t)
    ids_t, bounds_j, kept_b, history_bi, class_v = (
        x.contiguous() for x in (ids_t, bounds_j, kept_b, history_bi, class_v)
    )
    images = image_t.contiguous().view(torch.uint8)
    _window[(triton.cdiv(t, LAUNCH.tokens),)](
        ids_t,
        images,
        bounds_j,
        history_bi,
        class_v,
        window_tw,
        images_t.view(torch.uint8),
        t,
        b,
        class_v.numel(),
        pad_class,
        PLACES=kept + 1,
        PLACES_PAD=triton.next_power_of_2(kept + 1),
        BLOCK=LAUNCH.tokens,
        BLOCK_REQUESTS=LAUNCH.requests,
        num_warps=LAUNCH.num_warps,
    )
    _history[(triton.cdiv(b, LAUNCH.requests),)](
        ids_t,
        images,
        bounds_j,
        kept_b,
        history_bi,
        class_v,
        histories_bi,
        b,
        class_v.numel(),
        KEPT=kept,
        KEPT_PAD=triton.next_power_of_2(kept),
        BLOCK=LAUNCH.requests,
        num_warps=LAUNCH.num_warps,
    )
    return window_tw, images_t, histories_bi


def engram_hash(
    window_tw: torch.Tensor,
    image_t: torch.Tensor,
    *,
    constants: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_heads: int,
    num_classes: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of every layer; `constants` are the multipliers, primes and offsets, int64, one line a layer.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: window_tw is on the CPU and kernels are not interpreted.
    """
    (t, places), (layers, columns) = window_tw.shape, constants[1].shape
    row_ltz = output_buffer(out, (layers, t, columns), torch.int32, window_tw)
    if not t:
        return row_ltz
    require_runnable("window_tw", window_tw)
    window_tw = window_tw if window_tw.stride(1) == 1 else window_tw.contiguous()
    _hash[(triton.cdiv(t, LAUNCH.tokens), layers)](
        window_tw,
        image_t.contiguous().view(torch.uint8),
        *constants,
        row_ltz,
        t,
        num_classes,
        window_tw.stride(0),
        HEADS=num_heads,
        PLACES=places,
        PLACES_PAD=triton.next_power_of_2(places),
        COLUMNS=columns,
        COLUMNS_PAD=triton.next_power_of_2(columns),
        BLOCK=LAUNCH.tokens,
        num_warps=LAUNCH.num_warps,
    )
    return row_ltz


def engram_lookup(
    table_rd: torch.Tensor,
    table_sf_rg: torch.Tensor,
    row_tz: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the named rows side by side; rows that the table does not have are holes.

    Raises:
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: tensors are on the CPU and kernels are not interpreted.
    """
    (r, dim), groups, (t, columns) = table_rd.shape, table_sf_rg.shape[1], row_tz.shape
    codes_out, sf_out = out or (None, None)
    codes_tm = output_buffer(codes_out, (t, columns * dim), torch.float8_e4m3fn, row_tz)
    sf_tg = output_buffer(sf_out, (t, columns * groups), torch.uint8, row_tz)
    if not row_tz.numel():
        return codes_tm, sf_tg
    require_runnable("row_tz", row_tz)
    table, table_sf = _rows(table_rd.view(torch.uint8)), _rows(table_sf_rg)
    _lookup[(triton.cdiv(row_tz.numel(), LAUNCH.rows),)](
        table,
        table_sf,
        row_tz,
        codes_tm.view(torch.uint8),
        sf_tg,
        row_tz.numel(),
        r,
        columns,
        table.stride(0),
        table_sf.stride(0),
        *row_tz.stride(),
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        GROUPS=groups,
        GROUPS_PAD=triton.next_power_of_2(groups),
        BLOCK=LAUNCH.rows,
        num_warps=LAUNCH.num_warps,
    )
    return codes_tm, sf_tg


def engram_embed(
    table_rd: torch.Tensor,
    table_sf_rg: torch.Tensor,
    row_tz: torch.Tensor,
    *,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values of the named rows side by side, in `dtype`.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: tensors are on the CPU and kernels are not interpreted.
    """
    (r, dim), (t, columns) = table_rd.shape, row_tz.shape
    e_tm = output_buffer(out, (t, columns * dim), dtype, row_tz)
    if not row_tz.numel():
        return e_tm
    require_runnable("row_tz", row_tz)
    table, table_sf = _rows(table_rd.view(torch.uint8)), _rows(table_sf_rg)
    launch, num_groups = embed_launch(arch_of(row_tz.device)), row_tz.numel() * (dim // 32)
    _embed[(triton.cdiv(num_groups, launch.groups),)](
        table,
        table_sf,
        row_tz.contiguous(),
        e_tm,
        num_groups,
        r,
        table.stride(0),
        table_sf.stride(0),
        GROUPS=dim // 32,
        BLOCK=launch.groups,
        BITS=launch.e4m3_bits,
        num_warps=launch.num_warps,
    )
    return e_tm


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with adjacent elements of a row; a table of the released size must not need a copy."""
    if x.stride(1) != 1:
        raise NotImplementedError(f"table_rd: expected rows without gaps between their bytes, got strides {x.stride()}")
    return x
