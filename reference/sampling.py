"""Deterministic sampling: from a row of logits to a token, as a function of the row, its parameters and its stream.

The order of operations on a row (blacklists and masks come before, `sampling_rows`):

    lp    = (x − max x) * (1 / T) − log sum exp(...)          log-probabilities at temperature T
    kept  = prefix of (logit descending, id ascending)        top-p and top-k, both measured on all of lp
    lp   <- lp − log(mass of the kept), −inf elsewhere        unless no filter is active
    w     = floor(exp(lp) * 2^31)                             whole numbers from here on
    token = where a random number below the sum of w falls    inverse CDF over lanes, not in the order of ids

Nothing else is read: no state, no other row. Given the fp32 probabilities a token is defined to the last bit, on every
machine. A row that cannot be drawn says why (`RowError`), has token −1, and disturbs no other row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .checks import expect_dtype, expect_multiple, expect_shape
from .config import LEAST_TEMPERATURE, Draw, RowError
from .numerics import CONTRACT, Numerics
from .philox import words
from .sampling_filter import expect_filters, fixed_point, kept_of_row

WORD = 2**32


def sample_probs(probs_tv: Tensor, seed_t: Tensor, subsequence_t: Tensor, *, draw: Draw) -> tuple[Tensor, Tensor]:
    """Draw a token of every row of weights by the fixed-point inverse CDF.

    Math:
        w[c]  = floor(probs[c] * 2^31); lane k holds the columns k, k + lanes, k + 2 lanes, …; total = sum w
        rho   = word mod total, of the first word of the stream below the largest multiple of total under 2^32
                (`Draw.ASCEND`: of the first two words, low then high, without a bound)
        k     = the lane in which rho falls, when lanes follow one another; m = the same within the lane
        token = k + m * lanes

    Shapes:
        probs_tv: fp32 [t, v]; seed_t, subsequence_t: int64 [t]; returns token_t int64 [t] and error_t int32 [t].

    Rounding:
        none but the floor.

    Edges:
        weights below 2^-31 are never drawn; a row need not sum to one. For a total of 2^31, a row with one clear token,
        every second word is refused, and any number of them may be refused in a row. A row that cannot be drawn has
        token −1: INVALID (NaN, infinite or negative), EMPTY, OVERFULL (total of 2^32 or more).

    Raises:
        ValueError: shapes disagree; v = 0; `Draw.ASCEND` and v no multiple of 64; a stream number is negative.
        TypeError: an argument is not of its dtype.

    Source:
        runtime.md section 2.3
    """
    dims: dict[str, int] = {}
    expect_shape("probs_tv", probs_tv, "tv", dims)
    expect_dtype("probs_tv", probs_tv, torch.float32)
    _check_streams(seed_t, subsequence_t, dims)
    _check_columns("probs_tv", dims["v"], draw)
    streams = zip(seed_t.tolist(), subsequence_t.tolist(), strict=True)
    drawn = [_draw(probs_v, words(*stream), draw) for probs_v, stream in zip(probs_tv, streams, strict=True)]
    return _columns(drawn)


def sample_logits(
    logits_tv: Tensor,
    temperature_t: Tensor,
    top_p_t: Tensor,
    top_k_t: Tensor,
    seed_t: Tensor,
    subsequence_t: Tensor,
    *,
    draw: Draw,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole pipeline: log-probabilities, filters, a token.

    Math:
        the module docstring; `keep_prefix` on fp32(exp(lp)), `sample_probs` on the final probabilities

    Shapes:
        logits_tv: fp32 [t, v]; temperature_t, top_p_t: fp32 [t]; top_k_t, seed_t, subsequence_t: int64 [t]; returns
        token_t int64 [t], error_t int32 [t], logprobs_tv and probs_tv fp32 [t, v].

    Rounding:
        1 / T, and the probabilities that the filters see, to fp32 (definitional); the difference, its product with
        1 / T, the exponentials, their sum, its logarithm, lp, the kept mass, its logarithm, the difference and the
        final probabilities to fp32 each.

    Edges:
        greedy requests have temperature 1e-5: two logits closer than 2.149e-4 can both be drawn, exact ties are decided
        by the stream. A row that cannot be drawn has token −1, log-probabilities −inf and probabilities 0: PARAMETER
        (temperature below 1e-5 or not finite, top_p outside [0, 1], top_k 0), INVALID (a logit NaN or +inf), EMPTY.

    Raises:
        ValueError: shapes disagree; v = 0; `Draw.ASCEND` and v no multiple of 64; a stream number is negative.
        TypeError: an argument is not of its dtype.

    Source:
        runtime.md section 2.2
    """
    dims: dict[str, int] = {}
    expect_shape("logits_tv", logits_tv, "tv", dims)
    expect_dtype("logits_tv", logits_tv, torch.float32)
    expect_shape("temperature_t", temperature_t, "t", dims)
    expect_dtype("temperature_t", temperature_t, torch.float32)
    expect_filters(top_p_t, top_k_t, dims)
    _check_streams(seed_t, subsequence_t, dims)
    _check_columns("logits_tv", dims["v"], draw)
    logprobs_tv = torch.full_like(num.wide(logits_tv), -torch.inf)
    drawn = []
    for row, stream in enumerate(zip(seed_t.tolist(), subsequence_t.tolist(), strict=True)):
        error = row_error(logits_tv[row], temperature_t[row], top_p_t[row], top_k_t[row])
        if error is RowError.NONE:
            filters = top_p_t[row].item(), int(top_k_t[row])
            logprobs_tv[row] = _filtered(
                log_probs(logits_tv[row], temperature_t[row], num=num), logits_tv[row], filters, num
            )
        probs_v = CONTRACT.f32(torch.exp(logprobs_tv[row]))
        drawn.append(_draw(probs_v, words(*stream), draw) if error is RowError.NONE else (-1, error))
    return *_columns(drawn), logprobs_tv, num.f32(torch.exp(logprobs_tv))


def log_probs(logits_v: Tensor, temperature: Tensor, *, num: Numerics = CONTRACT) -> Tensor:
    """Log-probabilities of one row at a temperature, a number of fp32; the rounding is that of `sample_logits`."""
    x_v, inverse = num.wide(logits_v), num.wide(1.0 / temperature)
    scaled_v = num.f32(num.f32(x_v - x_v.max()) * inverse)
    total = num.f32(num.sum(num.f32(torch.exp(scaled_v)), dim=-1))
    return num.f32(scaled_v - num.f32(torch.log(total)))


def row_error(logits_v: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> RowError:
    """Why a row of logits and its parameters cannot be drawn from."""
    # compared in fp32, where the least temperature is a little below 1e-5
    if not bool(
        (temperature >= LEAST_TEMPERATURE) & temperature.isfinite() & (top_p >= 0) & (top_p <= 1) & (top_k != 0)
    ):
        return RowError.PARAMETER
    if bool((logits_v.isnan() | (logits_v == torch.inf)).any()):
        return RowError.INVALID
    return RowError.EMPTY if bool((logits_v == -torch.inf).all()) else RowError.NONE


def argmax_tokens(logits_tv: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy decoding without a draw: the lowest id among the largest logits.

    Shapes:
        logits_tv: fp32 [t, v]; returns token_t int64 [t] and error_t int32 [t].

    Edges:
        −0 equals +0. INVALID (NaN, +inf) and EMPTY (all −inf) rows have token −1.

    Raises:
        ValueError: the shape is not [t, v], or v = 0.
        TypeError: logits are not fp32.

    Source:
        runtime.md section 1.3 (`greedy_argmax`)
    """
    dims: dict[str, int] = {}
    expect_shape("logits_tv", logits_tv, "tv", dims)
    expect_dtype("logits_tv", logits_tv, torch.float32)
    _check_columns("logits_tv", dims["v"], Draw.NVIDIA)
    one = torch.ones(())
    found = []
    for logits_v in logits_tv:
        error = row_error(logits_v, one, one, one)
        best = int((logits_v == logits_v.max()).nonzero()[0]) if error is RowError.NONE else -1
        found.append((best, error))
    return _columns(found)


def num_lanes(num_columns: int, draw: Draw) -> int:
    """Into how many lanes the columns of a row are dealt."""
    power = 1 << (num_columns - 1).bit_length()
    if draw is Draw.NVIDIA:
        return 2048 if num_columns >= 8192 else power
    return 4096 if num_columns >= 8192 else min(max(64, power), 2048)


def _draw(probs_v: Tensor, stream: Iterator[int], draw: Draw) -> tuple[int, RowError]:
    """The token that the stream draws from one row."""
    if not bool(((probs_v >= 0) & probs_v.isfinite()).all()):
        return -1, RowError.INVALID
    lanes = num_lanes(len(probs_v), draw)
    weight_mk = _dealt(fixed_point(probs_v), lanes)
    lane_k = weight_mk.sum(0, dtype=torch.int64)
    total = int(lane_k.sum(dtype=torch.int64))
    if not 0 < total < WORD:
        return -1, RowError.OVERFULL if total else RowError.EMPTY
    if draw is Draw.NVIDIA:
        limit = (WORD - 1) // total * total
        rho = next(word for word in stream if word < limit) % total
    else:
        low, high = next(stream), next(stream)
        rho = (high * WORD + low) % total
    k, rho_in_lane = _fallen(lane_k, rho)
    m, _ = _fallen(weight_mk[:, k], rho_in_lane)
    return k + m * lanes, RowError.NONE


def _fallen(weight_i: Tensor, rho: int) -> tuple[int, int]:
    """The i with C[i − 1] <= rho < C[i], C the running sums, and rho − C[i − 1]."""
    end_i = weight_i.cumsum(0)
    i = int((end_i <= rho).sum(dtype=torch.int64))
    return i, rho - (int(end_i[i - 1]) if i else 0)


def _dealt(weight_v: Tensor, lanes: int) -> Tensor:
    """Column k + m * lanes at [m, k], zeros behind the last."""
    rows = -(-len(weight_v) // lanes)
    padded = weight_v.new_zeros(rows * lanes)
    padded[: len(weight_v)] = weight_v
    return padded.reshape(rows, lanes)


def _filtered(logprobs_v: Tensor, logits_v: Tensor, filters: tuple[float, int], num: Numerics) -> Tensor:
    """Log-probabilities of the kept tokens, by their own mass; the others have none."""
    top_p, top_k = filters
    if top_p == 1 and not 0 < top_k < len(logits_v):
        return logprobs_v
    seen_v = CONTRACT.f32(torch.exp(logprobs_v))  # definitional
    kept_v = kept_of_row(logits_v, seen_v, top_p, top_k)
    mass = num.f32(num.sum(torch.where(kept_v, num.wide(seen_v), 0.0), dim=-1))
    return torch.where(kept_v, num.f32(logprobs_v - num.f32(torch.log(mass))), -torch.inf)


def _columns(drawn: list[tuple[int, RowError]]) -> tuple[Tensor, Tensor]:
    token_t = torch.tensor([token for token, _ in drawn], dtype=torch.int64)
    return token_t, torch.tensor([int(error) for _, error in drawn], dtype=torch.int32)


def _check_columns(name: str, num_columns: int, draw: Draw) -> None:
    if not num_columns:
        raise ValueError(f"{name}: expected at least one column, got none")
    if draw is Draw.ASCEND:
        expect_multiple(f"{name} (columns)", num_columns, 64)


def _check_streams(seed_t: Tensor, subsequence_t: Tensor, dims: dict[str, int]) -> None:
    for name, x in (("seed_t", seed_t), ("subsequence_t", subsequence_t)):
        expect_shape(name, x, "t", dims)
        expect_dtype(name, x, torch.int64)
    if (subsequence_t < 0).any():
        raise ValueError(f"subsequence_t: expected numbers from 0 on, got {subsequence_t.tolist()}")
