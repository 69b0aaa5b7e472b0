"""Where an attention layer of V4 meets its past: over whole sequences of values, or over records in pages and rings.

The values of the first form are those that the records of the second give back, so both mean the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_chunk, expect_shape
from .compressor import compress, compress_decode, compress_prefill, compress_project, compress_rows
from .config import OutputCast, PageLayout, TwoCaches, V4AttnConfig
from .csa2_state import Csa2Batch, Csa2Step
from .kv_cache import load_records, pack_records, store_records, unpack_records
from .numerics import CONTRACT, Numerics
from .quant import fake_quantize
from .sparse_attn import sparse_attn, two_cache_attn, two_cache_attn_decode
from .topk import physical_slots
from .v4_layer import pool_tail
from .v4_weights import CompressorWeights, owned
from .window import history_slots, ring_slots, window_decode, window_prefill

SECTIONED = PageLayout.SECTIONED  # of every cache of V4


# without caches


def packed_positions(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Position and sequence of every token of whole sequences; raise if `cu_seqlens` does not split `tokens`."""
    expect_shape("cu_seqlens", cu_seqlens, "n", {})
    expect_chunk(torch.zeros_like(cu_seqlens[1:]), cu_seqlens, tokens)
    seq_t = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device).repeat_interleave(cu_seqlens.long().diff())
    return torch.arange(tokens, device=cu_seqlens.device) - cu_seqlens.long()[seq_t], seq_t


def whole_entries(
    x_tm: Tensor,
    weights: CompressorWeights,
    table_sr: Tensor,
    cu_seqlens: Tensor,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The rotated entries of whole sequences, before a quantiser, in the rows that `compress_rows` says."""
    value_tw, gate_tw = compress_project(x_tm, weights.value_wm, weights.gate_wm, num=num)
    start_b, pooling = torch.zeros_like(cu_seqlens[1:]), config.compressor
    pooled_yd, entry_y = compress(value_tw, gate_tw, weights.bias_rw, start_b, cu_seqlens, config=pooling, num=num)
    return pool_tail(pooled_yd, entry_y, weights, table_sr, config=config, num=num)


def visible_rows(positions_t: Tensor, seq_t: Tensor, cu_seqlens: Tensor, *, ratio: int) -> Tensor:
    """The row of `whole_entries` that entry j of a token's sequence is, int64 [t, j]; -1 where it is not visible.

    Entry j is visible to a query at position p iff its last token is there: (j + 1) * ratio <= p + 1.
    """
    entry_y, seq_y = compress_rows(torch.zeros_like(cu_seqlens[1:]), cu_seqlens, ratio=ratio)
    first_b = torch.searchsorted(seq_y.long(), torch.arange(len(cu_seqlens) - 1, device=seq_y.device))
    most = int(entry_y.max()) + 1 if len(entry_y) else 0
    entry_j = torch.arange(most, device=positions_t.device)
    is_visible_tj = (entry_j + 1) * ratio <= positions_t[:, None] + 1
    return torch.where(is_visible_tj, first_b[seq_t][:, None] + entry_j, -1)


def attend_values(
    q_thd: Tensor,
    key_td: Tensor,
    entry_yd: Tensor,
    rows_tk: Tensor,
    positions_t: Tensor,
    sink_h: Tensor,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Attention over the window and the listed entries, all of them values as a cache would hold them.

    Math:
        one softmax over keys p - W + 1 … p of the token's sequence and the entries rows_tk, no list removing what the
        other covers too; scale d^-0.5, the sink in the denominator alone; key = value

    Shapes:
        key_td, entry_yd: before the quantiser; rows_tk: rows of entry_yd, -1 for none; returns out_thd.
    """
    held_sd = torch.cat([as_cached(x_yd, config=config, num=num) for x_yd in (key_td, entry_yd)])
    back_w = torch.arange(config.window - 1, -1, -1, device=positions_t.device)
    own_t = torch.arange(len(q_thd), device=positions_t.device)
    window_tw = torch.where(back_w <= positions_t[:, None], own_t[:, None] - back_w, -1)
    idx_tk = torch.cat([window_tw, torch.where(rows_tk >= 0, rows_tk + len(key_td), -1)], 1).to(torch.int32)
    dtype = torch.float32 if config.output is OutputCast.FUSED else torch.bfloat16
    scale, d, fmt = config.head_dim**-0.5, config.head_dim, config.cache
    if fmt is None:
        return sparse_attn(q_thd, held_sd, idx_tk, sink_h, None, scale=scale, value_dim=d, dtype=dtype, num=num)[0]
    # as over records: weights are rounded to bf16 whatever the output is stored in
    none_pow, none_tk = torch.zeros(0, 1, fmt.record_bytes, dtype=torch.uint8), idx_tk[:, :0]
    caches = TwoCaches(window=fmt, main=fmt, layout=SECTIONED, scale=scale)
    return two_cache_attn(q_thd, held_sd, idx_tk, none_pow, none_tk, sink_h, caches=caches, dtype=dtype, num=num)[0]


def as_cached(x_yd: Tensor, *, config: V4AttnConfig, num: Numerics = CONTRACT) -> Tensor:
    """What a cache would give back: all but the rotary channels through the quantiser."""
    if config.cache is None:
        return x_yd
    c = config.cache.channels
    return torch.cat([fake_quantize(x_yd[:, :c], fmt=config.cache.quant, num=num), x_yd[:, c:]], 1)


# with caches


def step_entries_(
    x_tm: Tensor,
    weights: CompressorWeights,
    pool_: Tensor,
    table_sr: Tensor,
    step: Csa2Step,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """The rotated entries that a step completes, and their slots, -1 for none; advances the pool, in place."""
    value_tw, logit_tw = compress_project(x_tm, weights.value_wm, weights.gate_wm, num=num)
    gate_tw = owned(logit_tw, "gate_wm")
    pooling, bias_rw, cu = config.compressor, weights.bias_rw, step.cu_seqlens
    if step.decode:
        slot_t, seq_y = step.state_b[step.seq_t.long()], step.seq_t
        pooled_yd, entry_y = compress_decode(
            value_tw, gate_tw, bias_rw, pool_, slot_t, step.positions_t, config=pooling, num=num
        )
    else:
        seq_y = compress_rows(step.first_b, cu, ratio=config.ratio)[1]
        pooled_yd, entry_y = compress_prefill(
            value_tw, gate_tw, bias_rw, pool_, step.state_b, step.first_b, cu, config=pooling, num=num
        )
    slot_y1 = physical_slots(entry_y[:, None], step.table_bp[seq_y.long()], page_entries=config.page_entries)
    return pool_tail(pooled_yd, entry_y, weights, table_sr, config=config, num=num), slot_y1[:, 0]


def attend_records_(
    q_thd: Tensor,
    key_td: Tensor,
    ring_pow_: Tensor,
    main_pow: Tensor | None,
    slot_tk: Tensor,
    sink_h: Tensor,
    step: Csa2Step,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Store the window keys of a step in their rings, in place, and attend to window and entries by their records.

    A prefill step reads the history of the rings before it overwrites them, then its own rows; a decode step stores
    first and reads the rings. Both see the same values.

    Shapes:
        main_pow: None reads no entry; slot_tk: int32 [t, any] slots of main_pow; returns out_thd.
    """
    window, fmt = config.sliding, config.cache
    assert fmt is not None
    store_t = ring_slots(step.positions_t, step.seq_t, step.end_b, step.known_b, step.state_b, config=window)
    caches = TwoCaches(window=fmt, main=fmt, layout=SECTIONED, scale=config.head_dim**-0.5)
    main_pow = ring_pow_[:0] if main_pow is None else main_pow
    dtype = torch.float32 if config.output is OutputCast.FUSED else torch.bfloat16
    if step.decode:
        store_records(ring_pow_, key_td, store_t, layout=SECTIONED, fmt=fmt, num=num)
        seen_tk = window_decode(step.positions_t, step.seq_t, step.state_b, step.valid_b, config=window)
        return two_cache_attn_decode(
            q_thd, ring_pow_, seen_tk, main_pow, slot_tk, sink_h, caches=caches, dtype=dtype, num=num
        )[0]
    past_b = history_slots(step.first_b, step.state_b, step.valid_b, config=window)
    past_sd = load_records(ring_pow_, past_b.flatten(), layout=SECTIONED, num=num)
    store_records(ring_pow_, key_td, store_t, layout=SECTIONED, fmt=fmt, num=num)
    rows_td = unpack_records(pack_records(key_td, fmt=fmt, num=num), fmt=fmt, num=num)  # decode will read these values
    seen_tk = window_prefill(
        step.positions_t, step.seq_t, step.first_b, step.offset_b, step.known_b, step.valid_b, config=window
    )
    window_sd = torch.cat([past_sd, rows_td])
    return two_cache_attn(q_thd, window_sd, seen_tk, main_pow, slot_tk, sink_h, caches=caches, dtype=dtype, num=num)[0]


def entry_slots(positions_t: Tensor, table_tp: Tensor, *, config: V4AttnConfig) -> Tensor:
    """The slot of every entry j that a token sees, int32 [t, j], -1 where it is not visible."""
    visible_t = (positions_t.long() + 1) // config.ratio
    entry_j = torch.arange(int(visible_t.max()) if len(visible_t) else 0, device=visible_t.device)
    entry_tj = torch.where(entry_j < visible_t[:, None], entry_j, -1).to(torch.int32)
    return physical_slots(entry_tj, table_tp, page_entries=config.page_entries)


def check_steps(x_tm: Tensor, batch: Csa2Batch, config: V4AttnConfig) -> None:
    """Raise ValueError unless the steps are those of x_tm and no decode step is too long."""
    expect_shape("x_tm", x_tm, "tm", {"m": config.hidden})
    if int(batch.counts_kb.sum(dtype=torch.int64)) != len(x_tm):
        raise ValueError(f"batch: expected steps of {len(x_tm)} tokens in all, got {batch.counts_kb.tolist()}")
    longest = batch.counts_kb[batch.decode_k]
    if longest.numel() and int(longest.max()) > config.backtracking:
        raise ValueError(f"batch: expected decode steps of up to {config.backtracking}, got {longest.tolist()}")
