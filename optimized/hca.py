"""Heavily compressed and sliding attention of V4 on the fast kernels: the contract is `reference/hca.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.config import V4AttnConfig, V4Kind
from deeptwin.reference.csa2_state import Csa2Batch
from deeptwin.reference.v4_state import V4Caches
from deeptwin.reference.v4_weights import V4Weights, owned

from .attention_v4 import hca_step_triton_
from .csa import _require_parts, _require_steps, _whole_sequences


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
        y_tm[row_t] = hca_step_triton_(x_tm[row_t], weights, table_sr, caches, step, config=config)
    return y_tm, caches
