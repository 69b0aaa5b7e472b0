"""Multi-head latent attention (V3, V3.2): the naive form, the absorbed form, and the cores that kernels implement.

A token is cached as one latent row [c | k_rope], shared by all heads. A key head is W_UK c beside k_rope, a value head
is W_UV c. The naive form builds those heads. The absorbed form moves both matrices to the query side,

    <q_nope, W_UK c> = <W_UK^T q_nope, c>        sum_s p_s (W_UV c_s) = W_UV (sum_s p_s c_s)

so the latent row is key and (in its first part) value of every head. The two are equal by associativity and differ
only in where they round.

Where numbers are rounded: every projection to the storage dtype, also the absorbed query and the mixed latent; scores,
row sums and LSE in fp32; softmax weights unnormalised to the storage dtype (free scale), but not in the row sum.

Letters beside the project's: n is the width of a head without its rotary slice (no residual streams occur here).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_positive, expect_shape
from .config import MlaConfig, Pairing, RopeSpan
from .numerics import CONTRACT, Numerics
from .rms_norm import project_norm, rms_norm
from .rope import rope, softmax_scale
from .weights import Latents, MlaWeights


def mla_project(
    x_tm: Tensor,
    weights: MlaWeights,
    positions_t: Tensor,
    table_sr: Tensor,
    *,
    config: MlaConfig,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Latents]:
    """Query heads q_thd (d = n + r, rotated in the last r channels) and the row each token leaves in the cache.

    Rounding:
        each projection, each norm (by `config.weight_cast`) and each rotation to `dtype`. k_rope is not normalised.

    Raises:
        ValueError: shapes disagree.
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("positions_t", positions_t, "t", dims)
    expect_shape("weights.w_kv_dm", weights.w_kv_dm, "dm", dims)
    eps, cast, r = config.norm_eps, config.weight_cast, config.rope.rope_dim

    latent_ta = num.wide(x_tm)
    if weights.w_qa_am is not None and weights.q_norm_a is not None:
        latent_ta = project_norm(x_tm, weights.w_qa_am, weights.q_norm_a, eps=eps, cast=cast, dtype=dtype, num=num)
    q_thd = num.store(num.einsum("ta,hda->thd", latent_ta, num.wide(weights.w_qb_hda)), dtype)

    down_td = num.store(num.einsum("tm,dm->td", num.wide(x_tm), num.wide(weights.w_kv_dm)), dtype)
    c_tc = rms_norm(down_td[:, :-r], weights.kv_norm_c, eps=eps, cast=cast, dtype=dtype, num=num)
    rows_td = torch.cat([c_tc, down_td[:, -r:]], dim=-1)

    def rotated(x_thd: Tensor) -> Tensor:
        pairing, span = Pairing.INTERLEAVED, RopeSpan.LAST  # in every MLA release
        return rope(x_thd, table_sr, positions_t, pairing=pairing, span=span, inverse=False, dtype=dtype, num=num)

    return rotated(q_thd), Latents(rows_sd=rotated(rows_td[:, None, :])[:, 0, :], positions_s=positions_t)


def mla_naive(
    x_tm: Tensor,
    weights: MlaWeights,
    positions_t: Tensor,
    table_sr: Tensor,
    *,
    config: MlaConfig,
    past: Latents | None = None,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """One packed sequence, or its next chunk after the cached `past`, with key and value heads.

    Math:
        k[s, h] = [W_UK[h] c[s] | k_rope[s]]; v[s, h] = W_UV[h] c[s]; out[t] = W_O concat_h(attention)

    Shapes:
        x_tm: [t, m]; positions_t: int64 [t], rows of table_sr: fp32 [s, r]; returns [t, m].

    Rounding:
        see the module docstring; k and v heads to `dtype`.

    Edges:
        a query sees the keys whose position is not later than its own, `past` and its own chunk alike.

    Raises:
        ValueError: shapes disagree.

    Source:
        DeepSeek-V3, inference/model.py (both forms); v3-v32-v4.md section 3.2 (one cast policy for all releases).
    """
    q_thd, keys = mla_project(x_tm, weights, positions_t, table_sr, config=config, dtype=dtype, num=num)
    keys = keys if past is None else past.then(keys)
    visible_ts = keys.positions_s[None, :] <= positions_t[:, None]
    c_sc, k_rope_sr = num.wide(keys.rows_sd).split([config.kv_lora_rank, config.rope.rope_dim], dim=-1)
    k_nope_shn = num.store(num.einsum("sc,hnc->shn", c_sc, num.wide(weights.w_uk_hnc)), dtype)
    v_shu = num.store(num.einsum("sc,huc->shu", c_sc, num.wide(weights.w_uv_huc)), dtype)
    k_rope_shr = k_rope_sr[:, None, :].expand(-1, config.num_heads, -1)  # one rotary key for all heads
    k_shd = torch.cat([k_nope_shn, k_rope_shr], dim=-1)
    scale = softmax_scale(config.head_dim, config.rope.yarn)
    out_thu, _ = _attend(q_thd, k_shd, v_shu, visible_ts, scale=scale, dtype=dtype, num=num)
    return num.store(num.einsum("thu,mhu->tm", out_thu, num.wide(weights.w_o_mhu)), dtype)


def mla_absorbed(
    x_tm: Tensor,
    weights: MlaWeights,
    positions_t: Tensor,
    table_sr: Tensor,
    *,
    config: MlaConfig,
    past: Latents | None = None,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The same function of the same arguments as `mla_naive`, attending to latent rows directly.

    Math:
        qa[t, h] = W_UK[h]^T q_nope[t, h]; score = scale * <[qa | q_rope], [c | k_rope]>; z = sum_s p c[s];
        out[t] = W_O concat_h(W_UV[h] z[t, h])

    Rounding:
        see the module docstring; qa and z to `dtype`.

    Raises:
        ValueError: shapes disagree.
    """
    q_thd, keys = mla_project(x_tm, weights, positions_t, table_sr, config=config, dtype=dtype, num=num)
    keys = keys if past is None else past.then(keys)
    visible_ts = keys.positions_s[None, :] <= positions_t[:, None]
    q_nope_thn, q_rope_thr = q_thd.split([config.nope_dim, config.rope.rope_dim], dim=-1)
    qa_thc = num.store(num.einsum("thn,hnc->thc", q_nope_thn, num.wide(weights.w_uk_hnc)), dtype)
    q_thd = torch.cat([qa_thc, q_rope_thr], dim=-1)
    rows_s1d = num.wide(keys.rows_sd)[:, None, :]  # one key/value head
    scale = softmax_scale(config.head_dim, config.rope.yarn)
    c = config.kv_lora_rank
    z_thc, _ = _attend(q_thd, rows_s1d, rows_s1d[..., :c], visible_ts, scale=scale, dtype=dtype, num=num)
    out_thu = num.store(num.einsum("thc,huc->thu", z_thc, num.wide(weights.w_uv_huc)), dtype)
    return num.store(num.einsum("thu,mhu->tm", out_thu, num.wide(weights.w_o_mhu)), dtype)


def mla_prefill(
    q_thd: Tensor,
    k_shd: Tensor,
    v_shu: Tensor,
    *,
    scale: float,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the naive form: the queries are the last t of s positions.

    Math:
        query i sees keys j <= s - t + i; out = softmax(scale * <q, k>) v; lse = log sum exp of the scaled scores

    Shapes:
        q_thd: [t, h, d]; k_shd: [s, h, d]; v_shu: [s, h, u]; returns out_thu and fp32 lse_th (natural log).

    Rounding:
        softmax weights to `dtype` (free scale), output to `dtype`, LSE to fp32.

    Edges:
        t < s is a later chunk. Values have to be finite: a later key has weight 0, and 0 * NaN is NaN.

    Raises:
        ValueError: shapes disagree, there are fewer keys than queries, or `scale` is not positive.
        TypeError: `dtype` is no storage dtype.
    """
    dims: dict[str, int] = {}
    expect_shape("q_thd", q_thd, "thd", dims)
    expect_shape("k_shd", k_shd, "shd", dims)
    expect_shape("v_shu", v_shu, "shu", dims)
    expect_positive("scale", scale)
    if dims["s"] < dims["t"]:
        raise ValueError(f"k_shd: expected at least t={dims['t']} keys, got s={dims['s']}")
    own_t = dims["s"] - dims["t"] + torch.arange(dims["t"], device=q_thd.device)
    visible_ts = torch.arange(dims["s"], device=q_thd.device)[None, :] <= own_t[:, None]
    return _attend(q_thd, k_shd, v_shu, visible_ts, scale=scale, dtype=dtype, num=num)


def mla_decode(
    q_bthd: Tensor,
    cache_pod: Tensor,
    block_table_bp: Tensor,
    lengths_b: Tensor,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """Attention of the absorbed form over a paged cache: the queries are the last t of each request's positions.

    Math:
        key j of request b is slot j % o of page block_table[b, j // o]; query i sees keys j <= length - t + i;
        value = first `value_dim` channels of the key

    Shapes:
        q_bthd: [b, t, h, d], d = c + r; cache_pod: [p, o, d]; block_table_bp: int32 [b, pages of a request];
        lengths_b: int32 [b], the t queries included; returns out_bthu and fp32 lse_bth (natural log).

    Rounding:
        as `mla_prefill`.

    Edges:
        a query without a key (length 0, or i < t - length) gives out 0 and lse -inf. Table entries and slots beyond
        the length may hold anything.

    Raises:
        ValueError: shapes disagree, a length exceeds the table, a used table entry is no page, `value_dim` is not in
            1..d, or `scale` is not positive.
        TypeError: table or lengths are not int32, or `dtype` is no storage dtype.
    """
    dims: dict[str, int] = {}
    expect_shape("q_bthd", q_bthd, "bthd", dims)
    expect_shape("cache_pod", cache_pod, "pod", dims)
    expect_shape("block_table_bp", block_table_bp, "bp", {"b": dims["b"]})
    expect_shape("lengths_b", lengths_b, "b", dims)
    expect_dtype("block_table_bp", block_table_bp, torch.int32)
    expect_dtype("lengths_b", lengths_b, torch.int32)
    expect_in_range("lengths_b", lengths_b, 0, block_table_bp.shape[1] * dims["o"] + 1)
    expect_positive("scale", scale)
    if not 1 <= value_dim <= dims["d"]:
        raise ValueError(f"value_dim: expected a number in 1..{dims['d']}, got {value_dim}")
    out_bthu = num.wide(q_bthd.new_empty(*q_bthd.shape[:3], value_dim))
    lse_bth = torch.empty_like(out_bthu[..., 0])
    own_t = torch.arange(dims["t"], device=q_bthd.device) - dims["t"]
    for b, length in enumerate(lengths_b.tolist()):
        page_i = block_table_bp[b, : -(-length // dims["o"])].long()
        expect_in_range("block_table_bp", page_i, 0, dims["p"])
        rows_s1d = cache_pod[page_i].flatten(0, 1)[:length, None, :]  # one key/value head
        visible_ts = torch.arange(length, device=q_bthd.device)[None, :] <= length + own_t[:, None]
        out_bthu[b], lse_bth[b] = _attend(
            q_bthd[b], rows_s1d, rows_s1d[..., :value_dim], visible_ts, scale=scale, dtype=dtype, num=num
        )
    return out_bthu, lse_bth


def store_latent(cache_pod_: Tensor, latent_td: Tensor, slots_t: Tensor) -> Tensor:
    """Write rows into a paged cache, in place: row t goes to slot slots_t[t] = page * o + offset.

    Shapes:
        cache_pod_: [p, o, d], pages may be further apart than o * d elements; latent_td: [t, d]; slots_t: int32 or
        int64 [t]; returns cache_pod_.

    Edges:
        slot -1 writes nothing; every byte that no slot names keeps its value.

    Raises:
        ValueError: shapes disagree, a slot is neither -1 nor in the cache, or two rows share a slot.
        TypeError: slots are no integers, or the rows have another dtype than the cache.
    """
    dims: dict[str, int] = {}
    expect_shape("cache_pod_", cache_pod_, "pod", dims)
    expect_shape("latent_td", latent_td, "td", dims)
    expect_shape("slots_t", slots_t, "t", dims)
    expect_dtype("slots_t", slots_t, torch.int32, torch.int64)
    expect_dtype("latent_td", latent_td, cache_pod_.dtype)
    expect_in_range("slots_t", slots_t, -1, dims["p"] * dims["o"])
    used_t = slots_t >= 0
    slot_y = slots_t[used_t].long()
    if slot_y.unique().numel() < slot_y.numel():
        raise ValueError(f"slots_t: expected distinct slots, got {slots_t.tolist()}")
    cache_pod_[slot_y // max(dims["o"], 1), slot_y % max(dims["o"], 1)] = latent_td[used_t]
    return cache_pod_


def _attend(
    q_thd: Tensor,
    k_shd: Tensor,
    v_shu: Tensor,
    visible_ts: Tensor,
    *,
    scale: float,
    dtype: torch.dtype,
    num: Numerics,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the visible keys; h of the keys and values is the head count, or 1 for all heads."""
    if not visible_ts.shape[1]:
        out_thu = num.wide(q_thd.new_zeros(*q_thd.shape[:2], v_shu.shape[-1]))
        return out_thu, out_thu.new_full(q_thd.shape[:2], -torch.inf)
    scores_ths = num.einsum("thd,shd->ths", num.wide(q_thd), num.wide(k_shd)) * scale
    scores_ths = scores_ths.masked_fill(~visible_ts[:, None, :], -torch.inf)
    max_th1 = scores_ths.amax(-1, keepdim=True)
    max_th1 = torch.where(max_th1 == -torch.inf, 0, max_th1)  # no visible key: any finite number avoids inf - inf
    p_ths = torch.exp(scores_ths - max_th1)
    sum_th1 = num.sum(p_ths, dim=-1, keepdim=True)  # of the unrounded weights
    acc_thu = num.einsum("ths,shu->thu", num.store(p_ths, dtype, free_scale=True), num.wide(v_shu))
    out_thu = torch.where(sum_th1 == 0, 0, acc_thu / sum_th1)
    return num.store(out_thu, dtype), num.f32((max_th1 + torch.log(sum_th1)).squeeze(-1))
