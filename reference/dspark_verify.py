"""How drafts are verified: which are accepted, and what is drawn after a rejection.

A step verifies packed rows. Request b owns rows first[b] … first[b] + length[b] - 1: row j holds the target's
distribution q of the token at position P0 + j. All rows but the last are *verify rows*, of draft t with distribution p
in the proposal pool; the last is the *fresh row*. With π = 5e-5:

    accept    u < exp(min(log q(t) - log p(t), 0))
    residual  r(i) = max(q(i) - exp(log p(i) - π), 0): what is drawn from, normalised, if the draft is rejected
    α         max(1 - Σ_i floor(r(i) · 2^31) / 2^31, 0): an estimate of the acceptance; 1 on the fresh row

A fresh row draws from q itself, and a rejected row whose weights are all below 2^-31 takes the lowest of the largest
entries (`sampling.argmax_tokens`: of the raw logits on NVIDIA, of the log-probabilities on Ascend). The first rejected
row, or the fresh one, ends the request; rows behind it are ignored.
The penalty π keeps the residual from being empty where rounding rejects a token although q ≥ p. With ε = 1 - e^-π the
law of the emitted token stays within q - ε / (1 + ε) ≤ law ≤ (1 + ε) q, provided that drafts were drawn from p.

Pool slot 0 is a placeholder that no request writes to: a point mass on token V - 1, of confidence 1. Requests without
proposals, and fresh rows, read it.

Source: runtime.md section 1.3 (DeepInfer, layers/sampler.py, layers/tilelang_ops/{fused_sample,sampler}.py). Letters
beside the project's own: z rows of the pool, j positions of a request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_shape
from .config import Draw
from .numerics import CONTRACT, Numerics

PENALTY = 5e-5
FIXED_ONE = 2**31


def verify_rows(
    target_tv: Tensor,
    draft_zv: Tensor,
    token_t: Tensor,
    pool_t: Tensor,
    fresh_t: Tensor,
    word_t: Tensor,
    *,
    draw: Draw,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decide about every row, and say what its token is drawn from.

    Shapes:
        target_tv: log q, fp32 [t, v]; draft_zv: log p, fp32 [z, v], the pool; token_t: the draft of each row, -1 for
        none; pool_t: its row of the pool; both integer [t]; fresh_t: bool [t]; word_t: int64 [t], the 32-bit random
        word of the decision. Returns accepted_t bool [t], weights_tv fp32 [t, v] and alpha_t fp32 [t].

    Rounding:
        the log ratio, exponentials, the uniform number and the difference to fp32 each.

    Edges:
        a fresh row is never accepted; its token and its pool row are not read. Token -1 is rejected. log q(t) = -inf is
        rejected, also where log p(t) = -inf (the source would accept; no drawn token has that); log p(t) = -inf with
        q(t) > 0 is accepted.

    Raises:
        ValueError: shapes disagree; a draft of a verify row lies outside -1 … v - 1, a pool row outside the pool, or a
            word outside 32 bits; a log-probability is NaN or +inf.
        TypeError: log-probabilities are not fp32, ids no integers, fresh_t is not bool, or words are not int64.

    Source:
        runtime.md section 1.3
    """
    dims: dict[str, int] = {}
    expect_shape("target_tv", target_tv, "tv", dims)
    expect_shape("draft_zv", draft_zv, "zv", dims)
    _check_rows(token_t, pool_t, fresh_t, word_t, dims)
    for name, x in (("target_tv", target_tv), ("draft_zv", draft_zv)):
        expect_dtype(name, x, torch.float32)
        if not (x < torch.inf).all():
            raise ValueError(f"{name}: expected log-probabilities below infinity, got NaN or inf")
    token_t, pool_t = torch.where(fresh_t, -1, token_t.long()), torch.where(fresh_t, 0, pool_t.long())
    log_q_tv = num.wide(target_tv)
    log_p_tv = torch.where(fresh_t[:, None], -torch.inf, num.wide(draft_zv)[pool_t])
    at_t1 = token_t.clamp(min=0)[:, None]
    lp_t, lq_t = log_p_tv.gather(1, at_t1)[:, 0], log_q_tv.gather(1, at_t1)[:, 0]
    possible_t = (token_t >= 0) & (lq_t > -torch.inf)
    ratio_t = num.f32(torch.where(possible_t, lq_t - lp_t, 0)).clamp(max=0)
    accepted_t = possible_t & accepts(ratio_t, word_t, draw=draw, num=num)
    penalised_tv = num.f32(torch.exp(num.f32(log_p_tv - PENALTY)))
    weights_tv = num.f32((num.f32(torch.exp(log_q_tv)) - penalised_tv).clamp(min=0))
    alpha_t = acceptance_estimate(weights_tv, fresh_t, num=num)
    return accepted_t, weights_tv, alpha_t


def accepts(ratio_t: Tensor, word_t: Tensor, *, draw: Draw, num: Numerics = CONTRACT) -> Tensor:
    """Whether a random word accepts a log ratio of at most 0; the platforms decide differently.

    Math:
        NVIDIA: word · 2^-32 + 2^-33 in fp32 < exp(ratio);  ASCEND: 2 · word + 1 < floor(exp(ratio) · 2^33)

    Edges:
        NVIDIA: the 128 largest words give the uniform number 1.0, which rejects even a ratio of 1. ASCEND never does.

    Raises:
        ValueError: shapes disagree.
    """
    dims: dict[str, int] = {}
    expect_shape("ratio_t", ratio_t, "t", dims)
    expect_shape("word_t", word_t, "t", dims)
    chance_t = num.f32(torch.exp(num.wide(ratio_t)))
    if draw is Draw.ASCEND:
        return 2 * word_t + 1 < (chance_t * 2.0**33).long()
    # definitional under every numerics: the word is rounded to fp32, then the sum is
    uniform_t = CONTRACT.f32(CONTRACT.f32(CONTRACT.wide(word_t)) * 2.0**-32 + 2.0**-33)
    return uniform_t < chance_t


def acceptance_estimate(weights_tv: Tensor, fresh_t: Tensor, *, num: Numerics = CONTRACT) -> Tensor:
    """α: the share of the distribution that no rejection would draw.

    Math:
        max(1 - f32(Σ_i floor(r[i] · 2^31)) / 2^31, 0); 1 for fresh rows

    Rounding:
        the integer sum is exact; it is rounded once to fp32, and so is the difference.

    Raises:
        ValueError: shapes disagree.
    """
    dims: dict[str, int] = {}
    expect_shape("weights_tv", weights_tv, "tv", dims)
    expect_shape("fresh_t", fresh_t, "t", dims)
    fixed_t = (num.wide(weights_tv) * FIXED_ONE).long().sum(1, dtype=torch.int64)
    alpha_t = num.f32(1 - num.f32(num.wide(fixed_t)) / FIXED_ONE).clamp(min=0)
    return torch.where(fresh_t, 1, alpha_t)


def verify_pack(
    accepted_t: Tensor,
    sampled_t: Tensor,
    token_t: Tensor,
    golden_t: Tensor | None,
    length_b: Tensor,
    stop_bk: Tensor,
    *,
    draft: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What every request emits: its accepted drafts, then the token of the row that ends it.

    Shapes:
        accepted_t: bool [t]; sampled_t: the token drawn from each row; token_t: its draft; both integer [t]; golden_t:
        forced tokens, integer [t], -1 for none, or None; length_b: integer [b], rows of each request; stop_bk: integer
        [b, k], its stop tokens, -1 for none. Returns count_b int32 [b], accepted drafts; final_b int32 [b]; packed_t
        int32 [t], drafts on accepted rows and -1 elsewhere; stopped_b bool [b], whether an emitted token is a stop.

    Edges:
        a forced token replaces the row's, and its row is accepted if it is the draft; before the prefix rule. The last
        row of a request is never accepted. A padding request has no rows: count 0, final -1.

    Raises:
        ValueError: shapes disagree; lengths do not add up to t, or lie outside 0 … draft + 1.
        TypeError: accepted_t is not bool, or ids or lengths are no integers.

    Source:
        runtime.md section 1.3
    """
    _check_pack(accepted_t, sampled_t, token_t, golden_t, length_b, stop_bk, draft)
    if golden_t is not None:
        sampled_t = torch.where(golden_t >= 0, golden_t.to(torch.int64), sampled_t.to(torch.int64))
        accepted_t = torch.where(golden_t >= 0, golden_t == token_t, accepted_t)
    counts, finals, stopped = [], [], []
    packed_t = torch.full(token_t.shape, -1, dtype=torch.int32)
    row = 0
    for length, stops in zip(length_b.tolist(), stop_bk.tolist(), strict=True):
        count = 0
        while count < length - 1 and accepted_t[row + count]:
            packed_t[row + count] = token_t[row + count]
            count += 1
        final = int(sampled_t[row + count]) if length else -1
        emitted = [*token_t[row : row + count].tolist(), final]
        counts.append(count)
        finals.append(final)
        stopped.append(any(token in stops for token in emitted if token >= 0))
        row += length
    count_b, final_b = torch.tensor(counts, dtype=torch.int32), torch.tensor(finals, dtype=torch.int32)
    return count_b, final_b, packed_t, torch.tensor(stopped, dtype=torch.bool)


def verify_statistics(
    count_b: Tensor, length_b: Tensor, alpha_t: Tensor, confidence_t: Tensor, *, counters: int, num: Numerics = CONTRACT
) -> tuple[Tensor, Tensor, Tensor]:
    """What a step adds to the counters: rows accepted and rows verified at every position, and how wrong c was.

    Shapes:
        count_b, length_b: integer [b]; alpha_t, confidence_t: [t]; returns generated_j and verified_j int64 [counters],
        rows behind the last counter counted in it, and the error [1], Σ |α - c| over verify rows.

    Rounding:
        the error once, to fp32; the source adds with float atomics, so no bits are promised.

    Raises:
        ValueError: shapes disagree, or there is no counter.
    """
    dims: dict[str, int] = {}
    for name, x, letters in (("count_b", count_b, "b"), ("length_b", length_b, "b"), ("alpha_t", alpha_t, "t")):
        expect_shape(name, x, letters, dims)
    expect_shape("confidence_t", confidence_t, "t", dims)
    if counters < 1:
        raise ValueError(f"counters: expected at least 1, got {counters}")
    generated_j, verified_j = torch.zeros(2, counters, dtype=torch.int64)
    is_verify = []
    for count, length in zip(count_b.tolist(), length_b.tolist(), strict=True):
        for j in range(length - 1):
            verified_j[min(j, counters - 1)] += 1
            generated_j[min(j, counters - 1)] += j < count
        is_verify += [j < length - 1 for j in range(length)]
    apart_t = (num.wide(alpha_t) - num.wide(confidence_t)).abs()
    error = num.sum(torch.where(torch.tensor(is_verify, dtype=torch.bool), apart_t, 0), dim=0)
    return generated_j, verified_j, num.f32(error[None])


def _check_rows(token_t: Tensor, pool_t: Tensor, fresh_t: Tensor, word_t: Tensor, dims: dict[str, int]) -> None:
    for name, x in (("token_t", token_t), ("pool_t", pool_t), ("fresh_t", fresh_t), ("word_t", word_t)):
        expect_shape(name, x, "t", dims)
    expect_dtype("token_t", token_t, torch.int32, torch.int64)
    expect_dtype("pool_t", pool_t, torch.int32, torch.int64)
    expect_dtype("fresh_t", fresh_t, torch.bool)
    expect_dtype("word_t", word_t, torch.int64)
    expect_in_range("token_t", token_t[~fresh_t], -1, dims["v"])
    expect_in_range("pool_t", pool_t[~fresh_t], 0, dims["z"])
    expect_in_range("word_t", word_t, 0, 2**32)


def _check_pack(
    accepted_t: Tensor,
    sampled_t: Tensor,
    token_t: Tensor,
    golden_t: Tensor | None,
    length_b: Tensor,
    stop_bk: Tensor,
    draft: int,
) -> None:
    dims: dict[str, int] = {}
    rows = {"accepted_t": accepted_t, "sampled_t": sampled_t, "token_t": token_t}
    if golden_t is not None:
        rows["golden_t"] = golden_t
    for name, x in rows.items():
        expect_shape(name, x, "t", dims)
        expect_dtype(name, x, *((torch.bool,) if name == "accepted_t" else (torch.int32, torch.int64)))
    expect_shape("length_b", length_b, "b", dims)
    expect_shape("stop_bk", stop_bk, "bk", dims)
    for name, x in (("length_b", length_b), ("stop_bk", stop_bk)):
        expect_dtype(name, x, torch.int32, torch.int64)
    expect_in_range("length_b", length_b, 0, draft + 2)
    if int(length_b.sum(dtype=torch.int64)) != dims["t"]:
        raise ValueError(f"length_b: expected {dims['t']} rows in all, got {length_b.tolist()}")
