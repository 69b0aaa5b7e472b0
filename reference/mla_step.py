"""Latent attention of V3 over pages: one step of packed sequences, in place in the cache of a layer.

Every token leaves its row [c | k_rope] in a page. A sequence reads back the rows of all its tokens and attends to them
in the naive form, whose key and value heads are made anew. So a step gives the very rows that `mla_naive` gives for the
whole sequence, however it is cut into steps. The absorbed form computes the same from the rows themselves and rounds at
other places: it is a candidate for this, not its definition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_shape
from .config import MlaConfig
from .csa2_state import Csa2Step
from .mla import mla_prefill, mla_project, store_latent
from .numerics import CONTRACT, Numerics
from .rope import softmax_scale
from .topk import physical_slots
from .weights import MlaWeights


def mla_step_(
    x_tm: Tensor,
    weights: MlaWeights,
    table_sr: Tensor,
    cache_pod_: Tensor,
    step: Csa2Step,
    *,
    config: MlaConfig,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Store the rows of a step's tokens, and attend to all rows of their sequences, causally.

    Shapes:
        x_tm: [t, m], the rows of `step`; table_sr: fp32 [s, r]; cache_pod_: [p, o, c + r]; returns [t, m].

    Rounding:
        as `mla_naive`; rows to the dtype of the cache, under every numerics.

    Edges:
        slots that no token of the step names keep their bytes, and pages of other sequences are not read. A token that
        is run again writes over its row.

    Raises:
        ValueError: shapes disagree; a sequence has no page for one of its tokens.

    Source:
        v3-v32-v4.md sections 3.1, 3.2
    """
    expect_shape("x_tm", x_tm, "tm", {"t": len(step.positions_t), "m": config.hidden})
    expect_shape("cache_pod_", cache_pod_, "pod", {"d": config.latent_dim})
    q_thd, new = mla_project(x_tm, weights, step.positions_t, table_sr, config=config, dtype=dtype, num=num)
    rows_td = torch.empty_like(new.rows_sd, dtype=cache_pod_.dtype).copy_(new.rows_sd)
    store_latent(cache_pod_, rows_td, token_slots(step, cache_pod_.shape[1]))
    w_uk_hnc, w_uv_huc = num.wide(weights.w_uk_hnc), num.wide(weights.w_uv_huc)
    scale, parts = softmax_scale(config.head_dim, config.rope.yarn), []
    bounds = step.cu_seqlens.tolist()
    for b, end in enumerate(step.end_b.tolist()):
        page_i = step.table_bp[b, : -(-end // cache_pod_.shape[1])].long()
        rows_sd = num.wide(cache_pod_[page_i].flatten(0, 1)[:end])
        c_sc, k_rope_sr = rows_sd.split([config.kv_lora_rank, config.rope.rope_dim], dim=-1)
        k_nope_shn = num.store(num.einsum("sc,hnc->shn", c_sc, w_uk_hnc), dtype)
        v_shu = num.store(num.einsum("sc,huc->shu", c_sc, w_uv_huc), dtype)
        k_shd = torch.cat([k_nope_shn, k_rope_sr[:, None].expand(-1, config.num_heads, -1)], dim=-1)
        own_thd = q_thd[bounds[b] : bounds[b + 1]]
        parts.append(mla_prefill(own_thd, k_shd, v_shu, scale=scale, dtype=dtype, num=num)[0])
    out_thu = torch.cat(parts)
    return num.store(num.einsum("thu,mhu->tm", out_thu, num.wide(weights.w_o_mhu)), dtype)


def token_slots(step: Csa2Step, page_tokens: int) -> Tensor:
    """The slot of every token of a step in pages of one entry a token, int64 [t].

    Raises:
        ValueError: a sequence has no page for one of its tokens.
    """
    table_tp = step.table_bp[step.seq_t.long()]
    slot_t = physical_slots(step.positions_t[:, None], table_tp, page_entries=page_tokens)[:, 0].long()
    if (slot_t < 0).any():
        lost = int((slot_t < 0).nonzero()[0])
        raise ValueError(f"step: expected a page for every token, got none for position {step.positions_t[lost]}")
    return slot_t
