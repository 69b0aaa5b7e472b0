"""Compressed sparse attention (V4): a sliding window and the best compressed entries in one softmax.

Every four tokens become an entry, pooled from two neighbouring groups (`compressor.py`). An indexer with a compressor
of its own scores the entries that a query sees and keeps the `index_topk` best. Per layer, in this order:

1. queries, each head normalised by itself; the window key, which is key and value of all heads;
2. entries and index keys of the step's tokens: they stand in the caches before any query looks;
3. index queries and head weights; scores I(p, j) for j < floor((p + 1) / 4); the best entries, ties to the lower one;
4. one softmax over the window and the chosen entries, with a sink; key = value;
5. the output is rotated back at the query's position and goes through the grouped low-rank output.

`csa_attention` computes whole sequences from their values; `csa_run` takes any steps, all state in bytes. Both mean the
same. The chosen entries stand in ascending order here, not by their score: that is the order of accumulation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_shape
from .config import IndexCast, V4AttnConfig, V4Kind
from .csa2_state import Csa2Batch, Csa2Step
from .hadamard import hadamard
from .indexer import index_visible, index_weights, score_rows
from .kv_cache import load_records, store_records
from .numerics import CONTRACT, Numerics
from .quant import fake_quantize
from .taps import Tap, ignore
from .topk import physical_slots, seen_rows, topk
from .v4_attend import (
    SECTIONED,
    attend_records_,
    attend_values,
    check_steps,
    entry_slots,
    packed_positions,
    step_entries_,
    visible_rows,
    whole_entries,
)
from .v4_layer import product, rotated, v4_output, v4_project
from .v4_state import V4Caches, index_record
from .v4_weights import V4Weights, owned


def csa_index_rows(x_yd: Tensor, *, config: V4AttnConfig, num: Numerics = CONTRACT) -> Tensor:
    """Rotated index rows on their way to the quantiser: Hadamard transformed, or as they are for PLAIN.

    Shapes:
        x_yd: [y, index_dim]; returns the same shape.

    Rounding:
        the transform to bf16.

    Raises:
        ValueError: shapes disagree.
    """
    expect_shape("x_yd", x_yd, "yd", {"d": config.index_dim})
    return x_yd if config.index is IndexCast.PLAIN else hadamard(x_yd, num=num)


def csa_scores(
    x_tm: Tensor,
    latent_ta: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    positions_t: Tensor,
    key_sd: Tensor,
    rows_tj: Tensor,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The score of every entry that a query sees, -inf for the others.

    Math:
        q = latent index_wq, rotated, transformed, quantised; w = x index_head * (index_dim index_heads)^-0.5
        I(t, j) = sum_h w[t, h] max(q[t, h] . key[rows[t, j]], 0), for the j with rows[t, j] >= 0

    Shapes:
        x_tm: [t, m]; latent_ta: [t, a]; table_sr: fp32 [s, r]; positions_t: [t]; key_sd: [s, index_dim], values as a
        cache holds them; rows_tj: integer [t, j], the row of entry j, -1 if the query does not see it; returns [t, j].

    Rounding:
        the product to bf16, the rotation and the transform to bf16, the quantiser; weights to bf16 twice
        (`index_weights`); scores as config.score_order says.

    Raises:
        ValueError: shapes disagree; the weights have no indexer.

    Source:
        v3-v32-v4.md section 5.5
    """
    expect_shape("rows_tj", rows_tj, "tj", {"t": len(x_tm)})
    q_tk = product(latent_ta, owned(weights.index_wq, "index_wq"), weights.index_wq_sf, num=num)
    q_thd = rotated(q_tk.unflatten(1, (config.index_heads, config.index_dim)), table_sr, positions_t, num=num)
    q_yd = index_cached(csa_index_rows(q_thd.flatten(0, 1), config=config, num=num), config=config, num=num)
    scale = (config.index_heads * config.index_dim) ** -0.5
    w_th = index_weights(x_tm, owned(weights.index_head_hm, "index_head_hm"), scale=scale, num=num)
    q_thd = q_yd.unflatten(0, q_thd.shape[:2])
    return score_rows(q_thd, num.wide(key_sd), w_th, rows_tj, order=config.score_order, num=num)


def csa_select(
    x_tm: Tensor,
    latent_ta: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    positions_t: Tensor,
    index_pow: Tensor,
    table_tp: Tensor,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The entries that every query attends to, by the index keys of a paged cache.

    Math:
        the index_topk largest `csa_scores` of entries j < floor((p + 1) / ratio); a tie goes to the lower j

    Shapes:
        index_pow: uint8 [p, o, w], sectioned pages; table_tp: int32 [t, any], the pages of a token's sequence; the rest
        as `csa_scores`; returns int32 [t, index_topk], ascending, -1 behind.

    Edges:
        no visible entry gives a row of -1; fewer than index_topk are all chosen. There is no LayerNorm: the norm of
        the compressor plays its part. Entries that no query sees may hold any bytes.

    Raises:
        ValueError: shapes disagree; the weights have no indexer.

    Source:
        v3-v32-v4.md section 5.5
    """
    slot_y, rows_tj = seen_rows(entry_slots(positions_t, table_tp, config=config).long())
    key_yd = load_records(index_pow, slot_y, layout=SECTIONED, dtype=torch.float32, num=num)
    scores_tj = csa_scores(x_tm, latent_ta, weights, table_sr, positions_t, key_yd, rows_tj, config=config, num=num)
    return topk(scores_tj, index_visible(positions_t, ratio=config.ratio), k=config.index_topk)


def csa_attention(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    cu_seqlens: Tensor,
    picks_tk: Tensor | None,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> Tensor:
    """Whole sequences from position 0 on, without any cache.

    Shapes:
        x_tm: [t, m], the sequences one after the other; table_sr: fp32 [s, r], row p for position p; cu_seqlens:
        integer [b + 1]; picks_tk: int32 [t, any] entries to attend to, -1 for none, or None: the layer selects;
        returns y_tm.

    Rounding:
        as the stages; keys and entries are what a cache would give back.

    Edges:
        t = 0 gives an empty tensor; a sequence of fewer than four tokens has no entry.

    Raises:
        ValueError: shapes disagree; cu_seqlens is malformed; config is not of kind CSA.

    Source:
        v3-v32-v4.md section 5
    """
    _check_kind(config)
    positions_t, seq_t = packed_positions(cu_seqlens, len(x_tm))
    q_thd, key_td, latent_ta = v4_project(x_tm, weights, table_sr, positions_t, config=config, num=num)
    entry_yd = whole_entries(x_tm, owned(weights.entry, "entry"), table_sr, cu_seqlens, config=config, num=num)
    rows_tj = visible_rows(positions_t, seq_t, cu_seqlens, ratio=config.ratio)
    if picks_tk is None:
        index_yd = whole_entries(
            x_tm, owned(weights.index_entry, "index_entry"), table_sr, cu_seqlens, config=config, num=num
        )
        key_sd = index_cached(csa_index_rows(index_yd, config=config, num=num), config=config, num=num)
        scores_tj = csa_scores(x_tm, latent_ta, weights, table_sr, positions_t, key_sd, rows_tj, config=config, num=num)
        picks_tk = topk(scores_tj, (rows_tj >= 0).sum(1, dtype=torch.int32), k=config.index_topk)
        tap("scores", scores_tj)
        tap("picks", picks_tk)
    picked_tk = _picked(rows_tj, picks_tk)
    out_thd = attend_values(q_thd, key_td, entry_yd, picked_tk, positions_t, weights.sink_h, config=config, num=num)
    tap("heads", out_thd)
    return v4_output(out_thd, weights, table_sr, positions_t, config=config, num=num, tap=tap)


def csa_run(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    caches: V4Caches,
    batch: Csa2Batch,
    picks_tk: Tensor | None,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same layer step by step, all state in cache bytes: chunks of any length, then decode steps.

    Shapes:
        x_tm, picks_tk: as `csa_attention`; batch: the steps; returns y_tm, and copies of the rings, the pages of
        entries, the pool, the pages of index keys and the index pool after the last step.

    Rounding:
        as the stages; records are bytes under every numerics.

    Edges:
        caches may hold anything before. A token that is run again overwrites its key, its pool row and its entry.

    Raises:
        ValueError: shapes disagree; config is not of kind CSA; caches lack a part; the steps do not add up to t tokens,
            or a decode step is longer than `config.backtracking`.

    Source:
        v3-v32-v4.md sections 5.3, 5.4, 5.8
    """
    _check_kind(config)
    check_steps(x_tm, batch, config)
    for part in (caches.main_pow, caches.pool, caches.index_pow, caches.index_pool):
        owned(part, "caches")
    caches = caches.clone()
    y_tm = torch.zeros_like(num.wide(x_tm))
    for step, row_t in batch.steps():
        picks = None if picks_tk is None else picks_tk[row_t]
        y_tm[row_t] = csa_step_(num.wide(x_tm)[row_t], weights, table_sr, caches, step, picks, config=config, num=num)
    parts = (caches.main_pow, caches.pool, caches.index_pow, caches.index_pool)
    main_pow, pool, index_pow, index_pool = (owned(part, "caches") for part in parts)
    return y_tm, caches.ring_pow, main_pow, pool, index_pow, index_pool


def csa_step_(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    caches: V4Caches,
    step: Csa2Step,
    picks_tk: Tensor | None,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """One step, in place in the caches."""
    q_thd, key_td, latent_ta = v4_project(x_tm, weights, table_sr, step.positions_t, config=config, num=num)
    main_pow, index_pow = owned(caches.main_pow, "caches"), owned(caches.index_pow, "caches")
    entry_yd, slot_y = step_entries_(
        x_tm, owned(weights.entry, "entry"), owned(caches.pool, "caches"), table_sr, step, config=config, num=num
    )
    store_records(main_pow, entry_yd, slot_y, layout=SECTIONED, fmt=config.cache, num=num)
    index_yd, slot_y = step_entries_(
        x_tm,
        owned(weights.index_entry, "index_entry"),
        owned(caches.index_pool, "caches"),
        table_sr,
        step,
        config=config,
        num=num,
    )
    index_yd = csa_index_rows(index_yd, config=config, num=num)
    fmt = None if config.index is IndexCast.FP4 else index_record(config)
    store_records(index_pow, index_yd, slot_y, layout=SECTIONED, fmt=fmt, num=num)
    table_tp = step.table_bp[step.seq_t.long()]
    if picks_tk is None:
        picks_tk = csa_select(
            x_tm, latent_ta, weights, table_sr, step.positions_t, index_pow, table_tp, config=config, num=num
        )
    slot_tk = physical_slots(picks_tk, table_tp, page_entries=config.page_entries)
    out_thd = attend_records_(
        q_thd, key_td, caches.ring_pow, main_pow, slot_tk, weights.sink_h, step, config=config, num=num
    )
    return v4_output(out_thd, weights, table_sr, step.positions_t, config=config, num=num)


def index_cached(x_yd: Tensor, *, config: V4AttnConfig, num: Numerics = CONTRACT) -> Tensor:
    """What a cache of index keys would give back."""
    if config.index_quant is None:
        return x_yd
    return fake_quantize(x_yd, fmt=config.index_quant, dtype=torch.float32, num=num)


def _picked(rows_tj: Tensor, picks_tk: Tensor) -> Tensor:
    """The rows of picked entries; an entry that the query does not see is none."""
    known_tk = (picks_tk >= 0) & (picks_tk < rows_tj.shape[1])
    padded_tj = torch.nn.functional.pad(rows_tj, (0, 1), value=-1)
    return padded_tj.gather(1, torch.where(known_tk, picks_tk.long(), rows_tj.shape[1]))


def _check_kind(config: V4AttnConfig) -> None:
    if config.kind is not V4Kind.CSA:
        raise ValueError(f"config: expected kind CSA, got {config.kind.name}")
