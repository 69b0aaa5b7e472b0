"""Rows of logits to tokens: Philox words, fixed-point draws, top-p and top-k, in one program a row.

Whatever decides a token is a whole number: weights are multiples of 2^-31, their sums are int64, and the random words
too (no product of theirs leaves 63 bits). Sums in fp32 go lane by lane in the order of the chunks, then down one tree
over the lanes. The number of lanes is part of the definition, so nothing depends on the batch, and a probability that
is needed again is computed again from the logit, by the same operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer
from .router import exp_of_negative
from .topk import ordered

MOST_COLUMNS = 2**20
LEAST_TEMPERATURE = tl.constexpr(1e-5)
WEIGHT = tl.constexpr(2147483648.0)  # 2^31
NO_TARGET = tl.constexpr(2**62)
NO_COUNT = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-(2**31))
# the codes of reference.config.RowError
INVALID = tl.constexpr(1)
EMPTY = tl.constexpr(2)
OVERFULL = tl.constexpr(3)
PARAMETER = tl.constexpr(4)


@dataclass(frozen=True, kw_only=True)
class RowLaunch:
    """`lanes` is fixed by the definition of the draw; `search` columns are compared with sixteen thresholds at once."""

    lanes: int
    search: int
    num_warps: int


def row_launch(num_columns: int, *, ascend: bool) -> RowLaunch:
    """Lanes of the draw; a short row is searched at once.

    Raises:
        NotImplementedError: more than 2^20 columns.
    """
    if num_columns > MOST_COLUMNS:
        raise NotImplementedError(f"logits_tv: expected at most {MOST_COLUMNS} columns, got {num_columns}")
    power = triton.next_power_of_2(num_columns)
    if ascend:
        lanes = 4096 if num_columns >= 8192 else min(max(64, power), 2048)
    else:
        lanes = 2048 if num_columns >= 8192 else power
    return RowLaunch(lanes=lanes, search=min(max(power, 16), 256), num_warps=min(max(lanes // 256, 1), 16))


@dataclass(frozen=True, kw_only=True)
class WordLaunch:
    """Blocks of four words of a program."""

    block: int = 256
    num_warps: int = 4


@triton.jit
def _product(a, by: tl.constexpr):
    """High and low word of a * by, both below 2^32, from two halves of a."""
    upper = (a >> 16) * by
    lower = (a & 0xFFFF) * by
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & 0xFFFFFFFF


@triton.jit
def philox_words(seed, subsequence, block):
    """The four words of a block of a stream (Philox4x32-10); everything is int64 and below 2^32."""
    x, y = block & 0xFFFFFFFF, (block >> 32) & 0xFFFFFFFF
    z, w = subsequence & 0xFFFFFFFF, (subsequence >> 32) & 0xFFFFFFFF
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        high_a, low_a = _product(x, 0xD2511F53)
        high_b, low_b = _product(z, 0xCD9E8D57)
        x, y, z, w = high_b ^ y ^ k0, low_b, high_a ^ w ^ k1, low_a
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x, y, z, w


@triton.jit
def _below(total, seed, subsequence, ASCEND: tl.constexpr):
    """A random number below `total`, which is in 1 … 2^32 − 1."""
    rho = tl.full([], -1, tl.int64)
    block = tl.full([], 0, tl.int64)
    if ASCEND:
        low, high, _, _ = philox_words(seed, subsequence, block)
        rho = high % total
        rho = ((rho << 16) | (low >> 16)) % total
        rho = ((rho << 16) | (low & 0xFFFF)) % total
    else:
        limit = 0xFFFFFFFF // total * total
        # a total of 2^31 refuses every second word: no number of words is enough for certain
        while rho < 0:
            x, y, z, w = philox_words(seed, subsequence, block)
            word = tl.where(x < limit, x, tl.where(y < limit, y, tl.where(z < limit, z, w)))
            rho = tl.where(word < limit, word % total, rho)
            block += 1
    return rho


@triton.jit
def _fallen(weights, rho):
    """The place at which rho falls among the running sums, and how far behind the end of the place before."""
    ends = tl.cumsum(weights, axis=0)
    before = ends <= rho
    return tl.sum(before.to(tl.int32), axis=0), rho - tl.max(tl.where(before, ends, 0), axis=0)


@triton.jit
def _weights(probs):
    """floor(p * 2^31); what is twice a probability or more is all the same."""
    return (tl.minimum(probs, 4.0) * WEIGHT).to(tl.int64)


@triton.jit
def _drawn_lane(lane_weights, seed, subsequence, error, ASCEND: tl.constexpr):
    """The lane, how far in it, and the error of the row so far or of its total."""
    total = tl.sum(lane_weights, axis=0)
    error = tl.where((error == 0) & (total == 0), EMPTY, error)
    error = tl.where((error == 0) & (total > 0xFFFFFFFF), OVERFULL, error)
    rho = _below(tl.where(error == 0, total, 1), seed, subsequence, ASCEND)
    lane, rho_in_lane = _fallen(lane_weights, rho)
    return lane, rho_in_lane, error


@triton.jit
def _quotient(a, b):
    """a / b, rounded once: in one lane of a vector, as a quotient of scalars has no lowering for Ascend."""
    first = tl.arange(0, 16) == 0
    return tl.sum(tl.div_rn(tl.where(first, a, 0.0), tl.where(first, b, 1.0)), axis=0)


@triton.jit
def _log(x):
    """log x, in one lane of a vector beside log 1."""
    return tl.sum(tl.log(tl.where(tl.arange(0, 16) == 0, x, 1.0)), axis=0)


@triton.jit
def _log_prob(x, top, inverse, log_total):
    """Log-probability of logits; −inf stays −inf, whatever the temperature."""
    scaled = tl.where(x == float("-inf"), float("-inf"), (x - top) * inverse)
    return scaled, scaled - log_total


@triton.jit
def _class_of(logits_ptr, probs_ptr, column, inside, top, inverse, log_total, GIVEN: tl.constexpr):
    """Keys in the order of the logits, and probabilities: given, or those of the logits."""
    x = tl.load(logits_ptr + column, mask=inside, other=float("-inf"))
    key, _ = ordered(x, inside, 32)
    if GIVEN:
        probs = tl.load(probs_ptr + column, mask=inside, other=0.0)
    else:
        _, logprob = _log_prob(x, top, inverse, log_total)
        probs = exp_of_negative(logprob)
    return key, probs


@triton.jit
def _filter(
    logits_ptr,
    probs_ptr,
    num_columns,
    top_p,
    top_k,
    top,
    inverse,
    log_total,
    GIVEN: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """What is kept: keys above the first result, and at it the columns up to the second."""
    by_p = top_p < 1.0
    by_k = (top_k > 0) & (top_k < num_columns)
    low = tl.full([], LOWEST, tl.int32)
    cut = tl.full([], -1, tl.int32)
    if by_p | by_k:
        item = tl.arange(0, SEARCH)
        digit = tl.arange(0, 16)
        goal = (top_p * WEIGHT).to(tl.int64) + 1
        target = tl.where(by_p, goal, NO_TARGET)
        most = tl.where(by_k, top_k, NO_COUNT).to(tl.int32)
        # 1. the stopping class, digit by digit: the highest key at or above which a target is reached. If none is,
        # the key stays below all others
        for place in range(0, 8):
            shift = 28 - 4 * place
            mass = tl.zeros([16], tl.int64)
            count = tl.zeros([16], tl.int32)
            for start in range(0, num_columns, SEARCH):
                column = start + item
                inside = column < num_columns
                key, probs = _class_of(logits_ptr, probs_ptr, column, inside, top, inverse, log_total, GIVEN)
                at_least = inside[:, None] & (key[:, None] >= (low + (digit << shift))[None, :])
                count += tl.sum(at_least.to(tl.int32), axis=0)
                mass += tl.sum(tl.where(at_least, _weights(probs)[:, None], 0), axis=0)
            reached = (mass >= target) | (count >= most)
            low += (tl.maximum(tl.sum(reached.to(tl.int32), axis=0), 1) - 1) << shift
        # 2. what lies above it, and its probability
        above = tl.zeros([SEARCH], tl.int64)
        count_above = tl.zeros([SEARCH], tl.int32)
        of_class = tl.zeros([SEARCH], tl.float32)
        for start in range(0, num_columns, SEARCH):
            column = start + item
            inside = column < num_columns
            key, probs = _class_of(logits_ptr, probs_ptr, column, inside, top, inverse, log_total, GIVEN)
            above += tl.where(inside & (key > low), _weights(probs), 0)
            count_above += (inside & (key > low)).to(tl.int32)
            of_class = tl.where(inside & (key == low), tl.maximum(of_class, probs), of_class)
        # 3. how many of the class are wanted
        prob = tl.max(of_class, axis=0)
        missing = (goal - tl.sum(above, axis=0)).to(tl.float32) * 4.656612873077393e-10  # 2^-31
        wanted = tl.minimum(_quotient(missing, tl.where(prob > 0, prob, 1.0)), tl.cast(num_columns, tl.float32))
        wanted = tl.where(prob > 0, tl.ceil(wanted), 0.0)
        room = tl.where(by_p, wanted.to(tl.int32), NO_COUNT)
        room = tl.minimum(room, tl.where(by_k, most - tl.sum(count_above, axis=0), NO_COUNT))
        # 4. the column of the last wanted one
        tied = tl.full([], 0, tl.int32)
        for start in range(0, num_columns, SEARCH):
            column = start + item
            inside = column < num_columns
            key, valid = ordered(tl.load(logits_ptr + column, mask=inside, other=float("-inf")), inside, 32)
            is_tied = (inside & (key == low)).to(tl.int32)
            nth = tied + tl.cumsum(is_tied, axis=0)
            cut = tl.maximum(cut, tl.max(tl.where((is_tied > 0) & (nth <= room), column, -1), axis=0))
            tied += tl.sum(is_tied, axis=0)
    return low, cut, by_p | by_k


@triton.jit
def _random_words(seed_ptr, subsequence_ptr, words_ptr, num_blocks, blocks_of_row, count, BLOCK: tl.constexpr):
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = item < num_blocks
    row, block = item // blocks_of_row, item % blocks_of_row
    seed = tl.load(seed_ptr + row, mask=inside, other=0)
    subsequence = tl.load(subsequence_ptr + row, mask=inside, other=0)
    x, y, z, w = philox_words(seed, subsequence, block)
    place = 4 * block
    out_ptr = words_ptr + row * count + place
    tl.store(out_ptr, x, mask=inside)
    tl.store(out_ptr + 1, y, mask=inside & (place + 1 < count))
    tl.store(out_ptr + 2, z, mask=inside & (place + 2 < count))
    tl.store(out_ptr + 3, w, mask=inside & (place + 3 < count))


@triton.jit
def _sample_probs(
    probs_ptr,
    seed_ptr,
    subsequence_ptr,
    token_ptr,
    error_ptr,
    num_columns,
    stride_pt,
    ASCEND: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
):
    # 1. the sum of every lane
    row = tl.program_id(0).to(tl.int64)
    row_ptr = probs_ptr + row * stride_pt
    item = tl.arange(0, LANES)
    bad = tl.zeros([LANES], tl.int32)
    lane_weights = tl.zeros([LANES], tl.int64)
    for start in range(0, num_columns, LANES):
        column = start + item
        probs = tl.load(row_ptr + column, mask=column < num_columns, other=0.0)
        fine = (probs >= 0.0) & (probs < float("inf"))  # false for NaN
        bad += tl.where(fine, 0, 1)
        lane_weights += _weights(tl.where(fine, probs, 0.0))
    # 2. the lane, then the column in it
    error = tl.where(tl.sum(bad, axis=0) > 0, INVALID, 0)
    seed, subsequence = tl.load(seed_ptr + row), tl.load(subsequence_ptr + row)
    lane, rho, error = _drawn_lane(lane_weights, seed, subsequence, error, ASCEND)
    column = lane + tl.arange(0, STEPS) * LANES
    probs = tl.load(row_ptr + column, mask=(column < num_columns) & (error == 0), other=0.0)
    step, _ = _fallen(_weights(probs), rho)
    token = tl.where(error == 0, lane + step * LANES, -1)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(error_ptr + row, error.to(tl.int32))


@triton.jit
def _keep_prefix(
    logits_ptr,
    probs_ptr,
    top_p_ptr,
    top_k_ptr,
    kept_ptr,
    num_columns,
    stride_lt,
    stride_pt,
    SEARCH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logit_ptr = logits_ptr + row * stride_lt
    top_p, top_k = tl.load(top_p_ptr + row), tl.load(top_k_ptr + row)
    low, cut, active = _filter(
        logit_ptr, probs_ptr + row * stride_pt, num_columns, top_p, top_k, 0.0, 1.0, 0.0, True, SEARCH
    )
    for start in range(0, num_columns, SEARCH):
        column = start + tl.arange(0, SEARCH)
        inside = column < num_columns
        key, valid = ordered(tl.load(logit_ptr + column, mask=inside, other=0.0), inside, 32)
        kept = (key > low) | ((key == low) & (column <= cut))
        tl.store(kept_ptr + row * num_columns + column, kept.to(tl.int8), mask=inside)


@triton.jit
def _sample_logits(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    top_k_ptr,
    seed_ptr,
    subsequence_ptr,
    token_ptr,
    error_ptr,
    logprobs_ptr,
    probs_ptr,
    num_columns,
    stride_lt,
    ASCEND: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    SEARCH: tl.constexpr,
):
    # 1. the largest logit, and whether the row can be drawn from
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_lt
    logprob_ptr, prob_ptr = logprobs_ptr + row * num_columns, probs_ptr + row * num_columns
    item = tl.arange(0, LANES)
    bad = tl.zeros([LANES], tl.int32)
    largest = tl.full([LANES], float("-inf"), tl.float32)
    for start in range(0, num_columns, LANES):
        column = start + item
        x = tl.load(row_ptr + column, mask=column < num_columns, other=float("-inf"))
        bad += tl.where(x < float("inf"), 0, 1)  # NaN is not
        largest = tl.where(x > largest, x, largest)
    top = tl.max(largest, axis=0)
    temperature, top_p, top_k = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row), tl.load(top_k_ptr + row)
    usable = (temperature >= LEAST_TEMPERATURE) & (temperature < float("inf"))
    usable = usable & (top_p >= 0.0) & (top_p <= 1.0) & (top_k != 0)
    error = tl.where(top == float("-inf"), EMPTY, 0)
    error = tl.where(tl.sum(bad, axis=0) > 0, INVALID, error)
    error = tl.where(usable, error, PARAMETER)
    if error != 0:
        for start in range(0, num_columns, LANES):
            column = start + item
            inside = column < num_columns
            tl.store(logprob_ptr + column, tl.full([LANES], float("-inf"), tl.float32), mask=inside)
            tl.store(prob_ptr + column, tl.zeros([LANES], tl.float32), mask=inside)
        tl.store(token_ptr + row, tl.full([], -1, tl.int64))
        tl.store(error_ptr + row, error.to(tl.int32))
    else:
        # 2. the sum of the exponentials
        inverse = _quotient(1.0, temperature)
        sums = tl.zeros([LANES], tl.float32)
        for start in range(0, num_columns, LANES):
            column = start + item
            x = tl.load(row_ptr + column, mask=column < num_columns, other=float("-inf"))
            scaled, _ = _log_prob(x, top, inverse, 0.0)
            sums += exp_of_negative(scaled)
        log_total = _log(tl.sum(sums, axis=0))
        # 3. filters, and the logarithm of what they leave
        low, cut, active = _filter(row_ptr, prob_ptr, num_columns, top_p, top_k, top, inverse, log_total, False, SEARCH)
        log_mass = tl.full([], 0.0, tl.float32)
        if active:
            sums = tl.zeros([LANES], tl.float32)
            for start in range(0, num_columns, LANES):
                column = start + item
                inside = column < num_columns
                key, probs = _class_of(row_ptr, prob_ptr, column, inside, top, inverse, log_total, False)
                kept = (key > low) | ((key == low) & (column <= cut))
                sums += tl.where(kept & inside, probs, 0.0)
            log_mass = _log(tl.sum(sums, axis=0))
        # 4. final probabilities, and the sum of every lane
        lane_weights = tl.zeros([LANES], tl.int64)
        for start in range(0, num_columns, LANES):
            column = start + item
            inside = column < num_columns
            logprob, probs = _final(row_ptr, column, inside, top, inverse, log_total, log_mass, low, cut)
            tl.store(logprob_ptr + column, logprob, mask=inside)
            tl.store(prob_ptr + column, probs, mask=inside)
            lane_weights += _weights(probs)
        # 5. the lane, then the column in it
        seed, subsequence = tl.load(seed_ptr + row), tl.load(subsequence_ptr + row)
        lane, rho, error = _drawn_lane(lane_weights, seed, subsequence, error, ASCEND)
        column = lane + tl.arange(0, STEPS) * LANES
        inside = (column < num_columns) & (error == 0)
        _, probs = _final(row_ptr, column, inside, top, inverse, log_total, log_mass, low, cut)
        step, _ = _fallen(_weights(probs), rho)
        tl.store(token_ptr + row, tl.where(error == 0, lane + step * LANES, -1).to(tl.int64))
        tl.store(error_ptr + row, error.to(tl.int32))


@triton.jit
def _final(row_ptr, column, inside, top, inverse, log_total, log_mass, low, cut):
    """Log-probabilities and probabilities by the mass of what is kept."""
    x = tl.load(row_ptr + column, mask=inside, other=float("-inf"))
    key, _ = ordered(x, inside, 32)
    kept = (key > low) | ((key == low) & (column <= cut))
    _, logprob = _log_prob(x, top, inverse, log_total)
    logprob = tl.where(kept, logprob - log_mass, float("-inf"))
    return logprob, exp_of_negative(logprob)


@triton.jit
def _argmax(logits_ptr, token_ptr, error_ptr, num_columns, stride_lt, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_lt
    item = tl.arange(0, BLOCK)
    # 1. the largest of every lane with its first column
    bad = tl.zeros([BLOCK], tl.int32)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    first = tl.zeros([BLOCK], tl.int32) + num_columns
    for start in range(0, num_columns, BLOCK):
        column = start + item
        x = tl.load(row_ptr + column, mask=column < num_columns, other=float("-inf"))
        bad += tl.where(x < float("inf"), 0, 1)
        first = tl.where(x > largest, column, first)
        largest = tl.where(x > largest, x, largest)
    # 2. the lowest column that holds the largest of all
    top = tl.max(largest, axis=0)
    best = tl.min(tl.where(largest == top, first, num_columns), axis=0)
    error = tl.where(top == float("-inf"), EMPTY, 0)
    error = tl.where(tl.sum(bad, axis=0) > 0, INVALID, error)
    tl.store(token_ptr + row, tl.where(error == 0, best, -1).to(tl.int64))
    tl.store(error_ptr + row, error.to(tl.int32))


def random_words(
    seed_t: torch.Tensor, subsequence_t: torch.Tensor, *, count: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The first words of every stream, int64 [t, count].

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: seed_t is on the CPU and kernels are not interpreted.
    """
    words_ti = output_buffer(out, (len(seed_t), count), torch.int64, seed_t)
    if not len(seed_t):
        return words_ti
    require_runnable("seed_t", seed_t)
    launch = WordLaunch()
    blocks_of_row = triton.cdiv(count, 4)
    num_blocks = len(seed_t) * blocks_of_row
    _random_words[(triton.cdiv(num_blocks, launch.block),)](
        seed_t.contiguous(),
        subsequence_t.contiguous(),
        words_ti,
        num_blocks,
        blocks_of_row,
        count,
        BLOCK=launch.block,
        num_warps=launch.num_warps,
    )
    return words_ti


def sample_probs(
    probs_tv: torch.Tensor,
    seed_t: torch.Tensor,
    subsequence_t: torch.Tensor,
    *,
    ascend: bool,
    launch: RowLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token int64 [t] of every row of weights, and an error int32 [t].

    Raises:
        NotImplementedError: the columns of a row are not one behind the other; more than 2^20 of them.
        RuntimeError: probs_tv is on the CPU and kernels are not interpreted.
    """
    t, v = probs_tv.shape
    launch = launch or row_launch(v, ascend=ascend)
    token_t, error_t = _tokens(probs_tv, "probs_tv")
    if not t:
        return token_t, error_t
    require_runnable("probs_tv", probs_tv)
    _sample_probs[(t,)](
        probs_tv,
        seed_t.contiguous(),
        subsequence_t.contiguous(),
        token_t,
        error_t,
        v,
        probs_tv.stride(0),
        ASCEND=ascend,
        LANES=launch.lanes,
        STEPS=_steps(v, launch.lanes),
        num_warps=launch.num_warps,
    )
    return token_t, error_t


def keep_prefix(
    logits_tv: torch.Tensor,
    probs_tv: torch.Tensor,
    top_p_t: torch.Tensor,
    top_k_t: torch.Tensor,
    *,
    launch: RowLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which columns top-p and top-k leave, bool [t, v].

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        NotImplementedError: the columns of a row are not one behind the other.
        RuntimeError: logits_tv is on the CPU and kernels are not interpreted.
    """
    t, v = logits_tv.shape
    kept_tv = output_buffer(out, (t, v), torch.bool, logits_tv)
    for name, x in (("logits_tv", logits_tv), ("probs_tv", probs_tv)):
        _require_rows(name, x)
    if not t * v:
        return kept_tv
    require_runnable("logits_tv", logits_tv)
    launch = launch or row_launch(v, ascend=False)
    _keep_prefix[(t,)](
        logits_tv,
        probs_tv,
        top_p_t.contiguous(),
        top_k_t.contiguous(),
        kept_tv.view(torch.int8),
        v,
        logits_tv.stride(0),
        probs_tv.stride(0),
        SEARCH=launch.search,
        num_warps=launch.num_warps,
    )
    return kept_tv


def sample_logits(
    logits_tv: torch.Tensor,
    temperature_t: torch.Tensor,
    top_p_t: torch.Tensor,
    top_k_t: torch.Tensor,
    seed_t: torch.Tensor,
    subsequence_t: torch.Tensor,
    *,
    ascend: bool,
    launch: RowLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token int64 [t], error int32 [t], log-probabilities and probabilities fp32 [t, v].

    Raises:
        NotImplementedError: the columns of a row are not one behind the other; more than 2^20 of them.
        RuntimeError: logits_tv is on the CPU and kernels are not interpreted.
    """
    t, v = logits_tv.shape
    launch = launch or row_launch(v, ascend=ascend)
    token_t, error_t = _tokens(logits_tv, "logits_tv")
    logprobs_tv = torch.empty((t, v), dtype=torch.float32, device=logits_tv.device)
    probs_tv = torch.empty_like(logprobs_tv)
    if not t:
        return token_t, error_t, logprobs_tv, probs_tv
    require_runnable("logits_tv", logits_tv)
    _sample_logits[(t,)](
        logits_tv,
        temperature_t.contiguous(),
        top_p_t.contiguous(),
        top_k_t.contiguous(),
        seed_t.contiguous(),
        subsequence_t.contiguous(),
        token_t,
        error_t,
        logprobs_tv,
        probs_tv,
        v,
        logits_tv.stride(0),
        ASCEND=ascend,
        LANES=launch.lanes,
        STEPS=_steps(v, launch.lanes),
        SEARCH=launch.search,
        num_warps=launch.num_warps,
        enable_fp_fusion=False,
    )
    return token_t, error_t, logprobs_tv, probs_tv


def argmax_tokens(logits_tv: torch.Tensor, *, launch: RowLaunch | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of the largest of every row, int64 [t], and an error int32 [t].

    Raises:
        NotImplementedError: the columns of a row are not one behind the other.
        RuntimeError: logits_tv is on the CPU and kernels are not interpreted.
    """
    t, v = logits_tv.shape
    token_t, error_t = _tokens(logits_tv, "logits_tv")
    if not t:
        return token_t, error_t
    require_runnable("logits_tv", logits_tv)
    launch = launch or row_launch(v, ascend=False)
    _argmax[(t,)](logits_tv, token_t, error_t, v, logits_tv.stride(0), BLOCK=launch.lanes, num_warps=launch.num_warps)
    return token_t, error_t


def _steps(num_columns: int, lanes: int) -> int:
    """Columns of a lane, a power of two of at least 16."""
    return max(triton.next_power_of_2(triton.cdiv(num_columns, lanes)), 16)


def _tokens(rows_tv: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    _require_rows(name, rows_tv)
    token_t = torch.empty(len(rows_tv), dtype=torch.int64, device=rows_tv.device)
    return token_t, torch.empty(len(rows_tv), dtype=torch.int32, device=rows_tv.device)


def _require_rows(name: str, x_tv: torch.Tensor) -> None:
    if x_tv.numel() and x_tv.stride(1) != 1:
        raise NotImplementedError(f"{name}: expected contiguous rows, got strides {x_tv.stride()}")
