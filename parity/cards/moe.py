"""How a mixture of experts is checked: layout of the slots, copies, sums in slot order, and the whole block."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import (
    FP8_1X128,
    FP8_128X128,
    Combine,
    MoeConfig,
    QuantFormat,
    ScaleKind,
    moe_v41,
)
from deeptwin.reference.moe import dispatch
from deeptwin.reference.numerics import SEMANTIC
from deeptwin.reference.quant import block_values, quantize
from deeptwin.reference.weights import ExpertWeights

from .. import draws
from ..builds.ascend_presets import MATRIX, VECTOR
from ..builds.presets import NO_PRODUCT, PRODUCT
from ..builds.spec import BuildCase
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Peer, Relation, variants
from ..floats import ordered
from ..relations import Context, Variant, batch_invariant, pick_rows, row_chunks, take
from ..rules import Bitwise, Budget, Close, Codes, Judgement, Oracles
from .linear import rows_of_experts
from .swiglu import e4m3_order, fp32, scale_order, sf_order

_mutant, _control = variants("moe")
PEERS = "deeptwin.parity.peers.moe"


@dataclass(frozen=True, kw_only=True)
class _FromContract:
    """Oracles in which the meaning is CONTRACT: what is quantised on the way has no unquantised meaning."""

    contract: Tensor
    rival: Tensor

    @property
    def semantic(self) -> Tensor:
        return self.contract


@dataclass(frozen=True, kw_only=True)
class BehindQuantiser:
    """`Budget` around CONTRACT, for outputs behind a quantiser that every side applies to its own values.

    An honest kernel rounds a few of the values before the quantiser to the other neighbour, and once in a while a
    code follows: the outputs of that row then move by some units. Without such a code rows agree almost bitwise.
    """

    budget: Budget

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Judge `got` against CONTRACT, with RIVAL as the yardstick."""
        return self.budget.judge(got, _FromContract(contract=oracles.contract, rival=oracles.rival))  # type: ignore[arg-type]


# measured on fp32 torch (products in blocks of 64, of 16 taken backwards, an exponential that is two units off):
# parity/evidence/moe-block.json
BLOCK = BehindQuantiser(
    budget=Budget(kind="moe block", floor=1.0, row=3.0, total=0.35, element_factor=4.0, element_slack=10.0, bias=0.1)
)


@dataclass(frozen=True, kw_only=True)
class DispatchCase:
    """`tokens` × `topk` slots over `experts`; `routing` says where they go."""

    tokens: int
    topk: int
    experts: int
    alignment: int = 1
    routing: str = "random"  # random, one, two, holes, none, ascending
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-k{self.topk}-e{self.experts}-a{self.alignment}-{self.routing}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class CombineCase:
    """Sums of `topk` slots, some of them empty, over `ranks` ranks on `nodes` nodes (0: no such level)."""

    tokens: int
    topk: int
    width: int
    ranks: int = 0
    nodes: int = 0
    shared: bool = True
    routing: str = "random"  # random, holes, none
    dtype: str = "bf16"
    regime: str = "normal"

    @property
    def id(self) -> str:
        shape = f"t{self.tokens}-k{self.topk}-m{self.width}-ranks{self.ranks}-nodes{self.nodes}"
        return f"{shape}-{'shared' if self.shared else 'alone'}-{self.routing}-{self.dtype}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class MoeCase:
    """A block of `experts` experts of width `inner` on rows of `width`."""

    tokens: int
    topk: int
    experts: int
    width: int
    inner: int
    ranks: int = 0  # 0: a single reduction
    shared: bool = True
    model: str = "v41"
    routing: str = "random"
    regime: str = "normal"

    @property
    def id(self) -> str:
        shape = f"t{self.tokens}-k{self.topk}-e{self.experts}-m{self.width}-f{self.inner}-ranks{self.ranks}"
        return f"{shape}-{'shared' if self.shared else 'alone'}-{self.model}-{self.routing}-{self.regime}"

    @property
    def config(self) -> MoeConfig:
        combine = Combine.MULTIPLE if self.ranks else Combine.SINGLE
        if self.model == "v41":
            return moe_v41(combine)
        return MoeConfig(
            routed=FP8_128X128, shared=FP8_128X128, activation=FP8_1X128, swiglu_limit=None, combine=combine
        )


@dataclass(frozen=True, kw_only=True)
class ExpertCase:
    """Experts with `sizes` rows of `width`, up to the quantised rows of width `inner`."""

    sizes: tuple[int, ...]
    width: int
    inner: int
    model: str = "v41"
    index: str = "int32"
    regime: str = "normal"

    @property
    def id(self) -> str:
        sizes = ".".join(map(str, self.sizes))
        return f"y{sizes}-m{self.width}-f{self.inner}-{self.model}-{self.index}-{self.regime}"

    @property
    def tokens(self) -> int:
        return sum(self.sizes)


# what an honest first half of an expert may store

UP = 2.0**-20  # error of an honest fp32 sum in units of the sum of its magnitudes, and of SwiGLU relative to its value


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.float32).to(torch.bfloat16).to(torch.float64)


def _projections(arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """The lowest and the highest bf16 number that an honest sum of each projection rounds to."""
    config: MoeConfig = arguments["config"]
    sizes = arguments["group_sizes_e"].tolist()
    x = block_values(arguments["x_q"], arguments["x_sf"], fmt=config.activation, num=SEMANTIC)
    ends = []
    for rows, w_q, w_sf in zip(x.split(sizes), arguments["w_q"], arguments["w_sf"], strict=True):
        if len(rows):
            w = block_values(w_q, w_sf, fmt=config.routed, num=SEMANTIC)
            exact, error = rows @ w.T, u * (rows.abs() @ w.abs().T)
            ends.append(torch.stack([_bf16(exact - error), _bf16(exact + error)]))
    low, high = torch.cat(ends, 1) if ends else x.new_zeros(2, 0, arguments["w_q"].shape[1])
    return low, high


def expert_interval(arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """The lowest and the highest value before the quantiser: SwiGLU of either end of gate and up."""
    limit, weight = arguments["config"].swiglu_limit, arguments["weight_y"].to(torch.float64)[:, None]
    found = []
    for gate, up in itertools.product(*zip(*(x.chunk(2, 1) for x in _projections(arguments, u)), strict=True)):
        a = gate if limit is None else gate.clamp(max=limit)
        c = up if limit is None else up.clamp(-limit, limit)
        found.append(a / (1 + fp32(torch.exp(-a))) * c * weight)
    corners = torch.stack(found)
    low, high = corners.amin(0), corners.amax(0)
    return fp32(low - low.abs() * u), fp32(high + high.abs() * u)


def expert_scales(marks: Any, arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """The lowest and the highest stored scale, in value order."""
    fmt: QuantFormat = arguments["config"].activation
    low, high = expert_interval(arguments, u)
    least = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.abs(), high.abs()))
    most = torch.maximum(low.abs(), high.abs())
    ends = [scale_order(x.unflatten(-1, (-1, fmt.group)).amax(-1), fmt) for x in (least, most)]
    return ends[0], ends[1]


def expert_codes(marks: Any, arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """The lowest and the highest e4m3 code, in value order, under the stored scales."""
    fmt: QuantFormat = arguments["config"].activation
    sf: Tensor = arguments["sf"]
    scale = sf.to(torch.float64) if fmt.scale is ScaleKind.F32 else torch.exp2(sf.to(torch.float64) - 127)
    spread = scale.repeat_interleave(fmt.group, -1)
    low, high = (e4m3_order(fp32(x / spread)) for x in expert_interval(arguments, u))
    return low, high


# inputs


def _routing(rng: np.random.Generator, tokens: int, topk: int, experts: int, kind: str) -> Tensor:
    """Different experts in the slots of a token, where there are enough of them."""
    if kind == "one":
        rows = [np.full(topk, experts - 1) for _ in range(tokens)]
    elif kind == "two":
        rows = [np.arange(topk) % 2 + experts // 2 for _ in range(tokens)]
    elif kind == "ascending":
        rows = [(np.arange(topk) + t) % experts for t in range(tokens)]
    else:
        rows = [rng.permutation(max(experts, topk))[:topk] % experts for _ in range(tokens)]
    idx = np.array(rows, dtype=np.int64).reshape(tokens, topk)
    if kind == "holes":
        idx[rng.random(idx.shape) < 0.3] = -1
        idx[: tokens // 4] = -1
    return torch.from_numpy(np.full_like(idx, -1) if kind == "none" else idx)


def draw_dispatch(case: DispatchCase, rng: np.random.Generator) -> Inputs:
    """Slots as a strided view."""
    idx = _routing(rng, case.tokens, case.topk, case.experts, case.routing)
    roomy = torch.full((case.tokens, case.topk + 3), 2**40)
    roomy[:, : case.topk] = idx
    return {"idx_tk": roomy[:, : case.topk], "num_experts": case.experts, "alignment": case.alignment}


def draw_rows(case: DispatchCase, rng: np.random.Generator) -> Inputs:
    """Rows of bytes to copy, as codes are; the layout of a routing. Other element sizes: tests/test_moe.py."""
    idx = _routing(rng, case.tokens, case.topk, case.experts, case.routing)
    _, slot_y, _ = dispatch(idx, num_experts=case.experts, alignment=case.alignment)
    width = {"wide": 2500, "one": 1}.get(case.regime, 96)
    x = torch.from_numpy(rng.integers(0, 256, (case.tokens, width), dtype=np.uint8))
    return {"x_tm": draws.strided(x, pad=16), "slot_y": slot_y, "topk": case.topk}


def draw_combine(case: CombineCase, rng: np.random.Generator) -> Inputs:
    """Outputs of experts in a layout with gaps that hold NaN; ranks of empty slots are out of range."""
    dtype = draws.DTYPES[case.dtype]
    idx = _routing(rng, case.tokens, case.topk, max(8, case.topk), case.routing)
    row_tk, slot_y, _ = dispatch(idx, num_experts=max(8, case.topk), alignment=4)
    outputs = draws.rows(rng, len(slot_y), case.width, dtype=dtype, regime=case.regime)
    if case.regime == "cancel":  # U70: 1e8 + 1 - 1e8 + 1 ...
        signs = torch.tensor([1e8, 1.0, -1e8, 1.0])[torch.from_numpy(rng.integers(0, 4, outputs.shape))]
        outputs = signs.to(dtype)
    outputs[slot_y < 0] = torch.nan
    rank = torch.from_numpy(rng.integers(0, max(case.ranks, 1), idx.shape).astype(np.int32))
    node = (rank * case.nodes // max(case.ranks, 1)).to(torch.int32)
    empty = torch.full_like(rank, 2**31 - 1)
    return {
        "expert_ym": draws.strided(outputs, pad=8),
        "row_tk": row_tk,
        "rank_tk": torch.where(row_tk >= 0, rank, empty) if case.ranks else None,
        "node_tk": torch.where(row_tk >= 0, node, empty) if case.nodes else None,
        "shared_tm": draws.rows(rng, case.tokens, case.width, dtype=dtype, regime=case.regime) if case.shared else None,
        "rule": Combine.MULTIPLE if case.ranks else Combine.SINGLE,
        "dtype": dtype,
    }


def _weights(
    rng: np.random.Generator, experts: int, width: int, inner: int, fmt: QuantFormat, *, low_gate: bool = False
) -> ExpertWeights:
    """Quantised weights, gate and up of different size; 0 experts: the shared one, without an axis of experts."""
    lead = (experts,) if experts else ()

    def quantised(rows: int, columns: int, scale: float) -> tuple[Tensor, Tensor]:
        w = draws.normal(rng, *lead, rows, columns, dtype=torch.float32, scale=scale * columns**-0.5)
        w[..., : rows // 2, :] *= 1.5
        if low_gate and rows == 2 * inner:
            w[..., :inner, :] = -w[..., :inner, :].abs()
            w[..., inner:, :] *= 4
        pairs = [quantize(one, fmt=fmt) for one in (w if experts else w[None])]
        codes, sf = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        return (codes, sf) if experts else (codes[0], sf[0])

    w13_q, w13_sf = quantised(2 * inner, width, 1.0)
    w2_q, w2_sf = quantised(width, inner, 1.0)
    if fmt.scale is ScaleKind.F32:
        w13_sf, w2_sf = w13_sf.to(torch.float32), w2_sf.to(torch.float32)
    return ExpertWeights(w13_q=w13_q, w13_sf=w13_sf, w2_q=w2_q, w2_sf=w2_sf)


def draw_moe(case: MoeCase, rng: np.random.Generator) -> Inputs:
    """Rows quantised once; weights of experts that no slot names are NaN."""
    config = case.config
    low_gate = case.regime == "low_gate"
    regime = "normal" if case.regime == "clamped" or low_gate else case.regime
    x = draws.rows(rng, case.tokens, case.width, dtype=torch.bfloat16, regime=regime)
    if low_gate:  # every gate is near -12: beyond the limit, where it must not hold
        x = (x.abs() + 1) * (11.5 * case.width**-0.5)
    x_q, x_sf = quantize(x * 12 if case.regime == "clamped" else x, fmt=config.activation)
    idx = _routing(rng, case.tokens, case.topk, case.experts, case.routing)
    experts = _weights(rng, case.experts, case.width, case.inner, config.routed, low_gate=low_gate)
    unused = torch.ones(case.experts, dtype=torch.bool)
    unused[idx[idx >= 0]] = False
    for sf in (experts.w13_sf, experts.w2_sf):
        sf[unused] = torch.nan if sf.is_floating_point() else 255
    weights = torch.from_numpy(rng.uniform(0.05, 0.6, idx.shape).astype(np.float32))
    return {
        "x_q": x_q,
        "x_sf": x_sf.to(torch.float32) if x_sf.is_floating_point() else x_sf,
        "idx_tk": idx,
        "weights_tk": torch.where(idx >= 0, weights, torch.nan),
        "rank_e": torch.from_numpy(rng.permutation(np.arange(case.experts) % case.ranks).astype(np.int32))
        if case.ranks
        else None,
        "experts": experts,
        "shared": _weights(rng, 0, case.width, case.inner, config.shared) if case.shared else None,
        "config": config,
    }


def draw_expert(case: ExpertCase, rng: np.random.Generator) -> Inputs:
    """Rows quantised once, expert by expert; weights of experts without rows are NaN; routing weights 0 and 1."""
    config = MoeCase(tokens=0, topk=1, experts=1, width=0, inner=0, model=case.model).config
    low_gate = case.regime == "low_gate"
    x = draws.rows(
        rng,
        case.tokens,
        case.width,
        dtype=torch.bfloat16,
        regime="normal" if case.regime in ("clamped", "low_gate") else case.regime,
    )
    if low_gate:
        x = (x.abs() + 1) * (11.5 * case.width**-0.5)
    x_q, x_sf = quantize(x * 12 if case.regime == "clamped" else x, fmt=config.activation)
    experts = _weights(rng, len(case.sizes), case.width, case.inner, config.routed, low_gate=low_gate)
    unused = torch.tensor(case.sizes) == 0
    experts.w13_sf[unused] = torch.nan if experts.w13_sf.is_floating_point() else 255
    weight = torch.from_numpy(rng.uniform(0.05, 0.6, case.tokens).astype(np.float32))
    weight[1:2], weight[2:3] = 1.0, 0.0
    return {
        "x_q": x_q,
        "x_sf": x_sf.to(torch.float32) if x_sf.is_floating_point() else x_sf,
        "w_q": experts.w13_q,
        "w_sf": experts.w13_sf,
        "group_sizes_e": torch.tensor(case.sizes, dtype=getattr(torch, case.index)),
        "weight_y": draws.strided(weight[:, None], pad=3)[:, 0] if case.tokens else weight,
        "config": config,
    }


# cases


def cases_dispatch(full: bool) -> list[DispatchCase]:
    """One expert, more experts than slots, counts that cross a chunk of slots, holes, alignments."""
    small = DispatchCase(tokens=6, topk=3, experts=8)
    found = [replace(small, routing=r) for r in ("random", "one", "two", "holes", "none", "ascending")]
    found += [replace(small, alignment=a, routing="holes") for a in (4, 16, 128)]
    found += [replace(small, tokens=t) for t in (0, 1)] + [DispatchCase(tokens=3, topk=1, experts=1, alignment=8)]
    found += [DispatchCase(tokens=3, topk=6, experts=90), DispatchCase(tokens=65, topk=2, experts=5, alignment=8)]
    found += [DispatchCase(tokens=129, topk=1, experts=3, routing="holes")]
    if full:
        found += [DispatchCase(tokens=3, topk=6, experts=384)]
        found += [DispatchCase(tokens=300, topk=6, experts=e, alignment=a) for e, a in ((16, 128), (100, 1), (384, 8))]
    return list({case.id: case for case in found}.values())


def cases_rows(full: bool) -> list[DispatchCase]:
    """Rows longer than a block and of one byte, gaps."""
    small = DispatchCase(tokens=4, topk=2, experts=5, alignment=4)
    found = [replace(small, regime=r) for r in ("normal", "one", "wide")]
    found += [replace(small, routing="holes"), replace(small, routing="none"), replace(small, tokens=0)]
    return [*found, DispatchCase(tokens=40, topk=6, experts=16)] if full else found


def cases_combine(full: bool) -> list[CombineCase]:
    """Regimes, holes, one rank to many, two levels, the widths of V4.1 and of nothing."""
    small = CombineCase(tokens=4, topk=6, width=200)
    found = [replace(small, regime=r) for r in (*REGIMES, "cancel", "huge")]
    found += [replace(small, ranks=r, regime="cancel") for r in (1, 2, 3, 8)]
    least = CombineCase(tokens=3, topk=3, width=40, routing="holes")  # relations make many calls
    found += [least, replace(least, ranks=2), replace(least, ranks=3, nodes=2, regime="cancel")]
    found += [replace(small, ranks=4, nodes=2, shared=s) for s in (True, False)]
    found += [replace(small, ranks=3, routing="holes"), replace(small, routing="holes"), replace(small, shared=False)]
    found += [replace(small, routing="none", shared=s) for s in (True, False)]
    found += [replace(small, tokens=0), replace(small, topk=1, width=1), replace(small, topk=8, width=33, ranks=5)]
    found += [CombineCase(tokens=1, topk=6, width=5120), CombineCase(tokens=1, topk=8, width=1100, ranks=2)]
    found += [replace(small, dtype="fp32", regime="cancel"), replace(small, dtype="fp32", ranks=2)]
    if full:
        found += [
            CombineCase(tokens=5, topk=k, width=300, ranks=r, nodes=min(r, 2), regime=regime, routing=h)
            for k, r, regime, h in itertools.product((3, 6), (0, 2, 8), (*REGIMES, "cancel"), ("random", "holes"))
            if r or k == 3
        ]
    return list({case.id: case for case in found}.values())


def cases_expert(full: bool) -> list[ExpertCase]:
    """Regimes and limits, sizes of nothing, one and around a tile of 64 rows, widths around a tile of channels."""
    small = ExpertCase(sizes=(3, 0, 2, 1), width=128, inner=96)
    found = [replace(small, regime=r) for r in (*REGIMES, "clamped", "low_gate", "zeros")]
    found += [
        replace(small, sizes=(63, 0, 65), width=64, inner=32),
        replace(small, sizes=(1, 64), width=32, inner=160, index="int64"),
        replace(small, sizes=(0, 0)),
        replace(small, sizes=(2,), width=512, inner=64),
    ]
    return found + _more_experts(full, small)


def cases_expert_f32(full: bool) -> list[ExpertCase]:
    """V3: no limit, fp32 scales, groups of 128."""
    small = ExpertCase(sizes=(2, 0, 3), width=256, inner=128, model="v3")
    found = [replace(small, regime=r) for r in REGIMES] + [replace(small, sizes=(0,)), replace(small, inner=384)]
    return found + _more_experts(full, small)


def _more_experts(full: bool, small: ExpertCase) -> list[ExpertCase]:
    if not full:
        return []
    shapes = ((65, 65), (0, 130, 1), tuple(range(9)))
    return [replace(small, sizes=s, regime=r, inner=256) for s in shapes for r in REGIMES]


def cases_moe(full: bool) -> list[MoeCase]:
    """Regimes and limits on a small block, groups of nothing, one and more than a tile, both combines, V3's formats."""
    small = MoeCase(tokens=4, topk=3, experts=6, width=128, inner=64)
    found = [replace(small, regime=r) for r in (*REGIMES, "clamped")]
    found += [MoeCase(tokens=2, topk=2, experts=3, width=64, inner=32)]  # relations make many calls
    found += [replace(small, regime="low_gate", shared=False)]
    found += [
        replace(small, ranks=3, topk=6, experts=12),
        replace(small, routing="holes", tokens=5),
        replace(small, routing="none"),
    ]
    found += [replace(small, tokens=0), replace(small, shared=False, tokens=1)]
    found += [replace(small, tokens=66, topk=1, experts=2, routing="one", shared=False)]
    found += [replace(small, model="v3", width=256, inner=128, tokens=3)]
    found += [MoeCase(tokens=2, topk=2, experts=8, width=256, inner=128)]
    if full:
        found += [MoeCase(tokens=2, topk=3, experts=16, width=512, inner=256)]
        found += [replace(small, tokens=33, regime=r, ranks=n) for r in REGIMES for n in (0, 3)]
        found += [MoeCase(tokens=3, topk=6, experts=32, width=1024, inner=512)]
        found += [replace(small, tokens=130, topk=2, experts=2, routing="one", regime="mean1")]
    return list({case.id: case for case in found}.values())


# relation hooks


def independent_slots(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Rows of sums, alone and together; the outputs of the experts stay where they are."""
    yield from batch_invariant(inputs, context)
    yield from row_chunks(inputs, context)


def rows_moved(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The layout of the experts' outputs is free: other rows, the same sums; unused rows hold infinity."""
    outputs, rows = inputs["expert_ym"], inputs["row_tk"]
    for attempt in range(2):
        order = torch.from_numpy(context.rng.permutation(len(outputs)))
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        moved = outputs[order].clone()
        moved[moved.isnan().all(-1)] = torch.inf
        renamed = torch.where(rows >= 0, place[rows.clamp(min=0).long()], -1).to(torch.int32) if len(order) else rows
        yield Variant(label=f"layout {attempt}", calls=(inputs | {"expert_ym": moved, "row_tk": renamed},))


def ranks_renamed(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Which ranks exist does not matter, only which slots share one."""
    renamed = dict(inputs)
    for name in ("rank_tk", "node_tk"):
        if inputs[name] is not None:
            renamed[name] = inputs[name] ^ 5
    yield Variant(label="ranks renamed", calls=(renamed,))


def independent_tokens(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """A token's row does not depend on its mates, their number, their order or where they are routed."""
    op = context.op
    plain = inputs | {name: _bits(inputs[name]) for name in ("x_q", "x_sf", "weights_tk")}
    for variant in (*batch_invariant(plain, context), *row_chunks(plain, context)):
        yield replace(variant, calls=tuple(_typed(call, inputs) for call in variant.calls))
    t = inputs["idx_tk"].shape[0]
    for keep in range(min(t, 2)):
        mates = torch.arange(t) != keep
        crowded = take(plain, op, list(range(t)))
        crowded["x_q"][mates] = 0x7E  # the largest code
        for name in ("idx_tk", "weights_tk"):
            crowded[name][mates] = plain[name][keep].clone()  # all of them at the token's own experts
        pick = pick_rows(op, [keep])
        label = f"row {keep} among rows of its own experts"
        yield Variant(label=label, calls=(_typed(crowded, inputs),), join=lambda r, p=pick: p(r[0]), expect=pick)  # type: ignore[misc]


def _bits(x: Tensor) -> Tensor:
    # integers: filling rows with NaN is no input here, and not implemented for the narrow floats
    return x.contiguous().view({1: torch.uint8, 4: torch.int32}[x.element_size()])


def _typed(call: Inputs, like: Inputs) -> Inputs:
    return call | {name: call[name].contiguous().view(like[name].dtype) for name in ("x_q", "x_sf", "weights_tk")}


def independent_experts(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Rows moved inside their expert, experts moved, rows alone, and mates of the largest code: NaN is no input."""
    for variant in rows_of_experts(inputs, context):
        if "0xFF" not in variant.label:
            yield variant
            continue
        spoiled = variant.calls[0]["x_q"].view(torch.uint8)
        codes = torch.where(spoiled == 0xFF, 0x7E, spoiled).view(inputs["x_q"].dtype)
        label = variant.label.replace("bytes 0xFF", "the largest code")
        yield replace(variant, label=label, calls=(inputs | {"x_q": codes},))


def same_experts_again(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same call, on fresh poisoned outputs and after a call with the rows in another order."""
    other = inputs | {"x_q": inputs["x_q"].view(torch.uint8).flip(0).view(inputs["x_q"].dtype)}
    for launch in range(1, 20 if context.full else 3):
        first = other if launch % 2 == 0 else None
        yield Variant(label=f"launch {launch}", calls=(inputs,), first=first, fresh_out=launch % 2 == 1)


def experts_renumbered(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Experts in other places, and every expert held twice: the sum goes by slot, so the bits are the same."""
    experts: ExpertWeights = inputs["experts"]
    e = experts.w13_q.shape[0]
    names = ("w13_q", "w13_sf", "w2_q", "w2_sf")
    for copies in (1, 2):
        order = torch.from_numpy(context.rng.permutation(copies * e))
        held = ExpertWeights(
            **{n: _bits_or_same(getattr(experts, n))[order % e].view(getattr(experts, n).dtype) for n in names}
        )
        place = torch.empty(copies, e, dtype=torch.int64)
        place[order // e, order % e] = torch.arange(copies * e)
        idx = inputs["idx_tk"]
        copy = torch.from_numpy(context.rng.integers(0, copies, idx.shape))
        renamed = torch.where(idx >= 0, place[copy, idx.clamp(min=0)], -1)
        yield Variant(label=f"{copies} of each expert", calls=(inputs | {"experts": held, "idx_tk": renamed},))


def _bits_or_same(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def few_sums(case: Any) -> bool:
    """Relations make many calls: they run on narrow rows."""
    return case.width <= 64 and case.regime in ("normal", "cancel", "file")


def few_experts(case: Any) -> bool:
    """The same for whole blocks."""
    return case.width <= 64 and case.regime in ("normal", "file")


def single(case: Any) -> bool:
    """Where replicas must not change a bit."""
    return few_experts(case) and not case.ranks


def few_rows(case: Any) -> bool:
    """The same for the first half of an expert."""
    return case.regime in ("normal", "file") and case.tokens * case.inner * case.width <= 2**18 and case.tokens > 0


def few_slots(case: Any) -> bool:
    """The same for layouts."""
    return case.tokens <= 6 and case.experts <= 16 and case.routing in ("random", "holes")


def golden_dispatch() -> list[DispatchCase]:
    """A layout with and without gaps."""
    return [DispatchCase(tokens=4, topk=2, experts=5, alignment=a, routing="holes") for a in (1, 4)]


def golden_rows() -> list[DispatchCase]:
    """Two slots a token."""
    return [DispatchCase(tokens=2, topk=2, experts=3, alignment=2)]


def golden_combine() -> list[CombineCase]:
    """Both variants and both levels."""
    small = CombineCase(tokens=3, topk=6, width=16)
    return [small, replace(small, ranks=2), replace(small, ranks=4, nodes=2), replace(small, routing="holes", ranks=1)]


def golden_expert() -> list[ExpertCase]:
    """Both sides of the limits."""
    small = ExpertCase(sizes=(2, 0, 1), width=64, inner=32)
    return [small, replace(small, regime="clamped")]


def golden_moe() -> list[MoeCase]:
    """A block of each model."""
    small = MoeCase(tokens=3, topk=2, experts=4, width=128, inner=32)
    return [small, replace(small, regime="clamped", ranks=2), replace(small, model="v3", inner=128, routing="holes")]


DISPATCH = Op(
    name="dispatch",
    reference="deeptwin.reference.moe:dispatch",
    outputs=tuple(Output(name=name, rule=Bitwise(), dtype=torch.int32) for name in ("row_tk", "slot_y", "end_e")),
    cases=cases_dispatch,
    draw=draw_dispatch,
    rows={"idx_tk": 0},
    out_rows={"row_tk": 0},
    relations=(Relation(name="run_to_run", axis="repeats", only=few_slots),),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.moe:dispatch_triton"),),
    builds=(
        BuildCase(
            name="v41-count",
            kernel="deeptwin.kernels.triton_ops.moe:_count_slots",
            launch="deeptwin.parity.builds.launches.moe:dispatch_v41",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="v41-chunks",
            kernel="deeptwin.kernels.triton_ops.moe:_add_up_chunks",
            launch="deeptwin.parity.builds.launches.moe:dispatch_v41",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="v41-experts",
            kernel="deeptwin.kernels.triton_ops.moe:_place_experts",
            launch="deeptwin.parity.builds.launches.moe:dispatch_v41",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="v41-slots",
            kernel="deeptwin.kernels.triton_ops.moe:_place_slots",
            launch="deeptwin.parity.builds.launches.moe:dispatch_v41",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("dispatch_last_token_first", "U46", "the rows of an expert come in the order of falling tokens"),
        _mutant("dispatch_order_by_call", "U46", "the order of rows depends on the call, as with atomics"),
        _mutant("dispatch_hole_is_expert_0", "U79", "-1 counts as expert 0"),
        _mutant("dispatch_hole_is_last_expert", "U79", "-1 wraps to the last expert"),
        _mutant("dispatch_ends_aligned", "U58", "an end counts the padding rows"),
        _mutant("dispatch_starts_unaligned", "U29", "the alignment is ignored"),
        _mutant("dispatch_tail_stale", "U58", "rows that no slot has are left unwritten"),
        _mutant("dispatch_chunks_not_added", "U83", "slots beyond the first 128 start at the expert's first row again"),
        _mutant("dispatch_last_slot_lost", "U26", "the last slot has no row"),
        _mutant("dispatch_by_slot_major", "U46", "the rows of an expert are ordered by slot, then by token"),
    ),
    controls=(_control("right_dispatch"),),
    golden=golden_dispatch,
)

ROWS = Op(
    name="gather_rows",
    reference="deeptwin.reference.moe:gather_rows",
    outputs=(Output(name="rows_ym", rule=Bitwise(), dtype=torch.uint8),),
    cases=cases_rows,
    draw=draw_rows,
    rows={"slot_y": 0},
    out_rows={"rows_ym": 0},
    relations=(
        Relation(name="batch_invariant", axis="rows", only=few_slots),
        Relation(name="run_to_run", axis="repeats", only=few_slots),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.moe:gather_rows_triton"),),
    builds=(
        BuildCase(
            name="v41-codes",
            kernel="deeptwin.kernels.triton_ops.moe:_gather_rows",
            launch="deeptwin.parity.builds.launches.moe:rows_v41_codes",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="v41-weights",
            kernel="deeptwin.kernels.triton_ops.moe:_gather_rows",
            launch="deeptwin.parity.builds.launches.moe:rows_v41_weights",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("rows_padding_is_row_0", "U58", "a row without a slot is a copy of the first token"),
        _mutant("rows_padding_stale", "U58", "a row without a slot is left unwritten"),
        _mutant("rows_slot_as_token", "U29", "the slot is taken for the token"),
        _mutant("rows_last_column_lost", "U26", "the last channel is not copied"),
        _mutant("rows_of_token_slots", "U46", "token and slot change places"),
    ),
    controls=(_control("right_rows"),),
    golden=golden_rows,
)

COMBINE = Op(
    name="combine",
    reference="deeptwin.reference.moe:combine",
    outputs=(Output(name="y_tm", rule=Bitwise()),),
    cases=cases_combine,
    draw=draw_combine,
    rows={"row_tk": 0, "rank_tk": 0, "node_tk": 0, "shared_tm": 0},
    out_rows={"y_tm": 0},
    relations=(
        Relation(name="batch_invariant", axis="tokens and token chunks", hook=independent_slots, only=few_sums),
        Relation(name="run_to_run", axis="repeats", only=few_sums),
        Relation(name="page_permutation", axis="layout of the rows", hook=rows_moved, only=few_sums),
        Relation(
            name="head_permutation",
            axis="names of ranks",
            hook=ranks_renamed,
            only=lambda case: few_sums(case) and getattr(case, "ranks", 0) > 0,
        ),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.moe:combine_triton"),),
    builds=(
        BuildCase(
            name="v41-single",
            kernel="deeptwin.kernels.triton_ops.moe:_combine_slots",
            launch="deeptwin.parity.builds.launches.moe:combine_v41",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="v41-multiple",
            kernel="deeptwin.kernels.triton_ops.moe:_combine_groups",
            launch="deeptwin.parity.builds.launches.moe:combine_v41_ranks",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="v41-nodes",
            kernel="deeptwin.kernels.triton_ops.moe:_combine_groups",
            launch="deeptwin.parity.builds.launches.moe:combine_v41_nodes",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="tile-kernels",
            function=f"{PEERS}:reduce_fused",
            needs=("tile_kernels",),
            explains="slots in order in fp32, without a shared expert or ranks",
            only=lambda case: not case.ranks and not case.shared and case.dtype == "bf16",
        ),
        Peer(
            name="loop",
            function=f"{PEERS}:combine_by_token",
            needs=(),
            explains="numpy, token by token, after DeepEP's description: groups first, then last slots in order",
        ),
    ),
    mutants=(
        _mutant("combine_shared_last", "U70", "the shared expert is added last"),
        _mutant("combine_slots_backwards", "U70", "slots are added last to first"),
        _mutant("combine_in_row_order", "U70", "slots are added in the order of their rows, as they arrive"),
        _mutant("combine_pairwise", "U70", "slots are added in pairs"),
        _mutant("combine_bf16_accumulator", "U86", "every addition rounds to bf16"),
        _mutant("combine_truncated", "U86", "the sum is truncated"),
        _mutant("combine_single_for_multiple", "U70", "partial sums of ranks are not rounded"),
        _mutant("combine_multiple_for_single", "U70", "all slots are summed and rounded before the shared expert"),
        _mutant("combine_ranks_in_rank_order", "U70", "ranks are added in the order of their numbers"),
        _mutant("combine_ranks_at_first_slot", "U70", "a rank's sum stands in its first slot"),
        _mutant("combine_shared_in_first_rank", "U70", "the shared expert is added to the first rank's sum"),
        _mutant("combine_nodes_ignored", "U70", "the second level is left out"),
        _mutant("combine_ranks_of_first_token", "U09", "every token takes the ranks of the first"),
        _mutant("combine_hole_is_last_row", "U79", "row -1 wraps to the last row"),
        _mutant("combine_hole_times_nan", "U74", "a hole adds 0 · NaN"),
        _mutant("combine_hole_is_row_0", "U74", "a hole adds row 0"),
        _mutant("combine_empty_row_unwritten", "U75", "a token without slots is left unwritten"),
        _mutant("combine_last_slot_lost", "U26", "the last slot is not added"),
        _mutant("combine_shared_lost", "U85", "the shared expert is not added"),
    ),
    controls=(_control("right_combine"),),
    golden=golden_combine,
)

EXPERT_MUTANTS = (
    _mutant("up_gate_and_up_swapped", "U38", "w1 and w3 are swapped"),
    _mutant("up_not_clamped", "U50", "the limit is not passed from one product to the other"),
    _mutant("up_gate_clamped_below", "U39", "the gate is limited from below too"),
    _mutant("up_up_clamped_above_only", "U39", "the up projection is limited from above only"),
    _mutant("up_weight_ignored", "U39", "the routing weight is left out"),
    _mutant("up_weight_bf16", "U17", "the routing weight is rounded to bf16"),
    _mutant("up_weight_before", "U38", "the routing weight is applied to the expert's input"),
    _mutant("up_of_unrounded_product", "U86", "projections are not rounded to bf16"),
    _mutant("up_rounded_before_quantiser", "U86", "what is quantised is rounded to bf16 first"),
    _mutant("up_scale_of_batch", "U76", "rows of the batch share the largest amax"),
    _mutant("up_nibbles_swapped", "U57", "the even element is taken from the high nibble"),
    _mutant("up_scales_of_next_row", "U23", "a weight row takes the scales of the next one"),
    _mutant("up_expert_off_by_one", "U29", "rows go to the next expert"),
    _mutant("up_last_channels_lost", "U80", "the last 32 channels do not enter the product"),
    _mutant("up_rows_beyond_a_tile_lost", "U75", "an expert computes its first 64 rows only"),
)
EXPERT_CONTROLS = (
    _control("right_up_blocks_of_64"),
    _control("right_up_blocks_of_16_backwards"),
    _control("right_up_fast_exponential"),
)


def _expert_op(name: str, found: Any, sf: torch.dtype, build: BuildCase, *, v41: bool) -> Op:
    return Op(
        name=name,
        reference="deeptwin.reference.moe:expert_up",
        outputs=(
            Output(name="codes", rule=Codes(u=UP, allowed=expert_codes, order=ordered), dtype=torch.float8_e4m3fn),
            Output(name="sf", rule=Codes(u=UP, allowed=expert_scales, order=sf_order), dtype=sf),
        ),
        cases=found,
        draw=draw_expert,
        rows={"x_q": 0, "x_sf": 0, "weight_y": 0},
        out_rows={"codes": 0, "sf": 0},
        tile=64,
        relations=(
            Relation(name="batch_invariant", axis="rows, experts, mates", hook=independent_experts, only=few_rows),
            Relation(name="run_to_run", axis="repeats", hook=same_experts_again, only=few_rows),
        ),
        candidates=(Candidate(name="triton", function="deeptwin.optimized.moe:expert_up_triton"),),
        builds=(build,),
        mutants=EXPERT_MUTANTS if v41 else (),
        controls=EXPERT_CONTROLS if v41 else (),
        golden=golden_expert if v41 else tuple,
    )


EXPERT = _expert_op(
    "expert_up",
    cases_expert,
    torch.uint8,
    BuildCase(
        name="v41",
        kernel="deeptwin.kernels.triton_ops.moe_expert:_expert_up",
        launch="deeptwin.parity.builds.launches.moe:expert_v41",
        expect=PRODUCT | MATRIX,
    ),
    v41=True,
)
EXPERT_F32 = _expert_op(
    "expert_up_f32",
    cases_expert_f32,
    torch.float32,
    BuildCase(
        name="v3",
        kernel="deeptwin.kernels.triton_ops.moe_expert:_expert_up",
        launch="deeptwin.parity.builds.launches.moe:expert_v3",
        expect=PRODUCT | MATRIX,
    ),
    v41=False,
)

MOE = Op(
    name="moe",
    reference="deeptwin.reference.moe:moe",
    outputs=(Output(name="y_tm", rule=BLOCK, dtype=torch.bfloat16),),
    cases=cases_moe,
    draw=draw_moe,
    rows={"x_q": 0, "x_sf": 0, "idx_tk": 0, "weights_tk": 0},
    out_rows={"y_tm": 0},
    relations=(
        Relation(name="batch_invariant", axis="tokens, mates, routing", hook=independent_tokens, only=few_experts),
        Relation(name="run_to_run", axis="repeats", only=few_experts),
        Relation(name="head_permutation", axis="experts and replicas", hook=experts_renumbered, only=single),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.moe:moe_triton"),),
    peers=(
        Peer(
            name="transformers-v4",
            function=f"{PEERS}:transformers_v4",
            needs=("transformers",),
            explains="weighs after the down projection and quantises nothing in between: equal up to e4m3 steps of v",
            rules={"y_tm": Close(rtol=0.06)},
            only=lambda case: case.model == "v41" and case.routing == "random" and case.shared and case.tokens > 0,
        ),
    ),
    mutants=(
        _mutant("weight_after_down", "U38", "the routing weight is applied to the expert's output"),
        _mutant("weight_before_up", "U38", "the routing weight is applied to the expert's input"),
        _mutant("weight_bf16", "U17", "the routing weight is rounded to bf16"),
        _mutant("weight_of_first_slot", "U09", "every slot takes the weight of the first"),
        _mutant("weight_ignored", "U39", "the routing weight is left out"),
        _mutant("gate_and_up_swapped", "U38", "w1 and w3 are swapped"),
        _mutant("gate_clamped_below", "U39", "the gate is limited from below too"),
        _mutant("up_clamped_above_only", "U39", "the up projection is limited from above only"),
        _mutant("not_clamped", "U50", "the limit is not passed between the two products"),
        _mutant("shared_not_clamped", "U85", "the shared expert has no limit"),
        _mutant("shared_lost", "U85", "the shared expert is left out"),
        _mutant("shared_weighted", "U85", "the shared expert is weighed like the first slot"),
        _mutant("inner_not_quantised", "U86", "what stands between the products is rounded to bf16 only"),
        _mutant("inner_rounded_before_quantiser", "U86", "what stands between the products is rounded to bf16 first"),
        _mutant("up_product_not_rounded", "U86", "the up projection is not rounded to bf16"),
        _mutant("expert_output_not_rounded", "U86", "the output of an expert is not rounded to bf16"),
        _mutant("scale_of_batch", "U76", "one scale for all rows of a call"),
        _mutant("nibbles_swapped", "U57", "the even element is taken from the high nibble"),
        _mutant("scales_of_next_row", "U23", "a weight row takes the scales of the next one"),
        _mutant("expert_of_first_token", "U09", "every token goes to the experts of the first"),
        _mutant("expert_off_by_one", "U29", "slots go to the next expert"),
        _mutant("hole_is_expert_0", "U79", "an empty slot goes to expert 0"),
        _mutant("last_slot_lost", "U26", "the last slot is not computed"),
        _mutant("last_channels_lost", "U80", "the last 32 channels do not enter the first product"),
        _mutant("rows_beyond_a_tile_lost", "U83", "an expert computes its first 64 rows only"),
        _mutant("other_combine", "U70", "the other reduction"),
        _mutant("ranks_of_slots", "U70", "slots are grouped by their number, not by the rank of the expert"),
    ),
    controls=(
        _control("right_blocks_of_64"),
        _control("right_blocks_of_16_backwards"),
        _control("right_fast_exponential"),
    ),
    golden=golden_moe,
)

CARD = Card(
    component="moe",
    summary="mixture of experts: dispatch, grouped products with SwiGLU and requantisation, combine in slot order",
    contract={
        "dtypes": "rows e4m3 with scales per group; weights mxfp4 (routed) and e4m3 (shared); routing weights fp32; "
        "layout int32; outputs bf16",
        "rounding": "up projections to bf16, v to e4m3 with its routing weight, expert outputs to bf16, result to bf16",
        "combine": "SINGLE: 0 + shared + slots in order, fp32, one rounding; MULTIPLE: bf16 partial sums by rank "
        "(then node), each in its last slot, then as SINGLE",
        "layout": "expert by expert, the rows of an expert in token order; starts are aligned, ends are true",
        "empty": "index or row -1: nothing is read; a token without experts has the shared row, or zeros",
        "replicas": "the sum goes by slot: with SINGLE neither places nor copies of experts change a bit",
    },
    ops=(DISPATCH, ROWS, EXPERT, EXPERT_F32, COMBINE, MOE),
    equivalents=(
        Equivalent(name="limits before or after the bf16 rounding", reason="10 is a bf16 number"),
        Equivalent(
            name="two slots without a shared expert added in bf16 (DeepEP)", reason="one fp32 addition and one rounding"
        ),
        Equivalent(name="starting from the shared row instead of from zero", reason="0 + x = x but for the sign of 0"),
    ),
)
