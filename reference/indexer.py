"""The indexer: which compressed entries a query should attend to.

Every query has H small heads, every compressed entry one small key; both are stored in FP4. The score of entry j is

    I(p, j) = sum over heads h of w[p, h] * max(q[p, h] . k[j], 0)      for j < S(p) = floor((p + 1) / ratio)

and −inf for entries that are not visible yet. The weights w are signed and come from the hidden row. Keys are a linear
map of the compressor's latent *before* it is rotated, normalised, rotated at the position of the entry's first token.

A query or key row is a record of 68 bytes (w): 64 bytes of e2m1 codes, element 2i in the low nibble of byte i, then
the 4 UE8M0 scales of its groups of 32 (`INDEX_FP4`). Pages of a cache hold the codes of all their entries first and
the scales of all entries behind them.

How scores are rounded is the contract of a kernel, not of the model, and shipped kernels differ: `ScoreOrder`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_positive, expect_shape
from .config import INDEX_FP4, Pairing, RopeSpan, ScoreOrder, WeightCast
from .numerics import CONTRACT, Numerics
from .quant import dequantize, quantize
from .rms_norm import FLOATING, rms_norm
from .rope import rope
from .topk import in_chunks, seen_rows

CHAINS = 4  # of ScoreOrder.BF16_CHAINS


def index_visible(positions_t: Tensor, *, ratio: int) -> Tensor:
    """How many compressed entries a query sees, int32 [t]: floor((p + 1) / ratio), all whose last token is there.

    Raises:
        TypeError: positions are no integers.
        ValueError: positions are not 1-D, or ratio is not positive.
    """
    expect_shape("positions_t", positions_t, "t", {})
    expect_dtype("positions_t", positions_t, torch.int32, torch.int64)
    expect_positive("ratio", ratio)
    return ((positions_t + 1) // ratio).to(torch.int32)


def index_keys(
    lat_sc: Tensor,
    wk_dc: Tensor,
    norm_d: Tensor,
    table_ir: Tensor,
    positions_s: Tensor,
    *,
    eps: float,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The records of index keys, from the pre-RoPE latents of compressed entries.

    Math:
        k = RMSNorm(lat wk^T; norm), its last r channels rotated at the position, quantised with Q4i

    Shapes:
        lat_sc: [s, c]; wk_dc: [128, c]; norm_d: [128]; table_ir: fp32 [i, r] of `rope_table`; positions_s: integer
        [s], the position of each entry's first token; returns uint8 [s, 68].

    Rounding:
        the product to bf16, the norm once to bf16, the rotation to bf16, then `quantize`.

    Raises:
        TypeError: an input is not floating, the table not float32, positions no integers.
        ValueError: shapes disagree; a key has not 128 channels; eps is not positive; a position is no row of the table.

    Source:
        v41-attention.md section 4.1
    """
    dims: dict[str, int] = {}
    expect_shape("lat_sc", lat_sc, "sc", dims)
    expect_shape("wk_dc", wk_dc, "dc", dims)
    expect_dtype("lat_sc", lat_sc, *FLOATING)
    expect_dtype("wk_dc", wk_dc, *FLOATING)
    k_sd = num.bf16(num.einsum("sc,dc->sd", num.wide(lat_sc), num.wide(wk_dc)))
    k_sd = rms_norm(k_sd, norm_d, eps=eps, cast=WeightCast.AFTER_WEIGHT, num=num)
    return _rotated_records(k_sd[:, None], table_ir, positions_s, "wk_dc", num)[:, 0]


def index_queries(q_thd: Tensor, table_ir: Tensor, positions_t: Tensor, *, num: Numerics = CONTRACT) -> Tensor:
    """The records of index queries, from their projected heads.

    Shapes:
        q_thd: [t, h, 128]; table_ir: fp32 [i, r]; positions_t: integer [t]; returns uint8 [t, h, 68].

    Rounding:
        the last r channels, rotated at the query's position, to bf16, then `quantize`; there is no norm.

    Raises:
        TypeError: q_thd is not floating, the table not float32, positions no integers.
        ValueError: shapes disagree; a head has not 128 channels; a position is no row of the table.
    """
    return _rotated_records(q_thd, table_ir, positions_t, "q_thd", num)


def index_weights(x_tm: Tensor, w_hm: Tensor, *, scale: float, num: Numerics = CONTRACT) -> Tensor:
    """The signed weights of the heads: scale times the product of hidden row and weight, no activation.

    Shapes:
        x_tm: [t, m]; w_hm: [h, m]; returns [t, h].

    Rounding:
        the product to bf16, then its multiple to bf16: exact for the scale 2^-6 of 32 heads of 128 channels, which
        therefore changes no ranking, and which some kernels leave out.

    Raises:
        TypeError: an input is not floating.
        ValueError: shapes disagree, or scale is not positive.
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("w_hm", w_hm, "hm", dims)
    expect_dtype("x_tm", x_tm, *FLOATING)
    expect_dtype("w_hm", w_hm, *FLOATING)
    expect_positive("scale", scale)
    return num.bf16(num.bf16(num.einsum("tm,hm->th", num.wide(x_tm), num.wide(w_hm))) * scale)


def index_scores(
    q_thw: Tensor,
    k_sw: Tensor,
    w_th: Tensor,
    first_t: Tensor,
    length_t: Tensor,
    blocks_tk: Tensor | None,
    *,
    block_size: int,
    order: ScoreOrder,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Scores of the entries that each query sees, keys of several sequences packed into one buffer.

    Math:
        without blocks: scores[t, j] = I(t, j) for j < length[t], otherwise −inf; key first[t] + j of the buffer
        with blocks:    column i is entry j = blocks[t, i div block_size] * block_size + i mod block_size, with the
                        very bits that it has without them

    Shapes:
        q_thw: uint8 [t, h, 68]; k_sw: uint8 [s, 68]; w_th: [t, h] of bf16 values; first_t, length_t: int32 [t], the
        first key of the token's sequence and how many it sees; blocks_tk: int32 [t, k] or None; returns [t, s], or
        [t, k * block_size] with blocks, in fp32 (ScoreOrder.FP32) or bf16.

    Rounding:
        FP32: every dot product and the weighted sum over heads to fp32; BF16_ONCE: that sum then to bf16.
        BF16_RELEASE: dot product, weighted product and sum each to bf16. BF16_CHAINS: the dot product to fp32, its
        positive part t to bf16; chain c of four takes heads c, c + 4, ... in ascending order, A_c <- bf16(t w + A_c) in
        one rounding; then bf16(bf16(A_0 + A_2) + bf16(A_1 + A_3)).

    Edges:
        keys that a row does not see may hold any bytes. A block of −1 and a key outside the buffer are −inf. A zero
        weight gives 0. `block_size` is not looked at without blocks.

    Raises:
        TypeError: records are not uint8, weights not floating, first, lengths or blocks not int32.
        ValueError: shapes disagree, a record has not 68 bytes, or block_size is not positive.

    Source:
        v41-attention.md sections 4.1 to 4.3
    """
    dims = _check_queries(q_thw, w_th, length_t)
    _check("k_sw", k_sw, "sw", torch.uint8, dims)
    _check("first_t", first_t, "t", torch.int32, dims)
    entry_ts = _entries(length_t, blocks_tk, block_size, dims["s"])
    row_ts = torch.where(entry_ts >= 0, first_t.long()[:, None] + entry_ts, -1)
    k_sd = dequantize(*_parted(k_sw), fmt=INDEX_FP4.quant, num=num)
    return score_rows(_query_values(q_thw, num), k_sd, w_th, row_ts, order=order, num=num)


def index_scores_paged(
    q_thw: Tensor,
    cache_pow: Tensor,
    w_th: Tensor,
    table_tj: Tensor,
    length_t: Tensor,
    blocks_tk: Tensor | None,
    *,
    block_size: int,
    order: ScoreOrder,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The same scores with keys in a paged cache.

    Shapes:
        cache_pow: uint8 [p, o, 68], pages of o entries, whose bytes are the codes of all entries and then their
        scales; table_tj: int32 [t, j], the pages of the token's sequence; returns [t, j * o], or [t, k * block_size]
        with blocks. The rest as `index_scores`; an entry outside cache or table is −inf.

    Raises:
        TypeError: records are not uint8, weights not floating, pages, lengths or blocks not int32.
        ValueError: shapes disagree, a record has not 68 bytes, or block_size is not positive.
    """
    dims = _check_queries(q_thw, w_th, length_t)
    _check("cache_pow", cache_pow, "pow", torch.uint8, dims)
    _check("table_tj", table_tj, "tj", torch.int32, dims)
    p, o, j = dims["p"], dims["o"], dims["j"]
    entry_ts = _entries(length_t, blocks_tk, block_size, j * o)
    # a column of −1 behind the table stands for every entry without a page
    table_tj = torch.nn.functional.pad(table_tj.long(), (0, 1), value=-1)
    page_ts = table_tj.gather(1, (entry_ts // max(o, 1)).clamp(-1, j) % (j + 1))
    is_known_ts = (entry_ts >= 0) & (page_ts >= 0) & (page_ts < p)
    seen_y, row_ts = seen_rows(torch.where(is_known_ts, page_ts * o + entry_ts % max(o, 1), -1))
    page_pw, data = cache_pow.flatten(1), o * INDEX_FP4.data_bytes
    codes, sf = page_pw[:, :data].reshape(p * o, 64), page_pw[:, data:].reshape(p * o, 4)
    k_yd = dequantize(codes[seen_y], sf[seen_y], fmt=INDEX_FP4.quant, num=num)
    return score_rows(_query_values(q_thw, num), k_yd, w_th, row_ts, order=order, num=num)


def score_rows(
    q_thd: Tensor, k_sd: Tensor, w_th: Tensor, row_ts: Tensor, *, order: ScoreOrder, num: Numerics = CONTRACT
) -> Tensor:
    """Every query against the rows of `k_sd` that it sees; a row outside is −inf, whatever stands in its place."""
    seen_ts = (row_ts >= 0) & (row_ts < k_sd.shape[0])
    scores_ts = torch.full(row_ts.shape, -torch.inf, dtype=num.carrier, device=row_ts.device)
    row_ts = torch.where(seen_ts, row_ts, 0)
    for token_y, most in in_chunks(seen_ts, q_thd.shape[2]):
        dots_yhs = num.einsum("yhd,ysd->yhs", q_thd[token_y], k_sd[row_ts[token_y, :most]])
        scores_ts[token_y, :most] = WEIGHTED[order](dots_yhs, num.wide(w_th[token_y]), num)
    return scores_ts.masked_fill(~seen_ts, -torch.inf)


def _weighted_release(dots_ths: Tensor, w_th: Tensor, num: Numerics) -> Tensor:
    products_ths = num.bf16(num.bf16(dots_ths).relu() * w_th[:, :, None])
    return num.bf16(num.sum(products_ths, dim=1))


def _weighted_chains(dots_ths: Tensor, w_th: Tensor, num: Numerics) -> Tensor:
    """An order that is part of the contract: an explicit loop of marks."""
    terms_ths = num.bf16(dots_ths.relu()) * w_th[:, :, None]
    chains = [torch.zeros_like(dots_ths[:, 0]) for _ in range(CHAINS)]
    for head in range(dots_ths.shape[1]):
        chains[head % CHAINS] = _bf16_once(terms_ths[:, head] + chains[head % CHAINS], num)
    return num.bf16(num.bf16(chains[0] + chains[2]) + num.bf16(chains[1] + chains[3]))


WEIGHTED = {
    ScoreOrder.FP32: lambda dots_ths, w_th, num: num.f32(num.einsum("th,ths->ts", w_th, dots_ths.relu())),
    ScoreOrder.BF16_ONCE: lambda dots_ths, w_th, num: num.bf16(num.einsum("th,ths->ts", w_th, dots_ths.relu())),
    ScoreOrder.BF16_RELEASE: _weighted_release,
    ScoreOrder.BF16_CHAINS: _weighted_chains,
}


def _bf16_once(x: Tensor, num: Numerics) -> Tensor:
    """Round to bf16 in one step, as a bf16 fma does; marks go through fp32 and are wrong where that hits a midpoint."""
    y = num.f32(x)
    near = num.bf16(y)
    far = 2 * y - near  # the other neighbour, if y is a midpoint
    is_midpoint = (near != y) & (num.bf16(far) == far)
    return torch.where(is_midpoint & ((x - y) * (far - near) > 0), far, near)


def _rotated_records(x_thd: Tensor, table_ir: Tensor, positions_t: Tensor, name: str, num: Numerics) -> Tensor:
    """The last r channels rotated, then the records [t, h, 68] of all rows."""
    if x_thd.dim() == 3 and x_thd.shape[2] != INDEX_FP4.channels:
        raise ValueError(f"{name}: expected {INDEX_FP4.channels} channels, got shape {tuple(x_thd.shape)}")
    expect_dtype("table_ir", table_ir, torch.float32)
    pairing, span = Pairing.INTERLEAVED, RopeSpan.LAST
    turned_yd = rope(x_thd, table_ir, positions_t, pairing=pairing, span=span, inverse=False, num=num).flatten(0, 1)
    return torch.cat(quantize(turned_yd, fmt=INDEX_FP4.quant, num=num), dim=1).unflatten(0, x_thd.shape[:2])


def _parted(records_yw: Tensor) -> tuple[Tensor, Tensor]:
    return records_yw[:, : INDEX_FP4.data_bytes], records_yw[:, INDEX_FP4.data_bytes :]


def _query_values(q_thw: Tensor, num: Numerics) -> Tensor:
    return dequantize(*_parted(q_thw.flatten(0, 1)), fmt=INDEX_FP4.quant, num=num).unflatten(0, q_thw.shape[:2])


def _entries(length_t: Tensor, blocks_tk: Tensor | None, block_size: int, columns: int) -> Tensor:
    """The entry that every column stands for, −1 where the row does not see it; 64 bits."""
    if blocks_tk is None:
        entry_ts = torch.arange(columns, device=length_t.device).expand(len(length_t), -1)
    else:
        expect_positive("block_size", block_size)
        _check("blocks_tk", blocks_tk, "tk", torch.int32, {"t": len(length_t)})
        inside = torch.arange(block_size, device=length_t.device)
        entry_ts = (blocks_tk.long()[:, :, None] * block_size + inside).flatten(1)
    return torch.where((entry_ts >= 0) & (entry_ts < length_t[:, None]), entry_ts, -1)


def _check_queries(q_thw: Tensor, w_th: Tensor, length_t: Tensor) -> dict[str, int]:
    dims: dict[str, int] = {}
    _check("q_thw", q_thw, "thw", torch.uint8, dims)
    expect_shape("w_th", w_th, "th", dims)
    expect_dtype("w_th", w_th, *FLOATING)
    _check("length_t", length_t, "t", torch.int32, dims)
    return dims


def _check(name: str, x: Tensor, letters: str, dtype: torch.dtype, dims: dict[str, int]) -> None:
    if letters.endswith("w") and x.shape[-1:] != (INDEX_FP4.record_bytes,):
        raise ValueError(f"{name}: expected records of {INDEX_FP4.record_bytes} bytes, got shape {tuple(x.shape)}")
    expect_shape(name, x, letters, dims)
    expect_dtype(name, x, dtype)
