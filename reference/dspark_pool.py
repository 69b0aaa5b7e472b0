"""Where proposals wait between two steps, and which rows the next step verifies.

Slot s of the pool owns rows s · γ … s · γ + γ - 1. Slot 0 is a placeholder that is never written: a point mass on token
V - 1, of confidence 1. A request without a proposal (its first decode step, or the first after preemption) reads it,
and so do fresh rows. A point mass is a valid proposal: it is accepted with probability q(V - 1), and what is left is q
without that token, so the law of the output is the same.

A pool may keep the `width` likeliest tokens of each row instead of all. That is lossless only where the draft cannot
draw any other token, so a row with more of them is refused.

Source: runtime.md sections 1.1, 1.3 (DeepInfer, layers/mtp_info_pool.py, layers/tilelang_ops/store_mtp_info.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_positive, expect_shape
from .dspark_state import ProposalPool


def placeholder_pool(*, slots: int, draft: int, vocab: int) -> ProposalPool:
    """A pool of `slots` slots behind slot 0, every one of which holds placeholders.

    Raises:
        ValueError: a size is not positive.
    """
    for name, size in (("slots", slots), ("draft", draft), ("vocab", vocab)):
        expect_positive(name, size)
    rows = (slots + 1) * draft
    logprob_zv = torch.full((rows, vocab), -torch.inf)
    logprob_zv[:, -1] = 0.0
    return ProposalPool(
        token_z=torch.full((rows,), vocab - 1), logprob_zv=logprob_zv, confidence_z=torch.ones(rows), draft=draft
    )


def store_proposals_(
    pool: ProposalPool, slot_b: Tensor, token_bj: Tensor, logprob_bjv: Tensor, confidence_bj: Tensor
) -> None:
    """Write what requests drafted, in place.

    Shapes:
        slot_b: integer [b]; token_bj: integer [b, j]; logprob_bjv: fp32 [b, j, v]; confidence_bj: fp32 [b, j].

    Edges:
        what goes to slot 0 is dropped.

    Raises:
        ValueError: shapes disagree; a slot is not in the pool, or is given twice; a token lies outside the vocabulary.
        TypeError: log-probabilities or confidences are not fp32, or ids are no integers.
    """
    dims = {"j": pool.draft, "v": pool.logprob_zv.shape[1]}
    expect_shape("slot_b", slot_b, "b", dims)
    expect_shape("token_bj", token_bj, "bj", dims)
    expect_shape("logprob_bjv", logprob_bjv, "bjv", dims)
    expect_shape("confidence_bj", confidence_bj, "bj", dims)
    expect_dtype("token_bj", token_bj, torch.int32, torch.int64)
    expect_dtype("logprob_bjv", logprob_bjv, torch.float32)
    expect_dtype("confidence_bj", confidence_bj, torch.float32)
    _check_slots(slot_b, pool)
    kept_b = slot_b > 0
    expect_in_range("token_bj", token_bj[kept_b], 0, dims["v"])
    if slot_b[kept_b].unique().numel() < int(kept_b.sum(dtype=torch.int64)):
        raise ValueError(f"slot_b: expected distinct slots, got {slot_b.tolist()}")
    row_bj = slot_b[kept_b].long()[:, None] * pool.draft + torch.arange(pool.draft)
    pool.token_z[row_bj] = token_bj[kept_b].long()
    pool.logprob_zv[row_bj] = logprob_bjv[kept_b]
    pool.confidence_z[row_bj] = confidence_bj[kept_b]


def verify_metadata(
    pool: ProposalPool, slot_b: Tensor, length_b: Tensor, position_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The packed rows of a step, as `verify_rows` takes them.

    Shapes:
        slot_b: integer [b], 0 for a request without proposals; length_b: integer [b], the rows of each request;
        position_b: integer [b], of the token that its first row produces. Returns token_t and pool_t int64, fresh_t
        bool, and for the streams of random words position_t, that of the first row, and row_t, the place in the
        request, both int64; all [t].

    Edges:
        a fresh row has draft -1 and the placeholder's row. A request of length 0 has no row.

    Raises:
        ValueError: shapes disagree; a slot is not in the pool; a length lies outside 0 … γ + 1.
        TypeError: lengths or slots are no integers.
    """
    dims: dict[str, int] = {}
    for name, x_b in (("slot_b", slot_b), ("length_b", length_b), ("position_b", position_b)):
        expect_shape(name, x_b, "b", dims)
    expect_dtype("length_b", length_b, torch.int32, torch.int64)
    _check_slots(slot_b, pool)
    expect_in_range("length_b", length_b, 0, pool.draft + 2)
    count_b = length_b.long()
    owner_t = torch.arange(dims["b"]).repeat_interleave(count_b)
    row_t = torch.arange(len(owner_t)) - (count_b.cumsum(0) - count_b)[owner_t]
    fresh_t = row_t == count_b[owner_t] - 1
    pool_t = torch.where(fresh_t, 0, slot_b.long()[owner_t] * pool.draft + row_t)
    token_t = torch.where(fresh_t, -1, pool.token_z[pool_t])
    return token_t, pool_t, fresh_t, position_b.long()[owner_t], row_t


def keep_likeliest(logprob_zv: Tensor, *, width: int) -> tuple[Tensor, Tensor]:
    """Distributions as the `width` likeliest tokens of each row.

    Shapes:
        logprob_zv: fp32 [z, v]; returns the logarithms fp32 [z, k] and tokens int64 [z, k], descending, of equal ones
        the lowest token first; places without a token hold -inf and -1.

    Raises:
        ValueError: a row can draw more than `width` tokens; width is not positive or above v.
    """
    dims: dict[str, int] = {}
    expect_shape("logprob_zv", logprob_zv, "zv", dims)
    if not 1 <= width <= dims["v"]:
        raise ValueError(f"width: expected 1 … {dims['v']}, got {width}")
    most = int((logprob_zv > -torch.inf).sum(1, dtype=torch.int64).max()) if dims["z"] else 0
    if most > width:
        raise ValueError(f"logprob_zv: expected rows of at most {width} possible tokens, got {most}")
    ordered_zv, ids_zv = torch.sort(logprob_zv, dim=1, descending=True, stable=True)
    value_zk, id_zk = ordered_zv[:, :width], ids_zv[:, :width]
    return value_zk, torch.where(value_zk > -torch.inf, id_zk, -1)


def from_likeliest(value_zk: Tensor, id_zk: Tensor, *, vocab: int) -> Tensor:
    """The whole rows fp32 [z, vocab] again, -inf where no token is listed.

    Raises:
        ValueError: shapes disagree, or a token lies outside -1 … vocab - 1.
    """
    dims: dict[str, int] = {}
    expect_shape("value_zk", value_zk, "zk", dims)
    expect_shape("id_zk", id_zk, "zk", dims)
    expect_in_range("id_zk", id_zk, -1, vocab)
    rows_zw = value_zk.new_full((dims["z"], vocab + 1), -torch.inf)  # the last column takes the places without a token
    rows_zw.scatter_(1, torch.where(id_zk >= 0, id_zk.long(), vocab), value_zk)
    return rows_zw[:, :vocab]


def _check_slots(slot_b: Tensor, pool: ProposalPool) -> None:
    expect_dtype("slot_b", slot_b, torch.int32, torch.int64)
    expect_in_range("slot_b", slot_b, 0, len(pool.token_z) // pool.draft)
