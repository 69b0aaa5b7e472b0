"""The two halves of a draft layer. `dspark.py` says how they follow, `dspark_state.py` what they take.

Attention is that of a layer without compression, but all rows of a block see one list: the last accepted keys and every
key of the block, which are stored first and read back as the bytes of the ring, like any window key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import KV_FP8, TwoCaches
from .csa2 import csa2_output, csa2_project
from .csa2_config import CastPoints
from .csa2_layer import layer_norm
from .dspark_state import DraftConfig, DraftLayer
from .kv_cache import store_records
from .linear import linear
from .moe import moe
from .numerics import CONTRACT, Numerics
from .quant import quantize
from .router import route
from .sparse_attn import two_cache_attn_decode


def draft_attend_(
    x_tm: Tensor,
    layer: DraftLayer,
    ring_pow: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    slots_t: Tensor,
    seen_tk: Tensor,
    *,
    config: DraftConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Store the keys of the block's rows in the ring, in place, then attend to the listed slots.

    Raises:
        ValueError: shapes disagree.
    """
    csa2, weights = config.csa2, layer.attention
    x_tm = layer_norm(x_tm, weights.attn_norm_m, csa2, num=num)
    q_thd, key_td, _ = csa2_project(x_tm, weights, table_sr, positions_t, config=csa2, num=num)
    store_records(ring_pow, key_td, slots_t, layout=csa2.layout, num=num)
    caches = TwoCaches(window=KV_FP8, main=csa2.main, layout=csa2.layout, scale=csa2.head_dim**-0.5)
    nothing = ring_pow.new_zeros(0, 1, csa2.main.record_bytes), seen_tk[:, :0]  # no compressed entries
    dtype = torch.float32 if csa2.cast is CastPoints.FUSED else torch.bfloat16
    out_thd, _ = two_cache_attn_decode(
        q_thd, ring_pow, seen_tk, *nothing, weights.sink_h, caches=caches, dtype=dtype, num=num
    )
    return csa2_output(out_thd, weights, table_sr, positions_t, config=csa2, num=num)


def draft_feed(x_tm: Tensor, layer: DraftLayer, *, config: DraftConfig, num: Numerics = CONTRACT) -> Tensor:
    """The feed-forward half: draft rows carry no image mask, so the text bias alone ranks experts.

    Raises:
        ValueError: shapes disagree.
    """
    x_tm = layer_norm(x_tm, layer.ffn_norm_m, config.csa2, num=num)
    logits_te = linear(x_tm, layer.gate_em, dtype=torch.float32, num=num)
    idx_tk, weights_tk = route(logits_te, layer.bias_e, None, None, None, config=config.router, num=num)
    x_q, x_sf = quantize(x_tm, fmt=config.moe.activation, num=num)
    return moe(x_q, x_sf, idx_tk, weights_tk, None, layer.experts, layer.shared, config=config.moe, num=num)
