"""How drafting is checked: exact rows, keys and hidden rows on budgets, heads on intervals of honest sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import (
    FP8_32X32,
    KV_FP8,
    MHC_V41,
    MXFP4,
    ROUTER_V41_DRAFT,
    Combine,
    DraftBlock,
    PageLayout,
    QuantFormat,
    RopeConfig,
    ScoreOrder,
    SlidingWindow,
    moe_v41,
)
from deeptwin.reference.csa2_config import CastPoints, Csa2Config, tiny_csa2
from deeptwin.reference.dspark import draft_rows
from deeptwin.reference.dspark_state import DraftConfig, DraftLayer
from deeptwin.reference.kv_cache import pack_records
from deeptwin.reference.quant import quantize
from deeptwin.reference.rope import rope_frequencies, rope_table
from deeptwin.reference.topology import Topology
from deeptwin.reference.weights import Csa2Weights, ExpertWeights, MhcSite

from .. import draws
from ..builds.ascend_presets import MATRIX, VECTOR
from ..builds.presets import NO_PRODUCT, PRODUCT
from ..builds.spec import BuildCase
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Relation, variants
from ..relations import Context, Variant, row_chunks
from ..rules import CSA2_SIDE, CSA2_STACK, Bitwise, Budget, OneRounding, Within

_mutant, _control = variants("dspark")
_forward, _right_forward = variants("dspark_forward")
F32, BF16 = torch.float32, torch.bfloat16

# a Markov step is an fp32 product whose accumulator starts with logits: the limits of `linear`'s fp32 results
MARKOV = Budget(
    kind="fp32 product", floor=1.0, row=200.0, total=150.0, element_factor=64.0, element_slack=256.0, bias=256.0
)


@dataclass(frozen=True, kw_only=True)
class BlockCase:
    """`requests` of `draft` drafts over a window in a ring; some begin, some restart, one is padding."""

    requests: int
    draft: int = 5
    window: int = 8
    spare: int = 6
    index: str = "int32"
    padding: bool = True
    regime: str = "normal"

    @property
    def id(self) -> str:
        pad = "-pad" if self.padding else ""
        return f"b{self.requests}-j{self.draft}-w{self.window}+{self.spare}-{self.index}{pad}-{self.regime}"

    @property
    def block(self) -> DraftBlock:
        window = SlidingWindow(window=self.window, ring=self.window + self.spare)
        return DraftBlock(draft=self.draft, noise_token=128799, window=window)


@dataclass(frozen=True, kw_only=True)
class FeatureCase:
    """`tokens` rows of `width` from `layers` target layers (or for `layers` draft layers)."""

    tokens: int
    width: int = 64
    layers: int = 3
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-m{self.width}-l{self.layers}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class HeadCase:
    """`requests` rows: hidden `width`, `vocab` tokens, tables of `rank`."""

    requests: int
    vocab: int = 96
    rank: int = 32
    width: int = 96
    temperature: float = 1.0
    regime: str = "normal"

    @property
    def id(self) -> str:
        sizes = f"b{self.requests}-v{self.vocab}-r{self.rank}-m{self.width}"
        return f"{sizes}-T{self.temperature:g}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class ForwardCase:
    """A whole draft forward of `requests`: `layers` layers over rings of random keys."""

    requests: int
    draft: int = 3
    layers: int = 1
    cast: str = "release"
    layout: str = "interleaved"
    padding: bool = False
    regime: str = "normal"

    @property
    def id(self) -> str:
        pad = "-pad" if self.padding else ""
        return f"b{self.requests}-j{self.draft}-l{self.layers}-{self.cast}-{self.layout}{pad}-{self.regime}"

    @property
    def tokens(self) -> int:
        """Rows of all blocks."""
        return self.requests * self.draft


# inputs


def draw_rows(case: BlockCase, rng: np.random.Generator) -> Inputs:
    """Sequences that begin, that restart inside their window, and that are far into the ring."""
    b, ring = case.requests, case.window + case.spare
    first = rng.integers(0, 4 * ring, b)
    first[: b // 3] = rng.integers(0, case.window, b // 3)
    accepted = rng.integers(0, case.draft + 1, b)
    valid = np.where(rng.random(b) < 0.4, np.maximum(first - rng.integers(0, case.window, b), 0), 0)
    if case.padding and b:
        first[-1] = -1
    return {
        "golden_b": _ints(case, rng.integers(0, 129280, b)),
        "first_b": _ints(case, first),
        "accepted_b": _ints(case, accepted),
        "state_b": _ints(case, rng.permutation(b + 2)[:b] + 1),
        "valid_b": _ints(case, valid),
        "block": case.block,
    }


def _ints(case: BlockCase, x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.astype(np.int64)).to(torch.int64 if case.index == "int64" else torch.int32)


def draw_features(case: FeatureCase, rng: np.random.Generator) -> Inputs:
    """One stream for each target layer; they are of different size."""
    shape = (case.tokens * MHC_V41.streams, case.width)
    streams = (draws.rows(rng, *shape, dtype=BF16, regime=case.regime) * 2.0**i for i in range(case.layers))
    return {"streams_ztnm": tuple(x.view(case.tokens, MHC_V41.streams, case.width) for x in streams)}


def fp8(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> tuple[Tensor, Tensor]:
    """A weight in FP8_32X32."""
    return quantize(draws.normal(rng, rows, columns, dtype=BF16, scale=columns**-0.5 * gain), fmt=FP8_32X32)


def norm(rng: np.random.Generator, width: int) -> Tensor:
    """The weight of a norm."""
    return draws.normal(rng, width, dtype=BF16, scale=0.1, mean=1.0)


def draw_keys(case: FeatureCase, rng: np.random.Generator) -> Inputs:
    """Features of two target layers; keys of 128 channels of which 64 turn."""
    rope = RopeConfig(rope_dim=64, theta=10000.0, yarn=None)
    return {
        "features_tz": draws.rows(rng, case.tokens, 2 * case.width, dtype=BF16, regime=case.regime),
        **dict(zip(("proj_q", "proj_sf"), fp8(rng, case.width, 2 * case.width), strict=True)),
        "norm_m": norm(rng, case.width),
        "wkv": tuple((*fp8(rng, 128, case.width), norm(rng, 128)) for _ in range(case.layers)),
        "table_sr": rope_table(torch.arange(40), rope_frequencies(rope)),
        "positions_t": torch.from_numpy(rng.integers(0, 39, case.tokens).astype(np.int32)),
        "eps": 1e-20,
    }


def draw_markov(case: HeadCase, rng: np.random.Generator) -> Inputs:
    """Base logits as a strided view, in the regime; tables that add to them."""
    base = draws.rows(rng, case.requests, case.vocab, dtype=F32, regime=case.regime)
    tables = (draws.normal(rng, case.vocab, case.rank, dtype=BF16, scale=case.rank**-0.25) for _ in range(2))
    return {
        "base_bv": draws.strided(base, pad=8),
        "token_b": _tokens(case, rng),
        **dict(zip(("w1_vr", "w2_vr"), tables, strict=True)),
    }


def _tokens(case: HeadCase, rng: np.random.Generator) -> Tensor:
    token = torch.from_numpy(rng.integers(0, case.vocab, case.requests))
    if case.requests > 1:
        token[:2] = torch.tensor([0, case.vocab - 1])
    return token


def draw_head(case: HeadCase, rng: np.random.Generator) -> Inputs:
    """Rows whose logits are a few units, or far beyond the limits (`beyond`)."""
    beyond = case.regime == "beyond"
    h = draws.rows(rng, case.requests, case.width, dtype=BF16, regime="normal" if beyond else case.regime)
    weight = draws.normal(rng, case.width + case.rank, dtype=BF16, scale=(case.width + case.rank) ** -0.5)
    return {
        "h_bm": draws.strided(h * 60 if beyond else h, pad=8),
        "token_b": _tokens(case, rng),
        "w1_vr": draws.normal(rng, case.vocab, case.rank, dtype=BF16, scale=2.0),
        "weight_x": weight,
        "temperature": case.temperature,
    }


def head_interval(arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """Confidences of sums that are off by u of their terms' sizes; a fast exponential is off by |x| / 4 units more."""
    token = arguments["token_b"].long()
    row = torch.cat([arguments["h_bm"], arguments["w1_vr"][token]], 1).double() * arguments["weight_x"].double()
    divisor = max(arguments["temperature"], 1e-5)
    logit, off = row.sum(1) / divisor, row.abs().sum(1) * u / divisor
    off = off + logit.abs() * 2.0**-21
    ends = []
    for x, sign in ((logit - off, -1), (logit + off, 1)):
        x = x.clamp(-60, 60)
        ends.append(torch.sigmoid(x) * (1 + sign * (2.0**-21 + x.abs() * 2.0**-22 * torch.sigmoid(-x))))
    return ends[0], ends[1]


NONE = Topology(
    ratios=(0,),
    draft_layers=1,
    kv_sources=(),
    index_sources=(),
    index_k_sources=(),
    index_heads=2,
    index_dim=128,
    index_topk=4,
    candidate_source=None,
    candidate_blocks=8,
    candidate_size=8,
)


def config_of(case: ForwardCase) -> DraftConfig:
    """Narrow rows, real records, four experts of which two are taken."""
    csa2 = tiny_csa2(cast=CastPoints(case.cast), score_order=ScoreOrder.BF16_CHAINS, layout=PageLayout(case.layout))
    return DraftConfig(
        csa2=replace(csa2, hidden=32, num_heads=2, q_rank=32, topology=NONE),
        mhc=MHC_V41,
        router=replace(ROUTER_V41_DRAFT, num_experts=4, topk=2),
        moe=moe_v41(Combine.SINGLE),
    )


def _experts(rng: np.random.Generator, count: int, hidden: int, fmt: QuantFormat) -> ExpertWeights:
    def quantised(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        pairs = [
            quantize(draws.normal(rng, rows, columns, dtype=F32, scale=columns**-0.5), fmt=fmt)
            for _ in range(max(count, 1))
        ]
        codes, sf = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        return (codes, sf) if count else (codes[0], sf[0])

    (w13_q, w13_sf), (w2_q, w2_sf) = quantised(2 * hidden, hidden), quantised(hidden, hidden)
    return ExpertWeights(w13_q=w13_q, w13_sf=w13_sf, w2_q=w2_q, w2_sf=w2_sf)


def _site(rng: np.random.Generator, width: int) -> MhcSite:
    fn, base = draws.normal(rng, 24, width, dtype=F32, scale=width**-0.5), draws.normal(rng, 24, dtype=F32)
    base[8:] *= 4  # a mixing matrix that is far from its transpose
    return MhcSite(fn_wx=fn, scale_z=torch.tensor([1.25, 0.75, 1.5]), base_w=base)


def _attention(rng: np.random.Generator, config: Csa2Config, regime: str) -> Csa2Weights:
    m, d, a, heads = config.hidden, config.head_dim, config.q_rank, config.num_heads
    pairs = {
        "wq_a": fp8(rng, a, m),
        "wq_b": fp8(rng, heads * d, a, {"peaked": 4.0, "flat": 0.1}.get(regime, 1.0)),
        "wkv": fp8(rng, d, m),
        "wo_a": fp8(rng, config.o_groups * config.o_rank, heads * d // config.o_groups),
        "wo_b": fp8(rng, m, config.o_groups * config.o_rank),
    }
    return Csa2Weights(
        attn_norm_m=draws.normal(rng, m, dtype=BF16, scale=0.6, mean=1.0),
        q_norm_a=norm(rng, a),
        kv_norm_d=norm(rng, d),
        sink_h=draws.normal(rng, heads, dtype=F32),
        **{f"{name}_{part}": x for name, pair in pairs.items() for part, x in zip(("q", "sf"), pair, strict=True)},
    )


def draw_forward(case: ForwardCase, rng: np.random.Generator) -> Inputs:
    """Rings hold keys of accepted tokens, and NaN where nothing was accepted; experts are settled by the bias."""
    config = config_of(case)
    csa2, block = config.csa2, BlockCase(requests=case.requests, draft=case.draft, window=4, padding=case.padding)
    rows = draw_rows(block, rng)
    _, positions, slots, seen = draft_rows(**rows)
    width = csa2.main.channels
    used = torch.zeros((case.requests + 3) * (block.window + block.spare), dtype=torch.bool)
    used[seen[seen >= 0].long()] = True
    used[slots[slots >= 0].long()] = False
    ring = block.window + block.spare
    rings = []
    for _ in range(case.layers):
        records = pack_records(draws.normal(rng, len(used), width, dtype=BF16), fmt=KV_FP8)
        records[~used] = 0xFF
        pages = records.view(-1, ring, KV_FP8.record_bytes)
        if csa2.layout is PageLayout.SECTIONED:
            data = KV_FP8.data_bytes
            pages = torch.cat([pages[..., :data].flatten(1), pages[..., data:].flatten(1)], 1).view_as(pages)
        rings.append(pages.contiguous())
    m = csa2.hidden
    layers = tuple(
        DraftLayer(
            attention=_attention(rng, csa2, case.regime),
            attention_site=_site(rng, 4 * m),
            ffn_site=_site(rng, 4 * m),
            ffn_norm_m=norm(rng, m),
            gate_em=draws.normal(rng, 4, m, dtype=BF16, scale=m**-0.5),
            bias_e=torch.from_numpy(rng.permutation(4).astype(np.float32) * 20),
            experts=_experts(rng, 4, m, MXFP4),
            shared=_experts(rng, 0, m, FP8_32X32),
        )
        for _ in range(case.layers)
    )
    shape = (case.requests * case.draft, m)
    embed = draws.rows(rng, *shape, dtype=BF16, regime=case.regime if case.regime == "mean1" else "normal")
    return {
        "embed_bjm": embed.view(case.requests, case.draft, m),
        "layers": layers,
        "rings": tuple(rings),
        "table_sr": rope_table(torch.arange(80), rope_frequencies(csa2.rope_window)),
        "positions_bj": positions,
        "slots_bj": slots,
        "seen_bk": seen,
        "config": config,
    }


# cases


def cases_rows(full: bool) -> list[BlockCase]:
    """Windows and blocks of several lengths, both index types, padding, no request."""
    small = BlockCase(requests=7)
    found = [small, replace(small, padding=False, index="int64"), replace(small, requests=0)]
    found += [BlockCase(requests=5, window=128, spare=6), BlockCase(requests=4, window=1, draft=1, spare=2)]
    found += [BlockCase(requests=4, window=60, draft=4, spare=5), BlockCase(requests=4, draft=32, spare=33)]
    return [*found, BlockCase(requests=200, window=128)] if full else found


def cases_features(full: bool) -> list[FeatureCase]:
    """Every regime, no token, the width of the release."""
    small = FeatureCase(tokens=3)
    found = [replace(small, regime=r) for r in (*REGIMES, "cancel")]
    found += [replace(small, tokens=0), replace(small, layers=1), replace(small, width=100)]
    return [*found, FeatureCase(tokens=2, width=5120)] if full else found


def cases_keys(full: bool) -> list[FeatureCase]:
    """Every regime, one layer, more tokens than a tile."""
    small = FeatureCase(tokens=4, layers=2)
    found = [replace(small, regime=r) for r in REGIMES]
    return [*found, replace(small, layers=1, tokens=1), *([replace(small, tokens=70)] if full else [])]


def cases_markov(full: bool) -> list[HeadCase]:
    """Every regime, ranks and vocabularies that are no multiple of a tile, no request."""
    small = HeadCase(requests=3)
    found = [replace(small, regime=r) for r in (*REGIMES, "zeros", "ties")]
    found += [replace(small, requests=0), replace(small, vocab=130, rank=70), replace(small, requests=1, rank=1)]
    found += [replace(small, requests=66, vocab=33)]
    return [*found, HeadCase(requests=2, vocab=1280, rank=256)] if full else found


def cases_head(full: bool) -> list[HeadCase]:
    """Every regime, beyond both limits, temperatures, widths that are no multiple of a block, the release's sizes."""
    small = HeadCase(requests=6)
    found = [replace(small, regime=r) for r in (*REGIMES, "zeros", "beyond", "cancel")]
    found += [replace(small, temperature=t) for t in (0.5, 2.0, 0.0)]
    found += [replace(small, temperature=40.0, regime="beyond")]
    found += [replace(small, requests=0), replace(small, width=1, rank=1, requests=2)]
    found += [replace(small, width=1100, rank=40), HeadCase(requests=2, width=5120, rank=256)]
    return found


def cases_forward(full: bool) -> list[ForwardCase]:
    """Every regime with one layer, both cast points and layouts, a padding request, three layers."""
    small = ForwardCase(requests=2)
    found = [replace(small, regime=r) for r in REGIMES]
    found += [replace(small, cast="fused", layout="sectioned", draft=1), replace(small, padding=True, layers=2)]
    found += [replace(small, draft=2)]
    return [*found, replace(small, layers=3, draft=5, requests=3)] if full else found


# relation hooks


def vocabulary_in_parts(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Requests in chunks; and the vocabulary in two parts, as ranks would hold it, each with the whole first table."""
    yield from row_chunks(inputs, context)


def other_places(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The last request alone, with the states in other pages of the rings."""
    rows = ("embed_bjm", "positions_bj", "slots_bj", "seen_bk")
    pages, ring = inputs["rings"][0].shape[:2]
    order = torch.from_numpy(context.rng.permutation(pages))
    place = torch.empty_like(order)
    place[order] = torch.arange(pages)

    def moved(slot: Tensor) -> Tensor:
        page, within = slot.clamp(min=0) // ring, slot.clamp(min=0) % ring
        return torch.where(slot >= 0, place[page.long()] * ring + within, -1).to(torch.int32)

    alone: dict[str, Any] = {name: inputs[name][-1:].contiguous() for name in rows}
    alone |= {name: moved(alone[name]) for name in ("slots_bj", "seen_bk")}
    alone["rings"] = tuple(x[order].contiguous() for x in inputs["rings"])
    yield Variant(
        label="the last request alone, states in other pages",
        calls=(inputs | alone,),
        expect=lambda outputs: {"h_bjm": outputs["h_bjm"][-1:]},
    )


def last_row_changes_all(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Keys of the block in another order of rows: attention is bidirectional, so rows only change places."""
    j = inputs["embed_bjm"].shape[1]
    order = torch.arange(j).flip(0)
    rows = ("embed_bjm", "positions_bj", "slots_bj")
    changed = inputs | {name: inputs[name][:, order].contiguous() for name in rows}
    yield Variant(
        label="rows of the block backwards",
        calls=(changed,),
        expect=lambda outputs: {name: x[:, order] for name, x in outputs.items()},
    )


def small_heads(case: HeadCase) -> bool:
    """Relations make many calls."""
    return case.requests == 3 and case.regime in ("normal", "peaked") and case.rank < 40


def one_head(case: HeadCase) -> bool:
    """A row is a program."""
    return case.requests == 6 and case.width == 96 and case.regime == "normal" and case.temperature == 1


def only_small(case: ForwardCase) -> bool:
    """A forward is some thirty launches."""
    return case.draft == 2


def many_kernels(case: ForwardCase) -> str | None:
    """What the interpreter leaves out."""
    if case.draft != 2 and case.cast != "fused":
        return "some thirty kernels a layer under an interpreter"
    return None


ONE_KERNEL = "every size is a kernel of its own to lower"
ROWS_B = dict.fromkeys(("golden_b", "first_b", "accepted_b", "state_b", "valid_b"), 0)

ROW_PARTS = ("ids_bj", "positions_bj", "slots_bj", "seen_bk")
ROWS = Op(
    name="draft_rows",
    reference="deeptwin.reference.dspark:draft_rows",
    outputs=tuple(
        Output(name=name, rule=Bitwise(), dtype=torch.int32)
        for name in ("ids_bj", "positions_bj", "slots_bj", "seen_bk")
    ),
    cases=cases_rows,
    draw=draw_rows,
    rows=ROWS_B,
    out_rows=dict.fromkeys(ROW_PARTS, 0),
    relations=(
        Relation(name="batch_invariant", axis="requests", only=lambda case: 4 < case.requests < 20),
        Relation(name="run_to_run", axis="repeats", only=lambda case: 4 < case.requests < 20),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.dspark:draft_rows_triton",
            lowered_declines=lambda case: None if case.requests == 7 and case.padding else ONE_KERNEL,
        ),
    ),
    builds=(
        BuildCase(
            name="w128-j5",
            kernel="deeptwin.kernels.triton_ops.dspark:_draft_rows",
            launch="deeptwin.parity.builds.launches.dspark:rows",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("block_one_early", "U61", "the block is seeded one position early"),
        _mutant("block_one_late", "U61", "the block is seeded one position late"),
        _mutant("accepted_forgotten", "U62", "the block stands behind the step's first row, whatever was accepted"),
        _mutant("golden_last", "U61", "the sampled token is the last input"),
        _mutant("golden_everywhere", "U49", "the sampled token fills the block"),
        _mutant("golden_missing", "U49", "the block is all noise"),
        _mutant("window_one_more", "U26", "W + 1 accepted keys are seen"),
        _mutant("window_one_less", "U26", "W - 1 accepted keys are seen"),
        _mutant("stride_of_window", "U36", "the ring has the stride of the window"),
        _mutant("padding_in_slot_0", "U79", "padding rows are stored in slot 0"),
        _mutant("padding_reads_token", "U40", "a padding request has a sampled token"),
        _mutant("first_key_of_block", "U61", "every row sees the first key of the block alone, as under a causal mask"),
        _mutant("block_unseen", "U61", "no key of the block is seen"),
        _mutant("restart_ignored", "U34", "keys before the restart of the state are seen"),
        _mutant("state_by_request", "U09", "the place in the batch names the state"),
        _mutant("newest_first", "U46", "keys come newest first"),
        _mutant("noise_zero", "U40", "token 0 fills the block"),
        _mutant("before_the_sequence", "U79", "positions below 0 wrap around the ring"),
    ),
    controls=(_control("right_rows"),),
    golden=lambda: [BlockCase(requests=4, window=3, draft=2, spare=4)],
)

FEATURES = Op(
    name="target_features",
    reference="deeptwin.reference.dspark:target_features",
    outputs=(Output(name="features_tz", rule=OneRounding(cancellation=1.0), dtype=BF16),),
    cases=cases_features,
    draw=draw_features,
    rows={},
    out_rows={},
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.dspark:target_features_triton",
            lowered_declines=lambda case: "the card of mhc lowers its kernel",
        ),
    ),
    mutants=(
        _mutant("sum_of_streams", "R14", "the sum of the streams, not their mean"),
        _mutant("first_stream", "U39", "the first stream alone"),
        _mutant("layers_reversed", "U23", "target layers in reverse order"),
        _mutant("sum_in_bf16", "U17", "streams are added in bf16"),
        _mutant("features_of_token_before", "U61", "features of the token before"),
    ),
    controls=(_control("right_features"),),
    golden=lambda: [FeatureCase(tokens=2, width=8, layers=2)],
)

KEYS = Op(
    name="main_keys",
    reference="deeptwin.reference.dspark:main_keys",
    outputs=(Output(name="keys_tid", rule=CSA2_SIDE, dtype=BF16),),
    cases=cases_keys,
    draw=draw_keys,
    rows={"features_tz": 0, "positions_t": 0},
    out_rows={"keys_tid": 0},
    relations=(
        Relation(
            name="chunk_invariant",
            axis="row chunks",
            hook=row_chunks,
            only=lambda case: case.regime == "normal" and case.tokens == 4,
        ),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.dspark:main_keys_triton",
            interpreter_declines=lambda case: (
                "two regimes are enough for a chain of kernels" if case.regime in ("flat", "mean1") else None
            ),
            lowered_declines=lambda case: "the cards of its kernels lower them one by one",
        ),
    ),
    mutants=(
        _mutant("main_norm_missing", "U39", "projected features are not normalised"),
        _mutant("key_norm_missing", "U39", "keys are not normalised"),
        _mutant("keys_of_first_layer", "U63", "every draft layer has the keys of the first"),
        _mutant("keys_reversed", "U63", "layers in reverse order"),
        _mutant("keys_half_split", "U38", "channels i and i + r / 2 turn together"),
        _mutant("keys_not_turned", "U30", "keys carry no position"),
        _mutant("keys_turned_in_front", "U12", "the first channels turn"),
        _mutant("keys_one_position_late", "U61", "keys are turned by the next position"),
        _mutant("products_unquantised", "U86", "inputs of both products stay bf16"),
        _mutant("second_product_unquantised", "U86", "the normalised row stays bf16"),
    ),
    controls=(_control("right_keys"),),
    golden=lambda: [FeatureCase(tokens=2, layers=2)],
)

FORWARD = Op(
    name="draft_hidden",
    reference="deeptwin.reference.dspark:draft_hidden",
    outputs=(Output(name="h_bjm", rule=CSA2_STACK, dtype=BF16),),
    cases=cases_forward,
    draw=draw_forward,
    rows={},
    out_rows={},
    relations=(
        Relation(name="batch_invariant", axis="requests and states", hook=other_places, only=only_small),
        Relation(
            name="head_permutation",
            axis="rows of the block",
            promise="within contract",
            hook=last_row_changes_all,
            only=only_small,
        ),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.dspark:draft_hidden_triton",
            interpreter_declines=many_kernels,
            lowered_declines=lambda case: "the cards of its kernels lower them one by one",
        ),
    ),
    mutants=(
        _forward("causal_block", "U61", "rows of a block see themselves and those before"),
        _forward("own_key_alone", "U61", "a row sees its own key of the block alone"),
        _forward("block_keys_unseen", "U61", "no row sees the block"),
        _forward("accepted_keys_unseen", "U34", "no row sees accepted keys"),
        _forward("positions_late", "U61", "the block is turned by the positions behind its own"),
        _forward("ring_of_first_layer", "U63", "all layers read the ring of the first"),
        _forward("sink_ignored", "U87", "no sink"),
        _forward("query_heads_normed", "U11", "the per-head query norm of V4"),
        _forward("scale_off", "U05", "scores are half as large"),
        _forward("own_pre", "U38", "sub-layers read with their own coefficients: the schedule of V4"),
        _forward("last_update_missing", "U39", "the last update of the streams is left out"),
        _forward("comb_transposed", "U38", "the mixing matrix is transposed"),
        _forward("attention_norm_missing", "U39", "attention reads rows that are not normalised"),
        _forward("ffn_norm_missing", "U39", "experts read rows that are not normalised"),
        _forward("shared_expert_missing", "U39", "no shared expert"),
        _forward("weights_missing", "U39", "experts are not weighted"),
        _forward("bias_ignored", "U49", "experts are ranked without the bias"),
        _forward("other_blocks_seen", "U09", "keys of all blocks of the batch are seen"),
    ),
    controls=(
        _right_forward("right_forward"),
        replace(_control("right_in_place"), declines=lambda case: None if case.draft == 2 else "one case is enough"),
    ),
    golden=lambda: [ForwardCase(requests=2, draft=2)],
)

MARKOV_STEP = Op(
    name="markov_step",
    reference="deeptwin.reference.dspark:markov_step",
    outputs=(Output(name="logits_bv", rule=MARKOV, dtype=F32),),
    cases=cases_markov,
    draw=draw_markov,
    rows={"base_bv": 0, "token_b": 0},
    out_rows={"logits_bv": 0},
    tile=64,
    relations=(
        Relation(name="batch_invariant", axis="requests", only=small_heads),
        Relation(name="run_to_run", axis="repeats", only=small_heads),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.dspark:markov_step_triton",
            lowered_declines=lambda case: (
                None if case.requests == 3 and case.rank == 32 and case.regime in ("normal", "peaked") else ONE_KERNEL
            ),
        ),
    ),
    builds=(
        BuildCase(
            name="v129280-r256",
            kernel="deeptwin.kernels.triton_ops.dspark:_markov_step",
            launch="deeptwin.parity.builds.launches.dspark:markov",
            expect=PRODUCT | MATRIX,
        ),
    ),
    mutants=(
        _mutant("tables_exchanged", "U49", "the two tables are exchanged"),
        _mutant("first_table_twice", "U49", "the first table stands in both places"),
        _mutant("base_in_bf16", "U17", "base logits are rounded to bf16"),
        _mutant("base_missing", "U49", "the step's own logits are left out"),
        _mutant("product_in_bf16", "U17", "the product is rounded to bf16"),
        _mutant("token_of_mate", "U09", "a request reads the token of its neighbour"),
        _mutant("next_token", "U61", "the row of the token with the next id"),
        _mutant("product_scaled", "U49", "the product is scaled by rank^-1/2"),
        _mutant("last_rank_left_out", "U80", "the last rank is left out"),
        _mutant("last_token_left_out", "U26", "the last token of the vocabulary gets its base alone"),
    ),
    controls=(_control("right_markov"), _control("right_markov_backwards")),
    golden=lambda: [HeadCase(requests=2, vocab=12, rank=8)],
)

HEAD = Op(
    name="confidence",
    reference="deeptwin.reference.dspark:confidence",
    outputs=(Output(name="confidence_b", rule=Within(u=2.0**-20, interval=head_interval), dtype=F32),),
    cases=cases_head,
    draw=draw_head,
    rows={"h_bm": 0, "token_b": 0},
    out_rows={"confidence_b": 0},
    relations=(
        Relation(name="batch_invariant", axis="requests", only=one_head),
        Relation(name="layout_invariant", axis="alignment of rows", only=one_head),
        Relation(name="run_to_run", axis="repeats", only=one_head),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.dspark:confidence_triton",
            lowered_declines=lambda case: None if one_head(case) else ONE_KERNEL,
        ),
    ),
    builds=(
        BuildCase(
            name="m5120-r256",
            kernel="deeptwin.kernels.triton_ops.dspark:_confidence",
            launch="deeptwin.parity.builds.launches.dspark:head",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("normed_row", "U39", "the row behind the final norm: where it was trained, not where it is served"),
        _mutant("token_part_of_mate", "U09", "a request reads the token of its neighbour"),
        _mutant("token_part_missing", "U49", "the hidden row alone"),
        _mutant("temperature_multiplies", "R14", "the logit is multiplied by the temperature"),
        _mutant("temperature_ignored", "U49", "the temperature is ignored"),
        _mutant("limit_before_temperature", "U50", "the limit holds before the temperature"),
        _mutant("limit_missing", "U50", "logits are not limited"),
        _mutant("limit_30", "U50", "logits are limited to 30"),
        _mutant("head_in_bf16", "U17", "products are rounded to bf16"),
        _mutant("sigmoid_missing", "U38", "the logit itself"),
        _mutant("with_bias", "U49", "the bias of the training code is added"),
        _mutant("token_part_first", "U23", "the token's part meets the first weights"),
    ),
    controls=(_control("right_head"), _control("right_head_backwards")),
    golden=lambda: [HeadCase(requests=3, width=16, rank=8, vocab=12)],
)

CARD = Card(
    component="dspark",
    summary="block drafting: features and keys of the main model, the block's forward, Markov step, confidence",
    contract={
        "positions": "inputs at a + 1 … a + γ behind the newest token with keys, a = first + accepted",
        "attention": "all rows of a block see the last W accepted keys and all γ keys of the block; no causal mask",
        "ring": "draft keys are stored before they are read, as records of the ring; rejected slots are overwritten",
        "features": "mean over the streams that enter a target layer's attention, bf16, layers in list order",
        "norms": "no per-head query norm: V4.1's `use_qnorm` is false (v41-attention.md section 1.1)",
        "markov": "bf16 tables, fp32 sum onto the fp32 logits of post_norm(h); the token before the position",
        "confidence": "h before its norm, no bias (DeepSpec: normed, with bias); limits ±60 behind the temperature",
    },
    ops=(ROWS, FEATURES, KEYS, FORWARD, MARKOV_STEP, HEAD),
    equivalents=(
        Equivalent(name="Markov product before or into the base logits", reason="one more rounding of an fp32 sum"),
    ),
)
