"""Attention on SM90 by specialised warps: what its kernels share.

Blocks of 64 keys go through two buffers, the even ones through the first, the odd ones through the second. One group of
128 threads scores the even blocks and keeps the left half of the values, another the odd ones and the right half: each
has 64 x 256 sums in registers. A third group brings the keys.

Weights, the factor by which earlier sums shrink, and the running maximum and total pass from block to block through the
shared memory declared here.
"""

# mypy: disable-error-code="valid-type"

from dataclasses import dataclass
from typing import Any, NamedTuple

from tilelang import PassConfigKey
from tilelang import language as T

LOWEST = -3.0e38  # start of the running maximum: finite, so that a list that begins with holes never meets inf - inf
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
GROUP = 128  # threads of a role
THREADS = 3 * GROUP
HEADS = 64  # heads of a program
KEYS = 64  # keys of a block, which fix the order of summation
VALUES = 512
HALF = VALUES // 2
# holes are tested once per row; the compiler's own test would stand before every element
PASS_CONFIGS = {PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Registers of a thread of each role, which may add up to 504; `lanes` threads bring one row between them."""

    multiply: int = 208
    bring: int = 88
    lanes: int = 8

    @property
    def step(self) -> int:
        """Rows that are brought at a time."""
        return GROUP // self.lanes


class Shared(NamedTuple):
    """Shared memory of a program, and its barriers."""

    q_left: Any
    q_right: Any
    key_left: Any
    key_right: Any
    weight: Any
    state: Any  # factor, maximum and total of the last block
    is_key: Any
    q_ready: Any
    left_ready: Any
    right_ready: Any
    key_free: Any
    named: Any
    weight_ready: Any
    weight_free: Any


def shared_memory() -> Shared:
    """Allocate it."""
    return Shared(
        q_left=T.alloc_shared((HEADS, HALF), T.bfloat16),
        q_right=T.alloc_shared((HEADS, HALF), T.bfloat16),
        key_left=T.alloc_shared((2, KEYS, HALF), T.bfloat16),
        key_right=T.alloc_shared((2, KEYS, HALF), T.bfloat16),
        weight=T.alloc_shared((HEADS, KEYS), T.bfloat16),
        state=T.alloc_shared((3, HEADS), T.float32),
        is_key=T.alloc_shared((2, KEYS), T.int32),
        q_ready=T.alloc_barrier(GROUP),
        left_ready=T.alloc_barrier([GROUP, GROUP]),
        right_ready=T.alloc_barrier([GROUP, GROUP]),
        key_free=T.alloc_barrier([2 * GROUP, 2 * GROUP]),
        named=T.alloc_barrier([GROUP, GROUP]),  # `is_key` is written by ordinary stores
        weight_ready=T.alloc_barrier([GROUP, GROUP]),
        weight_free=T.alloc_barrier([GROUP, GROUP]),
    )


@T.macro
def read_query(q_thd, token, head, target, h, lane, first, span, lanes):
    """Copy `span` channels of a query from channel `first` on."""
    for u in T.unroll(span // (8 * lanes)):
        at = lane * 8 + u * 8 * lanes
        T.ptx_cp_async(T.access_ptr(target[h, at], "w", 8), T.access_ptr(q_thd[token, head, first + at], "r", 8), 8)


@T.macro
def read_queries(q_thd, token, head0, shared, row, lane, lanes):
    """Bring the queries of a program."""
    for g in T.unroll(HEADS // (GROUP // lanes)):
        h = g * (GROUP // lanes) + row
        read_query(q_thd, token, head0 + h, shared.q_left, h, lane, 0, HALF, lanes)
        read_query(q_thd, token, head0 + h, shared.q_right, h, lane, HALF, HALF, lanes)
    T.fence_proxy_async()
    T.cp_async_barrier_noinc(shared.q_ready)


@T.macro
def read_span(kv_pod, row, page, slot, target, now, j, lane, first, span, lanes):
    """Copy `span` channels of a row from channel `first` on; the row -1 becomes zeros."""
    for u in T.unroll(span // (8 * lanes)):
        at = lane * 8 + u * 8 * lanes
        T.ptx_cp_async(
            T.access_ptr(target[now, j, at], "w", 8),
            T.access_ptr(kv_pod[page, slot, first + at], "r", 8),
            8,
            row >= 0,
        )


@T.macro
def read_rows(kv_pod, shared, now, row, page, slot, first_row, lane, lanes):
    """Bring a block of rows, each thread a part of as many as `lanes` threads share one.

    The copies arrive by themselves, so whoever multiplies their rows has to fence.
    """
    for g in T.unroll(KEYS // (GROUP // lanes)):
        j = g * (GROUP // lanes) + first_row
        read_span(kv_pod, row[g], page[g], slot[g], shared.key_left, now, j, lane, 0, HALF, lanes)
    T.cp_async_barrier_noinc(shared.left_ready[now])
    for g in T.unroll(KEYS // (GROUP // lanes)):
        j = g * (GROUP // lanes) + first_row
        read_span(kv_pod, row[g], page[g], slot[g], shared.key_right, now, j, lane, HALF, HALF, lanes)
    T.cp_async_barrier_noinc(shared.right_ready[now])


@T.macro
def name_keys(shared, now, row, first_row, lane, lanes):
    """Say which rows of a block are keys."""
    for g in T.unroll(KEYS // (GROUP // lanes)):
        if lane == 0:
            shared.is_key[now, g * (GROUP // lanes) + first_row] = T.if_then_else(row[g] >= 0, 1, 0)
    T.barrier_arrive(shared.named[now])


@T.macro
def publish_block(shared, now, score, top, total, shrink):
    """Leave weights, factor, maximum and total of a block to the other group."""
    T.copy(score, shared.weight)
    T.copy(shrink, shared.state[0, :])
    T.copy(top, shared.state[1, :])
    T.copy(total, shared.state[2, :])
    T.fence_proxy_async()
    T.barrier_arrive(shared.weight_ready[now])


@T.macro
def take_block(shared, now, phase, top, total, shrink):
    """Wait for what the other group leaves."""
    T.barrier_wait(shared.weight_ready[now], phase)
    T.copy(shared.state[0, :], shrink)
    T.copy(shared.state[1, :], top)
    T.copy(shared.state[2, :], total)


@T.macro
def scale_sums(sums, shrink):
    """Multiply every sum of a head by its factor."""
    for h, u in T.Parallel(HEADS, HALF):
        sums[h, u] = sums[h, u] * shrink[h]


@T.macro
def add_values(shared, now, phase, key_half, half_ready, sums, loose):
    """Start the product of the weights of a block with a half of its values."""
    T.barrier_wait(shared.weight_ready[now], phase)
    T.barrier_wait(half_ready[now], phase)
    if loose:
        T.fence_proxy_async()
    T.wgmma_gemm(shared.weight, key_half[now, :, :], sums)


@T.macro
def divide_sums(sums, top, total, shrink, sink_h, head0, has_sink):
    """Divide by the row total plus the sink; a row without keys is 0, and a NaN total stays visible."""
    for h in T.Parallel(HEADS):
        # may overflow to inf on purpose: the quotient is then 0
        sink = T.exp2(sink_h[head0 + h] * LOG2_E - top[h]) if has_sink else T.float32(0)
        shrink[h] = T.if_then_else(total[h] == 0.0, 0.0, 1.0 / (total[h] + sink))
    scale_sums(sums, shrink)
