"""Attention on SM90 by specialised warps, the group's own block first: another schedule than `turns_sm90.py`.

Blocks of 64 keys go through two buffers, the even ones through the first, the odd ones through the second. The first
group scores the even blocks and keeps the left half of the values, the second group the odd ones and the right half. A
group multiplies its own block first, from registers, and the other's after it, from shared memory; so each half of a
buffer is free, and fills again, while the other halves are still in use.

The first group weighs the even block against the maximum so far, the second the odd one against that of both; for the
right half the even weights are brought to the latter before they are rounded. What is summed, and in which order, is
fixed by the place of a key in its list alone: base-2 online softmax, weights rounded unnormalised.
"""

# mypy: disable-error-code="valid-type"

from typing import Any, NamedTuple

from tilelang import language as T

from .roles_sm90 import GROUP, HALF, HEADS, KEYS, LOWEST, VALUES, scale_sums


class Shared(NamedTuple):
    """Shared memory of a program, and its barriers; of two halves the first is the left one."""

    q: Any  # half, head, channel
    q_tail: Any
    key: Any  # half, buffer, key, channel
    key_tail: Any
    weight: Any  # of the even and of the odd block, for the other group
    state: Any  # maximum after the even block, after the odd one; total of the even blocks, of the odd ones
    is_key: Any
    q_ready: Any
    ready: Any  # of half of a buffer, by `half_of`
    tail_ready: Any
    free: Any
    named: Any
    top_ready: Any
    scored: Any
    weight_ready: Any
    total_ready: Any
    programs: int  # of a cluster, which bring keys for each other


def half_of(half, now):
    """Which barrier is that of half a buffer."""
    return half * 2 + now


def shared_memory(tail: int, *, programs: int = 1, flags: str = "shared.dyn") -> Shared:
    """Allocate it, for keys with `tail` channels behind the values that `programs` of a cluster bring.

    `flags`: where `is_key` lies; "shared" is beside the barriers, in what they leave of a KiB.
    """
    # who lets go of a half: threads of a program, or a lane of each warp for each program of a cluster
    freeing = GROUP if programs == 1 else GROUP // 32 * programs
    alloc_free = T.alloc_barrier if programs == 1 else T.alloc_cluster_barrier
    q = T.alloc_shared((2, HEADS, HALF), T.bfloat16)
    # the channels behind the values are needed no more when the weights of their block are left
    rest = T.alloc_shared((2, KEYS, tail or KEYS), T.bfloat16)
    return Shared(
        q=q,
        q_tail=T.alloc_shared((HEADS, tail), T.bfloat16) if tail else q,
        key=T.alloc_shared((2, 2, KEYS, HALF), T.bfloat16),
        key_tail=rest,
        weight=rest,
        state=T.alloc_shared((4, HEADS), T.float32),
        is_key=T.alloc_shared((2, KEYS), T.int32, scope=flags),
        q_ready=T.alloc_barrier(GROUP),
        ready=T.alloc_barrier([GROUP] * 4),
        tail_ready=T.alloc_barrier([GROUP, GROUP]),
        # by who sums a half, and by who scores it where that is another group
        free=alloc_free([freeing, 2 * freeing, 2 * freeing, freeing]),
        named=T.alloc_barrier([GROUP, GROUP]),  # `is_key` is written by ordinary stores
        top_ready=T.alloc_barrier(GROUP),
        scored=T.alloc_barrier(GROUP),
        weight_ready=T.alloc_barrier([GROUP, GROUP]),
        total_ready=T.alloc_barrier([GROUP, GROUP]),
        programs=programs,
    )


# one instruction, without the care for results below 2^-126, which become zero
EXP2 = """
__device__ __forceinline__ float dt_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""


@T.macro
def read_queries(q_thd, token, head0, shared, row, lane, tail, lanes):
    """Bring the queries of a program."""
    for g in T.unroll(HEADS // (GROUP // lanes)):
        h = g * (GROUP // lanes) + row
        for u in T.unroll(VALUES // (8 * lanes)):
            at = lane * 8 + u * 8 * lanes
            T.ptx_cp_async(
                T.access_ptr(shared.q[at // HALF, h, at % HALF], "w", 8),
                T.access_ptr(q_thd[token, head0 + h, at], "r", 8),
                8,
            )
        if tail:
            for u in T.unroll(tail // (8 * lanes)):
                at = lane * 8 + u * 8 * lanes
                T.ptx_cp_async(
                    T.access_ptr(shared.q_tail[h, at], "w", 8),
                    T.access_ptr(q_thd[token, head0 + h, VALUES + at], "r", 8),
                    8,
                )
    T.fence_proxy_async()
    T.cp_async_barrier_noinc(shared.q_ready)


@T.macro
def read_half(kv_pod, shared, half, now, row, page, slot, place, first, lane, lanes):
    """Bring half a block of rows, each thread a part of as many as `lanes` threads share one, `row` from `place` on.

    The row -1 becomes zeros. The copies arrive by themselves, and whoever multiplies them has to fence: a wait for
    them here would share its barrier with another group.
    """
    for g in T.unroll(KEYS // (GROUP // lanes)):
        j, i = g * (GROUP // lanes) + first, place + g
        for u in T.unroll(HALF // (8 * lanes)):
            at = lane * 8 + u * 8 * lanes
            T.ptx_cp_async(
                T.access_ptr(shared.key[half, now, j, at], "w", 8),
                T.access_ptr(kv_pod[page[i], slot[i], half * HALF + at], "r", 8),
                8,
                row[i] >= 0,
            )
    T.cp_async_barrier_noinc(shared.ready[half_of(half, now)])


@T.macro
def read_tail(kv_pod, shared, now, row, page, slot, place, first, lane, tail, lanes):
    """Bring the channels behind the values of a block of rows, as `read_half`."""
    for g in T.unroll(KEYS // (GROUP // lanes)):
        j, i = g * (GROUP // lanes) + first, place + g
        for u in T.unroll(tail // (8 * lanes)):
            at = lane * 8 + u * 8 * lanes
            T.ptx_cp_async(
                T.access_ptr(shared.key_tail[now, j, at], "w", 8),
                T.access_ptr(kv_pod[page[i], slot[i], VALUES + at], "r", 8),
                8,
                row[i] >= 0,
            )
    T.cp_async_barrier_noinc(shared.tail_ready[now])


@T.macro
def name_keys(shared, now, row, place, first, lane, lanes):
    """Say which rows of a block are keys."""
    for g in T.unroll(KEYS // (GROUP // lanes)):
        if lane == 0:
            shared.is_key[now, g * (GROUP // lanes) + first] = T.if_then_else(row[place + g] >= 0, 1, 0)
    T.barrier_arrive(shared.named[now])


@T.macro
def free_half(shared, half, now):
    """Let half a buffer be filled again, by whoever brings keys to it."""
    if shared.programs == 1:
        T.barrier_arrive(shared.free[half_of(half, now)])
    elif T.get_thread_binding() % 32 < shared.programs:
        T.mbarrier_arrive(shared.free[half_of(half, now)], T.get_thread_binding() % 32)


@T.macro
def score_half(shared, half, now, phase, score, fresh):
    """Start the product of queries with half a block."""
    T.barrier_wait(shared.ready[half_of(half, now)], phase)
    T.fence_proxy_async()
    T.wgmma_gemm(shared.q[half, :, :], shared.key[half, now, :, :], score, transpose_B=True, clear_accum=fresh)


@T.macro
def score_block(shared, now, phase, score, tail):
    """Scores of a block, which begin with the half that comes first."""
    score_half(shared, now, now, phase, score, True)
    score_half(shared, 1 - now, now, phase, score, False)
    if tail:
        T.barrier_wait(shared.tail_ready[now], phase)
        T.fence_proxy_async()
        T.wgmma_gemm(shared.q_tail, shared.key_tail[now, :, :], score, transpose_B=True)
    T.wait_wgmma(0)
    free_half(shared, 1 - now, now)


@T.macro
def find_top(score, block_top, scale_log2):
    """Maxima of scores, in base 2."""
    T.reduce_max(score, block_top, dim=1)
    for h in T.Parallel(HEADS):
        block_top[h] = T.ieee_mul(block_top[h], scale_log2)


@T.macro
def mask_block(shared, now, phase, score):
    """Scores of a block, -inf where there is no key."""
    T.barrier_wait(shared.named[now], phase)
    for h, j in T.Parallel(HEADS, KEYS):
        score[h, j] = T.if_then_else(shared.is_key[now, j] != 0, score[h, j], -T.infinity(T.float32))


@T.macro
def raise_top(top, new_top, shrink):
    """Let `new_top` be the maximum, and `shrink` the factor of what was summed against the old one."""
    for h in T.Parallel(HEADS):
        shrink[h] = T.exp2(top[h] - new_top[h])
        top[h] = new_top[h]


@T.macro
def weigh_block(score, weight, top, scale_log2):
    """Weights of a block against `top`, also as they are multiplied."""
    for h, j in T.Parallel(HEADS, KEYS):
        score[h, j] = T.call_extern("float32", "dt_exp2", T.ieee_fmaf(score[h, j], scale_log2, -top[h]))
    T.copy(score, weight)


@T.macro
def count_block(score, total, shrink, block_total):
    """Add the weights of a block to the total."""
    T.reduce_sum(score, block_total, dim=1)
    for h in T.Parallel(HEADS):
        total[h] = T.ieee_fmaf(total[h], shrink[h], block_total[h])


@T.macro
def leave_weights(shared, now, weight, scored, phase):
    """Leave weights to the other group, where the block's channels behind the values have been scored."""
    T.barrier_wait(scored, phase)
    T.copy(weight, shared.weight[now, :, :])
    T.fence_proxy_async()
    T.barrier_arrive(shared.weight_ready[now])


@T.macro
def add_other(shared, now, half, phase, sums):
    """Add the product of the weights that the other group left with a half of their block."""
    T.barrier_wait(shared.weight_ready[now], phase)
    T.barrier_wait(shared.ready[half_of(half, now)], phase)
    T.fence_proxy_async()
    T.wgmma_gemm(shared.weight[now, :, :], shared.key[half, now, :, :], sums)
    T.wait_wgmma(0)
    free_half(shared, half, now)


@T.macro
def first_group(
    shared,
    blocks,
    scale_log2,
    left,
    score,
    weight,
    top,
    total,
    shrink,
    block_top,
    block_total,
    turn,
    tail,
):
    """Score the even blocks and sum the left half of the values; `top` and `total` end as those of the row.

    `turn`: how many rows or splits this program has finished.
    """
    T.fill(top, LOWEST)
    T.fill(total, 0.0)
    T.fill(left, 0.0)
    T.barrier_wait(shared.q_ready, 0)
    T.fence_proxy_async()
    for pair in T.serial(T.ceildiv(blocks, 2)):
        phase = pair % 2
        score_block(shared, 0, phase, score, tail)
        mask_block(shared, 0, phase, score)
        find_top(score, block_top, scale_log2)
        for h in T.Parallel(HEADS):
            block_top[h] = T.max(top[h], block_top[h])
        raise_top(top, block_top, shrink)
        T.copy(top, shared.state[0, :])
        T.barrier_arrive(shared.top_ready)
        weigh_block(score, weight, top, scale_log2)
        scale_sums(left, shrink)
        T.wgmma_gemm(weight, shared.key[0, 0, :, :], left)
        count_block(score, total, shrink, block_total)
        T.wait_wgmma(0)
        free_half(shared, 0, 0)
        if pair * 2 + 1 < blocks:
            T.barrier_wait(shared.weight_ready[1], phase)
            T.copy(shared.state[1, :], block_top)
            raise_top(top, block_top, shrink)
            for h in T.Parallel(HEADS):
                total[h] = total[h] * shrink[h]
            for h, j in T.Parallel(HEADS, KEYS):
                score[h, j] = score[h, j] * shrink[h]
            T.copy(score, weight)
            leave_weights(shared, 0, weight, shared.top_ready, phase)
            scale_sums(left, shrink)
            add_other(shared, 1, 0, phase, left)
        else:
            leave_weights(shared, 0, weight, shared.top_ready, phase)
    T.copy(total, shared.state[2, :])
    T.barrier_arrive(shared.total_ready[0])
    T.barrier_wait(shared.total_ready[1], turn % 2)
    T.copy(shared.state[3, :], block_total)
    for h in T.Parallel(HEADS):
        total[h] = total[h] + block_total[h]


@T.macro
def second_group(
    shared,
    blocks,
    scale_log2,
    right,
    score,
    weight,
    top,
    total,
    shrink,
    block_top,
    block_total,
    turn,
    tail,
):
    """Score the odd blocks and sum the right half of the values; otherwise as `first_group`."""
    T.fill(top, LOWEST)
    T.fill(total, 0.0)
    T.fill(right, 0.0)
    T.barrier_wait(shared.q_ready, 0)
    T.fence_proxy_async()
    for pair in T.serial(T.ceildiv(blocks, 2)):
        phase = pair % 2
        if pair * 2 + 1 < blocks:
            score_block(shared, 1, phase, score, tail)
            T.barrier_arrive(shared.scored)
            mask_block(shared, 1, phase, score)
            find_top(score, block_top, scale_log2)
            T.barrier_wait(shared.top_ready, phase)
            T.copy(shared.state[0, :], block_total)
            for h in T.Parallel(HEADS):
                block_top[h] = T.max(block_total[h], block_top[h])
            raise_top(top, block_top, shrink)
            weigh_block(score, weight, top, scale_log2)
            T.copy(top, shared.state[1, :])
            leave_weights(shared, 1, weight, shared.scored, phase)
            scale_sums(right, shrink)
            T.wgmma_gemm(weight, shared.key[1, 1, :, :], right)
            count_block(score, total, shrink, block_total)
            T.wait_wgmma(0)
            free_half(shared, 1, 1)
        else:
            T.barrier_wait(shared.top_ready, phase)
            T.copy(shared.state[0, :], block_top)
            raise_top(top, block_top, shrink)
            for h in T.Parallel(HEADS):
                total[h] = total[h] * shrink[h]
            scale_sums(right, shrink)
        add_other(shared, 0, 1, phase, right)
    T.barrier_wait(shared.total_ready[0], turn % 2)
    T.copy(shared.state[2, :], block_total)
    T.copy(total, shared.state[3, :])
    T.barrier_arrive(shared.total_ready[1])
    for h in T.Parallel(HEADS):
        total[h] = block_total[h] + total[h]
