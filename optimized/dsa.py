"""DeepSeek sparse attention, fast: index rows, scores, attention over records; the contract is `reference/dsa*.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_positive, expect_records, expect_shape
from deeptwin.reference.config import DsaConfig, IndexerRope, PageLayout, RecordFormat
from deeptwin.reference.dsa_state import DsaState, DsaWeights
from deeptwin.reference.weights import Latents

from .attention_v3 import absorbed_output, absorbed_query, latent_rows, softmax_scale
from .kv_cache import WIDE, _wide_record
from .linear import linear_triton
from .providers import deep_gemm, expect_sm90, flash_mla_legacy, flash_mla_lists, flash_mla_schedule
from .quant import quantize_triton
from .sparse_attn import sparse_attn_triton
from .topk import topk_triton

if TYPE_CHECKING:
    from deeptwin.kernels.triton_ops.dsa_index import ScoresLaunch
    from deeptwin.kernels.triton_ops.split_softmax import SplitLaunch

E4M3 = torch.float8_e4m3fn


def dsa_index_queries_triton(
    q_thd: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    config: DsaConfig,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.dsa_index.dsa_index_queries` of bf16 heads. Values are not inspected: a position that is no row of the
    table gives NaN.

    Raises:
        TypeError: q_thd is not bfloat16, the table not float32, positions no integers; `out` has another dtype.
        ValueError: shapes disagree, also with `config`; `out` does not fit.
        NotImplementedError: d is no power of two from 16 up.
    """
    _check_rows("q_thd", q_thd, table_sr, positions_t, config)
    return _index_rows(q_thd, None, table_sr, positions_t, config, out)


def dsa_index_keys_triton(
    k_td: Tensor,
    weight_d: Tensor,
    bias_d: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    config: DsaConfig,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.dsa_index.dsa_index_keys` of bf16 keys; as `dsa_index_queries_triton`.

    Raises:
        TypeError: k_td is not bfloat16, weight or bias neither bfloat16 nor float32, the table not float32, positions
            no integers; `out` has another dtype.
        ValueError: shapes disagree, also with `config`; `out` does not fit.
        NotImplementedError: d is no power of two from 16 up.
    """
    expect_shape("k_td", k_td, "td", {})
    _check_rows("k_td", k_td[:, None], table_sr, positions_t, config)
    for name, x_d in (("weight_d", weight_d), ("bias_d", bias_d)):
        expect_shape(name, x_d, "d", {"d": config.index_dim})
        expect_dtype(name, x_d, torch.bfloat16, torch.float32)
    whole = None if out is None else out[:, None]
    return _index_rows(k_td[:, None], (weight_d, bias_d), table_sr, positions_t, config, whole)[:, 0]


def dsa_index_scores_triton(
    q_thd: Tensor,
    k_sd: Tensor,
    k_sf_s: Tensor,
    w_th: Tensor,
    length_t: Tensor,
    *,
    launch: ScoresLaunch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.dsa_index.dsa_index_scores` of e4m3 rows.

    Raises:
        TypeError: q or k are not e4m3, scales or weights are not float32, lengths are not int32; `out` has another
            dtype.
        ValueError: shapes disagree; `out` does not fit.
        NotImplementedError: d is no power of two from 16 up, or channels are not contiguous.
    """
    _check_dense(q_thd, k_sd, k_sf_s, w_th, length_t)
    from deeptwin.kernels.triton_ops import dsa_index

    codes = q_thd.view(torch.uint8), k_sd.view(torch.uint8)
    return dsa_index.index_scores(*codes, k_sf_s, w_th, length_t, launch=launch, out=out)


def dsa_index_scores_paged_triton(
    q_thd: Tensor,
    cache_pow: Tensor,
    w_th: Tensor,
    table_tj: Tensor,
    length_t: Tensor,
    *,
    launch: ScoresLaunch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.dsa_index.dsa_index_scores_paged`, with the bits of `dsa_index_scores_triton` for the same keys.

    Raises:
        TypeError: q is not e4m3, the cache not uint8, weights not float32, pages or lengths not int32; `out` has
            another dtype.
        ValueError: shapes disagree; `out` does not fit.
        NotImplementedError: d is no power of two from 16 up, channels are not contiguous, or pages do not begin at
            multiples of four bytes.
    """
    _check_paged(q_thd, cache_pow, w_th, table_tj, length_t)
    from deeptwin.kernels.triton_ops import dsa_index

    codes = q_thd.view(torch.uint8)
    return dsa_index.index_scores_paged(codes, cache_pow, w_th, table_tj, length_t, launch=launch, out=out)


def dsa_index_scores_tilelang(q_thd: Tensor, k_sd: Tensor, k_sf_s: Tensor, w_th: Tensor, length_t: Tensor) -> Tensor:
    """`dsa_index_scores_triton` on SM90 with specialised warps: the same arithmetic, codes as fp16.

    Raises:
        TypeError: as `dsa_index_scores_triton`.
        ValueError: as `dsa_index_scores_triton`.
        NotImplementedError: another device, heads that are no power of two from 16 to 128, not 128 channels, or rows
            that do not begin at multiples of 16 bytes.
    """
    _check_dense(q_thd, k_sd, k_sf_s, w_th, length_t)
    expect_sm90("q_thd", q_thd)
    from deeptwin.kernels.tilelang_ops import index_scores_sm90 as kernels

    return kernels.index_scores(q_thd, k_sd, k_sf_s, w_th, length_t, exact=True)


def dsa_index_scores_tilelang_fp8(
    q_thd: Tensor, k_sd: Tensor, k_sf_s: Tensor, w_th: Tensor, length_t: Tensor
) -> Tensor:
    """`dsa_index_scores_tilelang` by the FP8 unit, which cuts products 13 bits below the largest of their step.

    Raises:
        TypeError: as `dsa_index_scores_triton`.
        ValueError: as `dsa_index_scores_triton`.
        NotImplementedError: as `dsa_index_scores_tilelang`.
    """
    _check_dense(q_thd, k_sd, k_sf_s, w_th, length_t)
    expect_sm90("q_thd", q_thd)
    from deeptwin.kernels.tilelang_ops import index_scores_sm90 as kernels

    return kernels.index_scores(q_thd, k_sd, k_sf_s, w_th, length_t, exact=False)


def dsa_index_scores_paged_tilelang(
    q_thd: Tensor, cache_pow: Tensor, w_th: Tensor, table_tj: Tensor, length_t: Tensor
) -> Tensor:
    """`dsa_index_scores_paged_triton` on SM90 with specialised warps, over pages of 64 keys.

    Raises:
        TypeError: as `dsa_index_scores_paged_triton`.
        ValueError: as `dsa_index_scores_paged_triton`.
        NotImplementedError: as `dsa_index_scores_tilelang`; pages hold not 64 keys, or do not begin at multiples of
            16 bytes.
    """
    _check_paged(q_thd, cache_pow, w_th, table_tj, length_t)
    expect_sm90("q_thd", q_thd)
    from deeptwin.kernels.tilelang_ops import index_scores_sm90 as kernels

    return kernels.index_scores_paged(q_thd, cache_pow, w_th, table_tj, length_t, exact=True)


def dsa_index_scores_paged_tilelang_fp8(
    q_thd: Tensor, cache_pow: Tensor, w_th: Tensor, table_tj: Tensor, length_t: Tensor
) -> Tensor:
    """`dsa_index_scores_paged_tilelang` by the FP8 unit, with the bits of `dsa_index_scores_tilelang_fp8`.

    Raises:
        TypeError: as `dsa_index_scores_paged_triton`.
        ValueError: as `dsa_index_scores_paged_triton`.
        NotImplementedError: as `dsa_index_scores_paged_tilelang`.
    """
    _check_paged(q_thd, cache_pow, w_th, table_tj, length_t)
    expect_sm90("q_thd", q_thd)
    from deeptwin.kernels.tilelang_ops import index_scores_sm90 as kernels

    return kernels.index_scores_paged(q_thd, cache_pow, w_th, table_tj, length_t, exact=False)


def dsa_index_scores_deep_gemm(q_thd: Tensor, k_sd: Tensor, k_sf_s: Tensor, w_th: Tensor, length_t: Tensor) -> Tensor:
    """`dsa_index_scores` by DeepGEMM 2.5.0 on SM90, columns behind the last visible key cleaned.

    Raises:
        TypeError: as `dsa_index_scores_triton`.
        ValueError: as `dsa_index_scores_triton`.
        NotImplementedError: no DeepGEMM, not 32 or 64 heads of 128 channels, or no query or key.
    """
    return _deep_gemm_scores(q_thd, k_sd, k_sf_s, w_th, length_t, cleaned=True)


def dsa_index_scores_deep_gemm_uncleaned(
    q_thd: Tensor, k_sd: Tensor, k_sf_s: Tensor, w_th: Tensor, length_t: Tensor
) -> Tensor:
    """`dsa_index_scores_deep_gemm` without the second launch that cleans; a consumer has to stop at the length.

    Raises:
        TypeError: as `dsa_index_scores_triton`.
        ValueError: as `dsa_index_scores_triton`.
        NotImplementedError: as `dsa_index_scores_deep_gemm`.
    """
    return _deep_gemm_scores(q_thd, k_sd, k_sf_s, w_th, length_t, cleaned=False)


def dsa_index_scores_paged_deep_gemm(
    q_thd: Tensor, cache_pow: Tensor, w_th: Tensor, table_tj: Tensor, length_t: Tensor
) -> Tensor:
    """`dsa_index_scores_paged` by DeepGEMM 2.5.0 on SM90; it takes every page for present, so absent ones become 0.

    Raises:
        TypeError: as `dsa_index_scores_paged_triton`.
        ValueError: as `dsa_index_scores_paged_triton`.
        NotImplementedError: as `dsa_index_scores_deep_gemm`; pages hold not 64 keys.
    """
    _check_paged(q_thd, cache_pow, w_th, table_tj, length_t)
    _expect_deep_gemm(q_thd, table_tj.shape[1])
    pages, page, width = cache_pow.shape
    if page != 64 or not pages:
        raise NotImplementedError(f"cache_pow: expected pages of 64 keys, got {tuple(cache_pow.shape)}")
    library = deep_gemm()
    table_tj, columns = table_tj.clamp(0, pages - 1), table_tj.shape[1] * page
    length_t1 = length_t.clamp(max=columns)[:, None]
    plan = library.get_paged_mqa_logits_metadata(length_t1, page, library.get_num_sms())
    cache = cache_pow.contiguous().view(pages, page, 1, width)
    q = q_thd.contiguous()[:, None]
    logits: Tensor = library.fp8_paged_mqa_logits(q, cache, w_th, length_t1, table_tj, plan, columns, False)
    # the library cleans behind lengths of one dimension only, and takes lengths of two
    unseen_ts = torch.arange(columns, device=q.device) >= length_t1
    return logits[:, :columns].masked_fill(unseen_ts, -torch.inf)


def dsa_attention_triton(
    x_tm: Tensor,
    weights: DsaWeights,
    positions_t: Tensor,
    table_sr: Tensor,
    picks_tk: Tensor | None,
    *,
    config: DsaConfig,
    past: DsaState | None = None,
) -> Tensor:
    """`reference.dsa.dsa_attention` of bf16 rows and weights, a composition of kernels. Values are not inspected.

    Raises:
        TypeError: rows or picks have another dtype than bfloat16 and int32.
        ValueError: shapes disagree.
        NotImplementedError: index keys or latents are not quantised, or latents are no power of two of channels.
    """
    mla = config.mla
    expect_shape("x_tm", x_tm, "tm", {"t": len(positions_t), "m": mla.hidden})
    expect_dtype("x_tm", x_tm, torch.bfloat16)
    if config.index_key is None or config.latent is None:
        raise NotImplementedError(f"config: expected quantised index keys and latents, got {config}")
    if picks_tk is not None:
        expect_shape("picks_tk", picks_tk, "tk", {"t": len(positions_t)})
        expect_dtype("picks_tk", picks_tk, torch.int32)
    q_thd, latent_ta, new = _project(x_tm, weights, positions_t, table_sr, config)
    state = new if past is None else past.then(new)
    length_t = (state.latents.positions_s[None, :] <= positions_t[:, None]).sum(1, dtype=torch.int32)
    if picks_tk is None:
        picks_tk = _picks(x_tm, latent_ta, weights, positions_t, table_sr, state, length_t, config)
    picks_tk = torch.where(picks_tk < length_t[:, None], picks_tk, -1)
    q_full, scale = absorbed_query(q_thd, weights.mla, config=mla), softmax_scale(mla)
    z_thc, _ = sparse_attn_triton(
        q_full, state.latents.rows_sd, picks_tk, None, None, scale=scale, value_dim=mla.kv_lora_rank
    )
    return absorbed_output(z_thc, weights.mla)


def sparse_mla_triton(
    q_thd: Tensor,
    cache_pow: Tensor,
    idx_tk: Tensor,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    launch: SplitLaunch | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.dsa.sparse_mla` of bf16 queries, with bf16 weights and output.

    Raises:
        ValueError: shapes disagree, no format with a tail has records of w bytes, `scale` is not positive, or an `out`
            buffer has another shape.
        TypeError: queries are not bfloat16, the cache is not uint8, indices or lengths are not int32, or an `out`
            buffer has another dtype.
        NotImplementedError: scales are no fp32 numbers, rows are not contiguous, or pages do not begin at multiples of
            four bytes.
    """
    fmt = _check_sparse_mla(q_thd, cache_pow, idx_tk, topk_length_t, scale)
    from deeptwin.kernels.triton_ops import sparse_mla as kernels

    record = _wide_record(fmt, PageLayout.INTERLEAVED)
    return kernels.sparse_mla(
        q_thd, cache_pow, idx_tk, topk_length_t, scale=scale, record=record, launch=launch, out=out
    )


def sparse_mla_tilelang(
    q_thd: Tensor,
    cache_pow: Tensor,
    idx_tk: Tensor,
    topk_length_t: Tensor | None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`sparse_mla` on SM90 with specialised warps; queries and lists that are not contiguous are copied first.

    Raises:
        ValueError: as `sparse_mla_triton`.
        TypeError: as `sparse_mla_triton`.
        NotImplementedError: scales are no fp32 numbers, heads that are no multiple of 64, pages that do not begin at
            multiples of 16 bytes or span 32 GiB, or no SM90.
    """
    _check_sparse_mla(q_thd, cache_pow, idx_tk, topk_length_t, scale)
    if q_thd.shape[1] % 64:
        raise NotImplementedError(f"q_thd: expected 64·n heads, got {q_thd.shape[1]}")
    if cache_pow.stride(0) % 16 or cache_pow.data_ptr() % 16 or len(cache_pow) * cache_pow.stride(0) >= 2**35:
        raise NotImplementedError(f"cache_pow: expected pages at 16 bytes, below 32 GiB, got {cache_pow.stride()}")
    expect_sm90("q_thd", q_thd)
    from deeptwin.kernels.tilelang_ops import sparse_mla_sm90 as kernels

    return kernels.sparse_mla(q_thd.contiguous(), cache_pow, idx_tk.contiguous(), topk_length_t, scale=scale)


def sparse_mla_flash_mla(
    q_thd: Tensor,
    cache_pow: Tensor,
    idx_tk: Tensor,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    clean_lists: bool = False,
) -> tuple[Tensor, Tensor]:
    """`sparse_mla` by FlashMLA's legacy sparse decode (sgl-flash-mla 1.0.0, SM90), a request for each token.

    Layout: kv_v32, 656 bytes interleaved. Its LSE is natural; +inf of an empty row becomes −inf. Runs repeat their
    bits; lists are split by the batch, so a row depends on its neighbours. Scales are rounded to bf16 before use.
    With `clean_lists` the caller vouches for lists of whole steps of 64 entries whose holes are −1.

    Raises:
        ValueError: shapes disagree, no format with a tail has records of w bytes, or `scale` is not positive.
        TypeError: queries are not bfloat16, the cache is not uint8, or indices or lengths are not int32.
        NotImplementedError: no FlashMLA with the legacy line, other heads than 64 or 128, other records than those of
            656 bytes one behind the other, lengths, or no token.
    """
    return _sparse_mla_flash_mla(q_thd, cache_pow, idx_tk, topk_length_t, scale, clean_lists, whole=False)


def sparse_mla_flash_mla_unsplit(
    q_thd: Tensor,
    cache_pow: Tensor,
    idx_tk: Tensor,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    clean_lists: bool = False,
) -> tuple[Tensor, Tensor]:
    """`sparse_mla_flash_mla` by a schedule of whole requests: a row has the same bits in every batch.

    Raises:
        ValueError: as `sparse_mla_flash_mla`.
        TypeError: as `sparse_mla_flash_mla`.
        NotImplementedError: as `sparse_mla_flash_mla`.
    """
    return _sparse_mla_flash_mla(q_thd, cache_pow, idx_tk, topk_length_t, scale, clean_lists, whole=True)


def _sparse_mla_flash_mla(
    q_thd: Tensor,
    cache_pow: Tensor,
    idx_tk: Tensor,
    topk_length_t: Tensor | None,
    scale: float,
    clean_lists: bool,
    *,
    whole: bool,
) -> tuple[Tensor, Tensor]:
    fmt = _check_sparse_mla(q_thd, cache_pow, idx_tk, topk_length_t, scale)
    tokens, heads, width = q_thd.shape
    if topk_length_t is not None:
        raise NotImplementedError("topk_length_t: expected None, the kernel takes no lengths with these records")
    if heads not in (64, 128) or not tokens:
        raise NotImplementedError(f"q_thd: expected tokens of 64 or 128 heads, got {tokens} of {heads}")
    if (fmt.record_bytes, width) != (656, 576) or cache_pow.stride()[1:] != (656, 1) or cache_pow.stride(0) % 656:
        raise NotImplementedError(f"cache_pow: expected whole records of 656 bytes, got strides {cache_pow.stride()}")
    library = flash_mla_legacy()
    q_t1hd = q_thd[:, None].contiguous()
    lists = idx_tk if clean_lists else flash_mla_lists(idx_tk, cache_pow.shape[0] * cache_pow.shape[1], 64)
    blocks_t = torch.full_like(lists[:, 0], lists.shape[1] // 64) if whole else None
    out_t1hu, lse_th1 = library.flash_mla_with_kvcache(
        q_t1hd,
        cache_pow[:, :, None],
        None,
        None,
        512,
        flash_mla_schedule(library, q_t1hd, blocks_t),
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=lists[:, None],
        use_legacy=True,
    )
    return out_t1hu[:, 0], lse_th1[:, :, 0].masked_fill(lse_th1[:, :, 0] == torch.inf, -torch.inf)


def _project(
    x_tm: Tensor, weights: DsaWeights, positions_t: Tensor, table_sr: Tensor, config: DsaConfig
) -> tuple[Tensor, Tensor, DsaState]:
    """Query heads, the query latent, and what the tokens leave: latents by way of their records, index keys."""
    q_thd, latent_ta, rows_td = latent_rows(x_tm, weights.mla, positions_t, table_sr, config=config.mla)
    k_td = linear_triton(x_tm, weights.w_k_dm)
    k_td = dsa_index_keys_triton(k_td, weights.k_norm_d, weights.k_bias_d, table_sr, positions_t, config=config)
    assert config.index_key is not None
    key_sd, sf_s1 = quantize_triton(k_td, fmt=config.index_key.quant)
    latents = Latents(rows_sd=_by_way_of_records(rows_td, config), positions_s=positions_t)
    return q_thd, latent_ta, DsaState(latents=latents, key_sd=key_sd, key_sf_s=sf_s1[:, 0])


def _by_way_of_records(rows_td: Tensor, config: DsaConfig) -> Tensor:
    """The values that a cache would give back."""
    from deeptwin.kernels.triton_ops import wide_records

    fmt = config.latent
    assert fmt is not None
    record = _wide_record(fmt, PageLayout.INTERLEAVED)
    page_pow = torch.empty(1, len(rows_td), fmt.record_bytes, dtype=torch.uint8, device=rows_td.device)
    slots_t = torch.arange(len(rows_td), dtype=torch.int32, device=rows_td.device)
    wide_records.store_wide(page_pow, rows_td, slots_t, record=record)
    return wide_records.load_wide(page_pow, slots_t, record=record, dtype=torch.bfloat16)


def _picks(
    x_tm: Tensor,
    latent_ta: Tensor,
    weights: DsaWeights,
    positions_t: Tensor,
    table_sr: Tensor,
    state: DsaState,
    length_t: Tensor,
    config: DsaConfig,
) -> Tensor:
    """The picked rows of `state`, ascending, -1 behind them."""
    if len(state.key_sd) <= config.topk:
        row_k = torch.arange(config.topk, dtype=torch.int32, device=x_tm.device)
        return torch.where(row_k < length_t[:, None], row_k, -1)
    codes_thd, w_th = _index_query(x_tm, latent_ta, weights, positions_t, table_sr, config)
    scores_ts = dsa_index_scores_triton(codes_thd, state.key_sd, state.key_sf_s, w_th, length_t)
    return topk_triton(scores_ts, length_t, k=config.topk)


def _index_query(
    x_tm: Tensor, latent_ta: Tensor, weights: DsaWeights, positions_t: Tensor, table_sr: Tensor, config: DsaConfig
) -> tuple[Tensor, Tensor]:
    """The index query of every token as e4m3 codes, and the weights of its heads with the scales in them."""
    h, d = config.index_heads, config.index_dim
    q_thd = linear_triton(latent_ta, weights.w_qb_hda.flatten(0, 1)).view(len(x_tm), h, d)
    q_thd = dsa_index_queries_triton(q_thd, table_sr, positions_t, config=config)
    assert config.index_key is not None
    codes_yd, sf_y1 = quantize_triton(q_thd.flatten(0, 1), fmt=config.index_key.quant)
    w_th = linear_triton(x_tm.float(), weights.w_head_hm, dtype=torch.float32) * h**-0.5
    return codes_yd.view(q_thd.shape), w_th * sf_y1.view(w_th.shape) * d**-0.5


def _index_rows(
    x_thd: Tensor,
    norm: tuple[Tensor, Tensor] | None,
    table_sr: Tensor,
    positions_t: Tensor,
    config: DsaConfig,
    out: Tensor | None,
) -> Tensor:
    from deeptwin.kernels.triton_ops import dsa_index

    return dsa_index.index_rows(
        x_thd,
        norm,
        table_sr,
        positions_t,
        interleaved=config.indexer_rope is IndexerRope.INTERLEAVED,
        transform=config.index_key is not None,
        eps=config.norm_eps,
        out=out,
    )


def _check_rows(name: str, x_thd: Tensor, table_sr: Tensor, positions_t: Tensor, config: DsaConfig) -> None:
    dims = {"d": config.index_dim, "r": config.mla.rope.rope_dim}
    expect_shape(name, x_thd, "thd", dims)
    expect_dtype(name, x_thd, torch.bfloat16)
    expect_shape("table_sr", table_sr, "sr", dims)
    expect_dtype("table_sr", table_sr, torch.float32)
    expect_shape("positions_t", positions_t, "t", dims)
    expect_dtype("positions_t", positions_t, torch.int32, torch.int64)


def _check_sparse_mla(
    q_thd: Tensor, cache_pow: Tensor, idx_tk: Tensor, topk_length_t: Tensor | None, scale: float
) -> RecordFormat:
    """What every form over records with a tail takes; returns their format."""
    fmt = expect_records("cache_pow", cache_pow, {})
    if not fmt.tail:
        raise ValueError(f"cache_pow: expected records with a bf16 tail, got those of {fmt.name}")
    if fmt.quant.scale not in WIDE:
        raise NotImplementedError(f"cache_pow: expected records with fp32 scales, got those of {fmt.name}")
    expect_shape("q_thd", q_thd, "thd", {"d": fmt.width})
    expect_dtype("q_thd", q_thd, torch.bfloat16)
    expect_shape("idx_tk", idx_tk, "tk", {"t": q_thd.shape[0]})
    expect_dtype("idx_tk", idx_tk, torch.int32)
    if topk_length_t is not None:
        expect_shape("topk_length_t", topk_length_t, "t", {"t": q_thd.shape[0]})
        expect_dtype("topk_length_t", topk_length_t, torch.int32)
    expect_positive("scale", scale)
    return fmt


def _check_scores(q_thd: Tensor, w_th: Tensor, length_t: Tensor) -> dict[str, int]:
    dims: dict[str, int] = {}
    expect_shape("q_thd", q_thd, "thd", dims)
    expect_dtype("q_thd", q_thd, E4M3)
    expect_shape("w_th", w_th, "th", dims)
    expect_dtype("w_th", w_th, torch.float32)
    expect_shape("length_t", length_t, "t", dims)
    expect_dtype("length_t", length_t, torch.int32)
    return dims


def _check_dense(q_thd: Tensor, k_sd: Tensor, k_sf_s: Tensor, w_th: Tensor, length_t: Tensor) -> None:
    dims = _check_scores(q_thd, w_th, length_t)
    expect_shape("k_sd", k_sd, "sd", dims)
    expect_dtype("k_sd", k_sd, E4M3)
    expect_shape("k_sf_s", k_sf_s, "s", dims)
    expect_dtype("k_sf_s", k_sf_s, torch.float32)


def _check_paged(q_thd: Tensor, cache_pow: Tensor, w_th: Tensor, table_tj: Tensor, length_t: Tensor) -> None:
    dims = _check_scores(q_thd, w_th, length_t)
    expect_shape("cache_pow", cache_pow, "pow", {"w": dims["d"] + 4})
    expect_dtype("cache_pow", cache_pow, torch.uint8)
    expect_shape("table_tj", table_tj, "tj", dims)
    expect_dtype("table_tj", table_tj, torch.int32)


def _expect_deep_gemm(q_thd: Tensor, columns: int) -> None:
    t, h, d = q_thd.shape
    if h not in (32, 64) or d != 128 or not t or not columns:
        raise NotImplementedError(f"q_thd: expected rows of 32 or 64 heads of 128, and keys, got {t}, {h}, {d}")


def _deep_gemm_scores(
    q_thd: Tensor, k_sd: Tensor, k_sf_s: Tensor, w_th: Tensor, length_t: Tensor, *, cleaned: bool
) -> Tensor:
    _check_dense(q_thd, k_sd, k_sf_s, w_th, length_t)
    _expect_deep_gemm(q_thd, k_sd.shape[0])
    library = deep_gemm()
    keys = k_sd.contiguous(), k_sf_s.contiguous()
    start_t, end_t = torch.zeros_like(length_t), length_t.clamp(max=k_sd.shape[0])
    logits: Tensor = library.fp8_mqa_logits(q_thd.contiguous(), keys, w_th, start_t, end_t, cleaned)
    return logits
