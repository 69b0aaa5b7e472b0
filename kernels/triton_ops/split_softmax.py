"""Softmax attention over fixed splits of the keys: launch config, the last step of a row, the combine kernel.

Shared by the attention kernels of this folder. A program that owns one split leaves an fp32 accumulator, the maximum
(base 2) and the row sum; the combine kernel merges the splits in ascending order. Where one split holds every key, its
program finishes the rows itself, with the arithmetic that the combine kernel would use: the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# start of the running maximum: below every finite score, and finite, so that a list that begins with holes never
# meets -inf - (-inf)
LOWEST = tl.constexpr(-3.0e38)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, kw_only=True)
class SplitLaunch:
    """How the keys of a row are cut. `block_keys` and `split_keys` fix the order of summation."""

    block_heads: int
    block_keys: int
    split_keys: int
    num_warps: int
    num_stages: int
    combine_heads: int = 16  # heads a program of the combine kernel

    def __post_init__(self) -> None:
        if self.split_keys % self.block_keys:
            raise ValueError(f"split_keys: expected a multiple of {self.block_keys}, got {self.split_keys}")


def split_launch(num_heads: int, dtype: torch.dtype, arch: str) -> SplitLaunch:
    """The launch for a number of heads, a dtype and an architecture; it never looks at the batch or the list."""
    if dtype == torch.float32:  # products of fp32 run without tensor cores; larger tiles spill
        return SplitLaunch(block_heads=16, block_keys=16, split_keys=1024, num_warps=8, num_stages=1)
    heads = min(64, max(16, triton.next_power_of_2(num_heads)))
    if arch == "ascend950":  # 248 KiB of unified buffer hold 32 heads x 512 channels in fp32, and little beside them
        return SplitLaunch(block_heads=min(heads, 32), block_keys=16, split_keys=1024, num_warps=8, num_stages=1)
    # h200: half the key block or half the warps halve the speed, 128 heads spill. sm100 needs the small block: its
    # accumulator passes through shared memory, and 64 keys would ask for 345 KiB
    block_keys = 32 if arch == "sm100" and heads == 64 else 64
    return SplitLaunch(block_heads=heads, block_keys=block_keys, split_keys=1024, num_warps=8, num_stages=2)


def arch_of(device: torch.device) -> str:
    """The architecture that launch configs are written for; the interpreter runs what SM90 would."""
    if device.type == "npu":
        return "ascend950"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10:
        return "sm100"
    return "sm90"


@triton.jit
def attend_keys(
    q,
    q_tail,
    key_at,
    valid,
    top,
    total,
    acc,
    scale_log2,
    VALUE_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    TAIL_PAD: tl.constexpr,
):
    """One step of the online softmax: the keys at `key_at` are the values too, in their first VALUE_DIM channels."""
    value_cols = tl.arange(0, VALUE_DIM)
    # a hole reads nothing: its row may hold NaN, and 0 * NaN would reach the accumulator
    keys = tl.load(key_at[:, None] + value_cols[None, :], mask=valid[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if TAIL_PAD > 0:
        tail_cols = tl.arange(0, TAIL_PAD)
        tail_mask = valid[:, None] & (tail_cols < TAIL_DIM)[None, :]
        tail = tl.load(key_at[:, None] + VALUE_DIM + tail_cols[None, :], mask=tail_mask, other=0.0)
        scores = tl.dot(q_tail, tl.trans(tail), scores, input_precision="ieee")
    return online_step(tl.where(valid[None, :], scores * scale_log2, float("-inf")), keys, top, total, acc)


@triton.jit
def online_step(scores, values, top, total, acc):
    """Maximum, sum and accumulator after one more block: scores in base 2, -inf where there is no key."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(scores - new_top[:, None])
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def load_query_tail(q_at, in_heads, VALUE_DIM: tl.constexpr, TAIL_DIM: tl.constexpr, TAIL_PAD: tl.constexpr):
    """The query channels behind the value channels, padded with zeros to TAIL_PAD."""
    tail_cols = tl.arange(0, TAIL_PAD)
    mask = in_heads[:, None] & (tail_cols < TAIL_DIM)[None, :]
    return tl.load(q_at + VALUE_DIM + tail_cols[None, :], mask=mask, other=0.0)


@triton.jit
def leave_split(
    acc,
    total,
    top,
    rows,
    in_heads,
    split,
    rows_per_split,
    part_ptr,
    part_max_ptr,
    part_sum_ptr,
    VALUE_DIM: tl.constexpr,
):
    """Store the partials of a split; one without keys leaves no accumulator, and the combine kernel reads none."""
    value_cols = tl.arange(0, VALUE_DIM)
    part = split.to(tl.int64) * rows_per_split + rows
    tl.store(part_max_ptr + part, top, mask=in_heads)
    tl.store(part_sum_ptr + part, total, mask=in_heads)
    kept = in_heads & (total != 0.0)
    tl.store(part_ptr + part[:, None] * VALUE_DIM + value_cols[None, :], acc, mask=kept[:, None])


@triton.jit
def finish_rows(
    acc,
    total,
    top,
    rows,
    heads,
    in_heads,
    sink_ptr,
    out_ptr,
    lse_ptr,
    HAS_SINK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Divide by the row sum plus the sink, once, and store; `rows` = token * heads + head, in 64 bits."""
    denominator = total
    if HAS_SINK:
        sink = tl.load(sink_ptr + heads, mask=in_heads, other=0.0)
        # may overflow to inf on purpose: the quotient is then 0
        denominator = total + tl.exp2(sink * LOG2_E - top)
    value_cols = tl.arange(0, VALUE_DIM)
    # total == 0, not <= 0 or a negated >: a NaN total has to reach the output
    out = tl.where((total == 0.0)[:, None], 0.0, tl.div_rn(acc, tl.broadcast_to(denominator[:, None], acc.shape)))
    out_at = out_ptr + rows[:, None] * VALUE_DIM + value_cols[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=in_heads[:, None])
    tl.store(lse_ptr + rows, (top + tl.log2(total)) * LN_2, mask=in_heads)


@triton.jit
def _combine_splits(
    part_ptr,
    part_max_ptr,
    part_sum_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    num_tokens,
    num_heads,
    head_tiles,
    num_splits,
    HAS_SINK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    # 1. which token and heads this program owns
    pid = tl.program_id(0).to(tl.int64)
    token = pid // head_tiles
    heads = (pid % head_tiles).to(tl.int32) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    in_heads = heads < num_heads
    value_cols = tl.arange(0, VALUE_DIM)
    rows = token * num_heads + heads

    # 2. the maximum over the splits
    top = tl.full([BLOCK_HEADS], LOWEST, tl.float32)
    for split in range(0, num_splits):
        part = rows + tl.cast(split, tl.int64) * num_tokens * num_heads
        top = tl.maximum(top, tl.load(part_max_ptr + part, mask=in_heads, other=LOWEST))

    # 3. the sum over the splits, in ascending order
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, VALUE_DIM], tl.float32)
    for split in range(0, num_splits):
        part = rows + tl.cast(split, tl.int64) * num_tokens * num_heads
        part_sum = tl.load(part_sum_ptr + part, mask=in_heads, other=0.0)
        weight = tl.exp2(tl.load(part_max_ptr + part, mask=in_heads, other=LOWEST) - top)
        kept = in_heads & (part_sum != 0.0)
        part_acc = tl.load(part_ptr + part[:, None] * VALUE_DIM + value_cols[None, :], mask=kept[:, None], other=0.0)
        total += weight * part_sum
        acc += weight[:, None] * part_acc

    # 4. the sink, the quotient, the LSE
    finish_rows(acc, total, top, rows, heads, in_heads, sink_ptr, out_ptr, lse_ptr, HAS_SINK, VALUE_DIM)


def combine(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sink_h: torch.Tensor | None,
    out_thu: torch.Tensor,
    lse_th: torch.Tensor,
    launch: SplitLaunch,
) -> None:
    """Merge the partials of all splits, in ascending order, into `out_thu` and `lse_th`."""
    num_tokens, num_heads, value_dim = out_thu.shape
    head_tiles = triton.cdiv(num_heads, launch.combine_heads)
    _combine_splits[(num_tokens * head_tiles,)](
        *parts,
        out_thu if sink_h is None else sink_h,
        out_thu,
        lse_th,
        num_tokens,
        num_heads,
        head_tiles,
        parts[0].shape[0],
        HAS_SINK=sink_h is not None,
        VALUE_DIM=value_dim,
        BLOCK_HEADS=launch.combine_heads,
        num_warps=4,
    )


def split_partials(
    num_splits: int, shape: tuple[int, int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 accumulators, maxima and sums of every split; one element each when a single split finishes its rows."""
    if num_splits == 1:
        shape = (1, 1, 1)
    acc = torch.empty(num_splits, *shape, dtype=torch.float32, device=device)
    top, total = torch.empty(2, num_splits, *shape[:2], dtype=torch.float32, device=device)
    return acc, top, total


def attention_outputs(
    out: tuple[torch.Tensor, torch.Tensor] | None, shape: tuple[int, ...], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caller's buffers, checked, or new ones: values in the dtype of `like`, LSE in fp32."""
    if out is None:
        out_thu = torch.empty(shape, dtype=like.dtype, device=like.device)
        return out_thu, torch.empty(shape[:-1], dtype=torch.float32, device=like.device)
    for part, size, dtype in zip(out, (shape, shape[:-1]), (like.dtype, torch.float32), strict=True):
        if part.shape != size or not part.is_contiguous():
            raise ValueError(f"out: expected contiguous {tuple(size)}, got {tuple(part.shape)}, {part.stride()}")
        if part.dtype != dtype:
            raise TypeError(f"out: expected {dtype}, got {part.dtype}")
    return out


def padded_tail(tail_dim: int) -> int:
    """Columns of the tile that holds the key's extra channels: a power of two that tl.dot accepts, or none."""
    return max(16, triton.next_power_of_2(tail_dim)) if tail_dim else 0


def require_value_dim(value_dim: int) -> None:
    """Decline value widths that are no single tile."""
    if value_dim < 16 or value_dim & (value_dim - 1):
        raise NotImplementedError(f"value_dim: expected a power of two from 16 up, got {value_dim}")


def require_rows(name: str, x: torch.Tensor) -> None:
    """Decline rows whose channels are apart in memory."""
    if x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise NotImplementedError(f"{name}: expected a contiguous last dimension, got strides {x.stride()}")
