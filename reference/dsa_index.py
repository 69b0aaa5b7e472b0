"""The lightning indexer of V3.2: which earlier tokens a query should attend to.

Every query has H small heads, every token one small key. The score of token s for the query t is

    I(t, s) = k_sf[s] * sum over heads h of w[t, h] * max(q[t, h] . k[s], 0)      for s <= t

where q and k are e4m3 codes with one fp32 scale a row, and w holds the query's scales:

    w[t, h] = (x[t] . w_head[h]) * heads^-0.5 * q_sf[t, h] * dim^-0.5

The weight is signed, so a score may be negative. Keys go through a layer norm, queries do not; the *first* r channels
of both are rotated; `IndexerRope` says in which pairs. Then both go through the Hadamard transform, which changes no
score but spreads a large channel before the quantiser meets it.

A cache page of o keys holds the codes of all of them, then their fp32 scales: SECTIONED records of 132 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_positive, expect_shape
from .config import DsaConfig, IndexerRope, Pairing, RopeSpan
from .hadamard import hadamard
from .numerics import CONTRACT, Numerics
from .rms_norm import FLOATING
from .rope import rope
from .topk import in_chunks

E4M3 = torch.float8_e4m3fn
PAIRS = {IndexerRope.HALF_SPLIT: Pairing.HALF_SPLIT, IndexerRope.INTERLEAVED: Pairing.INTERLEAVED}


def dsa_index_queries(
    q_thd: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    config: DsaConfig,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Projected heads, their first r channels rotated, then through the Hadamard transform if keys are quantised.

    Shapes:
        q_thd: [t, h, d]; table_sr: fp32 [s, r] of `rope_table`; positions_t: integer [t]; returns [t, h, d].

    Rounding:
        the rotation to `dtype`, the transform as `hadamard`.

    Raises:
        TypeError: q_thd is not floating, the table not float32, positions no integers; dtype is no storage dtype.
        ValueError: shapes disagree, also with `config`; r is odd; a position is no row of the table.

    Source:
        v3-v32-v4.md section 4.1
    """
    expect_shape("q_thd", q_thd, "thd", {"d": config.index_dim})
    expect_shape("table_sr", table_sr, "sr", {"r": config.mla.rope.rope_dim})
    pairs = PAIRS[config.indexer_rope]
    y_thd = rope(q_thd, table_sr, positions_t, pairing=pairs, span=RopeSpan.FIRST, inverse=False, dtype=dtype, num=num)
    if config.index_key is None:
        return y_thd
    return hadamard(y_thd.flatten(0, 1), dtype=dtype, num=num).view(y_thd.shape)


def dsa_index_keys(
    k_td: Tensor,
    weight_d: Tensor,
    bias_d: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    config: DsaConfig,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Projected keys through the layer norm, then as `dsa_index_queries`.

    Math:
        y = (k - mean) / sqrt(mean of (k - mean)^2 + eps) * weight + bias, over the d channels

    Shapes:
        k_td: [t, d]; weight_d, bias_d: [d]; the rest as `dsa_index_queries`; returns [t, d].

    Rounding:
        the norm once to `dtype`, then as `dsa_index_queries`.

    Raises:
        TypeError: a tensor is not floating, the table not float32, positions no integers; dtype is no storage dtype.
        ValueError: as `dsa_index_queries`.

    Source:
        v3-v32-v4.md section 4.1
    """
    dims = {"d": config.index_dim}
    expect_shape("k_td", k_td, "td", dims)
    for name, x_d in (("weight_d", weight_d), ("bias_d", bias_d)):
        expect_shape(name, x_d, "d", dims)
        expect_dtype(name, x_d, *FLOATING)
    expect_dtype("k_td", k_td, *FLOATING)
    k_td = num.wide(k_td)
    apart_td = k_td - num.sum(k_td, dim=-1, keepdim=True) / dims["d"]
    rstd_t1 = torch.rsqrt(num.sum(apart_td * apart_td, dim=-1, keepdim=True) / dims["d"] + config.norm_eps)
    y_td = num.store(apart_td * rstd_t1 * num.wide(weight_d) + num.wide(bias_d), dtype)
    return dsa_index_queries(y_td[:, None], table_sr, positions_t, config=config, dtype=dtype, num=num)[:, 0]


def dsa_index_weights(
    x_tm: Tensor, w_hm: Tensor, q_sf_th: Tensor, *, index_dim: int, num: Numerics = CONTRACT
) -> Tensor:
    """The signed weights of the heads, the scales of the queries in them; all of it fp32.

    Shapes:
        x_tm: [t, m], widened; w_hm: fp32 [h, m]; q_sf_th: fp32 [t, h]; returns [t, h].

    Rounding:
        the product, and each of the three factors behind it, to fp32. A product in bf16 (first release) changes which
        tokens are chosen.

    Raises:
        TypeError: x_tm is not floating; w_hm or q_sf_th is not float32.
        ValueError: shapes disagree; index_dim is not positive.

    Source:
        v3-v32-v4.md section 4.1, step 6
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("w_hm", w_hm, "hm", dims)
    expect_shape("q_sf_th", q_sf_th, "th", dims)
    expect_dtype("x_tm", x_tm, *FLOATING)
    expect_dtype("w_hm", w_hm, torch.float32)
    expect_dtype("q_sf_th", q_sf_th, torch.float32)
    expect_positive("index_dim", index_dim)
    w_th = num.f32(num.einsum("tm,hm->th", num.wide(x_tm), num.wide(w_hm)))
    w_th = num.f32(w_th * dims["h"] ** -0.5)
    return num.f32(num.f32(w_th * num.wide(q_sf_th)) * index_dim**-0.5)


def dsa_index_scores(
    q_thd: Tensor, k_sd: Tensor, k_sf_s: Tensor, w_th: Tensor, length_t: Tensor, *, num: Numerics = CONTRACT
) -> Tensor:
    """Scores of the first length[t] keys of one sequence, -inf behind them.

    Shapes:
        q_thd: e4m3 codes [t, h, d]; k_sd: e4m3 [s, d]; k_sf_s: fp32 [s]; w_th: fp32 [t, h]; length_t: int32 [t];
        returns fp32 [t, s]. Rows that were not quantised may be bf16 or fp32, with scales of 1.

    Rounding:
        every dot product, the weighted sum over heads, and its product with the scale, to fp32.

    Edges:
        keys that a row does not see may hold any bytes. A NaN in a seen key or scale is a NaN score. A length above s
        counts as s. The positive part keeps NaN.

    Raises:
        TypeError: q and k are not both e4m3 or both floating; scales or weights are not fp32 numbers; lengths are not
            int32.
        ValueError: shapes disagree.

    Source:
        v3-v32-v4.md section 4.1, step 7; DeepGEMM fp8_mqa_logits
    """
    dims = _check_queries(q_thd, w_th, length_t)
    expect_shape("k_sd", k_sd, "sd", dims)
    expect_dtype("k_sd", k_sd, *((E4M3,) if q_thd.dtype is E4M3 else FLOATING))
    expect_shape("k_sf_s", k_sf_s, "s", dims)
    expect_dtype("k_sf_s", k_sf_s, torch.float32)
    row_ts = torch.arange(dims["s"], device=k_sd.device).expand(dims["t"], -1)
    return _scored(q_thd, k_sd, k_sf_s, w_th, torch.where(row_ts < length_t[:, None], row_ts, -1), num)


def dsa_index_scores_paged(
    q_thd: Tensor, cache_pow: Tensor, w_th: Tensor, table_tj: Tensor, length_t: Tensor, *, num: Numerics = CONTRACT
) -> Tensor:
    """The same scores with keys in a paged cache of SECTIONED records.

    Shapes:
        cache_pow: uint8 [p, o, d + 4], whose pages may lie apart; table_tj: int32 [t, j], the pages of the token's
        sequence; returns fp32 [t, j * o]. The rest as `dsa_index_scores`.

    Edges:
        as `dsa_index_scores`; an entry whose page is not in the cache is -inf.

    Raises:
        TypeError: q is not e4m3, the cache not uint8, weights no fp32 numbers, pages or lengths not int32.
        ValueError: shapes disagree.

    Source:
        v3-v32-v4.md section 4.7; DeepGEMM fp8_paged_mqa_logits
    """
    dims = _check_queries(q_thd, w_th, length_t)
    expect_dtype("q_thd", q_thd, E4M3)
    expect_shape("cache_pow", cache_pow, "pow", dims | {"w": dims["d"] + 4})
    expect_dtype("cache_pow", cache_pow, torch.uint8)
    expect_shape("table_tj", table_tj, "tj", dims)
    expect_dtype("table_tj", table_tj, torch.int32)
    p, o, d = *cache_pow.shape[:2], dims["d"]
    page_pw = cache_pow.flatten(1)  # copies pages that lie apart
    k_sd = page_pw[:, : o * d].reshape(p * o, d).view(E4M3)
    k_sf_s = page_pw[:, o * d :].reshape(p * o, 4).contiguous().view(torch.float32)[:, 0]
    entry_s = torch.arange(dims["j"] * o, device=cache_pow.device)
    page_ts = table_tj.long().repeat_interleave(o, 1)
    seen_ts = (entry_s < length_t[:, None]) & (page_ts >= 0) & (page_ts < p)
    return _scored(q_thd, k_sd, k_sf_s, w_th, torch.where(seen_ts, page_ts * o + entry_s % max(o, 1), -1), num)


def _scored(q_thd: Tensor, k_sd: Tensor, k_sf_s: Tensor, w_th: Tensor, row_ts: Tensor, num: Numerics) -> Tensor:
    """Every query against the rows that it sees; a row of -1 is -inf, whatever stands in its place."""
    seen_ts, rows_ts = row_ts >= 0, row_ts.clamp(min=0)
    scores_ts = torch.full(row_ts.shape, -torch.inf, dtype=num.carrier, device=row_ts.device)
    for token_y, most in in_chunks(seen_ts, q_thd.shape[2]):
        rows_ys = rows_ts[token_y, :most]
        dots_yhs = num.einsum("yhd,ysd->yhs", num.wide(q_thd[token_y]), num.wide(k_sd[rows_ys]))
        weighted_ys = num.einsum("yh,yhs->ys", num.wide(w_th[token_y]), dots_yhs.relu())
        scores_ts[token_y, :most] = num.f32(weighted_ys * num.wide(k_sf_s[rows_ys]))
    return scores_ts.masked_fill(~seen_ts, -torch.inf)


def _check_queries(q_thd: Tensor, w_th: Tensor, length_t: Tensor) -> dict[str, int]:
    dims: dict[str, int] = {}
    expect_shape("q_thd", q_thd, "thd", dims)
    expect_dtype("q_thd", q_thd, E4M3, *FLOATING)
    expect_shape("w_th", w_th, "th", dims)
    expect_dtype("w_th", w_th, torch.float32, torch.float64)
    expect_shape("length_t", length_t, "t", dims)
    expect_dtype("length_t", length_t, torch.int32)
    return dims
