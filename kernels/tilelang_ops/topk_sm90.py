"""Exact top-k of rows on SM90: a histogram of group maxima bounds the threshold, few scores remain to be ranked.

A program owns a row, or a part of one, and a thread keeps 32 of its scores. The k-th largest of the maxima of groups is
reached by k scores at least, and by few more; these are put in a list, and histograms of their ranks narrow the range
of the threshold until it is settled. What is chosen is marked in a map of bits, which is read in the order of the row:
counts and marks commute, so nothing depends on the order of atomics. Of a row that is too long the best of its parts
are selected first, then the best of these.
"""

# mypy: disable-error-code="valid-type"

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import tilelang
import torch
from tilelang import PassConfigKey
from tilelang import language as T

LANES = 32
EACH = 32  # scores that a thread reads, and bits of the map that it writes out
LEAST = 0x00800000  # rank of the most negative finite number
PASS_CONFIGS = {
    PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
    PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # the kernel says where to wait
    PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE: True,  # which would have to know
}


@dataclass(frozen=True, kw_only=True)
class SelectLaunch:
    """Scores of a program, groups of a thread's scores, bins of a histogram; nothing of it changes a result."""

    block: int = 8192
    groups: int = 4
    bins: int = 256

    @property
    def threads(self) -> int:
        return self.block // EACH


def rank(x):
    """An fp32 number as an unsigned integer in value order, ±0 alike."""
    bits = T.reinterpret(T.ieee_add(x, T.float32(0), "rn"), T.int32)  # -0 + 0 is +0
    return T.reinterpret(bits ^ ((bits >> 31) | T.int32(-(2**31))), T.uint32)


def number(key):
    """The fp32 number of a rank."""
    bits = T.reinterpret(key, T.int32)
    return T.reinterpret(bits ^ (~(bits >> 31) | T.int32(-(2**31))), T.float32)


@T.macro
def sum_before(own, before: T.Ref, sums, warp, lane, warps):
    """The sum over the threads before this one; `sums` are those of the warps."""
    before = own
    for d in T.unroll(5):
        other = T.shfl_up(before, 1 << d)
        if lane >= 1 << d:
            before += other
    if lane == LANES - 1:
        sums[warp] = before
    T.sync_threads()
    before += T.warp_reduce_sum(T.if_then_else(lane < warp, sums[lane % warps], 0)) - own


@T.macro
def count_in(histogram, key, low, span, shift):
    """Count a rank from `low` to `low + span`; in the lowest bin, which has what the others leave, `low` alone."""
    from_low = key - low
    if from_low <= span and (from_low >= T.uint32(1) << shift or from_low == 0):
        T.atomic_add(histogram[T.cast(from_low >> shift, T.int32)], 1)


@T.macro
def find_bin(histogram, found, need, lane, bins):
    """The highest bin that `need` ranks reach, how many lie above it, how many in it; then the bins are emptied."""
    lines = bins // LANES
    inside = T.alloc_local((lines,), T.int32)
    line = T.alloc_var(T.int32)
    above = T.alloc_var(T.int32)
    reached = T.alloc_var(T.int32)
    own = T.alloc_var(T.int32)
    for q in T.unroll(lines):
        inside[q] = T.warp_reduce_sum(histogram[q * LANES + lane])
    reached = 0
    for q in T.unroll(lines):
        if reached < need:
            line = lines - 1 - q
            above = reached
            reached += inside[lines - 1 - q]
    own = histogram[line * LANES + lane]
    reached = own
    for d in T.unroll(5):
        other = T.shfl_down(reached, 1 << d)
        if lane + (1 << d) < LANES:
            reached += other
    reached += above
    # all that is counted may be less than `need`: then it is the lowest bin
    if (reached >= need and reached - own < need) or (reached < need and lane == 0):
        found[0] = line * LANES + lane
        found[1] = reached - own
        found[2] = own
    for q in T.unroll(lines):
        histogram[q * LANES + lane] = 0


def select_program(dtype: str, *, step: int, from_parts: bool = False, launch: SelectLaunch | None = None):
    """The program for any number of rows and columns; a thread reads `step` scores at once.

    `from_parts`: the columns are those that the parts of a row have found, -1 for none.
    """
    launch = launch or SelectLaunch()
    block, groups, bins, threads = launch.block, launch.groups, launch.bins, launch.threads
    warps, halves, log_bins = threads // LANES, groups // 2, bins.bit_length() - 1
    tokens, columns, width, parts, k = T.dynamic("tokens, columns, width, parts, k")
    stride = T.dynamic("stride", "int64")

    def shift_of(span):
        """How far ranks are shifted, so that `span` falls into the last bin at most."""
        return T.max(32 - log_bins - T.cast(T.clz(span), T.int32), 0)

    def place_of(i, thread):
        """Where in the block the i-th score of a thread lies."""
        return (i // step * threads + thread) * step + i % step

    @T.prim_func
    def select(
        scores_ts: T.StridedTensor((tokens, columns), (stride, 1), dtype),
        origin_tj: T.Tensor((tokens, width), T.int32),
        length_t: T.Tensor((tokens,), T.int32),
        idx_tpk: T.Tensor((tokens, parts, k), T.int32),
    ):
        with T.Kernel(tokens, parts, threads=threads) as (token, part):
            T.assume(stride % step == 0)
            T.annotate_min_blocks_per_sm(1024 // threads)
            row = T.alloc_shared((block,), T.float32)
            listed = T.alloc_shared((block,), T.uint16)
            above_map = T.alloc_shared((threads,), T.uint32)
            tied_map = T.alloc_shared((threads,), T.uint32)
            histogram = T.alloc_shared((bins,), T.int32)
            found = T.alloc_shared((3,), T.int32)
            lows = T.alloc_shared((warps,), T.uint32)
            highs = T.alloc_shared((warps,), T.uint32)
            sums = T.alloc_shared((warps,), T.int32)
            x = T.alloc_local((EACH,), T.float32)
            best = T.alloc_local((groups,), T.float32)
            bound = T.alloc_var(T.float32)
            top = T.alloc_var(T.float32)
            floor = T.alloc_var(T.float32)
            low = T.alloc_var(T.uint32)
            high = T.alloc_var(T.uint32)
            shift = T.alloc_var(T.int32)
            word = T.alloc_var(T.uint32)
            tied = T.alloc_var(T.uint32)
            count = T.alloc_var(T.int32)
            own = T.alloc_var(T.int32)
            place = T.alloc_var(T.int32)
            need = T.alloc_var(T.int32)
            inside = T.alloc_var(T.int32)
            thread = T.get_thread_binding()
            warp, lane = thread // LANES, thread % LANES
            first = part * block

            # 1. the scores; what cannot be chosen is -inf or NaN, which reaches no finite number
            count = T.min(width if from_parts else T.min(length_t[token], columns), first + block) - first
            for c in T.unroll(EACH // step):
                at = place_of(c * step, thread)
                if from_parts:
                    x[c] = -T.infinity(T.float32)
                    origin = T.if_then_else(at < count, origin_tj[token, first + at], -1)
                    if origin >= 0:
                        x[c] = T.cast(scores_ts[token, origin], T.float32)
                elif at + step <= count:
                    for j in T.vectorized(step):
                        x[c * step + j] = T.cast(scores_ts[token, first + at + j], T.float32)
                else:
                    for j in T.unroll(step):
                        x[c * step + j] = -T.infinity(T.float32)
                        if at + j < count:
                            x[c * step + j] = T.cast(scores_ts[token, first + at + j], T.float32)
            for c in T.unroll(EACH // step):
                for j in T.vectorized(step):
                    row[place_of(c * step, thread) + j] = x[c * step + j]
            above_map[thread] = 0
            tied_map[thread] = 0
            for b in T.unroll(T.ceildiv(bins, threads)):
                if b * threads + thread < bins:
                    histogram[b * threads + thread] = 0

            # 2. a first bound: each of k groups reaches the least of their maxima
            for g in T.unroll(groups):
                best[g] = -T.infinity(T.float32)
                for i in T.unroll(EACH // groups):
                    best[g] = T.max(best[g], x[i * groups + g])
            bound = T.max(best[0], best[halves])
            top = bound
            for g in T.unroll(halves - 1):
                bound = T.min(bound, T.max(best[g + 1], best[halves + g + 1]))
                top = T.max(top, T.max(best[g + 1], best[halves + g + 1]))
            if k > halves * threads:
                bound = -T.infinity(T.float32)
            low = T.warp_reduce_min(T.max(rank(bound), T.uint32(LEAST)))
            high = T.warp_reduce_max(rank(top))
            if lane == 0:
                lows[warp] = low
                highs[warp] = high
            T.sync_threads()
            low = T.warp_reduce_min(lows[lane % warps])
            high = T.max(T.warp_reduce_max(highs[lane % warps]), low)

            # 3. a better one: the k-th largest of the maxima
            shift = shift_of(high - low)
            for g in T.unroll(groups):
                count_in(histogram, rank(best[g]), low, high - low, shift)
            T.sync_threads()
            if warp == 0:
                find_bin(histogram, found, k, lane, bins)
            T.sync_threads()
            low += T.cast(found[0], T.uint32) << shift

            # 4. the list of the scores that reach it
            floor = number(low)
            word = 0
            for i in T.unroll(EACH):
                if x[i] >= floor:
                    word = word | T.uint32(1 << i)
            own = T.cast(T.popcount(word), T.int32)
            sum_before(own, place, sums, warp, lane, warps)
            count = T.warp_reduce_sum(T.if_then_else(lane < warps, sums[lane % warps], 0))
            while word != 0:
                bit = 31 - T.cast(T.clz(word), T.int32)
                word = word ^ (T.uint32(1) << bit)
                listed[place] = T.cast(place_of(bit, thread), T.uint16)
                place += 1
            T.sync_threads()

            # 5. the range of the threshold: of the `inside` scores whose ranks are low to high, `need` are chosen
            need = T.min(k, count)
            inside = count
            while inside > need and low < high:
                shift = shift_of(high - low)
                for j in T.serial(T.ceildiv(count, threads)):
                    if j * threads + thread < count:
                        key = rank(row[listed[j * threads + thread]])
                        count_in(histogram, key, low, high - low, shift)
                T.sync_threads()
                if warp == 0:
                    find_bin(histogram, found, need, lane, bins)
                T.sync_threads()
                need -= found[1]
                inside = T.if_then_else(found[0] > 0, found[2], inside - found[1])
                low += T.cast(found[0], T.uint32) << shift
                high = low + T.min(high - low, (T.uint32(1) << shift) - 1)
                if found[0] == 0 and found[2] == inside:
                    high = low  # ties, as of scores without a positive part

            # 6. marks of what lies above the range, and in it; a bit is set once, so it can be added
            for j in T.serial(T.ceildiv(count, threads)):
                if j * threads + thread < count:
                    at = T.cast(listed[j * threads + thread], T.int32)
                    key = rank(row[at])
                    if key > high:
                        T.atomic_add(above_map[at // EACH], T.uint32(1) << (at % EACH))
                    elif key >= low:
                        T.atomic_add(tied_map[at // EACH], T.uint32(1) << (at % EACH))
            T.sync_threads()

            # 7. all above the range, and the first `need` in it, in the order of the row; the two sums share a word
            word = above_map[thread]
            tied = tied_map[thread]
            own = (T.cast(T.popcount(word), T.int32) << 16) + T.cast(T.popcount(tied), T.int32)
            sum_before(own, place, sums, warp, lane, warps)
            own = place & 0xFFFF
            place = (place >> 16) + T.min(own, need)
            own = T.max(need - own, 0)
            if own == 0:
                tied = 0
            while T.cast(T.popcount(tied), T.int32) > own:
                tied = tied ^ (T.uint32(1) << (31 - T.cast(T.clz(tied), T.int32)))
            word = word | tied
            while word != 0:
                lowest = word & (~word + 1)
                word = word ^ lowest
                at = first + thread * EACH + 31 - T.cast(T.clz(lowest), T.int32)
                idx_tpk[token, part, place] = origin_tj[token, at] if from_parts else at
                place += 1

            # 8. what is left of the k places
            for j in T.serial(T.ceildiv(k - T.min(k, count), threads)):
                if T.min(k, count) + j * threads + thread < k:
                    idx_tpk[token, part, T.min(k, count) + j * threads + thread] = -1

    return select


def select_launch(num_columns: int, k: int) -> SelectLaunch:
    """A row of up to 32768 scores in one block, else parts, the smaller the faster; 2 k groups if there can be so many.

    Raises:
        NotImplementedError: parts do not narrow a row down to half.
    """
    width, row = 2 ** (k - 1).bit_length(), 2 ** (num_columns - 1).bit_length()
    block = max(8192, row if row <= 32768 else min(16 * width, 32768))
    if num_columns > block and block < 2 * k:
        raise NotImplementedError(f"k: expected at most {block // 2} of more than {block} columns, got {k}")
    return SelectLaunch(block=block, groups=max(4, min(2 * width * EACH // block, EACH // 2)))


@lru_cache(maxsize=32)
def _compiled(dtype: str, step: int, from_parts: bool, launch: SelectLaunch) -> Any:
    program = select_program(dtype, step=step, from_parts=from_parts, launch=launch)
    return tilelang.compile(program, target={"kind": "cuda", "arch": "sm_90a"}, pass_configs=PASS_CONFIGS)


def topk(
    scores_ts: torch.Tensor, length_t: torch.Tensor, *, k: int, launch: SelectLaunch | None = None
) -> torch.Tensor:
    """Build once for the launch, and select: int32 [t, k]. A length beyond the row counts as the row's.

    Raises:
        NotImplementedError: as `select_launch`; the scores of a row are not one behind the other.
    """
    t, s = scores_ts.shape
    if scores_ts.numel() and scores_ts.stride(1) != 1:
        raise NotImplementedError(f"scores_ts: expected contiguous rows, got strides {scores_ts.stride()}")
    launch = launch or select_launch(s, k)
    if not scores_ts.numel():
        return torch.full((t, k), -1, dtype=torch.int32, device=scores_ts.device)
    length_t = length_t.contiguous()
    dtype = str(scores_ts.dtype).removeprefix("torch.")
    step = 16 // scores_ts.element_size()
    if scores_ts.stride(0) % step or scores_ts.data_ptr() % 16:
        step = 1
    origin_tj, width, from_parts = length_t[:, None], s, False  # not read before there are parts
    while True:
        # the best of every part, then the best of these, until one part is left
        parts = -(-width // launch.block)
        found_tpk = torch.empty((t, parts, k), dtype=torch.int32, device=scores_ts.device)
        _compiled(dtype, step, from_parts, launch)(scores_ts, origin_tj, length_t, found_tpk)
        if parts == 1:
            return found_tpk.view(t, k)
        origin_tj, width, step, from_parts = found_tpk.view(t, parts * k), parts * k, 1, True
