"""Heavily compressed and sliding attention of V4 on the fast kernels: the contract is `reference/hca.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.config import V4AttnConfig, V4Kind
from deeptwin.reference.csa2_state import Csa2Batch, Csa2Step
from deeptwin.reference.v4_state import V4Caches
from deeptwin.reference.v4_weights import V4Weights, owned

from .csa import _attend, _projected, _require_parts, _require_steps, _store_entries, _whole_sequences, v4_output_triton
from .topk import physical_slots_triton


def hca_attention_triton(
    x_tm: Tensor, weights: V4Weights, table_sr: Tensor, cu_seqlens: Tensor, *, config: V4AttnConfig
) -> Tensor:
    """Whole sequences: one prefill step over fresh caches.

    Raises:
        ValueError: shapes disagree; config is not of kind HCA.
        NotImplementedError: keys are not quantised.
    """
    caches, batch = _whole_sequences(x_tm, cu_seqlens, config)
    return hca_run_triton(x_tm, weights, table_sr, caches, batch, config=config)[0]


def sliding_attention_triton(
    x_tm: Tensor, weights: V4Weights, table_sr: Tensor, cu_seqlens: Tensor, *, config: V4AttnConfig
) -> Tensor:
    """As `hca_attention_triton`, for layers with a window alone.

    Raises:
        ValueError: shapes disagree; config is not of kind SLIDING.
        NotImplementedError: keys are not quantised.
    """
    caches, batch = _whole_sequences(x_tm, cu_seqlens, config)
    return sliding_run_triton(x_tm, weights, table_sr, caches, batch, config=config)[0]


def hca_run_triton(
    x_tm: Tensor, weights: V4Weights, table_sr: Tensor, caches: V4Caches, batch: Csa2Batch, *, config: V4AttnConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Any steps; caches are copied once and then written in place.

    Raises:
        ValueError: shapes disagree; config is not of kind HCA; caches lack a part; the steps do not add up to t tokens,
            or a decode step is longer than `config.backtracking`.
    """
    _require_steps(x_tm, batch, config, V4Kind.HCA)
    _require_parts(caches, V4Kind.HCA)
    y_tm, caches = _run(x_tm, weights, table_sr, caches, batch, config)
    return y_tm, caches.ring_pow, owned(caches.main_pow, "caches"), owned(caches.pool, "caches")


def sliding_run_triton(
    x_tm: Tensor, weights: V4Weights, table_sr: Tensor, caches: V4Caches, batch: Csa2Batch, *, config: V4AttnConfig
) -> tuple[Tensor, Tensor]:
    """As `hca_run_triton`, for layers with a window alone.

    Raises:
        ValueError: shapes disagree; config is not of kind SLIDING; the steps do not add up to t tokens, or a decode
            step is longer than `config.backtracking`.
    """
    _require_steps(x_tm, batch, config, V4Kind.SLIDING)
    y_tm, caches = _run(x_tm, weights, table_sr, caches, batch, config)
    return y_tm, caches.ring_pow


def _run(
    x_tm: Tensor, weights: V4Weights, table_sr: Tensor, caches: V4Caches, batch: Csa2Batch, config: V4AttnConfig
) -> tuple[Tensor, V4Caches]:
    caches = caches.clone()
    y_tm = torch.empty_like(x_tm, memory_format=torch.contiguous_format)
    for step, row_t in batch.steps():
        y_tm[row_t] = _step(x_tm[row_t], weights, table_sr, caches, step, config)
    return y_tm, caches


def _step(
    x_tm: Tensor, weights: V4Weights, table_sr: Tensor, caches: V4Caches, step: Csa2Step, config: V4AttnConfig
) -> Tensor:
    q_thd, down_td, _ = _projected(x_tm, weights, table_sr, step.positions_t, config)
    main_pow = caches.ring_pow[:0]
    slot_tk = torch.zeros(len(x_tm), 0, dtype=torch.int32, device=x_tm.device)
    if config.kind is V4Kind.HCA:
        main_pow = owned(caches.main_pow, "caches")
        _store_entries(x_tm, weights, caches, table_sr, step, config)
        slot_tk = _visible_slots(step, config)
    out_thd = _attend(q_thd, down_td, weights, main_pow, slot_tk, caches.ring_pow, table_sr, step, config)
    return v4_output_triton(out_thd, weights, table_sr, step.positions_t, config=config)


def _visible_slots(step: Csa2Step, config: V4AttnConfig) -> Tensor:
    """The slots of all entries that every token sees, -1 behind; as long as the fullest sequence needs."""
    most = int(step.end_b.max()) // config.ratio
    entry_j = torch.arange(most, dtype=torch.int32, device=step.positions_t.device)
    visible_t1 = ((step.positions_t + 1) // config.ratio)[:, None]
    entry_tj = torch.where(entry_j < visible_t1, entry_j, -1).to(torch.int32)
    return physical_slots_triton(
        entry_tj, step.table_bp[step.seq_t.long()].contiguous(), page_entries=config.page_entries
    )
