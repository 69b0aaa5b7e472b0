"""Fast verification of drafts; the contract is `reference/dspark_verify.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_in_range, expect_shape
from deeptwin.reference.config import Draw

PENALTY = 5e-5


def verify_rows_vectorised(
    target_tv: Tensor,
    draft_zv: Tensor,
    token_t: Tensor,
    pool_t: Tensor,
    fresh_t: Tensor,
    word_t: Tensor,
    *,
    draw: Draw,
    trusted: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.dspark_verify.verify_rows` in fp32 torch, on any device.

    Raises:
        ValueError: shapes disagree; where values are inspected: a draft of a verify row lies outside -1 … v - 1, a pool
            row outside the pool, a word outside 32 bits, or a log-probability is NaN or +inf.
        TypeError: log-probabilities are not fp32, ids no integers, fresh_t is not bool, or words are not int64.
    """
    _check_verify(target_tv, draft_zv, token_t, pool_t, fresh_t, word_t, trusted)
    verify_t = ~fresh_t & (token_t >= 0)
    at_t1 = torch.where(verify_t, token_t, 0).long()[:, None]
    log_p_tv = draft_zv[torch.where(fresh_t, 0, pool_t).long()] if len(draft_zv) else torch.zeros_like(target_tv)
    lq_t, lp_t = target_tv.gather(1, at_t1)[:, 0], log_p_tv.gather(1, at_t1)[:, 0]
    verify_t = verify_t & (lq_t > -torch.inf)
    # fp64 and one rounding: torch's fp32 exponential gives other bits in the vector body than in its tail
    chance_t = torch.where(verify_t, lq_t - lp_t, 0.0).clamp(max=0).double().exp().float()
    if draw is Draw.ASCEND:
        below_t = 2 * word_t + 1 < (chance_t * 2.0**33).long()
    else:
        below_t = word_t.float() * 2.0**-32 + 2.0**-33 < chance_t
    penalised_tv = torch.where(fresh_t[:, None], 0.0, (log_p_tv - PENALTY).double().exp().float())
    weights_tv = (target_tv.double().exp().float() - penalised_tv).clamp(min=0)
    fixed_t = (weights_tv.double() * 2.0**31).long().sum(1)
    alpha_t = (1 - fixed_t.float() * 2.0**-31).clamp(min=0)
    return verify_t & below_t, weights_tv, torch.where(fresh_t, 1.0, alpha_t)


def verify_rows_triton(
    target_tv: Tensor,
    draft_zv: Tensor,
    token_t: Tensor,
    pool_t: Tensor,
    fresh_t: Tensor,
    word_t: Tensor,
    *,
    draw: Draw,
    trusted: bool = False,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.dspark_verify.verify_rows`; ids that were not inspected and lie outside give a rejected row.

    Raises:
        ValueError: shapes disagree; an `out` buffer does not fit; where values are inspected: a draft of a verify row
            lies outside -1 … v - 1, a pool row outside the pool, a word outside 32 bits, or a log-probability is NaN or
            +inf.
        TypeError: log-probabilities are not fp32, ids no integers, fresh_t is not bool, words are not int64, or an
            `out` buffer has another dtype.
    """
    _check_verify(target_tv, draft_zv, token_t, pool_t, fresh_t, word_t, trusted)
    from deeptwin.kernels.triton_ops import dspark_verify as kernels

    return kernels.verify_rows(
        target_tv, draft_zv, token_t, pool_t, fresh_t, word_t, ascend=draw is Draw.ASCEND, out=out
    )


def verify_pack_triton(
    accepted_t: Tensor,
    sampled_t: Tensor,
    token_t: Tensor,
    golden_t: Tensor | None,
    length_b: Tensor,
    stop_bk: Tensor,
    *,
    draft: int,
    trusted: bool = False,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.dspark_verify.verify_pack`.

    Raises:
        ValueError: shapes disagree; an `out` buffer does not fit; where values are inspected: lengths do not add up to
            t, or lie outside 0 … draft + 1.
        TypeError: accepted_t is not bool, ids or lengths are no integers, or an `out` buffer has another dtype.
    """
    dims: dict[str, int] = {}
    rows = {"accepted_t": accepted_t, "sampled_t": sampled_t, "token_t": token_t}
    rows |= {} if golden_t is None else {"golden_t": golden_t}
    for name, x in rows.items():
        expect_shape(name, x, "t", dims)
        expect_dtype(name, x, *((torch.bool,) if name == "accepted_t" else (torch.int32, torch.int64)))
    expect_shape("length_b", length_b, "b", dims)
    expect_shape("stop_bk", stop_bk, "bk", dims)
    for name, x in (("length_b", length_b), ("stop_bk", stop_bk)):
        expect_dtype(name, x, torch.int32, torch.int64)
    if not trusted:
        expect_in_range("length_b", length_b, 0, draft + 2)
        if int(length_b.sum()) != dims["t"]:
            raise ValueError(f"length_b: expected {dims['t']} rows in all, got {length_b.tolist()}")
    from deeptwin.kernels.triton_ops import dspark_verify as kernels

    return kernels.verify_pack(accepted_t, sampled_t, token_t, golden_t, length_b, stop_bk, draft=draft, out=out)


def _check_verify(
    target_tv: Tensor,
    draft_zv: Tensor,
    token_t: Tensor,
    pool_t: Tensor,
    fresh_t: Tensor,
    word_t: Tensor,
    trusted: bool,
) -> None:
    dims: dict[str, int] = {}
    expect_shape("target_tv", target_tv, "tv", dims)
    expect_shape("draft_zv", draft_zv, "zv", dims)
    for name, x in (("token_t", token_t), ("pool_t", pool_t), ("fresh_t", fresh_t), ("word_t", word_t)):
        expect_shape(name, x, "t", dims)
    for name, x in (("target_tv", target_tv), ("draft_zv", draft_zv)):
        expect_dtype(name, x, torch.float32)
        if not trusted and not (x < torch.inf).all():
            raise ValueError(f"{name}: expected log-probabilities below infinity, got NaN or inf")
    for name, x in (("token_t", token_t), ("pool_t", pool_t)):
        expect_dtype(name, x, torch.int32, torch.int64)
    expect_dtype("fresh_t", fresh_t, torch.bool)
    expect_dtype("word_t", word_t, torch.int64)
    if not trusted:
        expect_in_range("token_t", token_t[~fresh_t], -1, dims["v"])
        expect_in_range("pool_t", pool_t[~fresh_t], 0, dims["z"])
        expect_in_range("word_t", word_t, 0, 2**32)
