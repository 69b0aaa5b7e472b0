"""Attention on SM90 by specialised warps, block after block: another schedule than `seesaw_sm90.py`.

The first group scores the even blocks and keeps the left half of the values, the second group the odd ones and the
right half. A group scores its block as soon as it is there, and weighs it against the maximum of all blocks before it
while it multiplies the one before. So a buffer is free soon after it has been filled, whatever the other one does.

A row is summed in the order of its blocks, whoever scores them: base-2 online softmax, weights rounded unnormalised.
"""

# mypy: disable-error-code="valid-type"

from typing import Any, NamedTuple

from tilelang import language as T

from .roles_sm90 import HALF, HEADS, KEYS, LOWEST, add_values, publish_block, scale_sums, take_block
from .seesaw_sm90 import find_top, raise_top


class Group(NamedTuple):
    """Registers of a group that multiplies."""

    sums: Any  # of half the values
    score: Any
    top: Any  # maximum so far, in base 2
    total: Any
    shrink: Any  # what earlier sums are multiplied by
    block_top: Any
    block_total: Any


def group_registers() -> Group:
    """Allocate them."""
    heads = [T.alloc_fragment((HEADS,), T.float32) for _ in range(5)]
    return Group(T.alloc_fragment((HEADS, HALF), T.float32), T.alloc_fragment((HEADS, KEYS), T.float32), *heads)


@T.macro
def score_block(shared, group, now, phase, loose):
    """Scores of a block, -inf where there is no key."""
    T.barrier_wait(shared.left_ready[now], phase)
    if loose:
        T.fence_proxy_async()
    T.wgmma_gemm(shared.q_left, shared.key_left[now, :, :], group.score, transpose_B=True, clear_accum=True)
    T.barrier_wait(shared.right_ready[now], phase)
    if loose:
        T.fence_proxy_async()
    T.wgmma_gemm(shared.q_right, shared.key_right[now, :, :], group.score, transpose_B=True)
    T.wait_wgmma(0)
    T.barrier_wait(shared.named[now], phase)
    for h, j in T.Parallel(HEADS, KEYS):
        group.score[h, j] = T.if_then_else(shared.is_key[now, j] != 0, group.score[h, j], -T.infinity(T.float32))


@T.macro
def weigh_block(group, scale_log2):
    """Weights of a block against the maximum so far, it included; maximum and total become those so far."""
    find_top(group.score, group.block_top, scale_log2)
    for h in T.Parallel(HEADS):
        group.block_top[h] = T.max(group.top[h], group.block_top[h])
    raise_top(group.top, group.block_top, group.shrink)
    for h, j in T.Parallel(HEADS, KEYS):
        group.score[h, j] = T.call_extern(
            "float32", "dt_exp2", T.ieee_fmaf(group.score[h, j], scale_log2, -group.top[h])
        )
    T.reduce_sum(group.score, group.block_total, dim=1)
    for h in T.Parallel(HEADS):
        group.total[h] = T.ieee_fmaf(group.total[h], group.shrink[h], group.block_total[h])


@T.macro
def add_block(shared, group, now, phase, key_half, half_ready, loose):
    """Start adding the product of the weights of a block with a half of its values."""
    scale_sums(group.sums, group.shrink)
    add_values(shared, now, phase, key_half, half_ready, group.sums, loose)


@T.macro
def give_back(shared, now):
    """Wait for the product with a block, and give its buffer back."""
    T.wait_wgmma(0)
    T.barrier_arrive(shared.key_free[now])


@T.macro
def leave_block(shared, group, own, phase, key_half, half_ready, loose):
    """Leave the weights of a block to the other group, and add its values."""
    publish_block(shared, own, group.score, group.top, group.total, group.shrink)
    add_block(shared, group, own, phase, key_half, half_ready, loose)
    give_back(shared, own)
    T.barrier_arrive(shared.weight_free[own])


@T.macro
def attend_half(shared, group, blocks, scale_log2, own, key_half, half_ready, loose):
    """Score the even (`own` 0) or the odd blocks, and sum a half of the values of all; needs `EXP2` and two blocks.

    `loose`: the copies of rows arrive by themselves, and who multiplies them has to fence.
    """
    T.fill(group.top, LOWEST)
    T.fill(group.total, 0.0)
    T.fill(group.sums, 0.0)
    T.barrier_wait(shared.q_ready, 0)
    T.fence_proxy_async()
    for turn in T.serial((blocks + 1 - own) // 2):
        phase, before = turn % 2, turn % 2 ^ (1 - own)
        score_block(shared, group, own, phase, loose)
        if turn + own > 0:
            # the block before, which the other group has weighed, is multiplied while this one is weighed
            take_block(shared, 1 - own, before, group.top, group.total, group.shrink)
            add_block(shared, group, 1 - own, before, key_half, half_ready, loose)
            weigh_block(group, scale_log2)
            give_back(shared, 1 - own)
            T.barrier_wait(shared.weight_free[1 - own], before)  # the other group has read its weights
        else:
            weigh_block(group, scale_log2)
        leave_block(shared, group, own, phase, key_half, half_ready, loose)
    if (blocks - own) % 2 == 0:
        last = (blocks - 1) // 2 % 2
        take_block(shared, 1 - own, last, group.top, group.total, group.shrink)
        add_block(shared, group, 1 - own, last, key_half, half_ready, loose)
        give_back(shared, 1 - own)
