"""Deterministic sampling, fast: all rows at once in torch, and Triton kernels; the contract is `reference/sampling.py`.

The torch forms run on any device. Their sums over a row go down a tree that only the number of columns shapes, so no
row sees its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_multiple, expect_positive, expect_shape
from deeptwin.reference.config import LEAST_TEMPERATURE, POSITION_STRIDE, Draw, DrawUse, RowError

if TYPE_CHECKING:
    from deeptwin.kernels.triton_ops.sampling import RowLaunch

MASK = 2**32 - 1


def random_words_vectorised(seed_t: Tensor, subsequence_t: Tensor, *, count: int) -> Tensor:
    """`reference.philox.random_words`.

    Raises:
        ValueError: shapes disagree, or count is not positive.
        TypeError: an argument is not int64.
    """
    _check_streams(seed_t, subsequence_t, {})
    expect_positive("count", count)
    block_i = torch.arange(-(-count // 4), device=seed_t.device)
    words_ti4 = _philox(seed_t[:, None], subsequence_t[:, None], block_i[None, :])
    return words_ti4.flatten(1)[:, :count].contiguous()


def random_words_triton(seed_t: Tensor, subsequence_t: Tensor, *, count: int, out: Tensor | None = None) -> Tensor:
    """`reference.philox.random_words`.

    Raises:
        ValueError: shapes disagree, or count is not positive; `out` does not fit.
        TypeError: an argument is not int64; `out` has another dtype.
    """
    _check_streams(seed_t, subsequence_t, {})
    expect_positive("count", count)
    from deeptwin.kernels.triton_ops import sampling

    return sampling.random_words(seed_t, subsequence_t, count=count, out=out)


def uniforms_vectorised(seed_t: Tensor, subsequence_t: Tensor) -> Tensor:
    """`reference.philox.uniforms`.

    Raises:
        ValueError: shapes disagree.
        TypeError: an argument is not int64.
    """
    word_t = random_words_vectorised(seed_t, subsequence_t, count=1)[:, 0]
    return word_t.to(torch.float32) * 2.0**-32 + 2.0**-33


def subsequences_vectorised(position_t: Tensor, row_t: Tensor, *, use: DrawUse) -> Tensor:
    """`reference.philox.subsequences`; numbers are not inspected.

    Raises:
        ValueError: shapes disagree.
        TypeError: an argument is not int64.
    """
    dims: dict[str, int] = {}
    for name, x in (("position_t", position_t), ("row_t", row_t)):
        expect_shape(name, x, "t", dims)
        expect_dtype(name, x, torch.int64)
    return 3 * (position_t + row_t * POSITION_STRIDE) + int(use)


def sample_seeds_vectorised(seed_b: Tensor, *, samples: int) -> Tensor:
    """`reference.philox.sample_seeds`.

    Raises:
        ValueError: the shape is not [b], or samples is not positive.
        TypeError: seeds are not int64.
    """
    expect_shape("seed_b", seed_b, "b", {})
    expect_dtype("seed_b", seed_b, torch.int64)
    expect_positive("samples", samples)
    stride = 0x9E3779B97F4A7C15 - 2**64  # int64 products wrap as the definition asks
    return seed_b[:, None] + torch.arange(samples, device=seed_b.device) * stride


def sample_probs_vectorised(
    probs_tv: Tensor, seed_t: Tensor, subsequence_t: Tensor, *, draw: Draw
) -> tuple[Tensor, Tensor]:
    """`reference.sampling.sample_probs`.

    Raises:
        ValueError: shapes disagree; v = 0; `Draw.ASCEND` and v no multiple of 64.
        TypeError: an argument is not of its dtype.
    """
    _check_probs(probs_tv, seed_t, subsequence_t, draw)
    return _draw(probs_tv, seed_t, subsequence_t, draw)


def sample_probs_triton(
    probs_tv: Tensor,
    seed_t: Tensor,
    subsequence_t: Tensor,
    *,
    draw: Draw,
    launch: RowLaunch | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.sampling.sample_probs`.

    Raises:
        ValueError: shapes disagree; v = 0; `Draw.ASCEND` and v no multiple of 64.
        TypeError: an argument is not of its dtype.
        NotImplementedError: the columns of a row are not one behind the other; more than 2^20 of them.
    """
    _check_probs(probs_tv, seed_t, subsequence_t, draw)
    from deeptwin.kernels.triton_ops import sampling

    return sampling.sample_probs(probs_tv, seed_t, subsequence_t, ascend=draw is Draw.ASCEND, launch=launch)


def keep_prefix_vectorised(logits_tv: Tensor, probs_tv: Tensor, top_p_t: Tensor, top_k_t: Tensor) -> Tensor:
    """`reference.sampling_filter.keep_prefix`; values are not inspected.

    Raises:
        ValueError: shapes disagree.
        TypeError: an argument is not of its dtype.
    """
    _check_prefix(logits_tv, probs_tv, top_p_t, top_k_t)
    return _kept(logits_tv, probs_tv, top_p_t, top_k_t)


def keep_prefix_triton(
    logits_tv: Tensor,
    probs_tv: Tensor,
    top_p_t: Tensor,
    top_k_t: Tensor,
    *,
    launch: RowLaunch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.sampling_filter.keep_prefix`; values are not inspected.

    Raises:
        ValueError: shapes disagree; `out` does not fit.
        TypeError: an argument is not of its dtype; `out` has another one.
        NotImplementedError: the columns of a row are not one behind the other.
    """
    _check_prefix(logits_tv, probs_tv, top_p_t, top_k_t)
    from deeptwin.kernels.triton_ops import sampling

    return sampling.keep_prefix(logits_tv, probs_tv, top_p_t, top_k_t, launch=launch, out=out)


def sample_logits_vectorised(
    logits_tv: Tensor,
    temperature_t: Tensor,
    top_p_t: Tensor,
    top_k_t: Tensor,
    seed_t: Tensor,
    subsequence_t: Tensor,
    *,
    draw: Draw,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.sampling.sample_logits`.

    Raises:
        ValueError: shapes disagree; v = 0; `Draw.ASCEND` and v no multiple of 64.
        TypeError: an argument is not of its dtype.
    """
    _check_logits(logits_tv, temperature_t, top_p_t, top_k_t, seed_t, subsequence_t, draw)
    error_t = _row_errors(logits_tv, temperature_t, top_p_t, top_k_t)
    good_t1 = (error_t == RowError.NONE)[:, None]
    # 1. log-probabilities; a row that cannot be drawn is computed as if it were all zero
    x_tv = torch.where(good_t1, logits_tv, 0.0)
    scaled_tv = (x_tv - x_tv.amax(1, keepdim=True)) * (1.0 / temperature_t)[:, None]
    scaled_tv = torch.where(good_t1, scaled_tv, 0.0)
    logprobs_tv = scaled_tv - _row_sums(torch.exp(scaled_tv)).log()[:, None]
    # 2. filters
    active_t = (top_p_t < 1) | ((top_k_t > 0) & (top_k_t < logits_tv.shape[1]))
    seen_tv = torch.exp(logprobs_tv)
    kept_tv = _kept(x_tv, seen_tv, top_p_t, top_k_t)
    mass_t = _row_sums(torch.where(kept_tv, seen_tv, 0.0))
    own_tv = torch.where(kept_tv, logprobs_tv - mass_t.log()[:, None], -torch.inf)
    logprobs_tv = torch.where(active_t[:, None], own_tv, logprobs_tv)
    # 3. the draw
    logprobs_tv = torch.where(good_t1, logprobs_tv, -torch.inf)
    probs_tv = torch.exp(logprobs_tv)
    token_t, drawn_error_t = _draw(probs_tv, seed_t, subsequence_t, draw)
    token_t = torch.where(good_t1[:, 0], token_t, -1)
    return token_t, torch.where(good_t1[:, 0], drawn_error_t, error_t), logprobs_tv, probs_tv


def sample_logits_triton(
    logits_tv: Tensor,
    temperature_t: Tensor,
    top_p_t: Tensor,
    top_k_t: Tensor,
    seed_t: Tensor,
    subsequence_t: Tensor,
    *,
    draw: Draw,
    launch: RowLaunch | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.sampling.sample_logits` in one launch, a program a row.

    Raises:
        ValueError: shapes disagree; v = 0; `Draw.ASCEND` and v no multiple of 64.
        TypeError: an argument is not of its dtype.
        NotImplementedError: the columns of a row are not one behind the other; more than 2^20 of them.
    """
    _check_logits(logits_tv, temperature_t, top_p_t, top_k_t, seed_t, subsequence_t, draw)
    from deeptwin.kernels.triton_ops import sampling

    rows = (temperature_t, top_p_t, top_k_t, seed_t, subsequence_t)
    return sampling.sample_logits(logits_tv, *rows, ascend=draw is Draw.ASCEND, launch=launch)


def argmax_tokens_vectorised(logits_tv: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.sampling.argmax_tokens`.

    Raises:
        ValueError: the shape is not [t, v], or v = 0.
        TypeError: logits are not fp32.
    """
    _check_columns("logits_tv", logits_tv, {})
    one_t = torch.ones_like(logits_tv[:, 0])
    error_t = _row_errors(logits_tv, one_t, one_t, one_t.long())
    # the first of the largest: torch.argmax leaves open which
    is_best_tv = logits_tv == logits_tv.amax(1, keepdim=True)
    column_v = torch.arange(logits_tv.shape[1], device=logits_tv.device)
    best_t = torch.where(is_best_tv, column_v, logits_tv.shape[1]).amin(1)
    return torch.where(error_t == RowError.NONE, best_t, -1), error_t


def argmax_tokens_triton(logits_tv: Tensor, *, launch: RowLaunch | None = None) -> tuple[Tensor, Tensor]:
    """`reference.sampling.argmax_tokens`.

    Raises:
        ValueError: the shape is not [t, v], or v = 0.
        TypeError: logits are not fp32.
        NotImplementedError: the columns of a row are not one behind the other.
    """
    _check_columns("logits_tv", logits_tv, {})
    from deeptwin.kernels.triton_ops import sampling

    return sampling.argmax_tokens(logits_tv, launch=launch)


def mask_logits_vectorised(
    logits_tv: Tensor, banned_v: Tensor | None, no_eos_t: Tensor | None, allowed_ti: Tensor | None, *, eos: int
) -> Tensor:
    """`reference.sampling_rows.mask_logits`, as one mask.

    Raises:
        ValueError: shapes disagree, or eos is no column.
        TypeError: an argument is not of its dtype.
    """
    dims: dict[str, int] = {}
    _check_columns("logits_tv", logits_tv, dims)
    if not 0 <= eos < dims["v"]:
        raise ValueError(f"eos: expected a column of {dims['v']}, got {eos}")
    removed_tv = torch.zeros_like(logits_tv, dtype=torch.bool)
    if banned_v is not None:
        expect_shape("banned_v", banned_v, "v", dims)
        expect_dtype("banned_v", banned_v, torch.bool)
        removed_tv |= banned_v
    if no_eos_t is not None:
        expect_shape("no_eos_t", no_eos_t, "t", dims)
        expect_dtype("no_eos_t", no_eos_t, torch.bool)
        removed_tv[:, eos] |= no_eos_t
    if allowed_ti is not None:
        expect_shape("allowed_ti", allowed_ti, "ti", {"t": dims["t"], "i": -(-dims["v"] // 32)})
        expect_dtype("allowed_ti", allowed_ti, torch.int32)
        bit_i = torch.arange(32, dtype=torch.int32, device=logits_tv.device)
        removed_tv |= ((allowed_ti[:, :, None] >> bit_i & 1) == 0).flatten(1)[:, : dims["v"]]
    return logits_tv.masked_fill(removed_tv, -torch.inf)


def ranked_vectorised(values_tv: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """`reference.sampling_rows.ranked`, by integer keys of value and id; values are not inspected.

    Raises:
        ValueError: the shape is not [t, v], or k is not positive.
        TypeError: values are not fp32.
    """
    dims: dict[str, int] = {}
    expect_shape("values_tv", values_tv, "tv", dims)
    expect_dtype("values_tv", values_tv, torch.float32)
    expect_positive("k", k)
    t, v = values_tv.shape
    bits_tv = (values_tv + 0.0).view(torch.int32).long()
    order_tv = torch.where(bits_tv < 0, bits_tv ^ 0x7FFFFFFF, bits_tv)
    # value first, then the lower id: no two keys are equal, so the selection has no order of its own
    key_tv = (order_tv << 31) | (2**31 - 1 - torch.arange(v, device=values_tv.device))
    found_tk = key_tv.topk(min(k, v), dim=1).indices
    id_tk = torch.full((t, k), -1, dtype=torch.int64, device=values_tv.device)
    value_tk = values_tv.new_full((t, k), -torch.inf)
    id_tk[:, : found_tk.shape[1]] = found_tk
    value_tk[:, : found_tk.shape[1]] = values_tv.gather(1, found_tk)
    return value_tk, id_tk


def smaller_mass_vectorised(logprobs_tv: Tensor, token_t: Tensor) -> Tensor:
    """`reference.sampling_rows.smaller_mass`; tokens are not inspected.

    Raises:
        ValueError: shapes disagree.
        TypeError: log-probabilities are not fp32, or tokens not int64.
    """
    dims: dict[str, int] = {}
    expect_shape("logprobs_tv", logprobs_tv, "tv", dims)
    expect_shape("token_t", token_t, "t", dims)
    expect_dtype("logprobs_tv", logprobs_tv, torch.float32)
    expect_dtype("token_t", token_t, torch.int64)
    own_t1 = logprobs_tv.gather(1, token_t.clamp(min=0)[:, None])
    id_v = torch.arange(dims["v"], device=token_t.device)
    counted_tv = (logprobs_tv < own_t1) | ((logprobs_tv == own_t1) & (id_v <= token_t[:, None]))
    mass_t = _row_sums(torch.where(counted_tv, torch.exp(logprobs_tv), 0.0))
    return torch.where(token_t >= 0, mass_t, 0.0)


def _philox(seed: Tensor, subsequence: Tensor, block: Tensor) -> Tensor:
    """The four words of a block, as a new last axis. Numbers below 2^32 in int64: no product leaves 63 bits."""
    seed, subsequence, block = torch.broadcast_tensors(seed, subsequence, block)
    x, y = block & MASK, block >> 32 & MASK
    z, w = subsequence & MASK, subsequence >> 32 & MASK
    k0, k1 = seed & MASK, seed >> 32 & MASK
    for _ in range(10):
        high_a, low_a = _product(x, 0xD2511F53)
        high_b, low_b = _product(z, 0xCD9E8D57)
        x, y, z, w = high_b ^ y ^ k0, low_b, high_a ^ w ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return torch.stack([x, y, z, w], -1)


def _product(a: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32-bit product, from two halves of `a`."""
    upper, lower = (a >> 16) * by, (a & 0xFFFF) * by
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & MASK


def _draw(probs_tv: Tensor, seed_t: Tensor, subsequence_t: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    t, v = probs_tv.shape
    lanes = _num_lanes(v, draw)
    good_t = ((probs_tv >= 0) & (probs_tv < torch.inf)).all(1)
    known_tv = torch.where(good_t[:, None], probs_tv, 0.0).clamp(max=4.0)
    weight_tv = torch.nn.functional.pad((known_tv * 2.0**31).to(torch.int64), (0, -v % lanes))
    weight_tmk = weight_tv.unflatten(1, (-1, lanes))
    end_tk = weight_tmk.sum(1).cumsum(1)
    total_t = end_tk[:, -1]
    error_t = torch.where(total_t == 0, RowError.EMPTY, RowError.NONE)
    error_t = torch.where(total_t >= 2**32, RowError.OVERFULL, error_t)
    error_t = torch.where(good_t, error_t, RowError.INVALID).to(torch.int32)
    drawable_t = error_t == RowError.NONE
    rho_t = _rho(torch.where(drawable_t, total_t, 1), seed_t, subsequence_t, draw)
    lane_t, rho_t = _fallen(end_tk, rho_t)
    lane_t = lane_t.clamp(max=lanes - 1)  # of a row that is not drawn
    column_tm = weight_tmk.gather(2, lane_t[:, None, None].expand(t, weight_tmk.shape[1], 1))[:, :, 0]
    step_t, _ = _fallen(column_tm.cumsum(1), rho_t)
    return torch.where(drawable_t, lane_t + step_t * lanes, -1), error_t


def _rho(total_t: Tensor, seed_t: Tensor, subsequence_t: Tensor, draw: Draw) -> Tensor:
    """A number below the total of every row, from the words of its stream."""
    if draw is Draw.ASCEND:
        words_t4 = _philox(seed_t, subsequence_t, torch.zeros_like(seed_t))
        rho_t = words_t4[:, 1] % total_t
        for part in (words_t4[:, 0] >> 16, words_t4[:, 0] & 0xFFFF):
            rho_t = (rho_t << 16 | part) % total_t
        return rho_t
    limit_t = MASK // total_t * total_t
    rho_t = torch.full_like(total_t, -1)
    waiting = torch.arange(len(total_t), device=total_t.device)
    block = 0
    while len(waiting):  # half of the rows whose total is 2^31 wait for another block in 16, and so on without end
        number = torch.full_like(waiting, block)
        words_i4 = _philox(seed_t[waiting], subsequence_t[waiting], number)
        accepted_i4 = words_i4 < limit_t[waiting, None]
        first_i = torch.where(accepted_i4, torch.arange(4, device=words_i4.device), 4).amin(1)
        word_i = words_i4.gather(1, first_i.clamp(max=3)[:, None])[:, 0]
        rho_t[waiting] = torch.where(first_i < 4, word_i % total_t[waiting], -1)
        waiting, block = waiting[first_i == 4], block + 1
    return rho_t


def _fallen(end_ti: Tensor, rho_t: Tensor) -> tuple[Tensor, Tensor]:
    """Where rho falls among the running sums of a row, and how far behind the end before."""
    below_ti = end_ti <= rho_t[:, None]
    return below_ti.sum(1), rho_t - torch.where(below_ti, end_ti, 0).amax(1)


def _kept(logits_tv: Tensor, probs_tv: Tensor, top_p_t: Tensor, top_k_t: Tensor) -> Tensor:
    t, v = logits_tv.shape
    by_p_t, by_k_t = top_p_t < 1, (top_k_t > 0) & (top_k_t < v)
    if not (by_p_t | by_k_t).any():
        return torch.ones_like(logits_tv, dtype=torch.bool)
    logit_tv, order_tv = torch.sort(logits_tv + 0.0, dim=1, descending=True, stable=True)
    weight_tv = (probs_tv.clamp(max=4.0) * 2.0**31).to(torch.int64)
    sum_tv = weight_tv.gather(1, order_tv).cumsum(1)
    rank_v = torch.arange(v, device=logits_tv.device)
    last_t1 = torch.ones_like(logits_tv[:, :1], dtype=torch.bool)
    is_end_tv = torch.cat([logit_tv[:, 1:] != logit_tv[:, :-1], last_t1], 1)
    target_t = (top_p_t * 2.0**31).to(torch.int64) + 1
    reached_tv = (sum_tv >= target_t[:, None]) & by_p_t[:, None]
    reached_tv |= (rank_v + 1 >= top_k_t[:, None]) & by_k_t[:, None]
    end_t = torch.where(is_end_tv & reached_tv, rank_v, v).amin(1)
    at_t1 = end_t.clamp(max=v - 1)[:, None]
    above_t = (logit_tv > logit_tv.gather(1, at_t1)).sum(1)
    mass_t = torch.where(above_t > 0, sum_tv.gather(1, (above_t - 1).clamp(min=0)[:, None])[:, 0], 0)
    prob_t = probs_tv.gather(1, order_tv.gather(1, at_t1))[:, 0]
    wanted_t = torch.ceil((target_t - mass_t).to(torch.float32) * 2.0**-31 / prob_t).clamp(0, v)
    wanted_t = torch.where(prob_t > 0, wanted_t, 0.0).to(torch.int64)
    room_t = end_t + 1 - above_t
    room_t = torch.where(by_k_t, torch.minimum(room_t, top_k_t - above_t), room_t)
    room_t = torch.where(by_p_t, torch.minimum(room_t, wanted_t), room_t)
    count_t = torch.where(end_t < v, above_t + room_t, v)
    rank_tv = torch.empty_like(order_tv).scatter_(1, order_tv, rank_v.expand(t, v))
    return rank_tv < count_t[:, None]


def _row_errors(logits_tv: Tensor, temperature_t: Tensor, top_p_t: Tensor, top_k_t: Tensor) -> Tensor:
    usable_t = (temperature_t >= LEAST_TEMPERATURE) & temperature_t.isfinite()
    usable_t &= (top_p_t >= 0) & (top_p_t <= 1) & (top_k_t != 0)
    error_t = torch.where((logits_tv == -torch.inf).all(1), RowError.EMPTY, RowError.NONE)
    error_t = torch.where((logits_tv < torch.inf).all(1), error_t, RowError.INVALID)
    return torch.where(usable_t, error_t, RowError.PARAMETER).to(torch.int32)


def _row_sums(x_tv: Tensor) -> Tensor:
    """The sum of every row, halves added until one column is left."""
    width = 1 << (x_tv.shape[1] - 1).bit_length()
    x_tv = torch.nn.functional.pad(x_tv, (0, width - x_tv.shape[1]))
    while width > 1:
        width //= 2
        x_tv = x_tv[:, :width] + x_tv[:, width:]
    return x_tv[:, 0]


def _num_lanes(num_columns: int, draw: Draw) -> int:
    power = 1 << (num_columns - 1).bit_length()
    if draw is Draw.NVIDIA:
        return min(power, 2048) if num_columns >= 8192 else power
    return 4096 if num_columns >= 8192 else min(max(power, 64), 2048)


def _check_columns(name: str, x_tv: Tensor, dims: dict[str, int]) -> None:
    expect_shape(name, x_tv, "tv", dims)
    expect_dtype(name, x_tv, torch.float32)
    if not dims["v"]:
        raise ValueError(f"{name}: expected at least one column, got none")


def _check_streams(seed_t: Tensor, subsequence_t: Tensor, dims: dict[str, int]) -> None:
    for name, x in (("seed_t", seed_t), ("subsequence_t", subsequence_t)):
        expect_shape(name, x, "t", dims)
        expect_dtype(name, x, torch.int64)


def _check_draw(name: str, x_tv: Tensor, draw: Draw, dims: dict[str, int]) -> None:
    _check_columns(name, x_tv, dims)
    if draw is Draw.ASCEND:
        expect_multiple(f"{name} (columns)", dims["v"], 64)


def _check_probs(probs_tv: Tensor, seed_t: Tensor, subsequence_t: Tensor, draw: Draw) -> None:
    dims: dict[str, int] = {}
    _check_draw("probs_tv", probs_tv, draw, dims)
    _check_streams(seed_t, subsequence_t, dims)


def _check_filters(top_p_t: Tensor, top_k_t: Tensor, dims: dict[str, int]) -> None:
    expect_shape("top_p_t", top_p_t, "t", dims)
    expect_dtype("top_p_t", top_p_t, torch.float32)
    expect_shape("top_k_t", top_k_t, "t", dims)
    expect_dtype("top_k_t", top_k_t, torch.int64)


def _check_prefix(logits_tv: Tensor, probs_tv: Tensor, top_p_t: Tensor, top_k_t: Tensor) -> None:
    dims: dict[str, int] = {}
    for name, x_tv in (("logits_tv", logits_tv), ("probs_tv", probs_tv)):
        expect_shape(name, x_tv, "tv", dims)
        expect_dtype(name, x_tv, torch.float32)
    _check_filters(top_p_t, top_k_t, dims)


def _check_logits(
    logits_tv: Tensor,
    temperature_t: Tensor,
    top_p_t: Tensor,
    top_k_t: Tensor,
    seed_t: Tensor,
    subsequence_t: Tensor,
    draw: Draw,
) -> None:
    dims: dict[str, int] = {}
    _check_draw("logits_tv", logits_tv, draw, dims)
    expect_shape("temperature_t", temperature_t, "t", dims)
    expect_dtype("temperature_t", temperature_t, torch.float32)
    _check_filters(top_p_t, top_k_t, dims)
    _check_streams(seed_t, subsequence_t, dims)
