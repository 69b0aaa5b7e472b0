"""How routers are checked: a selection with declared ties, judged on intervals of honest scores, and its weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import (
    ROUTER_V3,
    ROUTER_V4_PRO,
    ROUTER_V41,
    ROUTER_V41_DRAFT,
    GroupScore,
    RouterConfig,
    Scoring,
    WeightSum,
)

from .. import draws
from ..builds.ascend_presets import VECTOR
from ..builds.presets import NO_PRODUCT
from ..builds.spec import BuildCase
from ..card import (
    REGIMES,
    Candidate,
    Card,
    Equivalent,
    Inputs,
    Op,
    Output,
    Outputs,
    Peer,
    Relation,
    Sm90Candidate,
    variants,
)
from ..relations import Context, Variant, batch_invariant, row_chunks
from ..rules import Bitwise, Judgement, Oracles, Within, Worst

_mutant, _control = variants("router")
# relative error of a score and of each of the three steps behind it: four units of 2^-24
U = 2.0**-22
SMALLEST_NORMAL = 2.0**-126

TINY = RouterConfig(
    num_experts=8, topk=6, scoring=Scoring.SQRT_SOFTPLUS, weight_sum=WeightSum.PLUS_EPS, route_scale=1.5
)
CONFIGS = {
    "v41": ROUTER_V41,
    "v41_draft": ROUTER_V41_DRAFT,
    "v4_pro": ROUTER_V4_PRO,
    "v3": ROUTER_V3,
    "tiny": TINY,
    "pair": replace(TINY, topk=2),
    "one": replace(TINY, num_experts=1, topk=1),
    "every": replace(TINY, num_experts=7, topk=7),
    "awkward": replace(TINY, num_experts=100, topk=5),
    "groups": replace(TINY, num_experts=32, topk=3, num_groups=8, kept_groups=3, scoring=Scoring.SIGMOID),
    "groups_max": replace(TINY, num_experts=32, topk=3, num_groups=4, kept_groups=2, group_score=GroupScore.MAX),
}


@dataclass(frozen=True, kw_only=True)
class RouteCase:
    """`tokens` rows of logits; `bias`, `image` and `mask` say what comes with them."""

    tokens: int
    config: str = "v41"
    bias: str = "normal"  # normal, zero, strong, negative, disabled
    image: bool = False
    mask: bool = False
    dtype: str = "fp32"
    regime: str = "normal"

    @property
    def id(self) -> str:
        extras = ("-image" if self.image else "") + ("-mask" if self.mask else "")
        return f"t{self.tokens}-{self.config}-bias_{self.bias}{extras}-{self.dtype}-{self.regime}"

    @property
    def router(self) -> RouterConfig:
        return CONFIGS[self.config]


# the interval of honest scores, and what a selection may be


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(torch.float32).to(dtype).to(torch.float64)


def score_interval(arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """Lowest and highest score of every expert; padding rows as if their logits were zero.

    Below the smallest normal number e^x may be flushed to zero, or have the coarse steps of the subnormals: both are
    shipped, and accepted.
    """
    x = arguments["logits_te"].to(torch.float64)
    if arguments["mask_t"] is not None:
        x = torch.where(arguments["mask_t"][:, None], x, 0.0)
    if arguments["config"].scoring is Scoring.SIGMOID:
        score = torch.sigmoid(x)
        flushed, coarse = score < SMALLEST_NORMAL * (1 + 2.0**-20), score + 2.0**-149
    else:
        softplus = torch.where(x > 20, x, x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())))
        score = softplus.sqrt()
        flushed, coarse = softplus < SMALLEST_NORMAL * (1 + 2.0**-20), (softplus + 2.0**-149).sqrt()
    low = torch.where(flushed, 0.0, score * (1 - u))
    high = torch.where(flushed, torch.maximum(coarse, score), score) * (1 + u)
    return _stored(low, arguments["dtype"]), _stored(high, arguments["dtype"])


def rank_interval(arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor, Tensor]:
    """Lowest and highest rank, and a key that two experts share when every evaluation ranks them equally."""
    low, high = score_interval(arguments, u)
    bias = arguments["bias_e"].to(torch.float64).expand_as(low)
    if arguments["bias_vl_e"] is not None:
        bias = torch.where(arguments["image_mask_t"][:, None], arguments["bias_vl_e"].to(torch.float64), bias)
    low, high = ((x + bias).to(torch.float32).to(torch.float64) for x in (low, high))
    # equal logits and biases, or a rank that is the same at both ends
    settled = low == high
    twin = torch.stack([torch.where(settled, low, arguments["logits_te"] + 0.0), torch.where(settled, 0.5, bias)], -1)
    return low, high, twin


def _beats(low: Tensor, high: Tensor, twin: Tensor, first: int, second: int) -> bool:
    """Whether an honest evaluation may place `first` before `second`."""
    if bool((twin[first] == twin[second]).all()):
        return first < second
    return bool(high[first] >= low[second])


def _possible(low: Tensor, high: Tensor, twin: Tensor, picked: list[int]) -> bool:
    """Whether `picked`, in this order, are the best of the items."""
    others = [i for i in range(len(low)) if i not in picked]
    in_order = all(_beats(low, high, twin, a, b) for a, b in itertools.pairwise(picked))
    return in_order and all(_beats(low, high, twin, a, b) for a in picked for b in others)


def _kept_sets(low: Tensor, high: Tensor, twin: Tensor, config: RouterConfig) -> Iterator[list[int]]:
    """Experts outside every choice of groups that an honest evaluation may keep."""
    shape = (config.num_groups, config.group_size)
    if config.num_groups == 1:
        yield []
        return
    count = 1 if config.group_score is GroupScore.MAX else 2
    low_g, high_g = (x.reshape(shape).topk(count).values.sum(-1) for x in (low, high))
    low_g, high_g = low_g - low_g.abs() * 2.0**-23, high_g + high_g.abs() * 2.0**-23  # the sum is rounded
    twin_g = twin.reshape(config.num_groups, -1)
    for kept in itertools.combinations(range(config.num_groups), config.kept_groups):
        rest = [g for g in range(config.num_groups) if g not in kept]
        if all(_beats(low_g, high_g, twin_g, a, b) for a in kept for b in rest):
            yield [e for g in rest for e in range(g * config.group_size, (g + 1) * config.group_size)]


@dataclass(frozen=True)
class Selection:
    """R9 with scores behind arithmetic: the experts, in their order, are the best for some honest scores.

    Experts with equal logits and biases have equal ranks under every evaluation: there the smaller index is first.
    """

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Rows equal to CONTRACT's hold by definition; every other row must be possible."""
        expected = oracles.contract
        rows = (got != expected).any(-1).nonzero().flatten().tolist()
        low, high, twin = rank_interval(oracles.arguments, U) if rows else (got, got, got)
        for row in rows:
            problem = self._problem(got[row].tolist(), low[row], high[row], twin[row], oracles.arguments, row)
            if problem:
                worst = Worst(index=(row,), got=str(got[row].tolist()), expected=str(expected[row].tolist()))
                return Judgement(ok=False, used=float("inf"), message=f"row {row}: {problem}", worst=worst)
        return Judgement(ok=True, used=0.0, metrics={"rows that differ": float(len(rows))})

    def _problem(
        self, picked: list[int], low: Tensor, high: Tensor, twin: Tensor, arguments: dict[str, Any], row: int
    ) -> str | None:
        config: RouterConfig = arguments["config"]
        if arguments["mask_t"] is not None and not arguments["mask_t"][row]:
            return "a padding row has experts"
        if any(not 0 <= e < config.num_experts for e in picked):
            return f"an index outside 0..{config.num_experts - 1}"
        if len(set(picked)) != len(picked):
            return "an expert twice"
        for outside in _kept_sets(low, high, twin, config):
            hidden = low.clone(), high.clone()
            for bound in hidden:
                bound[outside] = -torch.inf
            if not set(outside) & set(picked) and _possible(*hidden, twin, picked):
                return None
        return "no honest scores select these experts in this order (wrong rank, wrong group or wrong tie)"


def weight_interval(arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """Lowest and highest weights of the experts that the candidate selected."""
    config, dtype, idx = arguments["config"], arguments["dtype"], arguments["idx_tk"]
    low, high = (x.gather(-1, idx.clamp(0, config.num_experts - 1)) for x in score_interval(arguments, u))
    eps = 1e-20 if config.weight_sum is WeightSum.PLUS_EPS else 0.0
    least = _stored(_stored(low.sum(-1, keepdim=True) * (1 - u), dtype) + eps, dtype)
    most = _stored(_stored(high.sum(-1, keepdim=True) * (1 + u), dtype) + eps, dtype)
    ends = []
    for score, total, factor in ((low, most, 1 - u), (high, least, 1 + u)):
        share = torch.where(total > 0, _stored(score / total * factor, dtype), 1.0)
        ends.append(_stored(share * config.route_scale * factor, dtype))
    real = torch.ones_like(idx, dtype=torch.bool) if arguments["mask_t"] is None else arguments["mask_t"][:, None]
    return torch.where(real, ends[0], 0.0), torch.where(real, ends[1], 0.0)


# inputs


def _logits(case: RouteCase, rng: np.random.Generator) -> Tensor:
    t, e = case.tokens, case.router.num_experts
    if case.regime == "ties":
        return torch.from_numpy(rng.integers(-2, 3, (t, e)).astype(np.float32) / 2)
    if case.regime == "group_ties":  # groups that are copies of one another, in random pairs
        half = rng.standard_normal((t, case.router.num_groups // 2, case.router.group_size)).astype(np.float32)
        groups = np.concatenate([half, half], 1)
        return torch.from_numpy(np.stack([row[rng.permutation(len(row))] for row in groups]).reshape(t, e))
    if case.regime in ("low", "underflow"):
        ends = (-87.0, -70.0) if case.regime == "low" else (-206.0, -88.0)
        return torch.from_numpy(rng.uniform(*ends, (t, e)).astype(np.float32))
    if case.regime == "steps":  # where the formula changes its branch
        points = np.array([-104, -40, -20, -1, 0, 1, 10.001, 19.999, 20, 20.001, 88, 89, 100], dtype=np.float32)
        beside = np.float32(2.0**-14) * rng.integers(-2, 3, (t, e)).astype(np.float32)
        every = rng.permutation(np.resize(points, t * e)).reshape(t, e)  # each of them somewhere
        return torch.from_numpy(every + beside)
    return draws.rows(rng, t, e, dtype=torch.float32, regime=case.regime)


def _bias(case: RouteCase, rng: np.random.Generator) -> Tensor:
    e = case.router.num_experts
    bias = draws.normal(rng, e, dtype=torch.float32, scale=0.2)
    if case.bias == "zero":
        bias *= 0
    elif case.bias == "strong":
        bias[:1] = 10.0
    elif case.bias == "negative":
        bias = bias - 50
    elif case.bias == "disabled":  # half of each group
        bias.view(case.router.num_groups, -1)[:, 1::2] = -torch.inf
    return bias


def draw(case: RouteCase, rng: np.random.Generator) -> Inputs:
    """Logits as a strided view; padding rows hold NaN."""
    logits = _logits(case, rng)
    mask = torch.from_numpy(rng.random(case.tokens) < 0.6) if case.mask else None
    if mask is not None:
        logits[~mask] = torch.nan
    image = torch.from_numpy(rng.random(case.tokens) < 0.5) if case.image else None
    return {
        "logits_te": draws.strided(logits, pad=8),
        "bias_e": _bias(case, rng),
        "bias_vl_e": _bias(replace(case, bias="normal"), rng) * 3 if case.image else None,
        "image_mask_t": image,
        "mask_t": mask,
        "config": case.router,
        "dtype": draws.DTYPES[case.dtype],
    }


def draw_hash(case: RouteCase, rng: np.random.Generator) -> Inputs:
    """A table of distinct experts; ids of padding rows are out of range."""
    route = draw(case, rng)
    vocabulary, config = 40, case.router
    table = np.stack([draws.distinct(rng, config.num_experts, config.topk) for _ in range(vocabulary)])
    token = torch.from_numpy(rng.integers(0, vocabulary, case.tokens))
    if case.tokens > 1:
        token[:2] = torch.tensor([0, vocabulary - 1])
    if route["mask_t"] is not None:
        token[~route["mask_t"]] = -(2**31)
    return {
        "logits_te": route["logits_te"],
        "token_t": token,
        "table_vk": torch.from_numpy(table),
        **{name: route[name] for name in ("mask_t", "config", "dtype")},
    }


@dataclass(frozen=True, kw_only=True)
class ReplicaCase:
    """`tokens` rows of `topk` slots over `experts`, each with one to `most` replicas."""

    tokens: int
    topk: int = 6
    experts: int = 24
    most: int = 4
    ep_rank: int = 0
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-k{self.topk}-e{self.experts}-r{self.most}-rank{self.ep_rank}-{self.regime}"


def draw_replicas(case: ReplicaCase, rng: np.random.Generator) -> Inputs:
    """Unused entries of the map are out of range; some slots are empty."""
    count = rng.integers(1, case.most + 1, case.experts)
    count[0] = case.most
    used = np.arange(case.most)[None, :] < count[:, None]
    table = np.full((case.experts, case.most), -(2**31), dtype=np.int64)
    table[used] = rng.permutation(int(count.sum()))
    idx = rng.integers(0, case.experts, (case.tokens, case.topk))
    idx[rng.random(idx.shape) < 0.1] = -1
    return {
        "idx_tk": torch.from_numpy(idx),
        "map_ej": torch.from_numpy(table.astype(np.int32)),
        "count_e": torch.from_numpy(count.astype(np.int32)),
        "ep_rank": case.ep_rank,
    }


def cases(full: bool) -> list[RouteCase]:
    """Every regime and every bias on some router, production routers at few rows, the smallest and awkward ones."""
    small = RouteCase(tokens=3, config="awkward")
    found = [replace(small, regime=r) for r in (*REGIMES, "ties", "zeros", "low", "underflow", "steps", "huge")]
    found += [RouteCase(tokens=2, config=name) for name in CONFIGS if name != "pair"]
    pair = RouteCase(tokens=3, config="pair")
    found += [pair, replace(pair, image=True, mask=True, regime="ties", tokens=5)]
    found += [RouteCase(tokens=2, image=True), RouteCase(tokens=3, config="v41_draft", mask=True, regime="ties")]
    found += [replace(small, image=True, mask=True, tokens=5), replace(small, mask=True, bias="negative", tokens=4)]
    found += [replace(small, bias=b) for b in ("zero", "strong", "negative", "disabled")]
    groups = RouteCase(tokens=4, config="groups")
    found += [replace(groups, regime=r) for r in ("ties", "zeros", "group_ties", "peaked")]
    found += [replace(groups, bias=b) for b in ("negative", "disabled", "zero")]
    found += [replace(groups, bias="zero", regime="group_ties", tokens=6)]
    found += [RouteCase(tokens=2, config="v3", dtype="bf16"), replace(groups, dtype="bf16", mask=True)]
    found += [replace(small, tokens=0), RouteCase(tokens=2, config="every", regime="ties")]
    found += [RouteCase(tokens=4, config="every", regime="steps")]
    if full:
        found += [
            RouteCase(tokens=3, config=c, bias=b, image=i, mask=i, regime=r)
            for c, b, i, r in itertools.product(
                ("v41", "v3", "v41_draft"), ("normal", "negative", "disabled"), (False, True), (*REGIMES, "ties")
            )
        ]
        found += [replace(small, dtype="bf16", regime=r) for r in (*REGIMES, "ties")]
    return list({case.id: case for case in found}.values())


def cases_hash(full: bool) -> list[RouteCase]:
    """Regimes, the range in which the epsilon shows, padding rows, V4's routers."""
    small = RouteCase(tokens=3, config="awkward")
    found = [replace(small, regime=r) for r in (*REGIMES, "low", "underflow", "steps")]
    found += [
        RouteCase(tokens=3, config="v4_pro"),
        RouteCase(tokens=5, config="pair", mask=True),
        replace(small, tokens=0),
    ]
    found += [replace(small, config="tiny", regime="ties"), replace(small, dtype="bf16")]
    if full:
        found += [RouteCase(tokens=3, config="v4_pro", mask=True, regime=r) for r in REGIMES]
    return found


def cases_replicas(full: bool) -> list[ReplicaCase]:
    """A single replica, several, another rank, and rows beyond 2^31 / 23333."""
    small = ReplicaCase(tokens=40)
    found = [small, replace(small, most=1), replace(small, ep_rank=3), replace(small, tokens=0)]
    found += [replace(small, tokens=1, topk=1), ReplicaCase(tokens=92100, topk=1, experts=3, most=3)]
    return [*found, ReplicaCase(tokens=184100, topk=1, experts=5, most=3)] if full else found


# relation hooks

HUGE = 2.0**100


def independent_rows(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Rows alone, permuted and beside others; the garbage is huge, because NaN is no logit of a token."""
    for variant in (*batch_invariant(inputs, context), *row_chunks(inputs, context)):
        calls = tuple(_with_huge(call) for call in variant.calls)
        yield replace(variant, label=variant.label.replace("NaN", "huge"), calls=calls)


def _with_huge(call: Inputs) -> Inputs:
    return call | {"logits_te": call["logits_te"].nan_to_num(nan=HUGE)}


def padding_changes_nothing(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Poisoned padding rows between and behind the tokens leave them as they are."""
    t, rows = inputs["logits_te"].shape[0], context.op.rows
    for pads in (1, 3):
        padded = dict(inputs)
        for name in rows:
            if inputs[name] is not None:
                value = inputs[name]
                filler = value.new_full((pads, *value.shape[1:]), torch.nan if value.is_floating_point() else 0)
                padded[name] = torch.cat([filler, value, filler])
        old = torch.ones(t, dtype=torch.bool) if inputs["mask_t"] is None else inputs["mask_t"]
        blank = torch.zeros(pads, dtype=torch.bool)
        padded["mask_t"] = torch.cat([blank, old, blank])
        yield Variant(
            label=f"{pads} padding rows on either side",
            calls=(padded,),
            join=lambda results, n=pads: {k: x[n : n + t] for k, x in results[0].items()},  # type: ignore[misc]
        )


def permute_experts(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Experts renumbered: the same ones are selected, with the same weights."""
    e = inputs["logits_te"].shape[1]
    order = torch.from_numpy(context.rng.permutation(e))
    renumbered = dict(inputs)
    for name in ("logits_te", "bias_e", "bias_vl_e"):
        if inputs[name] is not None:
            renumbered[name] = inputs[name][..., order].contiguous()

    def back(results: list[Outputs]) -> Outputs:
        idx = results[0]["idx_tk"]
        return results[0] | {"idx_tk": torch.where(idx >= 0, order[idx.clamp(min=0)], -1)}

    yield Variant(label="experts renumbered", calls=(renumbered,), join=back)


def few_calls(case: Any) -> bool:
    """Relations make many calls: they run on few experts."""
    return case.config in ("pair", "groups") and case.bias == "normal" and case.regime in ("normal", "ties", "file")


def no_ties(case: Any) -> bool:
    """Renumbering moves ties, and does not respect groups."""
    return case.config in ("pair", "v41_draft") and case.regime in ("normal", "file")


def outside_tile_kernels(case: RouteCase) -> str | None:
    """Why TileKernels' gate does not take a case."""
    config = case.router
    kind = (config.scoring, config.weight_sum, config.num_groups)
    if kind != (Scoring.SQRT_SOFTPLUS, WeightSum.PLUS_EPS, 1) or config.num_experts % 4 or case.dtype != "fp32":
        return "sqrt-softplus without groups, the sum plus 1e-20, 4·n experts, fp32"
    return None


def golden() -> list[RouteCase]:
    """One small case per branch."""
    tiny = RouteCase(tokens=4, config="tiny")
    groups = RouteCase(tokens=3, config="groups")
    return [
        tiny,
        replace(tiny, regime="ties", mask=True),
        replace(tiny, image=True, regime="steps"),
        replace(tiny, regime="low"),
        groups,
        replace(groups, regime="group_ties", bias="zero"),
        replace(groups, dtype="bf16", bias="negative"),
    ]


def golden_hash() -> list[RouteCase]:
    """Two rows of a small router."""
    return [RouteCase(tokens=3, config="tiny", mask=True), RouteCase(tokens=2, config="tiny", regime="low")]


def golden_replicas() -> list[ReplicaCase]:
    """A few rows of another rank."""
    return [ReplicaCase(tokens=5, topk=3, experts=6, ep_rank=2)]


OUTPUTS = (
    Output(name="idx_tk", rule=Selection(), dtype=torch.int64),
    Output(name="weights_tk", rule=Within(u=U, interval=weight_interval)),
)
OUT_ROWS = {"idx_tk": 0, "weights_tk": 0}

ROUTE = Op(
    name="route",
    reference="deeptwin.reference.router:route",
    outputs=OUTPUTS,
    cases=cases,
    draw=draw,
    rows={"logits_te": 0, "image_mask_t": 0, "mask_t": 0},
    out_rows=OUT_ROWS,
    relations=(
        Relation(name="batch_invariant", axis="rows and row chunks", hook=independent_rows, only=few_calls),
        Relation(name="run_to_run", axis="repeats", only=few_calls),
        Relation(name="masked_equals_absent", axis="padding rows", hook=padding_changes_nothing, only=few_calls),
        Relation(
            name="head_permutation",
            axis="experts",
            promise="within contract",
            hook=permute_experts,
            only=no_ties,
        ),
    ),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.router:route_triton"),
        Sm90Candidate(
            name="tile-kernels",
            function="deeptwin.optimized.router:route_tile_kernels",
            needs=("tile_kernels",),
            declines=outside_tile_kernels,
        ),
    ),
    builds=(
        BuildCase(
            name="v41",
            kernel="deeptwin.kernels.triton_ops.router:_route",
            launch="deeptwin.parity.builds.launches.router:route_v41",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="v41-draft",
            kernel="deeptwin.kernels.triton_ops.router:_route",
            launch="deeptwin.parity.builds.launches.router:route_v41_draft",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="v3-groups",
            kernel="deeptwin.kernels.triton_ops.router:_route",
            launch="deeptwin.parity.builds.launches.router:route_v3",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="tile-kernels",
            function="deeptwin.parity.peers.router:tile_kernels_gate",
            needs=("tile_kernels",),
            explains="its fp32 formula underflows below -88 and is a few units off from -80 on",
            only=lambda case: (
                case.router.scoring is Scoring.SQRT_SOFTPLUS
                and case.router.weight_sum is WeightSum.PLUS_EPS
                and case.router.num_groups == 1
                and case.dtype == "fp32"
                and case.regime != "underflow"
            ),
        ),
        Peer(
            name="transformers-v4",
            function="deeptwin.parity.peers.router:transformers_v4",
            needs=("transformers",),
            explains="adds 1e-20 whatever the release does: nothing while scores are larger; leaves ties open",
            only=lambda case: (
                case.router.scoring is Scoring.SQRT_SOFTPLUS
                and case.router.num_groups == 1
                and case.dtype == "fp32"
                and not case.image
                and not case.mask
                and case.regime not in ("ties", "zeros", "steps", "underflow")
            ),
        ),
        Peer(
            name="transformers-v3",
            function="deeptwin.parity.peers.router:transformers_v3",
            needs=("transformers",),
            explains="adds 1e-20 whatever the release does: nothing at these scores; leaves ties open",
            only=lambda case: (
                case.router.scoring is Scoring.SIGMOID
                and case.dtype == "fp32"
                and not case.mask
                and case.regime not in ("ties", "zeros", "group_ties")
            ),
        ),
    ),
    mutants=(
        _mutant("bias_in_weights", "U44", "weights are taken from the biased scores"),
        _mutant("bias_forgotten", "U49", "the bias is left out of the ranking"),
        _mutant("bias_twice", "U49", "the bias is added twice"),
        _mutant("ties_to_the_larger_index", "U45", "of equal ranks the larger index wins"),
        _mutant("ties_by_place_in_the_batch", "U46", "how a tie falls depends on the row"),
        _mutant("ties_change_between_calls", "U46", "how a tie falls depends on the call"),
        _mutant("group_ties_to_the_larger_group", "U46", "of equal groups the larger one wins"),
        _mutant("other_groups_zero", "U47", "experts of other groups get rank 0, which beats negative ranks"),
        _mutant("padding_lanes_win", "U47", "lanes beyond the experts have rank 0 and stand for expert 0"),
        _mutant("disabled_expert_kept", "U47", "a bias of -inf counts as 0"),
        _mutant("sigmoid_without_groups", "U48", "sqrt(softplus) becomes sigmoid where there are no groups"),
        _mutant("softplus_without_root", "U48", "softplus, not its root"),
        _mutant("softplus_naive", "U51", "log(1 + exp(x)): infinite from 89 on, 0 below -17"),
        _mutant("softplus_linear_above_10", "U51", "softplus is taken for the identity above 10"),
        _mutant("eps_missing", "U39", "nothing is added to the sum of the scores"),
        _mutant("eps_as_minimum", "U39", "the sum is clamped at 1e-20"),
        _mutant("eps_1e_6", "U39", "the sum is clamped at 1e-6"),
        _mutant("eps_after_division", "U39", "1e-20 is added to the weight"),
        _mutant("scale_missing", "U39", "the route scale is left out"),
        _mutant("scale_twice", "U39", "the route scale is applied twice"),
        _mutant("normalised_over_all", "U39", "scores are divided by the sum over all experts"),
        _mutant("not_normalised", "U39", "scores are not divided by their sum"),
        _mutant("image_bias_ignored", "U49", "image tokens are ranked with the text bias"),
        _mutant("image_bias_for_all", "U49", "text tokens are ranked with the image bias"),
        _mutant("image_bias_on_top", "U49", "the image bias is added to the text bias"),
        _mutant("image_mask_of_first_row", "U09", "every row takes the image flag of the first"),
        _mutant("mask_ignored", "U37", "padding rows are routed"),
        _mutant("masked_index_0", "U37", "a padding row gets expert 0"),
        _mutant("masked_weights_kept", "U37", "a padding row keeps its weights"),
        _mutant("masked_row_nan", "U76", "a padding row multiplies NaN by 0"),
        _mutant("group_by_best_expert", "U63", "a group is ranked by its best expert alone"),
        _mutant("groups_strided", "U63", "groups are every n-th expert"),
        _mutant("one_group_more", "U63", "one group too many is kept"),
        _mutant("groups_by_unbiased_scores", "U49", "groups are ranked without the bias"),
        _mutant("logits_bf16", "U17", "logits are rounded to bf16"),
        _mutant("scores_bf16", "U17", "scores are rounded to bf16"),
        _mutant("weights_bf16", "U17", "weights are rounded to bf16"),
        _mutant("sorted_by_index", "U46", "the experts come in ascending order"),
        _mutant("last_expert_unseen", "U26", "the last expert is never selected"),
        _mutant("bias_of_batch_mate", "U09", "the ranking of a row takes in the row before"),
    ),
    controls=(_control("right_stable"), _control("right_backwards"), _control("right_naive_log1p")),
    golden=golden,
)

HASH = Op(
    name="route_hash",
    reference="deeptwin.reference.router:route_hash",
    outputs=(replace(OUTPUTS[0], rule=Bitwise()), OUTPUTS[1]),
    cases=cases_hash,
    draw=draw_hash,
    rows={"logits_te": 0, "token_t": 0, "mask_t": 0},
    out_rows=OUT_ROWS,
    relations=(
        Relation(name="batch_invariant", axis="rows and row chunks", hook=independent_rows, only=few_calls),
        Relation(name="run_to_run", axis="repeats", only=few_calls),
        Relation(name="masked_equals_absent", axis="padding rows", hook=padding_changes_nothing, only=few_calls),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.router:route_hash_triton"),),
    builds=(
        BuildCase(
            name="v4-pro",
            kernel="deeptwin.kernels.triton_ops.router:_route_hash",
            launch="deeptwin.parity.builds.launches.router:hash_v4_pro",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="transformers-v4",
            function="deeptwin.parity.peers.router:transformers_v4_hash",
            needs=("transformers",),
            explains="adds 1e-20 whatever the release does: nothing while scores are larger",
            only=lambda case: case.dtype == "fp32" and not case.mask and case.regime != "underflow",
        ),
    ),
    mutants=(
        _mutant("hash_row_of_first_token", "U09", "every token reads the table row of the first"),
        _mutant("hash_selects_by_score", "U49", "the best scores are selected, the table is ignored"),
        _mutant("hash_sorts_experts", "U46", "the experts come in ascending order, the weights in table order"),
        _mutant("hash_weights_equal", "U49", "every expert gets the same weight"),
        _mutant("hash_sigmoid", "U48", "sigmoid scores"),
        _mutant("hash_softplus_naive", "U51", "log(1 + exp(x))"),
        _mutant("hash_eps_as_minimum", "U39", "the sum is clamped at 1e-20"),
        _mutant("hash_padding_reads_last_row", "U40", "the id of a padding row indexes the table from its end"),
        _mutant("hash_by_position", "U61", "the table is read by position instead of by token"),
    ),
    controls=(_control("right_hash"),),
    golden=golden_hash,
)

REPLICAS = Op(
    name="map_replicas",
    reference="deeptwin.reference.router:map_replicas",
    outputs=(Output(name="physical_tk", rule=Bitwise(), dtype=torch.int64),),
    cases=cases_replicas,
    draw=draw_replicas,
    rows={"idx_tk": 0},
    out_rows={"physical_tk": 0},
    relations=(Relation(name="run_to_run", axis="repeats", only=lambda case: case.tokens < 1000),),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.router:map_replicas_triton"),),
    builds=(
        BuildCase(
            name="v41",
            kernel="deeptwin.kernels.triton_ops.router:_map_replicas",
            launch="deeptwin.parity.builds.launches.router:replicas_v41",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("replica_product_wraps", "U67", "row · 23333 is taken in 32 bits"),
        _mutant("replica_ignores_rank", "U67", "every rank takes the same replica"),
        _mutant("replica_of_width", "U63", "the replica is taken modulo the width of the map"),
        _mutant("replica_always_first", "U67", "the first replica takes every row"),
        _mutant("replica_row_within_expert", "U67", "rows are counted within the expert"),
        _mutant("replica_of_empty_slot", "U40", "-1 indexes the map from its end"),
    ),
    controls=(_control("right_replicas"),),
    golden=golden_replicas,
)

CARD = Card(
    component="router",
    summary="expert selection with deterministic ties: sqrt-softplus, sigmoid with groups, hash; replicas",
    contract={
        "dtypes": "logits and biases fp32; indices int64; weights in `dtype` (fp32; bf16: V3 release code)",
        "rounding": "scores to dtype, ranks to fp32, sum, quotient and product to dtype each",
        "order": "add 1e-20 to the sum (PLUS_EPS), divide, multiply by the route scale; the order of the sum is free "
        "(TileKernels and DeepGEMM: a tree of strides 4, 2, 1 over 8 lanes; ours the same)",
        "ties": "equal ranks go to the smaller expert, equal groups to the smaller group; -0 = +0",
        "padding": "mask False gives index -1 and weight 0; the logits of such a row are not read",
        "NaN": "logits of a token must be finite, a bias finite or -inf: refused before any launch",
        "underflow": "below a logit of -87.3 a score may be flushed to 0 or stay positive: both are shipped",
        "replicas": "(ep_rank + row · 23333) mod count, exact; padding rows count",
    },
    ops=(ROUTE, HASH, REPLICAS),
    equivalents=(
        Equivalent(name="constant added to all biases", reason="moves every rank alike, up to its rounding"),
        Equivalent(
            name="ranking raw logits where there is no bias",
            reason="scores are monotone; only logits whose scores tie after rounding would be ordered (DeepGEMM)",
        ),
    ),
)
