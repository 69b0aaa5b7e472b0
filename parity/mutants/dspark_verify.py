"""Verification of drafts row by row in numpy, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import Draw


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a row does wrong; the default is right."""

    ratio: str = "q_over_p"  # q_over_p, p_over_q, q, penalised
    decision: str = "asked"  # asked, other, inverted, half_open
    penalty: float = 5e-5
    penalty_of: str = "p"  # p, q, residual
    residual: str = "positive"  # positive, absolute, unclamped, normalised, min
    fresh: str = "own"  # own, residual, drafts_accepted
    fresh_alpha: float | None = 1.0  # None: like any row
    none: str = "rejected"  # rejected, last
    impossible: str = "rejected"  # rejected, accepted
    pool: str = "own"  # own, zero, next
    word: str = "own"  # own, mate
    alpha: str = "floor"  # floor, float, round, penalty_free
    accepted_row: str = "residual"  # residual, target
    precision: str = "f32"  # f32, bf16


def _exp(x: np.ndarray) -> np.ndarray:
    return np.exp(x.astype(np.float64)).astype(np.float32)


def _chance(faults: Rows, lq: np.float32, lp: np.float32) -> np.float32:
    if faults.ratio == "penalised":
        lp = np.float32(lp - np.float32(faults.penalty))
    delta: Any = {"p_over_q": lp - lq, "q": lq}.get(faults.ratio, lq - lp)
    return np.float32(_exp(np.minimum(np.array([delta], dtype=np.float32), 0))[0])


def _is_below(faults: Rows, word: int, chance: np.float32, draw: Draw) -> bool:
    integer = (draw is Draw.ASCEND) != (faults.decision == "other")
    if integer:
        below = 2 * word + 1 < int(float(chance) * 2**33)
    else:
        uniform: Any = np.float32(np.float32(word) * np.float32(2.0**-32))
        if faults.decision != "half_open":
            uniform = np.float32(uniform + np.float32(2.0**-33))
        else:
            uniform = np.minimum(uniform, np.float32(1 - 2.0**-24))
        below = bool(uniform < chance)
    return not below if faults.decision == "inverted" else below


def _weights(faults: Rows, log_q: np.ndarray, log_p: np.ndarray | None) -> np.ndarray:
    q = _exp(log_q)
    if log_p is None:
        return q
    p = _exp(log_p - np.float32(faults.penalty if faults.penalty_of == "p" else 0))
    if faults.penalty_of == "q":
        q = _exp(log_q - np.float32(faults.penalty))
    gap = q - p
    if faults.penalty_of == "residual":
        gap = gap + np.float32(faults.penalty)
    found = {"absolute": np.abs(gap), "unclamped": gap, "min": np.minimum(q, p)}.get(
        faults.residual, np.maximum(gap, 0)
    )
    if faults.residual == "normalised":
        found = (found / max(float(found.sum()), 1e-30)).astype(np.float32)
    return found.astype(np.float32)


def _estimate(faults: Rows, weights: np.ndarray, is_fresh: bool) -> np.float32:
    if is_fresh and faults.fresh_alpha is not None:
        return np.float32(faults.fresh_alpha)
    wide = weights.astype(np.float64)
    if faults.alpha == "float":
        return np.float32(np.maximum(1 - weights.sum(dtype=np.float32), 0))
    fixed = (np.rint(wide * 2**31) if faults.alpha == "round" else np.floor(wide * 2**31)).astype(np.int64).sum()
    alpha = max(np.float32(1) - np.float32(np.float32(fixed) / np.float32(2**31)), np.float32(0))
    return np.float32(alpha + np.float32(5e-5)) if faults.alpha == "penalty_free" else np.float32(alpha)


def _verify(faults: Rows) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def verify_rows(
        target_tv: Tensor,
        draft_zv: Tensor,
        token_t: Tensor,
        pool_t: Tensor,
        fresh_t: Tensor,
        word_t: Tensor,
        *,
        draw: Draw,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if faults.precision == "bf16":
            target_tv = target_tv.bfloat16().float()
        q_tv, p_zv, words = target_tv.numpy(), draft_zv.numpy(), word_t.tolist()
        accepted, weights, alphas = [], [], []
        rows = zip(q_tv, token_t.tolist(), pool_t.tolist(), fresh_t.tolist(), strict=True)
        for row, (log_q, token, pool, is_fresh) in enumerate(rows):
            pool = {"zero": 0, "next": (pool + 1) % len(p_zv) if len(p_zv) else 0}.get(faults.pool, pool)
            pool = min(max(pool, 0), len(p_zv) - 1)
            log_p = p_zv[pool] if not is_fresh or faults.fresh == "residual" else None
            take = False
            if not is_fresh and (token >= 0 or faults.none == "last") and log_p is not None:
                lq, lp = log_q[token], log_p[token]
                word = words[row - 1 if faults.word == "mate" else row]
                if lq > -np.inf:
                    take = _is_below(faults, word, _chance(faults, lq, lp), draw)
                else:
                    take = faults.impossible == "accepted" and lp == -np.inf
            if is_fresh and faults.fresh == "drafts_accepted":
                take = True
            plain = faults.accepted_row == "target" and take
            weight = _weights(faults, log_q, None if plain else log_p)
            accepted.append(take)
            weights.append(weight)
            alphas.append(_estimate(faults, weight, is_fresh))
        shape = target_tv.shape
        return (
            torch.tensor(accepted, dtype=torch.bool),
            torch.from_numpy(np.array(weights, dtype=np.float32).reshape(shape)),
            torch.from_numpy(np.array(alphas, dtype=np.float32)),
        )

    return verify_rows


right_verify = _verify(Rows())
ratio_upside_down = _verify(Rows(ratio="p_over_q"))
target_alone = _verify(Rows(ratio="q"))
penalty_in_the_ratio = _verify(Rows(ratio="penalised", penalty=0.01))
other_platform = _verify(Rows(decision="other"))
decision_inverted = _verify(Rows(decision="inverted"))
uniform_below_one = _verify(Rows(decision="half_open"))
penalty_missing = _verify(Rows(penalty=0.0))
penalty_tenfold = _verify(Rows(penalty=5e-4))
penalty_negative = _verify(Rows(penalty=-5e-5))
penalty_of_target = _verify(Rows(penalty_of="q"))
penalty_of_residual = _verify(Rows(penalty_of="residual"))
residual_absolute = _verify(Rows(residual="absolute"))
residual_unclamped = _verify(Rows(residual="unclamped"))
residual_normalised = _verify(Rows(residual="normalised"))
overlap_as_residual = _verify(Rows(residual="min"))
fresh_row_as_residual = _verify(Rows(fresh="residual"))
fresh_row_accepted = _verify(Rows(fresh="drafts_accepted"))
fresh_alpha_of_weights = _verify(Rows(fresh_alpha=None))
no_draft_reads_last_token = _verify(Rows(none="last"))
impossible_accepted = _verify(Rows(impossible="accepted"))
placeholder_for_all = _verify(Rows(pool="zero"))
pool_row_behind = _verify(Rows(pool="next"))
word_of_mate = _verify(Rows(word="mate"))
alpha_of_floats = _verify(Rows(alpha="float"))
alpha_rounded = _verify(Rows(alpha="round"))
alpha_without_penalty = _verify(Rows(alpha="penalty_free"))
accepted_row_redrawn = _verify(Rows(accepted_row="target"))
target_in_bf16 = _verify(Rows(precision="bf16"))


@dataclass(frozen=True, kw_only=True)
class Pack:
    """What packing does wrong; the default is right."""

    prefix: str = "first_rejection"  # first_rejection, all, none
    last: str = "fresh"  # fresh, verified
    final: int = 0  # rows beyond the one that ends the request
    packed: str = "accepted"  # accepted, with_final, all_accepted, everything
    golden: str = "before"  # before, after, ignored, token_only
    stop: str = "all"  # all, final, drafts, rows
    padding: int = -1
    none_is_stop: bool = False
    first: str = "own"  # own, full_width


def _pack(faults: Pack) -> Callable[..., tuple[Tensor, ...]]:
    def verify_pack(
        accepted_t: Tensor,
        sampled_t: Tensor,
        token_t: Tensor,
        golden_t: Tensor | None,
        length_b: Tensor,
        stop_bk: Tensor,
        *,
        draft: int,
    ) -> tuple[Tensor, ...]:
        accepted, sampled, token = accepted_t.tolist(), sampled_t.tolist(), token_t.tolist()
        golden = [-1] * len(token) if golden_t is None else golden_t.tolist()
        counts, finals, stopped, packed = [], [], [], [-1] * len(token)
        start = 0
        for length, stops in zip(length_b.tolist(), stop_bk.tolist(), strict=True):
            if not length:
                counts.append(0)
                finals.append(faults.padding)
                stopped.append(faults.none_is_stop and -1 in stops)
                continue
            take, shown = [], []
            for i in range(start, start + length):
                forced = golden[i] >= 0 and faults.golden != "ignored"
                judged = forced and faults.golden == "before"
                take.append(golden[i] == token[i] if judged else accepted[i])
                shown.append(golden[i] if forced else sampled[i])
            verified = length if faults.last == "verified" else length - 1
            count = next((j for j in range(verified) if not take[j]), verified)
            if faults.golden == "after":
                forced_at = [
                    j for j in range(count) if golden[start + j] >= 0 and golden[start + j] != token[start + j]
                ]
                shown = [golden[start + j] if j in forced_at else x for j, x in enumerate(shown)]
            every = sum(take[:verified])
            count = {"all": every, "none": 0}.get(faults.prefix, count)
            end = min(count + faults.final, length - 1)
            final = shown[end]
            for j in range(length):
                keep = {
                    "all_accepted": j < length - 1 and take[j],
                    "everything": j < length - 1,
                }.get(faults.packed, j < count)
                packed[start + j] = token[start + j] if keep else -1
            if faults.packed == "with_final":
                packed[start + end] = final
            tokens = {"final": [final], "drafts": token[start : start + count], "rows": token[start : start + length]}
            emitted = tokens.get(faults.stop, [*token[start : start + count], final])
            counts.append(count)
            finals.append(final)
            stopped.append(any(t in stops and (t >= 0 or faults.none_is_stop) for t in emitted))
            start += length
        ints = (torch.tensor(x, dtype=torch.int32) for x in (counts, finals, packed))
        return (*ints, torch.tensor(stopped, dtype=torch.bool))

    return verify_pack


right_pack = _pack(Pack())
accepted_behind_rejection = _pack(Pack(prefix="all"))
nothing_accepted = _pack(Pack(prefix="none"))
fresh_row_verified = _pack(Pack(last="verified"))
final_one_late = _pack(Pack(final=1))
final_is_packed = _pack(Pack(packed="with_final"))
packed_behind_rejection = _pack(Pack(packed="all_accepted"))
packed_everything = _pack(Pack(packed="everything"))
golden_after_prefix = _pack(Pack(golden="after"))
golden_ignored = _pack(Pack(golden="ignored"))
golden_token_alone = _pack(Pack(golden="token_only"))
stop_of_final_alone = _pack(Pack(stop="final"))
stop_of_drafts_alone = _pack(Pack(stop="drafts"))
stop_of_rejected_rows = _pack(Pack(stop="rows"))
padding_emits_token_0 = _pack(Pack(padding=0))
none_is_a_stop = _pack(Pack(none_is_stop=True))
