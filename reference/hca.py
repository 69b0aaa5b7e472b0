"""Heavily compressed attention (V4): a sliding window and every compressed entry; and layers with a window alone.

Every 128 tokens become one entry, each channel with a softmax of its own over them (`compressor.py`). Entries are few,
so a query attends to all that it sees: those whose last token is at or before it. Everything else is as in `csa.py`:
queries with a norm for each head, window keys that are values too, one softmax with a sink, the output rotated back.

A sliding layer has no compressor; its angles have the plain base, where those of the others have the compressed one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import V4AttnConfig, V4Kind
from .csa2_state import Csa2Batch, Csa2Step
from .kv_cache import store_records
from .numerics import CONTRACT, Numerics
from .taps import Tap, ignore
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
from .v4_layer import v4_output, v4_project
from .v4_state import V4Caches
from .v4_weights import V4Weights, owned


def hca_attention(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    cu_seqlens: Tensor,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> Tensor:
    """Whole sequences from position 0 on, without any cache.

    Shapes:
        x_tm: [t, m], the sequences one after the other; table_sr: fp32 [s, r], row p for position p; cu_seqlens:
        integer [b + 1]; returns y_tm.

    Rounding:
        as the stages; keys and entries are what a cache would give back.

    Edges:
        t = 0 gives an empty tensor; a sequence of fewer than `ratio` tokens has a window only.

    Raises:
        ValueError: shapes disagree; cu_seqlens is malformed; config is not of kind HCA.

    Source:
        v3-v32-v4.md section 5
    """
    _check_kind(config, V4Kind.HCA)
    positions_t, seq_t = packed_positions(cu_seqlens, len(x_tm))
    q_thd, key_td, _ = v4_project(x_tm, weights, table_sr, positions_t, config=config, num=num)
    entry_yd = whole_entries(x_tm, owned(weights.entry, "entry"), table_sr, cu_seqlens, config=config, num=num)
    rows_tj = visible_rows(positions_t, seq_t, cu_seqlens, ratio=config.ratio)
    out_thd = attend_values(q_thd, key_td, entry_yd, rows_tj, positions_t, weights.sink_h, config=config, num=num)
    tap("heads", out_thd)
    return v4_output(out_thd, weights, table_sr, positions_t, config=config, num=num, tap=tap)


def sliding_attention(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    cu_seqlens: Tensor,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> Tensor:
    """Whole sequences of a layer with a window alone; as `hca_attention` without entries.

    Raises:
        ValueError: shapes disagree; cu_seqlens is malformed; config is not of kind SLIDING.
    """
    _check_kind(config, V4Kind.SLIDING)
    positions_t, _ = packed_positions(cu_seqlens, len(x_tm))
    q_thd, key_td, _ = v4_project(x_tm, weights, table_sr, positions_t, config=config, num=num)
    none_tk = positions_t.new_zeros(len(x_tm), 0)
    out_thd = attend_values(q_thd, key_td, key_td[:0], none_tk, positions_t, weights.sink_h, config=config, num=num)
    tap("heads", out_thd)
    return v4_output(out_thd, weights, table_sr, positions_t, config=config, num=num, tap=tap)


def hca_run(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    caches: V4Caches,
    batch: Csa2Batch,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same layer step by step, all state in cache bytes: chunks of any length, then decode steps.

    Shapes:
        x_tm: as `hca_attention`; batch: the steps; returns y_tm, and copies of the rings, the pages of entries and the
        pool after the last step.

    Rounding:
        as the stages; records are bytes under every numerics.

    Edges:
        caches may hold anything before. A token that is run again overwrites its key, its pool row and its entry.

    Raises:
        ValueError: shapes disagree; config is not of kind HCA; caches lack a part; the steps do not add up to t tokens,
            or a decode step is longer than `config.backtracking`.

    Source:
        v3-v32-v4.md sections 5.3, 5.4, 5.8
    """
    _check_kind(config, V4Kind.HCA)
    owned(caches.main_pow, "caches")
    owned(caches.pool, "caches")
    y_tm, caches = _run(x_tm, weights, table_sr, caches, batch, config=config, num=num)
    return y_tm, caches.ring_pow, owned(caches.main_pow, "caches"), owned(caches.pool, "caches")


def sliding_run(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    caches: V4Caches,
    batch: Csa2Batch,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """A layer with a window alone step by step; returns y_tm and a copy of the rings.

    Raises:
        ValueError: shapes disagree; config is not of kind SLIDING; the steps do not add up to t tokens, or a decode
            step is longer than `config.backtracking`.
    """
    _check_kind(config, V4Kind.SLIDING)
    y_tm, caches = _run(x_tm, weights, table_sr, caches, batch, config=config, num=num)
    return y_tm, caches.ring_pow


def hca_step_(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    caches: V4Caches,
    step: Csa2Step,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """One step of a layer of kind HCA or SLIDING, in place in the caches."""
    q_thd, key_td, _ = v4_project(x_tm, weights, table_sr, step.positions_t, config=config, num=num)
    slot_tk = torch.zeros(len(x_tm), 0, dtype=torch.int32, device=x_tm.device)
    if config.kind is V4Kind.HCA:
        entry, pool_ = owned(weights.entry, "entry"), owned(caches.pool, "caches")
        entry_yd, slot_y = step_entries_(x_tm, entry, pool_, table_sr, step, config=config, num=num)
        store_records(owned(caches.main_pow, "caches"), entry_yd, slot_y, layout=SECTIONED, fmt=config.cache, num=num)
        slot_tk = entry_slots(step.positions_t, step.table_bp[step.seq_t.long()], config=config)
    out_thd = attend_records_(
        q_thd, key_td, caches.ring_pow, caches.main_pow, slot_tk, weights.sink_h, step, config=config, num=num
    )
    return v4_output(out_thd, weights, table_sr, step.positions_t, config=config, num=num)


def _run(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    caches: V4Caches,
    batch: Csa2Batch,
    *,
    config: V4AttnConfig,
    num: Numerics,
) -> tuple[Tensor, V4Caches]:
    check_steps(x_tm, batch, config)
    caches = caches.clone()
    y_tm = torch.zeros_like(num.wide(x_tm))
    for step, row_t in batch.steps():
        x_ym = num.wide(x_tm)[row_t]
        y_tm[row_t] = hca_step_(x_ym, weights, table_sr, caches, step, config=config, num=num)
    return y_tm, caches


def _check_kind(config: V4AttnConfig, kind: V4Kind) -> None:
    if config.kind is not kind:
        raise ValueError(f"config: expected kind {kind.name}, got {config.kind.name}")
