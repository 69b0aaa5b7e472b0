"""DeepSeek sparse attention (V3.2): latent attention to the tokens that the lightning indexer picks.

A layer takes its normalised input x and returns what the residual stream gains:

1. latent attention projects queries and the row [c | k_rope] that each token leaves in the cache (`mla_project`); with
   a record format c goes through its quantiser, for prefill and decode alike;
2. the indexer makes a key of every token, and queries from the latent that the main queries come from;
3. a query picks the `topk` best of the tokens at or before it, all of them while there are no more than that;
4. it attends to these alone, in the absorbed form: the row is key and (in its first c channels) value of every head.
   All heads share one list. Mass that was not picked is not made up for.

A pick that lies in the query's future is dropped although the selection never makes one: lists of foreign selections,
which mask scores and not indices, do.

State is passed as `DsaState`; a chunk, or a decode step, is a call with `past`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_records, expect_shape
from .config import DsaConfig, MlaConfig, PageLayout
from .dsa_index import dsa_index_scores
from .dsa_rows import dsa_query, dsa_rows, quantized_rows
from .dsa_state import DsaState, DsaWeights
from .kv_cache import load_records, pack_records, unpack_records
from .numerics import CONTRACT, Numerics
from .rope import softmax_scale
from .sparse_attn import sparse_attn
from .topk import topk
from .weights import Latents, MlaWeights


def dsa_project(
    x_tm: Tensor,
    weights: DsaWeights,
    positions_t: Tensor,
    table_sr: Tensor,
    *,
    config: DsaConfig,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor, DsaState]:
    """`dsa_rows` with what each token leaves in the caches in place of its rows.

    Rounding:
        as `dsa_rows`; latents and keys as their record formats.

    Raises:
        ValueError: shapes disagree.
    """
    q_thd, latent_ta, rows_td, k_td = dsa_rows(
        x_tm, weights, positions_t, table_sr, config=config, dtype=dtype, num=num
    )
    if config.latent is not None:
        # by way of the bytes: decode will read these values, whatever the numerics
        records_tw = pack_records(rows_td, fmt=config.latent, num=num)
        rows_td = unpack_records(records_tw, fmt=config.latent, dtype=dtype, num=num)
    key_sd, key_sf_sg = quantized_rows(k_td, config, num=num)
    latents = Latents(rows_sd=rows_td, positions_s=positions_t)
    return q_thd, latent_ta, DsaState(latents=latents, key_sd=key_sd, key_sf_s=key_sf_sg[:, 0])


def dsa_picks(
    x_tm: Tensor,
    latent_ta: Tensor,
    weights: DsaWeights,
    positions_t: Tensor,
    table_sr: Tensor,
    state: DsaState,
    *,
    config: DsaConfig,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """The picked tokens of every query, and the scores behind them.

    Shapes:
        latent_ta: of `dsa_project`; state: every token so far, in order of position, these t tokens last; returns int32
        [t, topk], rows of `state` in ascending order and -1 behind them, and fp32 scores [t, s].

    Rounding:
        as `dsa_index_queries`, `dsa_index_weights` and `dsa_index_scores`.

    Edges:
        while there are no more than `topk` tokens all of them are picked and no score decides; scores are [t, 0] then.
        Equal scores go to the earlier token.

    Raises:
        ValueError: shapes disagree.

    Source:
        v3-v32-v4.md sections 4.1, 4.6
    """
    length_t = _visible(positions_t, state)
    s = len(state.latents.positions_s)
    if s <= config.topk:
        row_k = torch.arange(config.topk, dtype=torch.int32, device=x_tm.device)
        picks_tk = torch.where(row_k < length_t[:, None], row_k, -1)
        return picks_tk, torch.zeros(len(x_tm), 0, dtype=num.carrier, device=x_tm.device)
    codes_thd, w_th = dsa_query(x_tm, latent_ta, weights, positions_t, table_sr, config=config, dtype=dtype, num=num)
    scores_ts = dsa_index_scores(codes_thd, state.key_sd, state.key_sf_s, w_th, length_t, num=num)
    return topk(scores_ts, length_t, k=config.topk), scores_ts


def dsa_attention(
    x_tm: Tensor,
    weights: DsaWeights,
    positions_t: Tensor,
    table_sr: Tensor,
    picks_tk: Tensor | None,
    *,
    config: DsaConfig,
    past: DsaState | None = None,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """One sequence, or its next tokens after the cached `past`.

    Math:
        score[t, h, s] = scale * <[W_UK[h]^T q_nope | q_rope], [c | k_rope]> for s in the picks of t with s <= t;
        out[t] = W_O concat_h(W_UV[h] sum_s softmax(score) c[s])

    Shapes:
        x_tm: [t, m]; positions_t: int64 [t], ascending by one; table_sr: fp32 [s, r]; picks_tk: int32 [t, any] rows of
        past and these tokens, or None: the indexer picks; returns [t, m].

    Rounding:
        as `mla_absorbed`, over latents of `dsa_project`.

    Edges:
        picks of -1 or after the query are holes; a query without a pick gives W_O applied to zeros.

    Raises:
        TypeError: picks are not int32.
        ValueError: shapes disagree.

    Source:
        v3-v32-v4.md section 4.3
    """
    mla = config.mla
    expect_shape("x_tm", x_tm, "tm", {"t": len(positions_t), "m": mla.hidden})
    q_thd, latent_ta, new = dsa_project(x_tm, weights, positions_t, table_sr, config=config, dtype=dtype, num=num)
    state = new if past is None else past.then(new)
    if picks_tk is None:
        picks_tk, _ = dsa_picks(
            x_tm, latent_ta, weights, positions_t, table_sr, state, config=config, dtype=dtype, num=num
        )
    expect_shape("picks_tk", picks_tk, "tk", {"t": len(positions_t)})
    expect_dtype("picks_tk", picks_tk, torch.int32)
    picks_tk = torch.where(picks_tk < _visible(positions_t, state)[:, None], picks_tk, -1)
    scale = softmax_scale(mla.head_dim, mla.rope.yarn)
    z_thc, _ = sparse_attn(
        absorbed_query(q_thd, weights.mla, config=mla, dtype=dtype, num=num),
        state.latents.rows_sd,
        picks_tk,
        None,
        None,
        scale=scale,
        value_dim=mla.kv_lora_rank,
        dtype=dtype,
        num=num,
    )
    return absorbed_output(z_thc, weights.mla, dtype=dtype, num=num)


def absorbed_query(
    q_thd: Tensor,
    weights: MlaWeights,
    *,
    config: MlaConfig,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Query heads as latent rows meet them: [W_UK[h]^T q_nope | q_rope], [t, h, c + r]."""
    q_nope_thn, q_rope_thr = q_thd.split([config.nope_dim, config.rope.rope_dim], dim=-1)
    qa_thc = num.store(num.einsum("thn,hnc->thc", q_nope_thn, num.wide(weights.w_uk_hnc)), dtype)
    return torch.cat([qa_thc, q_rope_thr], dim=-1)


def absorbed_output(
    z_thc: Tensor, weights: MlaWeights, *, dtype: torch.dtype = torch.bfloat16, num: Numerics = CONTRACT
) -> Tensor:
    """What mixed latents give to the residual stream: W_O concat_h(W_UV[h] z[t, h])."""
    out_thu = num.store(num.einsum("thc,huc->thu", z_thc, num.wide(weights.w_uv_huc)), dtype)
    return num.store(num.einsum("thu,mhu->tm", out_thu, num.wide(weights.w_o_mhu)), dtype)


def sparse_mla(
    q_thd: Tensor,
    cache_pow: Tensor,
    idx_tk: Tensor,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """Attend from each query to listed records of a paged cache, prefill and decode alike.

    Math:
        as `sparse_attn` without a sink; the key is the record's values, the value its quantised channels alone

    Shapes:
        q_thd: [t, h, d], d = 576; cache_pow: uint8 [p, o, 656], pages may lie apart; idx_tk: int32 [t, k], page * o +
        slot; topk_length_t: int32 [t] or None; returns out_thu [t, h, 512] and fp32 lse_th (natural log).

    Rounding:
        reading a record to bf16 (exact where its scale is a power of two), then as `sparse_attn`.

    Edges:
        as `sparse_attn`: holes read nothing, a row of holes gives 0 and -inf. A NaN code, scale or tail of a listed
        record comes out as NaN; records that no list names may hold any bytes.

    Raises:
        ValueError: shapes disagree, no format with a tail has records of w bytes, or `scale` is not positive.
        TypeError: the cache is not uint8, indices or lengths are not int32, or `dtype` is no storage dtype.

    Source:
        v3-v32-v4.md sections 4.3, 4.4; FlashMLA (layout V32)
    """
    dims: dict[str, int] = {}
    expect_shape("idx_tk", idx_tk, "tk", dims)
    expect_dtype("idx_tk", idx_tk, torch.int32)
    fmt = expect_records("cache_pow", cache_pow, {})
    if not fmt.tail:
        raise ValueError(f"cache_pow: expected records with a bf16 tail, got those of {fmt.name}")
    expect_shape("q_thd", q_thd, "thd", dims | {"d": fmt.width})
    is_listed_tk = (idx_tk >= 0) & (idx_tk < cache_pow.shape[0] * cache_pow.shape[1])
    if topk_length_t is not None:
        expect_shape("topk_length_t", topk_length_t, "t", dims)
        expect_dtype("topk_length_t", topk_length_t, torch.int32)
        is_listed_tk &= torch.arange(dims["k"], device=idx_tk.device) < topk_length_t[:, None]
    slot_y = idx_tk[is_listed_tk]
    rows_yd = load_records(cache_pow, slot_y, layout=PageLayout.INTERLEAVED, num=num)
    row_tk = torch.full_like(idx_tk, -1)
    row_tk[is_listed_tk] = torch.arange(len(slot_y), dtype=torch.int32, device=idx_tk.device)
    return sparse_attn(q_thd, rows_yd, row_tk, None, None, scale=scale, value_dim=fmt.channels, dtype=dtype, num=num)


def _visible(positions_t: Tensor, state: DsaState) -> Tensor:
    """How many tokens of `state` stand at or before each query, int32 [t]."""
    seen_ts = state.latents.positions_s[None, :] <= positions_t[:, None]
    return seen_ts.sum(1, dtype=torch.int32)
