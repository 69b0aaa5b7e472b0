"""Latent attention and its cache as kernels compute them, in fp32 on the CPU, with faults that can be switched on.

The whole blocks stand in `mla_block.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

LOG2_E = 1.4426950408889634
START = -1e30  # running maximum before the first block


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the emulation does wrong; the default is right. `block`, `backwards`, `split` are honest choices."""

    block: int = 64
    backwards: bool = False
    split: int = 0  # keys of one partial result, merged by LSE; 0: one part
    split_by_batch: bool = False
    merge: str = "natural"  # natural, base_2 (into a natural merge), last_lost, equal
    lse: str = "natural"  # natural, base_2, by_layout (base 2 for several queries)
    scale: float = 1.0
    causal: int = 0  # positions by which the mask is off
    corner: str = "bottom_right"  # bottom_right, top_left
    weights: str = "nearest"  # nearest, truncated
    accumulator: torch.dtype = torch.float32
    scores: torch.dtype = torch.float32
    output: str = "nearest"  # nearest, truncated
    empty: str = "zero"  # zero, nan, stale
    key_head: str = "own"  # own, first
    value: str = "first"  # first, last channels of a cached row
    tail: str = "cut"  # cut, read (slots of the last page beyond the length)
    table: str = "own"  # own, first_request
    lengths: str = "own"  # own, longest
    page: str = "strided"  # strided, packed
    chained: str = "both"  # both, first, second: which of two products into one accumulator arrives
    verify: str = "own"  # own, last (every query of a request sees what the last one sees)
    flicker: bool = False  # every second call flips the last bit of one element


_calls = 0


def product(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """An fp64 product rounded once: an fp32 BLAS call gives a row other bits in another batch."""
    return torch.einsum(equation, a.double(), b.double()).float()


def attend(
    faults: Faults,
    q_thd: Tensor,
    k_shd: Tensor,
    v_shu: Tensor,
    own_t: Tensor,
    *,
    scale: float,
    dtype: torch.dtype,
    batch: int = 1,
) -> tuple[Tensor, Tensor]:
    """Partial results over `split` keys each, merged by their LSE; out and LSE. Key j is seen if j <= own."""
    s = k_shd.shape[0]
    size = max(32, 128 // max(batch, 1)) if faults.split_by_batch else faults.split or max(s, 1)
    parts = [
        _partial(faults, q_thd, k_shd[i : i + size], v_shu[i : i + size], own_t - i, scale, dtype)
        for i in range(0, max(s, 1), size)
    ]
    if faults.merge == "last_lost" and len(parts) > 1:
        parts = parts[:-1]
    out, lse = parts[0] if len(parts) == 1 else _merge(faults, parts)
    empty = lse == -torch.inf
    out = torch.where(empty[..., None], {"zero": 0.0, "nan": torch.nan, "stale": 7.0}[faults.empty], out)
    if faults.lse == "base_2" or (faults.lse == "by_layout" and q_thd.shape[0] > 1):
        lse = lse * LOG2_E
    if faults.output == "truncated":
        out = (out.view(torch.int32) & -65536).view(torch.float32)
    return out.to(dtype), lse


def _partial(
    faults: Faults, q: Tensor, k: Tensor, v: Tensor, own_t: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    t, h, s = q.shape[0], q.shape[1], k.shape[0]
    # whole blocks, as a kernel has them: the width of the last one must not depend on the chunk
    k, v = (pad(x.float(), (0, 0, 0, 0, 0, -s % faults.block)) for x in (k, v))
    q = _arriving(faults, q)
    acc, total = torch.zeros(t, h, v.shape[-1]), torch.zeros(t, h, 1)
    top = torch.full((t, h, 1), START)
    starts = range(0, k.shape[0], faults.block)
    for start in reversed(starts) if faults.backwards else starts:
        keys, values = k[start : start + faults.block], v[start : start + faults.block]
        place = start + torch.arange(faults.block)
        seen = (place <= own_t[:, None] + faults.causal) & (place < s)
        x = product("thd,shd->ths", q, keys).to(faults.scores).float() * (scale * faults.scale * LOG2_E)
        x = x.masked_fill(~seen[:, None, :], -torch.inf)
        new = torch.maximum(top, x.amax(-1, keepdim=True).nan_to_num(nan=START))
        p, decay = _exp2(x - new), _exp2(top - new)
        total = total * decay + p.double().sum(-1, keepdim=True).float()
        acc = (acc * decay).to(faults.accumulator).float() + product("ths,shu->thu", _weights(faults, p, dtype), values)
        acc, top = acc.to(faults.accumulator).float(), new
    lse = (top + torch.log2(total.double()).float()) / LOG2_E
    return torch.where(total == 0, 0.0, acc / total), torch.where(total == 0, -torch.inf, lse).squeeze(-1)


def _arriving(faults: Faults, q: Tensor) -> Tensor:
    """A score is the product over the largest power of two of channels plus that over the rest."""
    width = q.shape[-1]
    channel = torch.arange(width)
    main = channel < 1 << (width.bit_length() - 1)
    return torch.where({"both": channel >= 0, "first": main, "second": ~main}[faults.chained], q.float(), 0)


def _exp2(x: Tensor) -> Tensor:
    # torch's fp32 exp2 gives other bits in the vector body than in its tail
    return torch.exp2(x.double()).float()


def _weights(faults: Faults, p: Tensor, dtype: torch.dtype) -> Tensor:
    if faults.weights == "truncated":
        return (p.view(torch.int32) & -65536).view(torch.float32)
    return p.to(dtype).float()


def _merge(faults: Faults, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    outs, lses = (torch.stack(list(x)).double() for x in zip(*parts, strict=True))
    if faults.merge == "base_2":
        lses = lses * LOG2_E
    if faults.merge == "equal":
        lses = torch.where(lses == -torch.inf, lses, lses.amax(0, keepdim=True))
    top = lses.amax(0).clamp_min(START)
    share = torch.exp(lses - top)
    total = share.sum(0)
    out = torch.where(total[..., None] == 0, 0.0, (share[..., None] * outs).sum(0) / total[..., None])
    return out.float(), torch.where(total == 0, -torch.inf, top + torch.log(total)).float()


def prefill(faults: Faults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `mla_prefill`."""

    def mla_prefill(
        q_thd: Tensor, k_shd: Tensor, v_shu: Tensor, *, scale: float, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[Tensor, Tensor]:
        t, s = q_thd.shape[0], k_shd.shape[0]
        own_t = torch.arange(t) + (s - t if faults.corner == "bottom_right" else 0)
        if faults.key_head == "first":
            k_shd = k_shd[:, :1]
        return attend(faults, q_thd, k_shd, v_shu, own_t, scale=scale, dtype=dtype)

    return mla_prefill


def decode(faults: Faults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `mla_decode`."""

    def mla_decode(
        q_bthd: Tensor,
        cache_pod: Tensor,
        block_table_bp: Tensor,
        lengths_b: Tensor,
        *,
        scale: float,
        value_dim: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[Tensor, Tensor]:
        global _calls
        (p, o, d), (b, t, h) = cache_pod.shape, q_bthd.shape[:3]
        if faults.page == "packed":
            cache_pod = cache_pod.as_strided((p, o, d), (o * d, d, 1))
        out, lse = torch.zeros(b, t, h, value_dim, dtype=dtype), torch.zeros(b, t, h)
        for i in range(b):
            length = int(lengths_b.max() if faults.lengths == "longest" else lengths_b[i])
            pages = block_table_bp[0 if faults.table == "first_request" else i, : -(-length // o)]
            rows = cache_pod[pages.long().clamp(0, p - 1)].flatten(0, 1)[:, None]
            rows = rows[:length] if faults.tail == "cut" else rows
            values = rows[..., :value_dim] if faults.value == "first" else rows[..., -value_dim:]
            own_t = length - t + torch.arange(t)
            own_t = torch.full_like(own_t, length - 1) if faults.verify == "last" else own_t
            out[i], lse[i] = attend(faults, q_bthd[i], rows, values, own_t, scale=scale, dtype=dtype, batch=b)
        if faults.flicker and out.numel():
            _calls += 1
            out.view(-1)[:1].view(torch.uint8)[0] ^= _calls % 2
        return out, lse

    return mla_decode


@dataclass(frozen=True, kw_only=True)
class StoreFaults:
    """What the store does wrong; the default is right."""

    minus_one: str = "skip"  # skip, wrap
    page: str = "strided"  # strided, packed
    slot: str = "right"  # right, next, transposed, offset_only
    rows: str = "all"  # all, none_after_a_hole, backwards
    width: str = "own"  # own, latent_only, one_more


def store(faults: StoreFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `store_latent`."""

    def store_latent(cache_pod_: Tensor, latent_td: Tensor, slots_t: Tensor) -> Tensor:
        p, o, d = cache_pod_.shape
        cache = cache_pod_.as_strided((p, o, d), (o * d, d, 1)) if faults.page == "packed" else cache_pod_
        slots = slots_t.tolist()
        if faults.rows == "backwards":
            latent_td = latent_td.flip(0)
        for row, slot in zip(latent_td, slots, strict=True):
            if slot == -1 and faults.rows == "none_after_a_hole":
                break
            if slot == -1 and faults.minus_one == "skip":
                continue
            page, offset = _place(faults, slot % (p * o), p, o)
            if faults.width == "latent_only":
                cache[page, offset, : d // 2] = row[: d // 2]
            else:
                cache[page, offset] = row
            if faults.width == "one_more" and offset + 1 < o:
                cache[page, offset + 1, 0] = 0.0
        return cache_pod_

    return store_latent


def _place(faults: StoreFaults, slot: int, p: int, o: int) -> tuple[int, int]:
    if faults.slot == "next":
        slot = (slot + 1) % (p * o)
    if faults.slot == "transposed":
        return slot % p, slot // p
    return (0 if faults.slot == "offset_only" else slot // o), slot % o


_RIGHT = Faults()
right_prefill = prefill(_RIGHT)
right_prefill_backwards = prefill(replace(_RIGHT, block=32, backwards=True))
right_prefill_merged = prefill(replace(_RIGHT, split=64))
future_by_one = prefill(replace(_RIGHT, causal=1))
own_key_hidden = prefill(replace(_RIGHT, causal=-1))
mask_top_left = prefill(replace(_RIGHT, corner="top_left"))
first_key_head_for_all = prefill(replace(_RIGHT, key_head="first"))
last_chunk_lost = prefill(replace(_RIGHT, split=64, merge="last_lost"))
chunks_merged_in_base_2 = prefill(replace(_RIGHT, split=64, merge="base_2"))
chunks_merged_equally = prefill(replace(_RIGHT, split=64, merge="equal"))
lse_base_2 = prefill(replace(_RIGHT, lse="base_2"))
scale_off_by_half_percent = prefill(replace(_RIGHT, scale=1.005))
weights_truncated = prefill(replace(_RIGHT, weights="truncated"))
scores_bf16 = prefill(replace(_RIGHT, scores=torch.bfloat16))
accumulator_bf16 = prefill(replace(_RIGHT, accumulator=torch.bfloat16))
first_product_alone = prefill(replace(_RIGHT, chained="first"))
second_product_alone = prefill(replace(_RIGHT, chained="second"))
output_truncated = prefill(replace(_RIGHT, output="truncated"))

right_decode = decode(_RIGHT)
right_decode_splits = decode(replace(_RIGHT, split=32))
splits_merged_in_base_2 = decode(replace(_RIGHT, split=32, merge="base_2"))
last_split_lost = decode(replace(_RIGHT, split=32, merge="last_lost"))
lse_base_by_layout = decode(replace(_RIGHT, lse="by_layout"))
empty_request_nan = decode(replace(_RIGHT, empty="nan"))
empty_request_unwritten = decode(replace(_RIGHT, empty="stale"))
first_table_for_all = decode(replace(_RIGHT, table="first_request"))
longest_length_for_all = decode(replace(_RIGHT, lengths="longest"))
split_depends_on_batch = decode(replace(_RIGHT, split_by_batch=True))
not_deterministic = decode(replace(_RIGHT, flicker=True))
page_tail_read = decode(replace(_RIGHT, tail="read"))
page_stride_ignored = decode(replace(_RIGHT, page="packed"))
verify_mask_missing = decode(replace(_RIGHT, verify="last"))
newest_key_hidden = decode(replace(_RIGHT, causal=-1))
value_from_the_rotary_end = decode(replace(_RIGHT, value="last"))
decode_scale_off_by_3_percent = decode(replace(_RIGHT, scale=1.03))

_RIGHT_STORE = StoreFaults()
right_store = store(_RIGHT_STORE)
slot_minus_one_wraps = store(replace(_RIGHT_STORE, minus_one="wrap"))
store_ignores_page_stride = store(replace(_RIGHT_STORE, page="packed"))
store_one_slot_on = store(replace(_RIGHT_STORE, slot="next"))
store_slot_transposed = store(replace(_RIGHT_STORE, slot="transposed"))
store_forgets_the_page = store(replace(_RIGHT_STORE, slot="offset_only"))
store_stops_at_a_hole = store(replace(_RIGHT_STORE, rows="none_after_a_hole"))
store_rows_backwards = store(replace(_RIGHT_STORE, rows="backwards"))
store_without_the_rotary_key = store(replace(_RIGHT_STORE, width="latent_only"))
store_spills_into_the_next_slot = store(replace(_RIGHT_STORE, width="one_more"))
