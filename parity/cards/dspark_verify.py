"""How verification is checked: decisions away from their boundary, weights on intervals, whole numbers exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import Draw
from deeptwin.reference.dspark_verify import acceptance_estimate

from .. import draws
from ..builds.ascend_presets import VECTOR
from ..builds.presets import NO_PRODUCT
from ..builds.spec import BuildCase
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Relation, variants
from ..relations import Context, Variant, batch_invariant, row_chunks
from ..rules import Bitwise, Judgement, OfStored, Oracles, Within, Worst

_mutant, _control = variants("dspark_verify")
PENALTY = 5e-5
# relative error of an exponential: four units of 2^-24
U = 2.0**-22


@dataclass(frozen=True, kw_only=True)
class VerifyCase:
    """`requests` of up to `draft` drafts over `vocab` tokens; filters remove a share of the target's."""

    requests: int
    draft: int = 5
    vocab: int = 40
    draw: str = "nvidia"
    filters: float = 0.0
    quality: str = "noisy"  # noisy, same, point, unlike
    regime: str = "normal"

    @property
    def id(self) -> str:
        sizes = f"b{self.requests}-j{self.draft}-v{self.vocab}"
        return f"{sizes}-{self.draw}-filter{self.filters:g}-{self.quality}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class PackCase:
    """`requests` with some rows each, none among them; drafts are accepted with probability `rate`."""

    requests: int
    draft: int = 5
    rate: float = 0.7
    golden: bool = False
    stops: int = 2
    index: str = "int32"
    regime: str = "normal"

    @property
    def id(self) -> str:
        golden = "-golden" if self.golden else ""
        return f"b{self.requests}-j{self.draft}-rate{self.rate:g}{golden}-stops{self.stops}-{self.index}-{self.regime}"


def chances(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The exact chance of every row, and whether every honest evaluation agrees about it (it is 0 or 1)."""
    fresh = arguments["fresh_t"]
    token = torch.where(fresh, 0, arguments["token_t"].long()).clamp(min=0)[:, None]
    pool = torch.where(fresh, 0, arguments["pool_t"].long())
    lq = arguments["target_tv"].gather(1, token)[:, 0]
    lp = arguments["draft_zv"][pool].gather(1, token)[:, 0]
    ratio = torch.where(lq > -torch.inf, lq - lp, 0.0).clamp(max=0)
    return torch.exp(ratio.double()), (ratio == 0) | fresh | (arguments["token_t"] < 0) | (lq == -torch.inf)


@dataclass(frozen=True)
class Decisions:
    """Decisions equal CONTRACT's, but where word and chance are two units of fp32 apart or less.

    A chance of 1 is exact in every evaluation, so there is no such room around it.
    """

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Compare with CONTRACT; a difference must lie at the boundary."""
        wrong = got != oracles.contract
        chance, is_settled = chances(oracles.arguments)
        uniform = (2.0 * oracles.arguments["word_t"].double() + 1) * 2.0**-33
        unit = torch.exp2(torch.floor(torch.log2(chance.clamp_min(2.0**-126)))) * 2.0**-23
        near = ((uniform - chance).abs() <= 2 * unit + 2.0**-25 * uniform) & ~is_settled
        bad = wrong & ~near
        row = int(bad.nonzero()[0]) if bad.any() else 0
        return Judgement(
            ok=not bool(bad.any()),
            used=float("inf") if bad.any() else 0.0,
            message=f"{int(bad.sum())} decisions differ away from the boundary ({int(wrong.sum())} in all)",
            worst=Worst(index=(row,), got=str(bool(got[row])), expected=f"{uniform[row]:.9g} < {chance[row]:.9g}")
            if bad.any()
            else None,
            metrics={"differ": float(wrong.sum())},
        )


def weight_interval(arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """Lowest and highest weights: both exponentials and log p - π may be off, and the difference is rounded once."""
    fresh = arguments["fresh_t"]
    log_q = arguments["target_tv"].double()
    log_p = arguments["draft_zv"][torch.where(fresh, 0, arguments["pool_t"].long())].double()
    log_p = torch.where(fresh[:, None], -torch.inf, log_p)
    q, p = torch.exp(log_q), torch.exp(log_p - PENALTY)
    off_q = q * u
    off_p = p * (u + torch.where(p > 0, log_p.abs(), 0.0) * 2.0**-23)
    low = (q - off_q - p - off_p).clamp(min=0) * (1 - 2.0**-23)
    high = (q + off_q - p + off_p).clamp(min=0) * (1 + 2.0**-23)
    # below the smallest normal number an exponential may be flushed
    return torch.where(low < 2.0**-126, 0.0, low), high + torch.where(high > 0, 2.0**-126, 0.0)


def alpha_again(arguments: dict[str, Any], outputs: Any, num: Any) -> Tensor:
    """The estimate of the weights that the candidate stored."""
    return acceptance_estimate(outputs["weights_tv"], arguments["fresh_t"], num=num)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _pool(case: VerifyCase, rng: np.random.Generator, target: np.ndarray) -> np.ndarray:
    """Log-probabilities of every slot; slot 0 is the placeholder."""
    rows = (case.requests + 1) * case.draft
    if case.quality == "point" or case.vocab == 1:
        pool = np.full((rows, case.vocab), -np.inf)
        pool[np.arange(rows), rng.integers(0, case.vocab, rows)] = 0
    else:
        base = np.zeros((rows, case.vocab))
        if case.quality != "unlike":
            base[case.draft :] = target.repeat(case.draft, 0)
        noise = 0.0 if case.quality == "same" else 1.0
        pool = _log_softmax(base + noise * rng.standard_normal(base.shape))
    pool[: case.draft] = -np.inf
    pool[: case.draft, -1] = 0
    return pool.astype(np.float32)


def draw_verify(case: VerifyCase, rng: np.random.Generator) -> Inputs:
    """Drafts drawn from their distribution, forced ones, ones the target cannot take; words at their boundaries.

    The draft and the pool row of a fresh row are poison; rows of one request share the target but for noise.
    """
    base = draws.rows(rng, case.requests, case.vocab, dtype=torch.float32, regime=case.regime).double().numpy()
    lengths = rng.integers(1, case.draft + 2, case.requests)
    owner = np.repeat(np.arange(case.requests), lengths)
    local = np.concatenate([np.arange(n) for n in lengths]) if case.requests else np.zeros(0, dtype=np.int64)
    t, fresh = len(owner), local == lengths[owner] - 1 if case.requests else np.zeros(0, dtype=bool)
    pool = _pool(case, rng, base)
    # some requests have no proposals and read the placeholder
    slot = np.where(rng.random(case.requests) < 0.2, 0, np.arange(case.requests) + 1)
    row = slot[owner] * case.draft + np.minimum(local, case.draft - 1)
    noise = 0.0 if case.quality == "same" else 0.3
    logits = base[owner] + noise * rng.standard_normal((t, case.vocab))
    logits[rng.random(logits.shape) < case.filters] = -np.inf
    logits[:, 0] = np.where(np.isneginf(logits).all(1), 0, logits[:, 0])
    target = _log_softmax(logits).astype(np.float32)
    if case.quality == "same":
        target = np.where(slot[owner][:, None] > 0, pool[row], target)
    token = np.array([_drafted(pool[r], rng) for r in row], dtype=np.int64)
    token = np.where(rng.random(t) < 0.1, rng.integers(0, case.vocab, t), token)
    token = np.where(rng.random(t) < 0.08, -1, token)
    # a token that neither side can draw
    never = np.isneginf(target) & np.isneginf(pool[row])
    token = np.where(never.any(1) & (rng.random(t) < 0.3), never.argmax(1), token)
    word = rng.integers(0, 2**32, t)
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = np.nan_to_num(target[np.arange(t), token] - pool[row, token], nan=0.0, posinf=0.0, neginf=-100.0)
        chance = np.exp(np.minimum(ratio.astype(np.float64), 0))
    beside = np.floor(chance * 2**32).astype(np.int64) + rng.integers(-3, 4, t) * 2 ** rng.integers(0, 14, t)
    word = np.where(rng.random(t) < 0.4, beside, word)
    word = np.where(rng.random(t) < 0.15, 2**32 - rng.choice([1, 100, 128, 129, 300], t), word)
    return {
        "target_tv": draws.strided(torch.from_numpy(target), pad=8),
        "draft_zv": torch.from_numpy(pool),
        "token_t": torch.from_numpy(np.where(fresh, -(2**31), token).astype(np.int32)),
        "pool_t": torch.from_numpy(np.where(fresh, 2**31 - 1, row).astype(np.int32)),
        "fresh_t": torch.from_numpy(fresh),
        "word_t": torch.from_numpy(np.clip(word, 0, 2**32 - 1)),
        "draw": Draw(case.draw),
    }


def _drafted(log_p: np.ndarray, rng: np.random.Generator) -> int:
    p = np.exp(log_p.astype(np.float64))
    return int(rng.choice(len(p), p=p / p.sum()))


def draw_pack(case: PackCase, rng: np.random.Generator) -> Inputs:
    """Few token ids, so that stops are met on accepted, final and rejected rows; fresh rows claim acceptance."""
    lengths = rng.integers(0, case.draft + 2, case.requests)
    if case.requests > 2:
        lengths[:3] = (case.draft + 1, 0, 1)
    t, dtype = int(lengths.sum()), torch.int64 if case.index == "int64" else torch.int32
    last = np.cumsum(lengths)[lengths > 0] - 1
    token, sampled = rng.integers(0, 9, t), rng.integers(0, 9, t)
    accepted = rng.random(t) < case.rate
    accepted[last], token[last] = True, -7
    golden = np.where(rng.random(t) < 0.5, np.where(rng.random(t) < 0.7, token, rng.integers(0, 9, t)), -1)
    golden[last] = np.where(rng.random(len(last)) < 0.5, 3, -1)
    stop = rng.integers(0, 9, (case.requests, case.stops))
    stop[:, 1:] = -1
    stop[rng.random(case.requests) < 0.3] = -1

    def ints(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x.astype(np.int64)).to(dtype)

    return {
        "accepted_t": torch.from_numpy(accepted),
        "sampled_t": ints(sampled),
        "token_t": ints(token),
        "golden_t": ints(golden) if case.golden else None,
        "length_b": ints(lengths),
        "stop_bk": ints(stop),
        "draft": case.draft,
    }


def cases_verify(full: bool) -> list[VerifyCase]:
    """Both platforms, every regime, every quality of drafts, filters, one draft, no request, several blocks."""
    small = VerifyCase(requests=4)
    found = [replace(small, regime=r, draw=d) for r in REGIMES for d in ("nvidia", "ascend")]
    found += [replace(small, quality=q, draw=d) for q in ("same", "point", "unlike") for d in ("nvidia", "ascend")]
    found += [replace(small, filters=0.5, quality="point", requests=9)]
    found += [replace(small, filters=0.6), replace(small, filters=0.6, quality="unlike", draw="ascend")]
    found += [replace(small, requests=0), replace(small, draft=1, requests=6), replace(small, vocab=1, requests=2)]
    found += [VerifyCase(requests=12, vocab=6), VerifyCase(requests=1, draft=2, vocab=2500)]
    found += [VerifyCase(requests=25, vocab=4, quality="same")]
    return [*found, VerifyCase(requests=2, vocab=129280)] if full else found


def cases_pack(full: bool) -> list[PackCase]:
    """Every rate, forced tokens, both index types, one draft, no request, more requests than a program takes."""
    small = PackCase(requests=9)
    found = [replace(small, rate=r) for r in (0.0, 0.5, 0.7, 1.0)]
    found += [replace(small, golden=True), replace(small, golden=True, rate=0.4, index="int64")]
    found += [replace(small, draft=1), replace(small, draft=32, rate=0.95), replace(small, requests=0)]
    found += [replace(small, requests=70, rate=0.8), replace(small, stops=1, index="int64")]
    return found


# relation hooks


def independent_rows(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Rows alone, permuted, in chunks and beside others; garbage is finite, because NaN is no log-probability."""
    for variant in (*batch_invariant(inputs, context), *row_chunks(inputs, context)):
        calls = tuple(
            call | {"target_tv": call["target_tv"].nan_to_num(nan=-3.0, neginf=-torch.inf)} for call in variant.calls
        )
        yield replace(variant, label=variant.label.replace("NaN", "other"), calls=calls)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=-3.0, neginf=-torch.inf)


def rows_behind_the_end(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """What stands behind the row that ends a request changes nothing of what the request emits."""
    changed = dict(inputs)
    token, accepted = inputs["token_t"].clone(), inputs["accepted_t"].clone()
    golden = None if inputs["golden_t"] is None else inputs["golden_t"].clone()
    row = 0
    for length in inputs["length_b"].tolist():
        take = [bool(accepted[row + j]) for j in range(length)]
        if golden is not None:
            forced = [int(golden[row + j]) for j in range(length)]
            take = [
                f == int(token[row + j]) if f >= 0 else a for j, (f, a) in enumerate(zip(forced, take, strict=True))
            ]
        end = next((j for j in range(max(length - 1, 0)) if not take[j]), length)
        for j in range(end + 1, length):
            token[row + j], accepted[row + j] = 8, not accepted[row + j]
            if golden is not None:
                golden[row + j] = -1
        row += length
    changed |= {"token_t": token, "accepted_t": accepted, "golden_t": golden}
    yield Variant(label="rows behind the end", calls=(changed,))


def requests_backwards(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Requests in reverse order."""
    lengths = inputs["length_b"].tolist()
    starts = [sum(lengths[:b]) for b in range(len(lengths))]
    rows = [start + j for start, n in zip(starts[::-1], lengths[::-1], strict=True) for j in range(n)]
    changed = dict(inputs)
    for name in ("accepted_t", "sampled_t", "token_t", "golden_t"):
        changed[name] = None if inputs[name] is None else inputs[name][rows]
    for name in ("length_b", "stop_bk"):
        changed[name] = inputs[name].flip(0).contiguous()

    def turned(outputs: Outputs) -> Outputs:
        return {n: x[rows] if n == "packed_t" else x.flip(0) for n, x in outputs.items()}

    yield Variant(label="requests backwards", calls=(changed,), expect=turned)


def lean(case: VerifyCase) -> bool:
    """Relations make many calls."""
    return case.id == VerifyCase(requests=4).id


def many_programs(case: VerifyCase) -> str | None:
    """What the interpreter leaves out: a program a row, and what the other cases show as well."""
    again = case.regime in ("flat", "mean1") or (case.regime, case.draw) == ("peaked", "nvidia")
    if again or case.requests > 6 or (case.quality, case.draw) in (("same", "nvidia"), ("point", "ascend")):
        return "a program a row under an interpreter"
    return None


def not_one_of_each_draw(case: VerifyCase) -> str | None:
    """What the lowering leaves out: every size is a kernel of its own to lower."""
    one = VerifyCase(requests=4, draw=case.draw)
    return None if case.id == one.id else "one kernel for each draw is enough"


ROWS_T = dict.fromkeys(("target_tv", "token_t", "pool_t", "fresh_t", "word_t"), 0)

VERIFY = Op(
    name="verify_rows",
    reference="deeptwin.reference.dspark_verify:verify_rows",
    outputs=(
        Output(name="accepted_t", rule=Decisions(), dtype=torch.bool),
        Output(name="weights_tv", rule=Within(u=U, interval=weight_interval), dtype=torch.float32),
        Output(name="alpha_t", rule=OfStored(rule=Bitwise(), again=alpha_again), dtype=torch.float32),
    ),
    cases=cases_verify,
    draw=draw_verify,
    rows=ROWS_T,
    out_rows={"accepted_t": 0, "weights_tv": 0, "alpha_t": 0},
    relations=(
        Relation(name="batch_invariant", axis="rows and row chunks", hook=independent_rows, only=lean),
        Relation(name="run_to_run", axis="repeats", only=lean),
    ),
    candidates=(
        Candidate(name="vectorised", function="deeptwin.optimized.dspark_verify:verify_rows_vectorised"),
        Candidate(
            name="triton",
            function="deeptwin.optimized.dspark_verify:verify_rows_triton",
            interpreter_declines=many_programs,
            lowered_declines=not_one_of_each_draw,
        ),
    ),
    builds=(
        BuildCase(
            name="v129280",
            kernel="deeptwin.kernels.triton_ops.dspark_verify:_verify_rows",
            launch="deeptwin.parity.builds.launches.dspark_verify:verify",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("ratio_upside_down", "U62", "accepts with p / q"),
        _mutant("target_alone", "U62", "accepts with q, as if the draft were a point mass"),
        _mutant("penalty_in_the_ratio", "U62", "the acceptance is penalised, ten thousandths of it"),
        _mutant("other_platform", "U68", "decides by the other platform's rule"),
        _mutant("decision_inverted", "U62", "accepts what must be rejected"),
        _mutant("uniform_below_one", "U68", "the uniform number stays below 1: a certain draft is never rejected"),
        _mutant("penalty_missing", "U39", "no penalty: the residual may be empty"),
        _mutant("penalty_tenfold", "U39", "a penalty of 5e-4"),
        _mutant("penalty_negative", "U39", "the penalty has the other sign"),
        _mutant("penalty_of_target", "U39", "the penalty lowers q"),
        _mutant("penalty_of_residual", "U39", "the penalty is added to the difference"),
        _mutant("residual_absolute", "U62", "the absolute difference"),
        _mutant("residual_unclamped", "U62", "negative weights"),
        _mutant("residual_normalised", "U62", "weights that sum to one: the fixed-point mass is no estimate"),
        _mutant("overlap_as_residual", "U62", "what both have in common"),
        _mutant("fresh_row_as_residual", "U75", "a fresh row reads the pool"),
        _mutant("fresh_row_accepted", "U75", "a fresh row counts as accepted"),
        _mutant("fresh_alpha_of_weights", "U75", "the estimate of a fresh row comes from its weights"),
        _mutant("no_draft_reads_last_token", "U40", "draft -1 indexes the row from its end"),
        _mutant("impossible_accepted", "U18", "a draft that neither side can draw is accepted, as -inf - -inf was"),
        _mutant("placeholder_for_all", "U09", "every request reads the placeholder"),
        _mutant("pool_row_behind", "U61", "the proposal of the next position"),
        _mutant("word_of_mate", "U66", "the random word of the row before"),
        _mutant("alpha_of_floats", "R14", "the estimate sums fp32 weights"),
        _mutant("alpha_rounded", "R14", "fixed-point weights are rounded, not cut"),
        _mutant("alpha_without_penalty", "R14", "the estimate is corrected for the penalty"),
        _mutant("accepted_row_redrawn", "U62", "an accepted row has the target's weights"),
        _mutant("target_in_bf16", "U17", "log-probabilities are rounded to bf16"),
    ),
    controls=(_control("right_verify"),),
    golden=lambda: [
        VerifyCase(requests=3, draft=2, vocab=5),
        VerifyCase(requests=3, draft=2, vocab=5, draw="ascend", filters=0.3),
    ],
)

PACK = Op(
    name="verify_pack",
    reference="deeptwin.reference.dspark_verify:verify_pack",
    outputs=(
        Output(name="count_b", rule=Bitwise(), dtype=torch.int32),
        Output(name="final_b", rule=Bitwise(), dtype=torch.int32),
        Output(name="packed_t", rule=Bitwise(), dtype=torch.int32),
        Output(name="stopped_b", rule=Bitwise(), dtype=torch.bool),
    ),
    cases=cases_pack,
    draw=draw_pack,
    rows={},
    out_rows={},
    relations=(
        Relation(
            name="masked_equals_absent",
            axis="rows behind the end of a request",
            hook=rows_behind_the_end,
            only=lambda case: case.requests == 9,
        ),
        Relation(
            name="batch_invariant", axis="requests", hook=requests_backwards, only=lambda case: case.requests in (9, 70)
        ),
        Relation(name="run_to_run", axis="repeats", only=lambda case: case.golden),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.dspark_verify:verify_pack_triton"),),
    builds=(
        BuildCase(
            name="b64-j5",
            kernel="deeptwin.kernels.triton_ops.dspark_verify:_verify_pack",
            launch="deeptwin.parity.builds.launches.dspark_verify:pack",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("accepted_behind_rejection", "U62", "drafts behind a rejection count"),
        _mutant("nothing_accepted", "U62", "no draft counts"),
        _mutant("fresh_row_verified", "U62", "the fresh row counts as a draft"),
        _mutant("final_one_late", "U62", "the token of the row behind the one that ends the request"),
        _mutant("final_is_packed", "U62", "the final token stands in the packed list too"),
        _mutant("packed_behind_rejection", "U62", "accepted drafts behind a rejection are packed"),
        _mutant("packed_everything", "U62", "rejected drafts are packed"),
        _mutant("golden_after_prefix", "U49", "forced tokens do not change the acceptance"),
        _mutant("golden_ignored", "U49", "forced tokens are ignored"),
        _mutant("golden_token_alone", "U49", "the forced token replaces the draw but not the decision"),
        _mutant("stop_of_final_alone", "U26", "a stop among the accepted drafts is not seen"),
        _mutant("stop_of_drafts_alone", "U26", "a stop in the final token is not seen"),
        _mutant("stop_of_rejected_rows", "U26", "a stop that was rejected counts"),
        _mutant("padding_emits_token_0", "U79", "a request without rows emits token 0"),
        _mutant("none_is_a_stop", "U40", "-1 among the stops meets the -1 of a request without rows"),
    ),
    controls=(_control("right_pack"),),
    golden=lambda: [PackCase(requests=4, golden=True)],
)

CARD = Card(
    component="dspark_verify",
    summary="verification of drafts: acceptance, residual weights, estimates, what requests emit",
    contract={
        "decision": "NVIDIA: fp32 uniform of the word < exp(min(log q - log p, 0)); Ascend: whole numbers; strict",
        "impossible": "log q = -inf rejects, also against log p = -inf (source: accepts; no drawn draft has that)",
        "penalty": "5e-5 below log p in the residual: the law stays within ε = 1 - e^-π of the target's",
        "weights": "fp32, not normalised; the sampler cuts them to multiples of 2^-31",
        "empty": "weights all below 2^-31: `sampling.argmax_tokens` of the raw logits (NVIDIA) or log-probs (Ascend)",
        "α": "1 - the fixed-point mass, fp32; 1 for a fresh row; 1 - ε for equal distributions",
        "prefix": "accepted drafts up to the first rejection; forced tokens are applied before",
        "fresh rows": "their draft and their pool row are not read",
    },
    ops=(VERIFY, PACK),
    equivalents=(
        Equivalent(name="q / p compared instead of the exponential", reason="the same number, up to its rounding"),
        Equivalent(name="≤ instead of <", reason="equality lies at the boundary, where honest ones differ"),
    ),
)
