"""The V3.2 indexer and attention over its records as kernels compute them, on the CPU, with faults to switch on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import DsaConfig, IndexerRope

from ..fp8_unit import fp8_unit_dots
from .sparse_attn import Faults as Attention
from .sparse_attn import emulate

E4M3 = torch.float8_e4m3fn
_calls = 0


def _bf16(x: Tensor) -> Tensor:
    return x.float().bfloat16().double()


@dataclass(frozen=True, kw_only=True)
class RowFaults:
    """What the way from projected rows to index rows does wrong; the default is right."""

    pairs: str = "asked"  # asked, other, interleaved (the flag is ignored)
    span: str = "first"  # first, last, none
    position: str = "own"  # own, next, first
    transform: str = "asked"  # asked, never, before_rotation, without_factor, rounded_twice
    norm: str = "layer"  # layer, rms, none, without_bias, without_weight, two_roundings, unrounded
    eps: float = 0.0  # instead of the configured one
    store: str = "nearest"  # nearest, truncated
    last_head: bool = True
    counter: bool = False


def _hadamard(x: Tensor, *, factor: bool = True) -> Tensor:
    width = x.shape[-1]
    index = torch.arange(width)
    odd = torch.tensor([[int(i & j).bit_count() % 2 for j in index.tolist()] for i in index.tolist()])
    return x @ (1.0 - 2.0 * odd).double() * (width**-0.5 if factor else 1.0)


def _index_rows(faults: RowFaults, x: Tensor, table: Tensor, positions: Tensor, config: DsaConfig) -> Tensor:
    """Rows [y, d] in fp64, one position each."""
    global _calls
    half, width = table.shape[1] // 2, x.shape[1]
    transformed = config.index_key is not None and faults.transform != "never"
    if transformed and faults.transform == "before_rotation":
        x = _bf16(_hadamard(x))
    if faults.position == "next":
        positions = (positions + 1).clamp(max=len(table) - 1)
    elif faults.position == "first":
        positions = positions[:1].expand_as(positions)
    rope = {
        "asked": config.indexer_rope,
        "other": next(r for r in IndexerRope if r is not config.indexer_rope),
        "interleaved": IndexerRope.INTERLEAVED,
    }[faults.pairs]
    if faults.span != "none":
        start = 0 if faults.span == "first" else width - 2 * half
        first, second = slice(start, start + half), slice(start + half, start + 2 * half)
        if rope is IndexerRope.INTERLEAVED:
            first, second = slice(start, start + 2 * half, 2), slice(start + 1, start + 2 * half, 2)
        cos, sin = table.double()[positions.long()].split(half, 1)
        turned = x.clone()
        turned[:, first] = x[:, first] * cos - x[:, second] * sin
        turned[:, second] = x[:, first] * sin + x[:, second] * cos
        x = turned if faults.transform == "rounded_once" else _bf16(turned)
    if transformed and faults.transform != "before_rotation":
        x = _hadamard(x, factor=faults.transform != "without_factor")
    stored = x.float()
    if faults.store == "truncated":
        stored = (stored.view(torch.int32) & -65536).view(torch.float32)
    y = stored.bfloat16()
    if faults.counter and y.numel():
        _calls += 1
        y.view(-1)[0] += _calls
    return y


def queries_with(faults: RowFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `dsa_index_queries`."""

    def dsa_index_queries(q_thd: Tensor, table_sr: Tensor, positions_t: Tensor, *, config: DsaConfig) -> Tensor:
        t, h, d = q_thd.shape
        x = q_thd.double().reshape(t * h, d)
        y = _index_rows(faults, x, table_sr, positions_t.repeat_interleave(h), config).view(t, h, d)
        if not faults.last_head:
            y[:, -1:] = torch.nan
        return y

    return dsa_index_queries


def keys_with(faults: RowFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `dsa_index_keys`."""

    def dsa_index_keys(
        k_td: Tensor, weight_d: Tensor, bias_d: Tensor, table_sr: Tensor, positions_t: Tensor, *, config: DsaConfig
    ) -> Tensor:
        x, weight, bias = k_td.double(), weight_d.double(), bias_d.double()
        if faults.norm != "none":
            mean = 0.0 if faults.norm == "rms" else x.mean(-1, keepdim=True)
            x = x - mean
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + (faults.eps or config.norm_eps))
            x = _bf16(x) if faults.norm == "two_roundings" else x
            x = x if faults.norm == "without_weight" else x * weight
            x = x if faults.norm == "without_bias" else x + bias
            x = x if faults.norm == "unrounded" else _bf16(x)
        return _index_rows(faults, x, table_sr, positions_t, config)

    return dsa_index_keys


def weights_with(
    *, product: str = "fp32", heads: bool = True, scale: str = "used", width: bool = True, relu: bool = False
) -> Callable[..., Tensor]:
    """An emulation with the signature of `dsa_index_weights`."""

    def dsa_index_weights(x_tm: Tensor, w_hm: Tensor, q_sf_th: Tensor, *, index_dim: int) -> Tensor:
        w = w_hm.bfloat16() if product == "bf16_weights" else w_hm
        total = (x_tm.double() @ w.double().T).float()
        if product == "bf16":
            total = total.bfloat16().float()
        if relu:
            total = total.relu()
        total = total * (w_hm.shape[0] ** -0.5 if heads else 1.0)
        if scale != "missing":
            total = total * (q_sf_th[:, :1] if scale == "first_head" else q_sf_th)
        return total * (index_dim**-0.5 if width else 1.0)

    return dsa_index_weights


@dataclass(frozen=True, kw_only=True)
class ScoreFaults:
    """What the scores do wrong; the default is right."""

    relu: str = "each"  # each, none, after, magnitude, hides_nan
    weight: str = "signed"  # signed, positive, unweighted
    scale: str = "own"  # own, missing, next, before_relu_of_minus
    dots: torch.dtype = torch.float32
    unit: str = "exact"  # exact, fp8 (of SM90)
    length: str = "used"  # used, ignored, first, one_more, one_less
    heads: str = "all"  # all, without_last, first_query
    unseen: str = "hidden"  # hidden, times_zero, zero
    page: str = "sectioned"  # sectioned, interleaved, sections_of_64, packed
    table: str = "own"  # own, first, reversed, wraps
    scale_bits: str = "fp32"  # fp32, exponent
    by_batch: bool = False
    counter: bool = False


def _score(faults: ScoreFaults, q: Tensor, k: Tensor, k_sf: Tensor, w: Tensor, seen: Tensor) -> Tensor:
    """Scores [s] of one query in fp32."""
    q, k = q.double(), k.double()
    if faults.unseen != "times_zero":
        k, k_sf = torch.where(seen[:, None], k, 0.0), torch.where(seen, k_sf, 0.0)
    if faults.heads == "without_last":
        q, w = q[:-1], w[:-1]
    dots = fp8_unit_dots(k, q) if faults.unit == "fp8" else k @ q.T
    dots = dots.float().to(faults.dots).double()
    weight = {"signed": w, "positive": w.abs(), "unweighted": torch.ones_like(w)}[faults.weight].double()
    if faults.relu == "none":
        total = (dots * weight).sum(1)
    elif faults.relu == "after":
        total = (dots * weight).sum(1).relu()
    elif faults.relu == "magnitude":
        total = (dots.abs() * weight).sum(1)
    else:
        positive = dots.relu().nan_to_num(0.0) if faults.relu == "hides_nan" else dots.relu()
        total = (positive * weight).sum(1)
    scale = {"own": k_sf, "missing": torch.ones_like(k_sf), "next": k_sf.roll(-1)}[faults.scale]
    score = (total.float() * scale).float()
    if faults.unseen == "times_zero":
        return score * seen + torch.where(seen, 0.0, -torch.inf)
    return torch.where(seen, score, 0.0 if faults.unseen == "zero" else -torch.inf)


def _lengths(faults: ScoreFaults, lengths: Tensor, columns: int) -> Tensor:
    if faults.length == "ignored":
        return torch.full_like(lengths, columns)
    if faults.length == "first":
        return lengths[:1].expand_as(lengths)
    return lengths + {"one_more": 1, "one_less": -1}.get(faults.length, 0)


def _finished(faults: ScoreFaults, rows: list[Tensor], t: int, columns: int) -> Tensor:
    global _calls
    out = torch.stack(rows) if rows else torch.zeros(t, columns)
    if faults.by_batch and t % 2 == 0:
        out = out * (1 + 2.0**-22)
    if faults.counter and out.numel():
        _calls += 1
        out.view(-1)[:1].view(torch.uint8)[0] ^= _calls % 2
    return out


def scores_with(faults: ScoreFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `dsa_index_scores`."""

    def dsa_index_scores(q_thd: Tensor, k_sd: Tensor, k_sf_s: Tensor, w_th: Tensor, length_t: Tensor) -> Tensor:
        s = k_sd.shape[0]
        lengths = _lengths(faults, length_t, s)
        if faults.heads == "first_query" and len(q_thd):
            q_thd = q_thd[:1].expand_as(q_thd)
        rows = [
            _score(faults, q, k_sd.float(), k_sf_s, w, torch.arange(s) < n)
            for q, w, n in zip(q_thd.float(), w_th, lengths, strict=True)
        ]
        return _finished(faults, rows, len(q_thd), s)

    return dsa_index_scores


def paged_with(faults: ScoreFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `dsa_index_scores_paged`."""

    def dsa_index_scores_paged(
        q_thd: Tensor, cache_pow: Tensor, w_th: Tensor, table_tj: Tensor, length_t: Tensor
    ) -> Tensor:
        (p, o, w), d, j = cache_pow.shape, q_thd.shape[2], table_tj.shape[1]
        flat = cache_pow.reshape(p, o * w)
        if faults.page == "packed" and p:
            flat = cache_pow.as_strided((p, o * w), (o * w, 1))
        if faults.page == "interleaved":
            records = flat.view(p, o, w)
            codes, sf = records[..., :d], records[..., d:]
        else:
            split = min(64, o) if faults.page == "sections_of_64" else o
            codes, sf = flat[:, : o * d].reshape(p, o, d), flat[:, split * d : split * d + o * 4].reshape(p, o, 4)
        k = codes.contiguous().view(E4M3).float()
        scale = sf.contiguous().view(torch.float32)[..., 0]
        if faults.scale_bits == "exponent":
            scale = torch.exp2(torch.log2(scale.abs()).floor())
        table = table_tj.long()
        if faults.table == "first" and len(table):
            table = table[:1].expand_as(table)
        elif faults.table == "reversed":
            table = table.flip(1)
        elif faults.table == "wraps" and p:
            table = torch.where(table == -1, p - 1, table)
        column = torch.arange(j * o)
        rows = []
        for q, weights, pages, n in zip(q_thd.float(), w_th, table, _lengths(faults, length_t, j * o), strict=True):
            page = pages.repeat_interleave(o)
            seen = (column < n) & (page >= 0) & (page < p)
            safe = torch.where((page >= 0) & (page < p), page, 0)
            slot = column % max(o, 1)
            found = (k[safe, slot], scale[safe, slot]) if p else (torch.zeros(j * o, d), torch.zeros(j * o))
            rows.append(_score(faults, q, *found, weights, seen))
        return _finished(faults, rows, len(q_thd), j * o)

    return dsa_index_scores_paged


@dataclass(frozen=True, kw_only=True)
class RecordFaults:
    """What the reader of 656-byte records does wrong; the default is right."""

    order: str = "codes_scales_tail"  # codes_scales_tail, codes_tail_scales, sectioned
    scale: str = "own"  # own, first_group, missing, exponent, next_group
    tail: str = "read"  # read, dropped, quantised, half_split
    stride: str = "used"  # used, ignored
    value: str = "latent"  # latent, last_channels
    codes: str = "e4m3"  # e4m3, subnormals_as_zero, nan_as_480
    pages: int = 1  # times their true size
    latent: str = "bf16"  # bf16, scaled_after_the_sum


def _rows(faults: RecordFaults, cache: Tensor) -> Tensor:
    p, o, w = cache.shape
    flat = cache.as_strided((p * o, w), (w, 1)) if faults.stride == "ignored" else cache.reshape(p * o, w)
    if faults.order == "sectioned":
        pages = cache.reshape(p, o * w)
        main = pages[:, : o * 640].reshape(p * o, 640)
        codes, tail, sf = main[:, :512], main[:, 512:], pages[:, o * 640 :].reshape(p * o, 16)
    elif faults.order == "codes_tail_scales":
        codes, tail, sf = flat.split([512, 128, 16], 1)
    else:
        codes, sf, tail = flat.split([512, 16, 128], 1)
    value = codes.contiguous().view(E4M3).float()
    if faults.codes == "subnormals_as_zero":
        value = torch.where(value.abs() < 2.0**-6, 0.0, value)
    elif faults.codes == "nan_as_480":
        value = value.nan_to_num(480.0)
    scale = sf.contiguous().view(torch.float32)
    if faults.scale == "first_group":
        scale = scale[:, :1].expand(-1, 4)
    elif faults.scale == "next_group":
        scale = scale.roll(-1, 1)
    elif faults.scale == "missing":
        scale = torch.ones_like(scale)
    elif faults.scale == "exponent":
        scale = torch.exp2(sf[:, ::4].double() - 127).float()
    rope = tail.contiguous().view(torch.bfloat16)
    if faults.tail == "dropped":
        rope = torch.zeros_like(rope)
    elif faults.tail == "quantised":
        rope = rope.float().clamp(-448, 448).to(E4M3).bfloat16()
    elif faults.tail == "half_split":
        rope = torch.cat([rope[:, 0::2], rope[:, 1::2]], 1)
    return torch.cat([(value * scale.repeat_interleave(128, 1)).bfloat16(), rope], 1)


def mla_with(faults: RecordFaults, attention: Attention | None = None) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `sparse_mla`."""
    inner = attention or Attention()

    def sparse_mla(
        q_thd: Tensor, cache_pow: Tensor, idx_tk: Tensor, topk_length_t: Tensor | None, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        rows = _rows(faults, cache_pow)
        if faults.value == "last_channels":
            rows, q_thd = rows.roll(64, 1), q_thd.roll(64, 2)
        return emulate(inner, q_thd, rows, idx_tk, None, topk_length_t, scale, 512, torch.bfloat16)

    return sparse_mla


_ROWS, _SCORES, _RECORD, _ATTEND = RowFaults(), ScoreFaults(), RecordFaults(), Attention()

right_queries = queries_with(_ROWS)
queries_other_pairs = queries_with(replace(_ROWS, pairs="other"))
queries_flag_ignored = queries_with(replace(_ROWS, pairs="interleaved"))
queries_last_channels = queries_with(replace(_ROWS, span="last"))
queries_not_turned = queries_with(replace(_ROWS, span="none"))
queries_next_position = queries_with(replace(_ROWS, position="next"))
queries_position_of_first = queries_with(replace(_ROWS, position="first"))
queries_untransformed = queries_with(replace(_ROWS, transform="never"))
queries_transformed_first = queries_with(replace(_ROWS, transform="before_rotation"))
queries_without_factor = queries_with(replace(_ROWS, transform="without_factor"))
queries_truncated = queries_with(replace(_ROWS, store="truncated"))
queries_last_head_unwritten = queries_with(replace(_ROWS, last_head=False))
queries_not_deterministic = queries_with(replace(_ROWS, counter=True))

right_keys = keys_with(_ROWS)
keys_rms_norm = keys_with(replace(_ROWS, norm="rms"))
keys_not_normalised = keys_with(replace(_ROWS, norm="none"))
keys_without_bias = keys_with(replace(_ROWS, norm="without_bias"))
keys_without_weight = keys_with(replace(_ROWS, norm="without_weight"))
keys_eps_1e_3 = keys_with(replace(_ROWS, eps=1e-3))
keys_other_pairs = keys_with(replace(_ROWS, pairs="other"))
keys_flag_ignored = keys_with(replace(_ROWS, pairs="interleaved"))
keys_last_channels = keys_with(replace(_ROWS, span="last"))
keys_untransformed = keys_with(replace(_ROWS, transform="never"))
keys_truncated = keys_with(replace(_ROWS, store="truncated"))

right_weights = weights_with()
weights_bf16_product = weights_with(product="bf16")
weights_bf16_matrix = weights_with(product="bf16_weights")
weights_without_heads = weights_with(heads=False)
weights_without_query_scale = weights_with(scale="missing")
weights_scale_of_first_head = weights_with(scale="first_head")
weights_without_width = weights_with(width=False)
weights_positive = weights_with(relu=True)

right_scores = scores_with(_SCORES)
scores_of_fp8_unit = scores_with(replace(_SCORES, unit="fp8"))
relu_missing = scores_with(replace(_SCORES, relu="none"))
relu_after_the_sum = scores_with(replace(_SCORES, relu="after"))
relu_is_magnitude = scores_with(replace(_SCORES, relu="magnitude"))
nan_hidden = scores_with(replace(_SCORES, relu="hides_nan"))
weights_made_positive = scores_with(replace(_SCORES, weight="positive"))
heads_unweighted = scores_with(replace(_SCORES, weight="unweighted"))
key_scale_missing = scores_with(replace(_SCORES, scale="missing"))
key_scale_of_next = scores_with(replace(_SCORES, scale="next"))
dots_bf16 = scores_with(replace(_SCORES, dots=torch.bfloat16))
length_ignored = scores_with(replace(_SCORES, length="ignored"))
length_of_first = scores_with(replace(_SCORES, length="first"))
sees_one_more = scores_with(replace(_SCORES, length="one_more"))
own_key_hidden = scores_with(replace(_SCORES, length="one_less"))
last_head_lost = scores_with(replace(_SCORES, heads="without_last"))
first_query_for_all = scores_with(replace(_SCORES, heads="first_query"))
unseen_times_zero = scores_with(replace(_SCORES, unseen="times_zero"))
unseen_is_zero = scores_with(replace(_SCORES, unseen="zero"))
depends_on_batch = scores_with(replace(_SCORES, by_batch=True))
scores_not_deterministic = scores_with(replace(_SCORES, counter=True))

right_paged = paged_with(_SCORES)
paged_scores_of_fp8_unit = paged_with(replace(_SCORES, unit="fp8"))
page_interleaved = paged_with(replace(_SCORES, page="interleaved"))
page_sections_of_64 = paged_with(replace(_SCORES, page="sections_of_64"))
page_stride_ignored = paged_with(replace(_SCORES, page="packed"))
page_table_of_first = paged_with(replace(_SCORES, table="first"))
page_table_reversed = paged_with(replace(_SCORES, table="reversed"))
absent_page_wraps = paged_with(replace(_SCORES, table="wraps"))
page_0_times_zero = paged_with(replace(_SCORES, unseen="times_zero"))
paged_length_ignored = paged_with(replace(_SCORES, length="ignored"))
scale_keeps_its_exponent = paged_with(replace(_SCORES, scale_bits="exponent"))
paged_relu_missing = paged_with(replace(_SCORES, relu="none"))

right_mla = mla_with(_RECORD)
right_mla_block_128 = mla_with(_RECORD, replace(_ATTEND, block=128))
right_mla_backwards = mla_with(_RECORD, replace(_ATTEND, block=32, backwards=True))
planes_swapped = mla_with(replace(_RECORD, order="codes_tail_scales"))
page_read_sectioned = mla_with(replace(_RECORD, order="sectioned"))
one_scale_a_record = mla_with(replace(_RECORD, scale="first_group"))
scale_of_next_group = mla_with(replace(_RECORD, scale="next_group"))
scale_missing = mla_with(replace(_RECORD, scale="missing"))
scale_byte_as_exponent = mla_with(replace(_RECORD, scale="exponent"))
tail_dropped = mla_with(replace(_RECORD, tail="dropped"))
tail_quantised = mla_with(replace(_RECORD, tail="quantised"))
tail_deinterleaved = mla_with(replace(_RECORD, tail="half_split"))
record_stride_ignored = mla_with(replace(_RECORD, stride="ignored"))
value_from_the_rotary_end = mla_with(replace(_RECORD, value="last_channels"))
subnormal_codes_as_zero = mla_with(replace(_RECORD, codes="subnormals_as_zero"))
nan_code_is_a_number = mla_with(replace(_RECORD, codes="nan_as_480"))
mla_scale_off_by_3_percent = mla_with(_RECORD, replace(_ATTEND, scale_factor=1.03))
mla_weights_truncated = mla_with(_RECORD, replace(_ATTEND, weights="truncated"))
mla_lse_base_2 = mla_with(_RECORD, replace(_ATTEND, lse="base2"))
mla_hole_wraps = mla_with(_RECORD, replace(_ATTEND, holes="wrap"))
mla_hole_times_nan = mla_with(_RECORD, replace(_ATTEND, holes="zero_times_row"))
mla_length_ignored = mla_with(_RECORD, replace(_ATTEND, lengths="ignored"))
mla_upper_bound_unchecked = mla_with(_RECORD, replace(_ATTEND, bound="lower_only"))
mla_first_list_for_all = mla_with(_RECORD, replace(_ATTEND, rows="first_row_shared"))
mla_empty_row_nan = mla_with(_RECORD, replace(_ATTEND, empty="nan"))
mla_last_key_dropped = mla_with(_RECORD, replace(_ATTEND, drop_last_key=True))
mla_split_depends_on_batch = mla_with(_RECORD, replace(_ATTEND, split_by_batch=True))
mla_not_deterministic = mla_with(_RECORD, replace(_ATTEND, flicker=True))
