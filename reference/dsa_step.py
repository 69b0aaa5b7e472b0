"""Sparse attention of V3.2 over pages: one step of packed sequences, in place in the caches of a layer.

A token leaves two records: its latent row for attention, its index key for the selection. Both stand in the pages of
its sequence before any query of the step looks. Queries score the keys of their sequence, pick, and attend to the
picked records; what they read is what `dsa_attention` has of whole sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_shape
from .config import DsaConfig, PageLayout
from .csa2_state import Csa2Step
from .dsa import absorbed_output, absorbed_query, sparse_mla
from .dsa_index import dsa_index_scores_paged
from .dsa_rows import dsa_query, dsa_rows
from .dsa_state import DsaCaches, DsaWeights
from .kv_cache import store_records
from .mla_step import token_slots
from .numerics import CONTRACT, Numerics
from .rope import softmax_scale
from .topk import physical_slots, topk


def dsa_step_(
    x_tm: Tensor,
    weights: DsaWeights,
    table_sr: Tensor,
    caches: DsaCaches,
    step: Csa2Step,
    *,
    config: DsaConfig,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Store the records of a step's tokens, pick, and attend.

    Shapes:
        x_tm: [t, m], the rows of `step`; table_sr: fp32 [s, r]; returns [t, m].

    Rounding:
        as `dsa_attention`; records are bytes under every numerics.

    Edges:
        as `mla_step_`. A query with no more than `topk` tokens at or before it picks all of them.

    Raises:
        ValueError: shapes disagree; a sequence has no page for one of its tokens; config has no records.

    Source:
        v3-v32-v4.md sections 4.1 to 4.4
    """
    mla, positions_t = config.mla, step.positions_t
    expect_shape("x_tm", x_tm, "tm", {"t": len(positions_t), "m": mla.hidden})
    if config.latent is None or config.index_key is None:
        raise ValueError(f"config: expected records of latents and keys, got {config.latent}, {config.index_key}")
    slot_t = token_slots(step, caches.latent_pow.shape[1])
    q_thd, latent_ta, rows_td, k_td = dsa_rows(
        x_tm, weights, positions_t, table_sr, config=config, dtype=dtype, num=num
    )
    store_records(caches.latent_pow, rows_td, slot_t, layout=PageLayout.INTERLEAVED, fmt=config.latent, num=num)
    store_records(caches.index_pow, k_td, slot_t, layout=PageLayout.SECTIONED, fmt=config.index_key, num=num)
    table_tp, length_t = step.table_bp[step.seq_t.long()], (positions_t + 1).to(torch.int32)
    codes_thd, w_th = dsa_query(x_tm, latent_ta, weights, positions_t, table_sr, config=config, dtype=dtype, num=num)
    scores_ts = dsa_index_scores_paged(codes_thd, caches.index_pow, w_th, table_tp, length_t, num=num)
    picks_tk = topk(scores_ts, length_t, k=config.topk)
    slot_tk = physical_slots(picks_tk, table_tp, page_entries=caches.latent_pow.shape[1])
    q_full = absorbed_query(q_thd, weights.mla, config=mla, dtype=dtype, num=num)
    scale = softmax_scale(mla.head_dim, mla.rope.yarn)
    z_thc, _ = sparse_mla(q_full, caches.latent_pow, slot_tk, None, scale=scale, dtype=dtype, num=num)
    return absorbed_output(z_thc, weights.mla, dtype=dtype, num=num)
