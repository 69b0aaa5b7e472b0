"""Latent attention of V3 over pages, fast: the contract is `reference/mla_step.py`, in the absorbed form.

Every row is a request of its own to the kernel of paged decoding, with the pages of its sequence and its position. So
no row depends on which others are in the step, and a chunk of a prompt gives the bits that single tokens give.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_shape
from deeptwin.reference.config import MlaConfig, MscaleRule, Pairing, RopeSpan
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.weights import MlaWeights

from .linear import linear_triton
from .mla import mla_decode_triton, store_latent_triton
from .rms_norm import rms_norm_triton
from .rope import rope_triton
from .topk import physical_slots_triton


def mla_step_triton_(
    x_tm: Tensor, weights: MlaWeights, table_sr: Tensor, cache_pod_: Tensor, step: Csa2Step, *, config: MlaConfig
) -> Tensor:
    """Store the rows of a step's tokens, and attend to all rows of their sequences, causally.

    Raises:
        TypeError: rows or cache are not bfloat16.
        ValueError: shapes disagree.
        NotImplementedError: latents are no power of two of channels.
    """
    expect_shape("x_tm", x_tm, "tm", {"t": len(step.positions_t), "m": config.hidden})
    expect_dtype("x_tm", x_tm, torch.bfloat16)
    expect_shape("cache_pod_", cache_pod_, "pod", {"d": config.latent_dim})
    q_thd, _, rows_td = latent_rows(x_tm, weights, step.positions_t, table_sr, config=config)
    table_tp = step.table_bp[step.seq_t.long()].contiguous()
    store_latent_triton(cache_pod_, rows_td, token_slots(step, table_tp, cache_pod_.shape[1]))
    z_t1hc, _ = mla_decode_triton(
        absorbed_query(q_thd, weights, config=config)[:, None],
        cache_pod_,
        table_tp,
        step.positions_t.to(torch.int32) + 1,
        scale=softmax_scale(config),
        value_dim=config.kv_lora_rank,
    )
    return absorbed_output(z_t1hc[:, 0], weights)


def latent_rows(
    x_tm: Tensor, weights: MlaWeights, positions_t: Tensor, table_sr: Tensor, *, config: MlaConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Query heads, the query latent (the row itself where there is none), and the row that each token leaves."""

    def norm(x_td: Tensor, weight_d: Tensor) -> Tensor:
        return rms_norm_triton(x_td, weight_d, eps=config.norm_eps, cast=config.weight_cast)

    def turned(x_thd: Tensor) -> Tensor:
        pairing, span = Pairing.INTERLEAVED, RopeSpan.LAST
        return rope_triton(x_thd, table_sr, positions_t, pairing=pairing, span=span, inverse=False)

    latent_ta, c = x_tm, config.kv_lora_rank
    if weights.w_qa_am is not None and weights.q_norm_a is not None:
        latent_ta = norm(linear_triton(x_tm, weights.w_qa_am), weights.q_norm_a)
    q_tk = linear_triton(latent_ta, weights.w_qb_hda.flatten(0, 1))
    down_td = linear_triton(x_tm, weights.w_kv_dm)
    rows_td = torch.cat([norm(down_td[:, :c], weights.kv_norm_c), down_td[:, c:]], dim=1)
    q_thd = turned(q_tk.view(len(x_tm), config.num_heads, config.head_dim))
    return q_thd, latent_ta, turned(rows_td[:, None])[:, 0]


def absorbed_query(q_thd: Tensor, weights: MlaWeights, *, config: MlaConfig) -> Tensor:
    """Query heads as latent rows meet them: [W_UK[h]^T q_nope | q_rope]."""
    from deeptwin.kernels.triton_ops.head_product import head_product

    q_nope_thn, q_rope_thr = q_thd.split([config.nope_dim, config.rope.rope_dim], dim=-1)
    return torch.cat([head_product(q_nope_thn, weights.w_uk_hnc), q_rope_thr], dim=-1)


def absorbed_output(z_thc: Tensor, weights: MlaWeights) -> Tensor:
    """What mixed latents give to the residual stream."""
    from deeptwin.kernels.triton_ops.head_product import head_product

    out_thu = head_product(z_thc, weights.w_uv_huc.mT)
    return linear_triton(out_thu.flatten(1), weights.w_o_mhu.flatten(1))


def token_slots(step: Csa2Step, table_tp: Tensor, page_tokens: int) -> Tensor:
    """The slot of every token of a step in pages of one entry a token; -1, which stores nothing, without a page."""
    position_t1 = step.positions_t.to(torch.int32)[:, None].contiguous()
    return physical_slots_triton(position_t1, table_tp, page_entries=page_tokens)[:, 0]


def softmax_scale(config: MlaConfig) -> float:
    """head_dim^-0.5, times the square of YaRN's magnitude, of the field that the rule names."""
    yarn = config.rope.yarn
    if yarn is None:
        return config.head_dim**-0.5
    field = yarn.mscale if yarn.mscale_rule is MscaleRule.DEMO else yarn.mscale_all_dim
    return config.head_dim**-0.5 * (0.1 * field * math.log(yarn.factor) + 1.0) ** 2
