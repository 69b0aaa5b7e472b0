"""Attention over a list of selected keys, with one key/value vector shared by all heads and an optional sink.

Every query token t brings its own list of key rows. For each entry n of the list that is valid:

    score[t, h, n] = scale * <q[t, h], kv[n]>
    p[t, h, n]     = exp(score - m),  m = the row's largest score
    out[t, h]      = sum_n p * kv[n, :value_dim] / (sum_n p + exp(sink[h] - m))
    lse[t, h]      = m + log(sum_n p)

The value is the key itself, or its first `value_dim` channels (V3.2: 512 of 576). The sink is a logit per head that
takes probability and brings no value: it is not scaled, does not enter the maximum and does not enter the LSE.

Where numbers are rounded: scores and row sums are fp32; the weight p is rounded *unnormalised* to the storage dtype
before it meets the values, while the row sum takes the unrounded p; the quotient is rounded once. A kernel that walks
the list in blocks rounds p against its running maximum, so the scale of that rounding is free (`free_scale`).

`sparse_attn` reads a contiguous sequence [s, d], `sparse_attn_decode` a paged cache [p, o, d]; the maths is the same.
`two_cache_attn` (prefill) and `two_cache_attn_decode` put two lists into one softmax: keys of the sliding window first,
then entries of a compressed cache, no list removing what the other holds too. Quantised entries are read from records
of w bytes, which are exact in bf16, so weights are rounded to bf16 there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_positive, expect_shape
from .config import PageLayout, RecordFormat, TwoCaches
from .kv_cache import record_addresses, unpack_records
from .numerics import CONTRACT, Numerics


def sparse_attn(
    q_thd: Tensor,
    kv_sd: Tensor,
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """Attend from each query token to the rows of `kv_sd` that its index list names.

    Math:
        see the module docstring.

    Shapes:
        q_thd: [t, h, d]; kv_sd: [s, d]; idx_tk: int32 [t, k]; sink_h: fp32 [h] or None; topk_length_t: int32 [t]
        or None; returns out_thu [t, h, value_dim] and lse_th [t, h].

    Rounding:
        softmax weights to `dtype` (free scale), output to `dtype`, LSE to fp32.

    Edges:
        an index below 0, at or above s, or standing at or beyond topk_length_t[t] is a hole: nothing is read for it.
        A row of holes gives out exactly 0 and lse -inf. Every occurrence of a repeated index counts.
        sink +inf gives out 0, -inf the plain softmax. Rows that no list names may hold NaN.

    Raises:
        ValueError: shapes disagree, `value_dim` is not in 1..d, or `scale` is not positive.
        TypeError: indices or lengths are not int32, the sink is not float32, or `dtype` is no storage dtype.

    Source:
        DeepSeek-V3.2-Exp and DeepSeek-V4-Flash, inference/model.py (maths); FlashMLA (index validity).
    """
    dims: dict[str, int] = {}
    expect_shape("q_thd", q_thd, "thd", dims)
    expect_shape("kv_sd", kv_sd, "sd", dims)
    _check_lists(idx_tk, sink_h, topk_length_t, dims, scale, value_dim)
    valid_tk, row_y = _entries(idx_tk, topk_length_t, dims["s"])
    keys_tkd = _scatter(valid_tk, kv_sd[row_y], num)
    return _attend(q_thd, keys_tkd, valid_tk, sink_h, scale=scale, value_dim=value_dim, dtype=dtype, num=num)


def sparse_attn_decode(
    q_thd: Tensor,
    kv_pod: Tensor,
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """Attend from each query token to the slots of a paged cache that its index list names.

    Math:
        see the module docstring; index = page * o + slot is physical, so no block table is needed.

    Shapes:
        q_thd: [t, h, d]; kv_pod: [p, o, d], pages may be further apart than o * d elements; the rest as in
        `sparse_attn`, with p * o in the place of s.

    Edges:
        as `sparse_attn`, its roundings too; slots that no list names may hold NaN.

    Raises:
        ValueError: shapes disagree, `value_dim` is not in 1..d, or `scale` is not positive.
        TypeError: indices or lengths are not int32, the sink is not float32, or `dtype` is no storage dtype.
    """
    dims: dict[str, int] = {}
    expect_shape("q_thd", q_thd, "thd", dims)
    expect_shape("kv_pod", kv_pod, "pod", dims)
    _check_lists(idx_tk, sink_h, topk_length_t, dims, scale, value_dim)
    valid_tk, slot_y = _entries(idx_tk, topk_length_t, dims["p"] * dims["o"])
    keys_tkd = _scatter(valid_tk, kv_pod[slot_y // max(dims["o"], 1), slot_y % max(dims["o"], 1)], num)
    return _attend(q_thd, keys_tkd, valid_tk, sink_h, scale=scale, value_dim=value_dim, dtype=dtype, num=num)


def two_cache_attn(
    q_thd: Tensor,
    window_sd: Tensor,
    window_idx_tk: Tensor,
    main_pow: Tensor,
    main_idx_tk: Tensor,
    sink_h: Tensor | None,
    *,
    caches: TwoCaches,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """Prefill: window keys are bf16 rows (history, then this chunk), compressed keys are records.

    Shapes:
        q_thd: [t, h, d]; window_sd: [s, d], d = caches.main.width; window_idx_tk: int32 [t, any], rows of window_sd;
        main_pow: uint8 [p, o, w] pages of o records, any page stride; main_idx_tk: int32 [t, any], page * o + slot;
        sink_h: fp32 [h] or None; returns out_thd [t, h, d] and lse_th [t, h].

    Rounding:
        softmax weights to bf16 (free scale), output to `dtype`, LSE to fp32. Reading a record is exact.

    Edges:
        as `sparse_attn`, for both lists; a NaN code or scale of a listed record comes out as NaN.

    Raises:
        ValueError: shapes disagree, or w is not the bytes of a record of `caches`.
        TypeError: pages are not uint8, indices are not int32, the sink is not float32, or `dtype` is no storage dtype.
    """
    dims = {"d": caches.main.width}
    expect_shape("window_sd", window_sd, "sd", dims)
    valid_tk, row_y = _listed("window_idx_tk", window_idx_tk, dims, q_thd, window_sd.shape[0])
    window = valid_tk, _scatter(valid_tk, window_sd[row_y], num)
    main = _record_keys("main", main_pow, main_idx_tk, caches.main, caches.layout, q_thd, num)
    return _attend_two(q_thd, window, main, sink_h, scale=caches.scale, dtype=dtype, num=num)


def two_cache_attn_decode(
    q_thd: Tensor,
    window_pow: Tensor,
    window_idx_tk: Tensor,
    main_pow: Tensor,
    main_idx_tk: Tensor,
    sink_h: Tensor | None,
    *,
    caches: TwoCaches,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """Decode: as `two_cache_attn`, but window keys are records of rings too; a ring is a page.

    Shapes:
        window_pow: uint8 [p, o, w], w = caches.window.record_bytes; window_idx_tk names page * o + slot.

    Raises:
        ValueError: shapes disagree, or w is not the bytes of a record of `caches`.
        TypeError: pages are not uint8, indices are not int32, the sink is not float32, or `dtype` is no storage dtype.
    """
    window = _record_keys("window", window_pow, window_idx_tk, caches.window, caches.layout, q_thd, num)
    main = _record_keys("main", main_pow, main_idx_tk, caches.main, caches.layout, q_thd, num)
    return _attend_two(q_thd, window, main, sink_h, scale=caches.scale, dtype=dtype, num=num)


def _attend_two(
    q_thd: Tensor,
    window: tuple[Tensor, Tensor],
    main: tuple[Tensor, Tensor],
    sink_h: Tensor | None,
    *,
    scale: float,
    dtype: torch.dtype,
    num: Numerics,
) -> tuple[Tensor, Tensor]:
    valid_tk, keys_tkd = (torch.cat([a, b], dim=1) for a, b in zip(window, main, strict=True))
    if sink_h is not None:
        expect_shape("sink_h", sink_h, "h", {"h": q_thd.shape[1]})
        expect_dtype("sink_h", sink_h, torch.float32)
    d = keys_tkd.shape[2]
    return _attend(q_thd, keys_tkd, valid_tk, sink_h, scale=scale, value_dim=d, dtype=dtype, num=num, records=True)


def _listed(name: str, idx_tk: Tensor, dims: dict[str, int], q_thd: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    expect_shape("q_thd", q_thd, "thd", dims)
    expect_shape(name, idx_tk, "tk", {"t": dims["t"]})
    expect_dtype(name, idx_tk, torch.int32)
    return _entries(idx_tk, None, num_rows)


def _record_keys(
    name: str,
    cache_pow: Tensor,
    idx_tk: Tensor,
    fmt: RecordFormat,
    layout: PageLayout,
    q_thd: Tensor,
    num: Numerics,
) -> tuple[Tensor, Tensor]:
    """Which entries of the list are valid, and the values of their records in its places."""
    dims = {"w": fmt.record_bytes}
    expect_shape(f"{name}_pow", cache_pow, "pow", dims)
    expect_dtype(f"{name}_pow", cache_pow, torch.uint8)
    valid_tk, slot_y = _listed(f"{name}_idx_tk", idx_tk, {"d": fmt.width}, q_thd, dims["p"] * dims["o"])
    page_y1, byte_yw = record_addresses(slot_y, dims["o"], fmt, layout)
    keys_yd = unpack_records(cache_pow.flatten(1)[page_y1, byte_yw], fmt=fmt, num=num)
    return valid_tk, _scatter(valid_tk, keys_yd, num)


def _attend(
    q_thd: Tensor,
    keys_tkd: Tensor,
    valid_tk: Tensor,
    sink_h: Tensor | None,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype,
    num: Numerics,
    records: bool = False,
) -> tuple[Tensor, Tensor]:
    scores_thk = num.einsum("thd,tkd->thk", num.wide(q_thd), keys_tkd) * scale
    scores_thk = scores_thk.masked_fill(~valid_tk[:, None, :], -torch.inf)
    max_th1 = scores_thk.amax(-1, keepdim=True)
    max_th1 = torch.where(max_th1 == -torch.inf, 0, max_th1)  # no valid key: any finite number avoids inf - inf

    p_thk = torch.exp(scores_thk - max_th1)
    sum_th1 = num.sum(p_thk, dim=-1, keepdim=True)  # of the unrounded weights
    # records are bf16, and so are their weights, whatever the output is stored in
    p_thk = num.store(p_thk, torch.bfloat16 if records else dtype, free_scale=True)
    acc_thu = num.einsum("thk,tku->thu", p_thk, keys_tkd[..., :value_dim])

    denominator_th1 = sum_th1
    if sink_h is not None:
        # added at the end and outside the maximum; exp may overflow to inf, which rightly gives out = 0
        denominator_th1 = sum_th1 + torch.exp(num.wide(sink_h)[None, :, None] - max_th1)
    # tested for zero, not for > 0: a NaN sum (a selected key holds NaN) has to stay visible
    out_thu = torch.where(sum_th1 == 0, 0, acc_thu / denominator_th1)
    lse_th = (max_th1 + torch.log(sum_th1)).squeeze(-1)  # log 0 = -inf for a row without keys
    return num.store(out_thu, dtype), num.f32(lse_th)


def _entries(idx_tk: Tensor, topk_length_t: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor]:
    """Which entries of the lists are valid [t, k], and the rows these name, in list order [y]."""
    if not idx_tk.shape[1]:
        idx_tk = idx_tk.new_full((idx_tk.shape[0], 1), -1)  # an empty list is a list of one hole
    valid_tk = (idx_tk >= 0) & (idx_tk < num_rows)
    if topk_length_t is not None:
        entry_k = torch.arange(idx_tk.shape[1], device=idx_tk.device)
        valid_tk = valid_tk & (entry_k[None, :] < topk_length_t[:, None])
    return valid_tk, idx_tk[valid_tk].long()


def _scatter(valid_tk: Tensor, rows_yd: Tensor, num: Numerics) -> Tensor:
    """Put the rows read for the valid entries in their places; holes are zero and were never read."""
    keys_tkd = torch.zeros(*valid_tk.shape, rows_yd.shape[-1], dtype=num.carrier, device=rows_yd.device)
    keys_tkd[valid_tk] = num.wide(rows_yd)
    return keys_tkd


def _check_lists(
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    dims: dict[str, int],
    scale: float,
    value_dim: int,
) -> None:
    expect_shape("idx_tk", idx_tk, "tk", dims)
    expect_dtype("idx_tk", idx_tk, torch.int32)
    if sink_h is not None:
        expect_shape("sink_h", sink_h, "h", dims)
        expect_dtype("sink_h", sink_h, torch.float32)
    if topk_length_t is not None:
        expect_shape("topk_length_t", topk_length_t, "t", dims)
        expect_dtype("topk_length_t", topk_length_t, torch.int32)
    expect_positive("scale", scale)
    if not 1 <= value_dim <= dims["d"]:
        raise ValueError(f"value_dim: expected a number in 1..{dims['d']}, got {value_dim}")
