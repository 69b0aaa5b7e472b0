"""Sparse attention as a fused kernel computes it, in fp32 on the CPU, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
START = -1e30  # running maximum before the first block


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the emulation does wrong; the default is right. `block`, `backwards`, `lazy` are honest choices."""

    block: int = 64
    backwards: bool = False
    lazy: float = 0.0  # raise the running maximum only when it grows by more than this
    scale_factor: float = 1.0
    drop_last_key: bool = False
    weights: str = "nearest"  # nearest, truncated
    accumulator: torch.dtype = torch.float32
    scores: torch.dtype = torch.float32
    sink: str = "add"  # add, ignore, scaled, in_maximum, base2_early
    lse: str = "natural"  # natural, base2, with_sink
    output: str = "nearest"  # nearest, truncated, up
    stored: torch.dtype | None = None  # of the output, where it is not that of the weights
    holes: str = "masked"  # masked, wrap, zero_times_row, read_row_0
    lengths: str = "used"  # used, ignored, one_if_all_are_zero
    empty: str = "zero"  # zero, nan, stale
    hide_nan: bool = False
    bound: str = "both"  # both, lower_only
    rows: str = "own"  # own, first_row_shared
    split_by_batch: bool = False
    order_by_place: bool = False  # scores are summed in an order that depends on the row's place in the tile
    flicker: bool = False  # every second call flips the last bit of one element


_calls = 0


def emulate(
    faults: Faults,
    q_thd: Tensor,
    kv_sd: Tensor,
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    scale: float,
    value_dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Base-2 online softmax over blocks of the index list; out and natural-log LSE."""
    t, h, _ = q_thd.shape
    size = faults.block if not faults.split_by_batch else max(8, 128 // max(t, 1))
    last = (idx_tk.shape[1] - 1) % size
    # whole blocks, as a kernel has them: the width of the last one must not depend on the list
    idx_tk = torch.nn.functional.pad(idx_tk, (0, -idx_tk.shape[1] % size), value=-2)
    keys, valid = _gather(faults, kv_sd, idx_tk, topk_length_t)
    blocks = range(0, idx_tk.shape[1], size)
    acc = torch.zeros(t, h, value_dim)
    top = torch.full((t, h, 1), START)
    if faults.sink == "in_maximum" and sink_h is not None:
        top = torch.maximum(top, sink_h.float()[None, :, None] * LOG2_E)
    total = torch.zeros(t, h, 1)
    for start in reversed(blocks) if faults.backwards else blocks:
        k, ok = keys[:, start : start + size], valid[:, start : start + size]
        if faults.drop_last_key and start == blocks[-1]:
            ok = ok & (torch.arange(size) < last)
        s = _scores(faults, q_thd, k).to(faults.scores).float()
        s = (s * (scale * faults.scale_factor * LOG2_E)).masked_fill(~ok[:, None, :], -torch.inf)
        high = s.amax(-1, keepdim=True).nan_to_num(nan=START)
        new = torch.where(high > top + faults.lazy, high, top)
        p, decay = _exp2(s - new), _exp2(top - new)
        total = total * decay + p.double().sum(-1, keepdim=True).float()
        acc = (acc * decay).to(faults.accumulator).float()
        acc = acc + _product("thk,tkd->thd", _round_weights(faults, p, dtype), k[..., :value_dim])
        acc = acc.to(faults.accumulator).float()
        top = new
    return _finish(faults, acc, top, total, sink_h, scale, faults.stored or dtype)


def _product(equation: str, a: Tensor, b: Tensor) -> Tensor:
    # fp64 and one rounding: an fp32 BLAS call gives a row other bits in another batch
    return torch.einsum(equation, a.double(), b.double()).float()


def _scores(faults: Faults, q_thd: Tensor, k: Tensor) -> Tensor:
    if not faults.order_by_place:
        return _product("thd,tkd->thk", q_thd, k)
    parts = [_product("thd,tkd->thk", q, keys) for q, keys in zip(q_thd.split(16, -1), k.split(16, -1), strict=True)]
    forward, backward = sum(parts[1:], parts[0]), sum(reversed(parts[:-1]), parts[-1])
    odd = (torch.arange(q_thd.shape[0]) % 2 == 1)[:, None, None]
    return torch.where(odd, backward, forward)


def _exp2(x: Tensor) -> Tensor:
    # torch's fp32 exp2 gives other bits in the vector body than in its tail
    return torch.exp2(x.double()).float()


def _gather(faults: Faults, kv: Tensor, idx: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    n = kv.shape[0]
    valid = idx >= 0 if faults.bound == "lower_only" else (idx >= 0) & (idx < n)
    if faults.holes == "wrap":
        valid = valid | (idx == -1)  # python indexing: −1 is the last row
    if lengths is not None and faults.lengths == "one_if_all_are_zero" and not lengths.any():
        lengths = torch.ones_like(lengths)
    if lengths is not None and faults.lengths != "ignored":
        valid = valid & (torch.arange(idx.shape[1])[None, :] < lengths[:, None])
    rows = torch.where(valid, idx.long(), 0) % max(n, 1)
    if faults.rows == "first_row_shared" and idx.shape[0]:
        rows, valid = rows[:1].expand_as(rows), valid[:1].expand_as(valid)
    keys = kv.float()[rows] if n else kv.new_zeros(*idx.shape, kv.shape[1]).float()
    if faults.holes == "zero_times_row":
        return keys * valid[..., None], valid  # 0 · NaN
    if faults.holes == "read_row_0":
        return keys, valid
    return torch.where(valid[..., None], keys, 0.0), valid


def _round_weights(faults: Faults, p: Tensor, dtype: torch.dtype) -> Tensor:
    if faults.weights == "truncated":
        return (p.view(torch.int32) & -65536).view(torch.float32)
    return p.to(dtype).float()


def _finish(
    faults: Faults, acc: Tensor, top: Tensor, total: Tensor, sink_h: Tensor | None, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    global _calls
    denominator = total
    if sink_h is not None and faults.sink != "ignore":
        sink = sink_h.float()[None, :, None] * LOG2_E
        sink = sink * scale if faults.sink == "scaled" else sink
        early = faults.sink == "base2_early"
        denominator = total + (_exp2(sink) * _exp2(-top) if early else _exp2(sink - top))
    out = acc / denominator
    empty = (total == 0) if faults.sink != "in_maximum" else (total == 0) & (acc == 0).all(-1, keepdim=True)
    out = torch.where(empty, {"zero": 0.0, "nan": torch.nan, "stale": 7.0}[faults.empty], out)
    mass = total if faults.lse != "with_sink" else denominator
    lse = top + torch.log2(mass.double()).float()
    lse = torch.where(total == 0, -torch.inf, lse if faults.lse == "base2" else lse / LOG2_E).squeeze(-1)
    if faults.hide_nan:
        out, lse = out.nan_to_num(0.0), lse.nan_to_num(0.0, neginf=-torch.inf)
    if faults.output == "truncated":
        out = (out.view(torch.int32) & -65536).view(torch.float32)
    stored = out.to(dtype)
    if faults.output == "up":
        stored = (stored.view(torch.int16) + 1).view(dtype)
    if faults.flicker and stored.numel():
        _calls += 1
        stored.view(-1)[:1].view(torch.uint8)[0] ^= _calls % 2
    return stored, lse


def prefill(faults: Faults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `sparse_attn`."""

    def sparse_attn(
        q_thd: Tensor,
        kv_sd: Tensor,
        idx_tk: Tensor,
        sink_h: Tensor | None,
        topk_length_t: Tensor | None,
        *,
        scale: float,
        value_dim: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[Tensor, Tensor]:
        return emulate(faults, q_thd, kv_sd, idx_tk, sink_h, topk_length_t, scale, value_dim, dtype)

    return sparse_attn


def decode(faults: Faults, *, ignore_stride: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `sparse_attn_decode`."""

    def sparse_attn_decode(
        q_thd: Tensor,
        kv_pod: Tensor,
        idx_tk: Tensor,
        sink_h: Tensor | None,
        topk_length_t: Tensor | None,
        *,
        scale: float,
        value_dim: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[Tensor, Tensor]:
        p, o, d = kv_pod.shape
        flat = kv_pod.as_strided((p * o, d), (d, 1)) if ignore_stride else kv_pod.reshape(p * o, d)
        return emulate(faults, q_thd, flat, idx_tk, sink_h, topk_length_t, scale, value_dim, dtype)

    return sparse_attn_decode


_RIGHT = Faults()
right_block_64 = prefill(_RIGHT)
right_block_128 = prefill(replace(_RIGHT, block=128))
right_block_32_backwards = prefill(replace(_RIGHT, block=32, backwards=True))
right_lazy_maximum = prefill(replace(_RIGHT, lazy=6.0))
right_decode = decode(_RIGHT)

scale_off_by_half_percent = prefill(replace(_RIGHT, scale_factor=1.005))
scale_off_by_3_percent = prefill(replace(_RIGHT, scale_factor=1.03))
last_key_dropped = prefill(replace(_RIGHT, drop_last_key=True))
weights_truncated = prefill(replace(_RIGHT, weights="truncated"))
accumulator_bf16 = prefill(replace(_RIGHT, accumulator=torch.bfloat16))
scores_bf16 = prefill(replace(_RIGHT, scores=torch.bfloat16))
sink_ignored = prefill(replace(_RIGHT, sink="ignore"))
sink_scaled = prefill(replace(_RIGHT, sink="scaled"))
sink_in_maximum = prefill(replace(_RIGHT, sink="in_maximum"))
sink_to_base_2_early = prefill(replace(_RIGHT, sink="base2_early"))
lse_base_2 = prefill(replace(_RIGHT, lse="base2"))
lse_with_sink = prefill(replace(_RIGHT, lse="with_sink"))
output_truncated = prefill(replace(_RIGHT, output="truncated"))
output_one_ulp_up = prefill(replace(_RIGHT, output="up"))
hole_wraps_to_last_row = prefill(replace(_RIGHT, holes="wrap"))
hole_times_nan = prefill(replace(_RIGHT, holes="zero_times_row"))
length_ignored = prefill(replace(_RIGHT, lengths="ignored"))
empty_row_nan = prefill(replace(_RIGHT, empty="nan"))
empty_row_unwritten = prefill(replace(_RIGHT, empty="stale"))
nan_hidden = prefill(replace(_RIGHT, hide_nan=True))
upper_bound_unchecked = prefill(replace(_RIGHT, bound="lower_only"))
first_list_for_all = prefill(replace(_RIGHT, rows="first_row_shared"))
split_depends_on_batch = prefill(replace(_RIGHT, split_by_batch=True))
order_depends_on_place = prefill(replace(_RIGHT, order_by_place=True))
not_deterministic = prefill(replace(_RIGHT, flicker=True))
decode_ignores_page_stride = decode(_RIGHT, ignore_stride=True)
decode_reads_page_0_for_holes = decode(replace(_RIGHT, holes="read_row_0"))
empty_batch_reads_a_key = decode(replace(_RIGHT, lengths="one_if_all_are_zero"))
