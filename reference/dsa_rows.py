"""What a token is projected to in a layer of V3.2: queries, its latent row, its index key, and its index query."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import DsaConfig
from .dsa_index import dsa_index_keys, dsa_index_queries, dsa_index_weights
from .dsa_state import DsaWeights
from .mla import mla_project
from .numerics import CONTRACT, Numerics
from .quant import quantize
from .rms_norm import project_norm


def dsa_rows(
    x_tm: Tensor,
    weights: DsaWeights,
    positions_t: Tensor,
    table_sr: Tensor,
    *,
    config: DsaConfig,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Main query heads, the query latent that the indexer shares, and the two rows of each token before a quantiser.

    Shapes:
        x_tm: [t, m]; positions_t: int64 or int32 [t], rows of table_sr: fp32 [s, r]; returns q_thd, latent_ta, latent
        rows [t, c + r] and index keys [t, index_dim].

    Rounding:
        as `mla_project` and `dsa_index_keys`.

    Raises:
        ValueError: shapes disagree.

    Source:
        v3-v32-v4.md sections 3.1, 4.1
    """
    mla = config.mla
    q_thd, new = mla_project(x_tm, weights.mla, positions_t, table_sr, config=mla, dtype=dtype, num=num)
    w_qa_am, q_norm_a = weights.mla.w_qa_am, weights.mla.q_norm_a
    assert w_qa_am is not None
    assert q_norm_a is not None
    latent_ta = project_norm(x_tm, w_qa_am, q_norm_a, eps=mla.norm_eps, cast=mla.weight_cast, dtype=dtype, num=num)
    k_td = num.store(num.einsum("tm,dm->td", num.wide(x_tm), num.wide(weights.w_k_dm)), dtype)
    norm = (weights.k_norm_d, weights.k_bias_d)
    k_td = dsa_index_keys(k_td, *norm, table_sr, positions_t, config=config, dtype=dtype, num=num)
    return q_thd, latent_ta, new.rows_sd, k_td


def dsa_query(
    x_tm: Tensor,
    latent_ta: Tensor,
    weights: DsaWeights,
    positions_t: Tensor,
    table_sr: Tensor,
    *,
    config: DsaConfig,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """The index query of every token, as its keys are stored, and the weights of its heads: [t, h, d] and fp32 [t, h].

    Raises:
        ValueError: shapes disagree.
    """
    q_thd = num.store(num.einsum("ta,hda->thd", num.wide(latent_ta), num.wide(weights.w_qb_hda)), dtype)
    q_thd = dsa_index_queries(q_thd, table_sr, positions_t, config=config, dtype=dtype, num=num)
    codes_yd, sf_y1 = quantized_rows(q_thd.flatten(0, 1), config, num=num)
    sf_th = sf_y1.view(q_thd.shape[:2])
    w_th = dsa_index_weights(x_tm, weights.w_head_hm, sf_th, index_dim=config.index_dim, num=num)
    return codes_yd.view(q_thd.shape), w_th


def quantized_rows(x_td: Tensor, config: DsaConfig, *, num: Numerics = CONTRACT) -> tuple[Tensor, Tensor]:
    """Index rows as codes [t, d] and fp32 scales [t, 1]; as fp32 rows with scales of 1 where nothing is quantised."""
    if config.index_key is not None:
        return quantize(x_td, fmt=config.index_key.quant, num=num)
    return x_td, torch.ones(len(x_td), 1, dtype=torch.float32, device=x_td.device)
