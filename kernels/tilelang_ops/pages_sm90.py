"""Pages of 64 latent rows on SM90: a page by the copy engine, the end of a sequence row by row."""

# mypy: disable-error-code="valid-type"

from tilelang import language as T

from .roles_sm90 import GROUP, HALF, KEYS, VALUES
from .seesaw_sm90 import half_of, name_keys, read_half, read_tail

SPLIT = 4096  # keys; an even number of pairs of blocks, so that the phases of barriers go on from split to split


@T.macro
def bring_half(cache_pod, shared, half, now, used, whole, row, page, slot, first, lane, lanes):
    """Bring half a block, by the copy engine if it is a whole page."""
    if whole:
        T.tma_copy(
            cache_pod[used, :, half * HALF : half * HALF + HALF],
            shared.key[half, now, :, :],
            barrier=shared.ready[half_of(half, now)],
        )
        T.barrier_arrive(shared.ready[half_of(half, now)])
    else:
        read_half(cache_pod, shared, half, now, row, page, slot, 0, first, lane, lanes)


@T.macro
def bring_tail(cache_pod, shared, now, used, whole, row, page, slot, first, lane, tail, lanes):
    """Bring the channels behind the values of a block."""
    if whole:
        T.tma_copy(
            cache_pod[used, :, VALUES : VALUES + tail],
            shared.key_tail[now, :, :],
            barrier=shared.tail_ready[now],
        )
        T.barrier_arrive(shared.tail_ready[now])
    else:
        read_tail(cache_pod, shared, now, row, page, slot, 0, first, lane, tail, lanes)


@T.macro
def bring_keys(
    cache_pod, table_bp, shared, request, start, keys, pages, used, row, page, slot, first, lane, tail, lanes, turns
):
    """Bring `keys` keys of a request from `start` on, halves of blocks in the order in which they become free.

    `turns`: two groups take turns, left even, right odd, right even, left odd; otherwise one takes block after block.
    """
    for pair in T.serial(T.ceildiv(keys, 2 * KEYS)):
        for i in T.serial(4):
            now, half, again = (i % 2, i // 2 ^ i % 2, i // 2) if turns else (i // 2, i % 2, i % 2)
            at = (pair * 2 + now) * KEYS
            if at < keys:
                used[0] = table_bp[request, (start + at) // KEYS]
                used[0] = T.if_then_else(used[0] < pages, used[0], -1)
                for g in T.unroll(KEYS // (GROUP // lanes)):
                    slot[g] = g * (GROUP // lanes) + first
                    row[g] = T.if_then_else(at + slot[g] < keys, used[0], -1)
                    page[g] = T.max(used[0], 0)
                T.barrier_wait(shared.free[half_of(half, now)], pair % 2 ^ 1)
                if again == 0:
                    name_keys(shared, now, row, 0, first, lane, lanes)
                whole = used[0] >= 0 and at + KEYS <= keys
                bring_half(cache_pod, shared, half, now, used[0], whole, row, page, slot, first, lane, lanes)
                if tail and again == 1:
                    bring_tail(cache_pod, shared, now, used[0], whole, row, page, slot, first, lane, tail, lanes)
