"""Sparse attention of V3.2 over pages, fast: the contract is `reference/dsa_step.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_shape
from deeptwin.reference.config import DsaConfig, PageLayout
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.dsa_state import DsaCaches, DsaWeights

from .attention_v3 import absorbed_output, absorbed_query, latent_rows, softmax_scale, token_slots
from .dsa import _index_query, dsa_index_keys_triton, dsa_index_scores_paged_triton, sparse_mla_triton
from .kv_cache import store_records_triton
from .linear import linear_triton
from .topk import physical_slots_triton, topk_triton


def dsa_step_triton_(
    x_tm: Tensor, weights: DsaWeights, table_sr: Tensor, caches: DsaCaches, step: Csa2Step, *, config: DsaConfig
) -> Tensor:
    """Store the records of a step's tokens, pick, and attend.

    Raises:
        TypeError: rows are not bfloat16.
        ValueError: shapes disagree.
        NotImplementedError: index keys or latents are not quantised.
    """
    mla, positions_t = config.mla, step.positions_t
    expect_shape("x_tm", x_tm, "tm", {"t": len(positions_t), "m": mla.hidden})
    expect_dtype("x_tm", x_tm, torch.bfloat16)
    if config.index_key is None or config.latent is None:
        raise NotImplementedError(f"config: expected quantised index keys and latents, got {config}")
    q_thd, latent_ta, rows_td = latent_rows(x_tm, weights.mla, positions_t, table_sr, config=mla)
    k_td = linear_triton(x_tm, weights.w_k_dm)
    k_td = dsa_index_keys_triton(k_td, weights.k_norm_d, weights.k_bias_d, table_sr, positions_t, config=config)
    table_tp, page_tokens = step.table_bp[step.seq_t.long()].contiguous(), caches.latent_pow.shape[1]
    slot_t = token_slots(step, table_tp, page_tokens)
    store_records_triton(caches.latent_pow, rows_td, slot_t, layout=PageLayout.INTERLEAVED, fmt=config.latent)
    store_records_triton(caches.index_pow, k_td, slot_t, layout=PageLayout.SECTIONED, fmt=config.index_key)
    codes_thd, w_th = _index_query(x_tm, latent_ta, weights, positions_t, table_sr, config)
    length_t = positions_t.to(torch.int32) + 1
    scores_ts = dsa_index_scores_paged_triton(codes_thd, caches.index_pow, w_th, table_tp, length_t)
    picks_tk = topk_triton(scores_ts, length_t, k=config.topk)
    slot_tk = physical_slots_triton(picks_tk, table_tp, page_entries=page_tokens)
    q_full, scale = absorbed_query(q_thd, weights.mla, config=mla), softmax_scale(mla)
    z_thc, _ = sparse_mla_triton(q_full, caches.latent_pow, slot_tk, None, scale=scale)
    return absorbed_output(z_thc, weights.mla)
