"""The indexer as a kernel computes it, on the CPU, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import ScoreOrder

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_calls = 0
_published: list[Tensor] = []


def _bf16(x: Tensor) -> Tensor:
    return x.float().bfloat16().double()


@dataclass(frozen=True, kw_only=True)
class RecordFaults:
    """What the way from rows to records does wrong; the default is right."""

    norm: str = "rows"  # rows, none, queries (a norm where there is none)
    eps: float = 0.0  # instead of the given one
    pairs: str = "interleaved"  # interleaved, half_split
    span: str = "last"  # last, first, none
    position: str = "own"  # own, zero, first
    hadamard: bool = False
    product: str = "rounded"  # rounded, kept, truncated
    floor: float = 6 * 2.0**-126
    nibble: str = "low_first"  # low_first, high_first
    scales: str = "in_order"  # in_order, reversed, in_front
    codes: str = "even"  # even, truncated
    stages: int = 1


def _rotated(faults: RecordFaults, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rows [y, 128] turned by the table rows of their positions, rounded to bf16."""
    if faults.span == "none":
        return x
    if faults.position == "zero":
        positions = torch.zeros_like(positions)
    elif faults.position == "first":
        positions = positions[:1].expand_as(positions)
    half = table.shape[1] // 2
    rows = table.double()[positions.long()]
    cos, sin = rows[:, :half], rows[:, half:]
    start = 0 if faults.span == "first" else x.shape[1] - 2 * half
    slices = {
        "interleaved": (slice(start, start + 2 * half, 2), slice(start + 1, start + 2 * half, 2)),
        "half_split": (slice(start, start + half), slice(start + half, start + 2 * half)),
    }
    first, second = slices[faults.pairs]
    turned = x.clone()
    turned[:, first] = x[:, first] * cos - x[:, second] * sin
    turned[:, second] = x[:, first] * sin + x[:, second] * cos
    return _bf16(turned)


def _hadamard(x: Tensor) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < x.shape[1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return _bf16(x @ matrix * x.shape[1] ** -0.5)


def _records(faults: RecordFaults, x: Tensor) -> Tensor:
    """Rows [y, 128] as 64 bytes of codes and 4 scales."""
    groups = x.unflatten(1, (4, 32)).float()
    bits = (groups.abs().amax(-1).clamp(min=faults.floor) / 6).contiguous().view(torch.int32)
    byte = ((bits + 0x7FFFFF) >> 23).clamp(1, 254)
    ratio = groups.double() * torch.exp2(127.0 - byte.double())[..., None]
    size = ratio.abs().flatten(1)
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    lower, upper = torch.bucketize(size, edges), torch.bucketize(size, edges, right=True)
    codes = torch.where(lower % 2 == 0, lower, upper)
    if faults.codes == "truncated":
        codes = torch.bucketize(size, E2M1.double(), right=True) - 1
    if faults.stages == 2:
        values = (E2M1[codes].double() * torch.sign(ratio.flatten(1))).unflatten(1, (4, 32))
        again = values * torch.exp2(byte.double() - 127)[..., None]
        return _records(replace(faults, stages=1), again.flatten(1))
    codes = (codes + 8 * torch.signbit(ratio.flatten(1))).to(torch.uint8)
    even, odd = codes[:, 0::2], codes[:, 1::2]
    packed = even | odd << 4 if faults.nibble == "low_first" else odd | even << 4
    scales = byte.flip(1) if faults.scales == "reversed" else byte
    parts = (scales.to(torch.uint8), packed) if faults.scales == "in_front" else (packed, scales.to(torch.uint8))
    return torch.cat(parts, 1)


def keys_with(faults: RecordFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `index_keys`."""

    def index_keys(
        lat_sc: Tensor, wk_dc: Tensor, norm_d: Tensor, table_ir: Tensor, positions_s: Tensor, *, eps: float
    ) -> Tensor:
        k = (lat_sc.double() @ wk_dc.double().T).float()
        if faults.product == "rounded":
            k = k.bfloat16().float()
        elif faults.product == "truncated":
            k = (k.view(torch.int32) & -65536).view(torch.float32)
        wide = k.double()
        if faults.norm != "none":
            mean = wide.square().mean(-1, keepdim=True)
            wide = _bf16(wide * torch.rsqrt(mean + (faults.eps or eps)) * norm_d.double())
        wide = _rotated(faults, wide, table_ir, positions_s)
        return _records(faults, _hadamard(wide) if faults.hadamard else wide)

    return index_keys


def queries_with(faults: RecordFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `index_queries`."""

    def index_queries(q_thd: Tensor, table_ir: Tensor, positions_t: Tensor) -> Tensor:
        t, h, _ = q_thd.shape
        wide = q_thd.double().flatten(0, 1)
        if faults.norm == "queries":
            wide = _bf16(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-20))
        wide = _rotated(faults, wide, table_ir, positions_t.repeat_interleave(h))
        return _records(faults, _hadamard(wide) if faults.hadamard else wide).unflatten(0, (t, h))

    return index_queries


def weights_with(*, scaled: bool = True, step: int = 0, activation: str = "none") -> Callable[..., Tensor]:
    """An emulation with the signature of `index_weights`; `step` > 0 adds up in bf16 every so many channels."""

    def index_weights(x_tm: Tensor, w_hm: Tensor, *, scale: float) -> Tensor:
        x, w = x_tm.double(), w_hm.double()
        total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.float64)
        for start in range(0, x.shape[1], step or max(x.shape[1], 1)):
            part = slice(start, start + (step or x.shape[1]))
            total = (total + x[:, part] @ w[:, part].T).float().double()
            total = _bf16(total) if step == 16 else total
        total = _bf16(total)
        if activation == "relu":
            total = total.relu()
        elif activation == "softmax":
            total = total.softmax(-1)
        return (total * (scale if scaled else 1.0)).float().bfloat16()

    return index_weights


@dataclass(frozen=True, kw_only=True)
class ScoreFaults:
    """What the scores do wrong; the default is right in every order."""

    relu: str = "each"  # each, none, after
    reduce: str = "weighted"  # weighted, sigmoid_mean, unweighted
    order: str = "asked"  # asked, or another ScoreOrder value
    chains: str = "strided"  # strided, contiguous, descending, one
    fma: str = "once"  # once, twice (product and sum through fp32), product_rounded
    sums: str = "wide"  # wide, bf16; fp32 is an honest choice where the contract sums in fp32
    visible: int = 0  # entries too many or too few
    length: str = "used"  # used, ignored, first
    first: str = "used"  # used, ignored
    heads: str = "all"  # all, without_last, padded (a seventeenth that holds garbage)
    unseen: str = "hidden"  # hidden, times_zero, unwritten
    keys: str = "own"  # own, stale
    table: str = "own"  # own, first, reversed
    pages: str = "sectioned"  # sectioned, interleaved, packed (page stride ignored)
    holes: str = "hidden"  # hidden, wrap
    blocks: str = "scaled"  # scaled, unscaled
    restricted: str = "same"  # same, fp32
    flicker: bool = False
    by_batch: bool = False
    codes: str = "e2m1"  # e2m1, without_scale


def _values(faults: ScoreFaults, codes: Tensor, sf: Tensor) -> Tensor:
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    value = E2M1.double()[nibbles & 7] * (1 - 2 * (nibbles >> 3))
    if faults.codes == "without_scale":
        return value
    scale = torch.exp2(sf.double() - 127).masked_fill(sf == 255, torch.nan)
    return value * scale.repeat_interleave(32, -1)


def _once(x: Tensor) -> Tensor:
    """bf16 in one rounding: through an fp32 number whose last bit says whether something was cut off."""
    near = x.float()
    bits = near.view(torch.int32)
    odd = torch.where(near.double().abs() > x.abs(), bits - 1, bits + 1)
    bits = torch.where((near.double() != x) & (bits & 1 == 0), odd, bits)
    return bits.view(torch.float32).bfloat16().double()


def _add(faults: ScoreFaults, t: Tensor, w: Tensor, total: Tensor) -> Tensor:
    if faults.fma == "twice":
        return _bf16(t * w + total)
    if faults.fma == "product_rounded":
        return _bf16(_bf16(t * w) + total)
    return _once(t * w + total)


def _score(faults: ScoreFaults, dots: Tensor, w: Tensor, order: ScoreOrder) -> Tensor:
    """One score per key from dots [h, s] and weights [h]."""
    heads = len(w) - 1 if faults.heads == "without_last" else len(w)
    dots, w = dots[:heads], w[:heads, None]
    if faults.reduce == "sigmoid_mean":
        return dots.sigmoid().mean(0)
    if faults.reduce == "unweighted":
        w = torch.ones_like(w)
    positive = dots.relu() if faults.relu == "each" else dots
    if order in (ScoreOrder.FP32, ScoreOrder.BF16_ONCE):
        scores = torch.zeros_like(dots[0])
        for product in (positive * w).float().double():
            scores = scores + product
            if faults.sums != "wide":
                scores = _bf16(scores) if faults.sums == "bf16" else scores.float().double()
    elif order is ScoreOrder.BF16_RELEASE:
        products = _bf16((_bf16(dots).relu() if faults.relu == "each" else _bf16(dots)) * w)
        scores = torch.zeros_like(dots[0])
        for product in products:
            scores = scores + product
            if faults.sums != "wide":
                scores = _bf16(scores) if faults.sums == "bf16" else scores.float().double()
    else:
        scores = _chained(faults, _bf16(positive), w)
    return scores.relu() if faults.relu == "after" else scores


def _chained(faults: ScoreFaults, t: Tensor, w: Tensor) -> Tensor:
    heads = range(len(w))
    width = -(-len(w) // 4)
    place: dict[str, Callable[[int], int]] = {"contiguous": lambda h: h // width, "one": lambda h: 0}
    chain = [torch.zeros_like(t[0]) for _ in range(4)]
    for head in reversed(heads) if faults.chains == "descending" else heads:
        c = place.get(faults.chains, lambda h: h % 4)(head)
        chain[c] = _add(faults, t[head], w[head], chain[c])
    if faults.sums == "bf16":
        return _bf16(_bf16(_bf16(chain[0] + chain[1]) + chain[2]) + chain[3])
    return _bf16(_bf16(chain[0] + chain[2]) + _bf16(chain[1] + chain[3]))


def _scored(
    faults: ScoreFaults, q: Tensor, keys: Tensor, w: Tensor, row_ts: Tensor, order: ScoreOrder, restricted: bool
) -> Tensor:
    global _calls
    _calls += 1
    out = torch.bfloat16 if order is not ScoreOrder.FP32 else torch.float32
    if faults.order != "asked" or (restricted and faults.restricted == "fp32"):
        order = ScoreOrder(faults.order) if faults.order != "asked" else ScoreOrder.FP32
    values = _values(faults, q[..., :64], q[..., 64:])
    scores = torch.full(row_ts.shape, torch.nan if faults.unseen == "unwritten" else -torch.inf, dtype=torch.float64)
    rounds = 4 if faults.by_batch and len(q) > 2 else 1
    for token in range(len(q)):
        rows = row_ts[token]
        seen = (rows >= 0) & (rows < len(keys))
        dots = (values[token] @ keys[rows[seen]].T).float().double()
        if faults.heads == "padded":
            extra = values[(token + 1) % len(q), :1] @ keys[rows[seen]].T
            dots, weights = torch.cat([dots, extra]), torch.cat([w[token], w[token][:1]])
        else:
            weights = w[token]
        faulty = replace(faults, chains="descending") if rounds > 1 else faults
        scores[token, seen] = _score(faulty, dots, weights.double(), order)
        if faults.unseen == "times_zero":
            scores[token] = scores[token] + 0.0 * keys.sum()
    scores = scores.float().to(out)
    if faults.flicker and _calls % 2 and scores.numel():
        scores.view(-1)[0] = scores.view(-1)[0] * 1.01 if scores.view(-1)[0] > -torch.inf else 0.0
    return scores


def _entries(faults: ScoreFaults, lengths: Tensor, blocks: Tensor | None, size: int, columns: int) -> Tensor:
    if blocks is None:
        entry = torch.arange(columns).expand(len(lengths), -1)
    else:
        inside = torch.arange(size)
        step = 1 if faults.blocks == "unscaled" else size
        entry = torch.where(blocks[:, :, None] >= 0, blocks.long()[:, :, None] * step + inside, -1).flatten(1)
    limit = {"used": lengths, "ignored": torch.full_like(lengths, 2**30), "first": lengths[:1].expand_as(lengths)}
    return torch.where(entry < (limit[faults.length] + faults.visible)[:, None], entry, -1)


def scores_with(faults: ScoreFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `index_scores`."""

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
    ) -> Tensor:
        if faults.keys == "stale":
            # published when the longest row has an even number of entries, read on every call
            if not _published or (len(length_t) and int(length_t.max()) % 2 == 0):
                _published[:] = [k_sw.clone()]
            k_sw = _published[0][: len(k_sw)]
        entry = _entries(faults, length_t, blocks_tk, block_size, len(k_sw))
        start = torch.zeros_like(first_t) if faults.first == "ignored" else first_t
        rows = torch.where(entry >= 0, start.long()[:, None] + entry, -1)
        keys = _values(faults, k_sw[:, :64], k_sw[:, 64:])
        return _scored(faults, q_thw, keys, w_th, rows, order, blocks_tk is not None)

    return index_scores


def paged_with(faults: ScoreFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `index_scores_paged`."""

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
    ) -> Tensor:
        pages, slots, _ = cache_pow.shape
        if faults.pages == "packed":
            flat = torch.empty(0, dtype=torch.uint8).set_(cache_pow.untyped_storage())
            cache_pow = flat[cache_pow.storage_offset() :][: cache_pow.numel()].view(cache_pow.shape)
        if faults.pages == "interleaved":
            codes, sf = cache_pow[..., :64].flatten(0, 1), cache_pow[..., 64:].flatten(0, 1)
        else:
            flat = cache_pow.reshape(pages, -1)
            codes, sf = flat[:, : slots * 64].reshape(-1, 64), flat[:, slots * 64 :].reshape(-1, 4)
        table = table_tj.long()
        if faults.table == "first":
            table = table[:1].expand_as(table)
        elif faults.table == "reversed":
            table = table.flip(1)
        columns = table.shape[1] * slots
        entry = _entries(faults, length_t, blocks_tk, block_size, columns)
        known = (entry >= 0) & (entry < columns)
        page = table.gather(1, torch.where(known, entry // max(slots, 1), 0)) if columns else entry
        if faults.holes == "wrap" and pages:
            page = torch.where(page == -1, pages - 1, page)
        known &= (page >= 0) & (page < pages)
        rows = torch.where(known, page * slots + entry % max(slots, 1), -1)
        return _scored(faults, q_thw, _values(faults, codes, sf), w_th, rows, order, blocks_tk is not None)

    return index_scores_paged


def _visible(numerator: int, *, up: bool = False) -> Callable[..., Tensor]:
    def index_visible(positions_t: Tensor, *, ratio: int) -> Tensor:
        shifted = positions_t + numerator
        return ((shifted + ratio - 1) // ratio if up else shifted // ratio).to(torch.int32)

    return index_visible


_R, _S = RecordFaults(), ScoreFaults()
right_visible = _visible(1)
visible_too_late = _visible(0)
visible_too_early = _visible(1, up=True)

right_keys = keys_with(_R)
keys_without_norm = keys_with(replace(_R, norm="none"))
keys_eps_1e_6 = keys_with(replace(_R, eps=1e-6))
keys_half_split = keys_with(replace(_R, pairs="half_split"))
keys_first_channels = keys_with(replace(_R, span="first"))
keys_not_rotated = keys_with(replace(_R, span="none"))
keys_at_position_zero = keys_with(replace(_R, position="zero"))
keys_at_the_first_position = keys_with(replace(_R, position="first"))
keys_hadamard = keys_with(replace(_R, hadamard=True))
keys_product_kept = keys_with(replace(_R, product="kept"))
keys_product_truncated = keys_with(replace(_R, product="truncated"))
keys_floor_of_fp8 = keys_with(replace(_R, floor=1e-4))
keys_high_nibble_first = keys_with(replace(_R, nibble="high_first"))
keys_scales_reversed = keys_with(replace(_R, scales="reversed"))
keys_scales_in_front = keys_with(replace(_R, scales="in_front"))
keys_truncated = keys_with(replace(_R, codes="truncated"))
keys_in_two_stages = keys_with(replace(_R, stages=2))

right_queries = queries_with(_R)
queries_normed = queries_with(replace(_R, norm="queries"))
queries_half_split = queries_with(replace(_R, pairs="half_split"))
queries_first_channels = queries_with(replace(_R, span="first"))
queries_not_rotated = queries_with(replace(_R, span="none"))
queries_at_the_first_position = queries_with(replace(_R, position="first"))
queries_hadamard = queries_with(replace(_R, hadamard=True))
queries_high_nibble_first = queries_with(replace(_R, nibble="high_first"))
queries_floor_of_fp8 = queries_with(replace(_R, floor=1e-4))

right_weights = weights_with()
right_weights_in_steps = weights_with(step=128)
weights_not_scaled = weights_with(scaled=False)
weights_added_in_bf16 = weights_with(step=16)
weights_positive = weights_with(activation="relu")
weights_softmax = weights_with(activation="softmax")

right_scores = scores_with(_S)
right_scores_summed_in_fp32 = scores_with(replace(_S, sums="fp32"))
relu_missing = scores_with(replace(_S, relu="none"))
relu_after_the_sum = scores_with(replace(_S, relu="after"))
sigmoid_mean = scores_with(replace(_S, reduce="sigmoid_mean"))
weights_ignored = scores_with(replace(_S, reduce="unweighted"))
sees_one_too_many = scores_with(replace(_S, visible=1))
sees_one_too_few = scores_with(replace(_S, visible=-1))
length_ignored = scores_with(replace(_S, length="ignored"))
length_of_the_first = scores_with(replace(_S, length="first"))
sequences_share_keys = scores_with(replace(_S, first="ignored"))
last_head_lost = scores_with(replace(_S, heads="without_last"))
padded_head_counts = scores_with(replace(_S, heads="padded"))
unseen_times_zero = scores_with(replace(_S, unseen="times_zero"))
unseen_unwritten = scores_with(replace(_S, unseen="unwritten"))
stale_keys = scores_with(replace(_S, keys="stale"))
scales_ignored = scores_with(replace(_S, codes="without_scale"))
block_number_as_entry = scores_with(replace(_S, blocks="unscaled"))
restricted_in_fp32 = scores_with(replace(_S, restricted="fp32"))
not_deterministic = scores_with(replace(_S, flicker=True))
order_depends_on_batch = scores_with(replace(_S, by_batch=True))
heads_added_in_bf16 = scores_with(replace(_S, sums="bf16"))
chains_contiguous = scores_with(replace(_S, chains="contiguous"))
chains_descending = scores_with(replace(_S, chains="descending"))
one_chain = scores_with(replace(_S, chains="one"))
fma_rounded_twice = scores_with(replace(_S, fma="twice"))
product_rounded = scores_with(replace(_S, fma="product_rounded"))
order_of_the_release = scores_with(replace(_S, order="bf16_release"))
order_of_the_chains = scores_with(replace(_S, order="bf16_chains"))
order_of_fp32 = scores_with(replace(_S, order="fp32"))

right_paged = paged_with(_S)
pages_interleaved = paged_with(replace(_S, pages="interleaved"))
page_stride_ignored = paged_with(replace(_S, pages="packed"))
table_of_the_first = paged_with(replace(_S, table="first"))
table_reversed = paged_with(replace(_S, table="reversed"))
absent_page_wraps = paged_with(replace(_S, holes="wrap"))
page_0_times_zero = paged_with(replace(_S, unseen="times_zero"))
paged_length_ignored = paged_with(replace(_S, length="ignored"))
