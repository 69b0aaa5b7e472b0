"""How rotary embedding is checked: frequencies, the table of cosines and sines, the rotation of heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from deeptwin.reference.config import MscaleRule, Pairing, RopeConfig, RopeSpan, YarnConfig
from deeptwin.reference.rope import rope_frequencies, rope_table

from .. import draws
from ..builds.ascend_presets import FP64, VECTOR
from ..builds.presets import FP64_ANGLES, NO_PRODUCT
from ..builds.spec import BuildCase
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Peer, Relation, Sm90Candidate, variants
from ..pairing import every_pair
from ..relations import row_chunks
from ..rules import Bitwise, Budget, Close, OneRounding

_mutant, _control = variants("rope")
ALL_REGIMES = (*REGIMES, "zeros", "ties", "tiny", "huge", "subnormal", "cancel", "constant")


def _yarn(factor: float, length: int, mscale: float) -> YarnConfig:
    return YarnConfig(
        factor=factor,
        original_length=length,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=mscale,
        mscale_all_dim=mscale,
        mscale_rule=MscaleRule.DEMO,
    )


# the tables of the released models: V3 and V3.2; compressed layers of V4 and V4.1; their plain layers
CONFIGS = {
    "v3": RopeConfig(rope_dim=64, theta=10000.0, yarn=_yarn(40.0, 4096, 1.0)),
    "v4_compressed": RopeConfig(rope_dim=64, theta=160000.0, yarn=_yarn(16.0, 65536, 0.0)),
    "plain": RopeConfig(rope_dim=64, theta=10000.0, yarn=None),
    "tiny": RopeConfig(rope_dim=8, theta=10000.0, yarn=_yarn(4.0, 16, 1.0)),
}
FAR = (0, 1, 2, 127, 4095, 4096, 65535, 65536, 70000, 131071, 524288, 1048575)


@dataclass(frozen=True, kw_only=True)
class FrequencyCase:
    """One frequency table."""

    config: str
    regime: str = "normal"

    @property
    def id(self) -> str:
        return self.config


@dataclass(frozen=True, kw_only=True)
class TableCase:
    """`rows` positions: the far ones, then random ones up to 2^20."""

    rows: int
    config: str = "v3"
    positions: str = "far"  # far, negative
    dtype: str = "int64"
    magnitude: float = 1.0
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"s{self.rows}-{self.config}-{self.positions}-{self.dtype}-x{self.magnitude:g}"


@dataclass(frozen=True, kw_only=True)
class RopeCase:
    """`tokens` × `heads` × `dim`, of which the width of `config` rotates."""

    tokens: int
    heads: int
    dim: int
    config: str = "v3"
    pairing: str = "interleaved"
    span: str = "last"
    inverse: bool = False
    dtype: str = "bf16"
    out: str = "bf16"
    positions: str = "far"  # far, near (0, 1, 4095)
    regime: str = "normal"

    @property
    def id(self) -> str:
        turn = "inverse" if self.inverse else "forward"
        shape = f"t{self.tokens}-h{self.heads}-d{self.dim}-{self.config}"
        return f"{shape}-{self.pairing}-{self.span}-{turn}-{self.dtype}-{self.out}-{self.positions}-{self.regime}"


def draw_frequencies(case: FrequencyCase, rng: np.random.Generator) -> Inputs:
    """The configuration alone."""
    return {"config": CONFIGS[case.config]}


def draw_table(case: TableCase, rng: np.random.Generator) -> Inputs:
    """Positions as a strided view; frequencies of the configuration."""
    positions = np.concatenate([FAR, rng.integers(0, 2**20, max(case.rows - len(FAR), 0))])[: case.rows]
    if case.positions == "negative":
        positions = -positions
    kind = torch.int64 if case.dtype == "int64" else torch.int32
    spaced = torch.stack([torch.from_numpy(positions).to(kind)] * 2, -1)
    return {"positions_s": spaced[:, 0], "freq_i": rope_frequencies(CONFIGS[case.config]), "magnitude": case.magnitude}


def draw_rope(case: RopeCase, rng: np.random.Generator) -> Inputs:
    """Heads as a strided view; a table of far rows in random order, of which the unused ones are NaN."""
    wide = np.array(FAR if case.positions == "far" else (0, 1, 4095), dtype=np.int64)
    if case.positions == "far":
        wide = np.concatenate([wide, rng.integers(0, 2**20, 4)])
    table = rope_table(torch.from_numpy(wide), rope_frequencies(CONFIGS[case.config]))
    # rows that no token names hold NaN: above, below and between the named ones
    roomy = draws.poisoned(2 * len(wide) + 1, table.shape[1] + 4, dtype=torch.float32)[:, : table.shape[1]]
    places = 1 + 2 * rng.permutation(len(wide))
    roomy[torch.from_numpy(places)] = table
    if case.positions == "far":
        places_t = rng.permutation(places)[np.arange(case.tokens) % len(wide)]
    else:
        places_t = places[np.arange(case.tokens) % len(wide)]
    x = draws.rows(
        rng, case.tokens * case.heads, case.dim, dtype=draws.DTYPES[case.dtype], regime=case.regime
    ).unflatten(0, (case.tokens, case.heads))
    return {
        "x_thd": draws.strided(x, pad=8),
        "table_sr": roomy,
        "positions_t": torch.from_numpy(places_t).to(torch.int64 if case.heads % 2 else torch.int32),
        "pairing": Pairing(case.pairing),
        "span": RopeSpan(case.span),
        "inverse": case.inverse,
        "dtype": draws.DTYPES[case.out],
    }


def cases_frequencies(full: bool) -> list[FrequencyCase]:
    """Every released table and a tiny one."""
    return [FrequencyCase(config=name) for name in CONFIGS]


def cases_table(full: bool) -> list[TableCase]:
    """Far positions under every table: together more than 10 000 entries."""
    found = [TableCase(rows=60, config=name) for name in ("v3", "v4_compressed", "plain")]
    found += [
        TableCase(rows=len(FAR), config="v4_compressed", positions="negative"),
        TableCase(rows=len(FAR), dtype="int32"),
        TableCase(rows=3, config="tiny", magnitude=1.25),
        TableCase(rows=1),
        TableCase(rows=0),
    ]
    if full:
        found += [TableCase(rows=600, config=name) for name in CONFIGS]
    return found


def cases_rope(full: bool) -> list[RopeCase]:
    """Regimes, both pairings, spans and directions, production heads, wide heads, awkward sizes."""
    base = RopeCase(tokens=3, heads=64, dim=64)
    found = [replace(base, regime=regime) for regime in ALL_REGIMES]
    small = RopeCase(tokens=4, heads=3, dim=128)
    choices = list(product(("interleaved", "half_split"), ("first", "last"), (False, True)))
    configs = ("v3", "v4_compressed", "plain")
    found += [
        replace(small, pairing=p, span=s, inverse=i, config=configs[n % 3]) for n, (p, s, i) in enumerate(choices)
    ]
    found += [
        RopeCase(tokens=1, heads=128, dim=192),
        RopeCase(tokens=2, heads=16, dim=512, config="v4_compressed", inverse=True),
        RopeCase(tokens=2, heads=64, dim=128, pairing="half_split", span="first"),
        RopeCase(tokens=16, heads=1, dim=64, pairing="half_split"),
        RopeCase(tokens=1, heads=1, dim=8, config="tiny"),
        RopeCase(tokens=2, heads=5, dim=11, config="tiny", span="last"),
        RopeCase(tokens=2, heads=5, dim=11, config="tiny", span="first", pairing="half_split"),
        replace(base, tokens=0),
        replace(small, dtype="fp16", out="fp16", heads=64),
        replace(small, dtype="fp32", out="bf16", positions="near"),
        replace(small, positions="near"),
    ]
    f32 = replace(base, dtype="fp32", out="fp32", heads=16)
    found += [replace(f32, regime=r) for r in REGIMES]
    found += [replace(f32, dim=128, pairing="half_split", span="first", inverse=True), replace(f32, tokens=0)]
    if full:
        found += [
            RopeCase(tokens=3, heads=17, dim=d, config=c, pairing=p, span=s, inverse=i, dtype=t, out=t, regime=r)
            for d, c, (p, s, i), t, r in every_pair((64, 192), configs, choices, ("bf16", "fp32"), ALL_REGIMES)
        ]
    return list({case.id: case for case in found}.values())


def few_calls(case: Any) -> bool:
    """Relations make many calls: they run on the normal regime and on few heads."""
    return case.regime in ("normal", "file") and case.tokens * case.heads <= 48


def few_rows(case: Any) -> bool:
    """The same for tables."""
    return case.regime == "file" or case.rows <= 12


def outside_tile_kernels(case: RopeCase) -> str | None:
    """Why TileKernels' rotation does not take a case."""
    if case.config == "tiny" or case.dim % 8 or case.dtype != case.out or case.dtype == "fp16":
        return "64 or 128 channels of heads of 8·n, bf16 to bf16 or fp32 to fp32"
    return None


def golden_table() -> list[TableCase]:
    """Near and far rows of the three released tables."""
    return [TableCase(rows=len(FAR), config=name) for name in ("v3", "v4_compressed", "plain")]


def golden_rope() -> list[RopeCase]:
    """A key after the rotation at positions 0, 1 and 4095, both pairings, both directions."""
    base = RopeCase(tokens=3, heads=1, dim=64, positions="near")
    found = [replace(base, pairing=p, inverse=i) for p, i in product(("interleaved", "half_split"), (False, True))]
    return [*found, replace(base, dim=128, pairing="half_split", span="first"), replace(base, dim=512)]


# a pair may cancel: an fp32 difference of products is off by up to 2^-23 of its larger product
ROTATED = {torch.bfloat16: OneRounding(cancellation=2.0**-15), torch.float16: OneRounding(cancellation=2.0**-12)}
# a peaked row has one large pair, whose rounding may be lucky on one side: RIVAL counts as at least one unit. 3 200
# judgements (10 regimes without subnormal fp32 rows, 50 seeds; plain, fused and wide products, the Triton kernel):
# worst row 2.03, total 0.99, element 1.13 (RIVAL's + 1), bias 0.06
F32_ROPE = Budget(kind="fp32 rope", floor=1.0, row=4.0, total=2.0)


ROPE = Op(
    name="rope",
    reference="deeptwin.reference.rope:rope",
    outputs=(Output(name="y_thd", rule=ROTATED | {torch.float32: F32_ROPE}),),
    cases=cases_rope,
    draw=draw_rope,
    rows={"x_thd": 0, "positions_t": 0},
    out_rows={"y_thd": 0},
    relations=(
        Relation(name="batch_invariant", axis="tokens", only=few_calls),
        Relation(name="chunk_invariant", axis="token chunks", hook=row_chunks, only=few_calls),
        Relation(name="run_to_run", axis="repeats", only=few_calls),
    ),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.rope:rope_triton"),
        Sm90Candidate(
            name="tile-kernels",
            function="deeptwin.optimized.rope:rope_tile_kernels",
            needs=("tile_kernels",),
            declines=outside_tile_kernels,
        ),
    ),
    builds=(
        BuildCase(
            name="query-v3",
            kernel="deeptwin.kernels.triton_ops.rope:_rope",
            launch="deeptwin.parity.builds.launches.rope:query_v3",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="key-v3",
            kernel="deeptwin.kernels.triton_ops.rope:_rope",
            launch="deeptwin.parity.builds.launches.rope:key_v3",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="query-v41-inverse",
            kernel="deeptwin.kernels.triton_ops.rope:_rope",
            launch="deeptwin.parity.builds.launches.rope:query_v41_inverse",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="indexer-v32",
            kernel="deeptwin.kernels.triton_ops.rope:_rope",
            launch="deeptwin.parity.builds.launches.rope:indexer_v32",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="transformers",
            function="deeptwin.parity.peers.rope:apply_interleaved",
            needs=("transformers",),
            explains="DeepseekV3 rotates the slice alone and returns it de-interleaved, which the adapter undoes",
            only=lambda case: case.pairing == "interleaved" and case.out == "fp32" and not case.inverse,
        ),
    ),
    mutants=(
        _mutant("other_pairing", "U12", "interleaved instead of half-split and the reverse"),
        _mutant("pairing_ignored", "U14", "interleaved pairs whatever is asked for"),
        _mutant("deinterleaved_output", "U13", "the rotated slice comes back in de-interleaved order"),
        _mutant("span_ignored", "U38", "the last channels rotate whatever is asked for"),
        _mutant("other_span", "U38", "the other end of the head rotates"),
        _mutant("next_position", "U61", "the table is read one row further"),
        _mutant("previous_position", "U61", "the table is read one row before"),
        _mutant("first_position_for_all", "U09", "every token uses the position of the first"),
        _mutant("inverse_ignored", "U30", "the inverse turns forward"),
        _mutant("always_inverse", "U30", "the sign of the sine is wrong in both directions"),
        _mutant("cos_and_sin_swapped", "U12", "cosines and sines change places"),
        _mutant("table_interleaved", "U12", "table rows are read as cos, sin, cos, sin"),
        _mutant("one_frequency_off", "U30", "pairs use the frequency of their neighbour"),
        _mutant("all_channels_rotated", "U38", "channels beyond the slice rotate too"),
        _mutant("slice_only_written", "U75", "channels beyond the slice are left unwritten"),
        _mutant("second_half_unrotated", "U38", "the second component keeps its old value"),
        _mutant("in_place_pair", "U38", "the second component is computed from the already rotated first"),
        _mutant("table_bf16", "U88", "cosines and sines are rounded to bf16"),
        _mutant("products_bf16", "U86", "each product is rounded to bf16"),
        _mutant("truncated", "R2", "the output is truncated to bf16"),
        _mutant("rest_rounded_to_e4m3", "U86", "channels that do not rotate are quantised"),
        _mutant("last_head_unwritten", "U75", "the last head is left unwritten"),
        _mutant("stale_row_mixed_in", "U74", "an unused table row is multiplied by zero and added"),
        _mutant("not_deterministic", "U10", "a counter leaks into the output: the second launch differs"),
        _mutant("depends_on_batch", "U73", "even batches fuse the products, odd ones do not"),
    ),
    controls=(_control("right_plain"), _control("right_fused"), _control("right_wide")),
    golden=golden_rope,
)

TABLE = Op(
    name="rope_table",
    reference="deeptwin.reference.rope:rope_table",
    outputs=(Output(name="table_sr", rule=OneRounding(), dtype=torch.float32),),
    cases=cases_table,
    draw=draw_table,
    rows={"positions_s": 0},
    out_rows={"table_sr": 0},
    relations=(
        Relation(name="batch_invariant", axis="positions", only=few_rows),
        Relation(name="chunk_invariant", axis="chunks of positions", hook=row_chunks, only=few_rows),
        Relation(name="run_to_run", axis="repeats", only=few_rows),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.rope:rope_table_triton"),),
    builds=(
        BuildCase(
            name="table",
            kernel="deeptwin.kernels.triton_ops.rope:_rope_table",
            launch="deeptwin.parity.builds.launches.rope:table",
            expect=FP64_ANGLES | FP64,
        ),
    ),
    peers=(
        Peer(
            name="transformers",
            function="deeptwin.parity.peers.rope:table",
            needs=("transformers",),
            explains="DeepseekV3RotaryEmbedding takes fp32 cosines of the same fp32 angles",
            rules={"table_sr": Close(rtol=2.0**-23)},
        ),
    ),
    mutants=(
        _mutant("table_angles_fp64", "U88", "angles are fp64 products"),
        _mutant("table_next_position", "U30", "row p holds the angles of p + 1"),
        _mutant("table_cos_fp32", "U95", "cosines of a reduced fp32 angle, as a device builds them"),
        _mutant("table_position_bf16", "U88", "positions are rounded to bf16"),
        _mutant("table_angle_bf16", "U88", "angles are rounded to bf16"),
        _mutant("table_sin_first", "U12", "sines come before cosines"),
        _mutant("table_interleaved_entries", "U12", "cosines and sines alternate"),
        _mutant("table_magnitude_ignored", "U06", "the magnitude is left out"),
        _mutant("table_position_wraps", "U30", "positions wrap at 65536"),
        _mutant("table_negative_as_positive", "U40", "negative positions turn forward"),
        _mutant("table_frequency_ulp", "U95", "one frequency is one ulp off"),
    ),
    controls=(_control("right_table"),),
    golden=golden_table,
)

FREQUENCIES = Op(
    name="rope_frequencies",
    reference="deeptwin.reference.rope:rope_frequencies",
    outputs=(Output(name="freq_i", rule=Bitwise(), dtype=torch.float32),),
    cases=cases_frequencies,
    draw=draw_frequencies,
    rows={},
    out_rows={},
    peers=(
        Peer(
            name="transformers",
            function="deeptwin.parity.peers.rope:yarn_frequencies",
            needs=("transformers",),
            explains="another order of the blend moves four V3 entries by one ulp; fp32 pow is torch's",
            rules={"freq_i": OneRounding()},
        ),
    ),
    mutants=(
        _mutant("yarn_left_out", "U30", "no YaRN"),
        _mutant("base_of_plain_layers", "U30", "theta 10000 whatever is asked for"),
        _mutant("ramp_truncated_twice", "U30", "the high end of the ramp is rounded down"),
        _mutant("ramp_not_clamped", "U30", "the ramp is not clamped"),
        _mutant("one_power", "U95", "theta^(-2i / r) in one power"),
        _mutant("factor_on_fast_pairs", "U30", "the factor divides the fast pairs instead of the slow ones"),
    ),
    controls=(_control("right_frequencies"),),
    golden=lambda: [FrequencyCase(config=name) for name in CONFIGS],
)

CARD = Card(
    component="rope",
    summary="rotary position embedding: rotation, table, frequencies",
    contract={
        "dtypes": "x and y bf16, fp16 or fp32; table fp32, cosines then sines; positions int32 or int64",
        "definitional": "frequencies, the fp32 angle position · frequency, cos and sin in fp64 rounded to fp32",
        "rounding": "one, of the output; channels that do not rotate are copied",
        "layout": "the slice is the first or last r channels; pairs (2i, 2i + 1) or (i, i + r/2); order is kept",
        "hostile": "table rows that no token names may hold NaN",
    },
    ops=(ROPE, TABLE, FREQUENCIES),
    equivalents=(
        Equivalent(
            name="fused or separate products", reason="one rounding of fp32 apart, far below the output rounding"
        ),
        Equivalent(name="cos of a wider type", reason="fp64 cos and sin are right to less than half an ulp of fp32"),
    ),
)
