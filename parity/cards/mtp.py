"""How draft modules are checked: their entrance on kernels, whole modules beside transformers' and by their faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from deeptwin.reference.config import FP8_128X128_UE8M0, WeightCast
from deeptwin.reference.mtp_weights import MtpJoin, MtpStreamJoin, MtpV3Weights, MtpV4Weights
from deeptwin.reference.quant import quantize
from deeptwin.reference.rope import table_of
from deeptwin.reference.weights import MhcSite

from .. import draws
from ..block_draws import v3_block, v4_block
from ..card import REGIMES, Candidate, Card, Inputs, Op, Output, Peer, Relation, variants
from ..relations import Context, Variant, row_chunks
from ..rules import BLOCK, JOIN, Close
from .block import GAIN, V3Case, V4Case, later_tokens, v3_config, v4_config
from .linear import F32_PRODUCT

_mutant, _control = variants("mtp")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class JoinCase:
    """Rows of `width`; `streams` 0 for V3; `quantised`: e4m3 matrices, as V4 stores them."""

    tokens: int
    width: int = 128
    streams: int = 0
    quantised: bool = False
    cast: str = "after"
    dtype: str = "bf16"
    regime: str = "normal"

    @property
    def id(self) -> str:
        shape = f"t{self.tokens}-m{self.width}" + (f"-n{self.streams}" if self.streams else "")
        return f"{shape}-{'q-' if self.quantised else ''}{self.cast}-{self.dtype}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class ModuleCase:
    """A module of the tiny V3, V3.2 (`v32`) or V4-Pro over `tokens`."""

    tokens: int
    model: str = "v3"
    dtype: str = "fp32"
    plain: bool = True
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"{self.model}-t{self.tokens}-{'plain' if self.plain else 'release'}-{self.dtype}-{self.regime}"


def _mean(regime: str) -> float:
    return 1.0 if regime == "mean1" else 0.0


def draw_join(case: JoinCase, rng: np.random.Generator) -> Inputs:
    """Rows of both kinds, at other sizes, and norms that are far from one another."""
    m, dtype, mean = case.width, DTYPES[case.dtype], _mean(case.regime)
    gain = GAIN.get(case.regime, 1.0)
    return {
        "e_tm": draws.strided(draws.normal(rng, case.tokens, m, dtype=dtype, scale=0.1, mean=0.1 * mean), pad=8),
        "h_tm": draws.strided(draws.normal(rng, case.tokens, m, dtype=dtype, scale=3.0, mean=mean), pad=8),
        "weights": MtpJoin(
            enorm_m=draws.normal(rng, m, dtype=dtype, scale=0.3, mean=1.0),
            hnorm_m=draws.normal(rng, m, dtype=dtype, scale=0.3, mean=1.0),
            w_mj=draws.normal(rng, m, 2 * m, dtype=dtype, scale=gain * (2 * m) ** -0.5),
        ),
        "eps": 1e-6,
        "cast": WeightCast.AFTER_WEIGHT if case.cast == "after" else WeightCast.BEFORE_WEIGHT,
        "dtype": dtype,
    }


def draw_streams(case: JoinCase, rng: np.random.Generator) -> Inputs:
    """Streams of different sizes."""
    m, n, mean, bf16 = case.width, case.streams, _mean(case.regime), torch.bfloat16
    gain = GAIN.get(case.regime, 1.0)
    stream = draws.normal(rng, case.tokens, n, m, dtype=bf16, mean=mean)
    matrices = [draws.normal(rng, m, m, dtype=bf16, scale=gain * m**-0.5) for _ in range(2)]
    norms = [draws.normal(rng, m, dtype=bf16, scale=0.3, mean=1.0) for _ in range(2)]
    scales = [None, None]
    if case.quantised:
        matrices, scales = (
            list(part) for part in zip(*(quantize(w, fmt=FP8_128X128_UE8M0) for w in matrices), strict=True)
        )
    return {
        "e_tm": draws.normal(rng, case.tokens, m, dtype=bf16, scale=0.1, mean=0.1 * mean),
        "stream_tnm": stream * torch.tensor([0.25, 1.0, 4.0, 2.0][:n], dtype=bf16)[:, None],
        "weights": MtpStreamJoin(
            enorm_m=norms[0],
            hnorm_m=norms[1],
            e_mm=matrices[0],
            h_mm=matrices[1],
            e_sf=scales[0],
            h_sf=scales[1],
        ),
        "eps": 1e-6,
    }


def draw_v3(case: ModuleCase, rng: np.random.Generator) -> Inputs:
    """Hidden states of the main model, and the tokens behind each."""
    config = v3_config(V3Case(tokens=case.tokens, model=case.model, plain=case.plain))
    m, v, dtype = config.hidden, config.vocab_size, DTYPES[case.dtype]
    joined = draw_join(JoinCase(tokens=1, width=m, dtype=case.dtype), rng)["weights"]
    return {
        "next_t": torch.from_numpy(rng.integers(0, v, case.tokens)),
        "h_tm": draws.normal(rng, case.tokens, m, dtype=dtype, mean=_mean(case.regime)),
        "weights": MtpV3Weights(
            join=joined,
            block=v3_block(config, config.num_layers, rng, dtype, gain=GAIN.get(case.regime, 1.0)),
            norm_m=draws.normal(rng, m, dtype=dtype, scale=0.3, mean=1.0),
            embed_vm=draws.normal(rng, v, m, dtype=dtype),
            head_vm=draws.normal(rng, v, m, dtype=dtype, scale=m**-0.5),
        ),
        "table_sr": table_of(config.attention.rope, case.tokens + 1),
        "config": config,
        "dtype": dtype,
    }


def draw_v4(case: ModuleCase, rng: np.random.Generator) -> Inputs:
    """Streams of the main model, and the tokens behind each row."""
    config = v4_config(V4Case(tokens=case.tokens, model="pro", plain=case.plain))
    m, n, v, bf16 = config.hidden, config.mhc.streams, config.vocab_size, torch.bfloat16
    layer = config.num_layers
    joined = draw_streams(JoinCase(tokens=1, width=m, streams=n, quantised=not case.plain), rng)["weights"]
    return {
        "next_t": torch.from_numpy(rng.integers(0, v, case.tokens)),
        "stream_tnm": draws.normal(rng, case.tokens, n, m, dtype=bf16, mean=_mean(case.regime)),
        "weights": MtpV4Weights(
            join=joined,
            block=v4_block(config, layer, rng, gain=GAIN.get(case.regime, 1.0)),
            site=MhcSite(
                fn_wx=draws.normal(rng, n, n * m, dtype=torch.float32, scale=(n * m) ** -0.5),
                scale_z=torch.ones(1),
                base_w=draws.normal(rng, n, dtype=torch.float32),
            ),
            norm_m=draws.normal(rng, m, dtype=bf16, scale=0.3, mean=1.0),
            embed_vm=draws.normal(rng, v, m, dtype=bf16),
            head_vm=draws.normal(rng, v, m, dtype=bf16, scale=m**-0.5),
        ),
        "table_sr": table_of(config.rope(layer), case.tokens + 1),
        "config": config,
    }


def cases_join(full: bool) -> list[JoinCase]:
    """Regimes, both casts, fp32, an odd width, no rows."""
    base = JoinCase(tokens=5)
    found = [replace(base, regime=r) for r in REGIMES]
    found += [
        replace(base, cast="before"),
        replace(base, dtype="fp32"),
        replace(base, width=80),
        replace(base, tokens=0),
    ]
    if full:
        found += [replace(base, tokens=33, cast=c, regime=r) for c, r in product(("before", "after"), REGIMES)]
        found += [JoinCase(tokens=1, width=7168)]
    return list({case.id: case for case in found}.values())


def cases_streams(full: bool) -> list[JoinCase]:
    """Regimes, plain and quantised matrices, no rows."""
    base = JoinCase(tokens=3, streams=4)
    found = [replace(base, regime=r) for r in REGIMES]
    found += [replace(base, quantised=True, width=256), replace(base, tokens=1), replace(base, tokens=0)]
    if full:
        found += [replace(base, tokens=17, quantised=q, regime=r) for q, r in product((False, True), REGIMES)]
        found += [JoinCase(tokens=1, streams=4, width=7168, quantised=True)]
    return list({case.id: case for case in found}.values())


def cases_v3(full: bool) -> list[ModuleCase]:
    """Both models, both dtypes."""
    base = ModuleCase(tokens=9)
    found = [base, replace(base, model="v32"), replace(base, regime="peaked"), replace(base, tokens=1)]
    found += [replace(base, tokens=7, dtype="bf16", plain=False)]
    if full:
        found += [replace(base, tokens=24, model=m, regime=r) for m, r in product(("v3", "v32"), REGIMES)]
    return list({case.id: case for case in found}.values())


def cases_v4(full: bool) -> list[ModuleCase]:
    """With and without quantisers, longer than the window."""
    base = ModuleCase(tokens=12, model="v4", dtype="bf16")
    found = [base, replace(base, plain=False), replace(base, regime="peaked"), replace(base, tokens=1)]
    if full:
        found += [replace(base, tokens=24, plain=p, regime=r) for p, r in product((True, False), REGIMES)]
    return list({case.id: case for case in found}.values())


def halves(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The rows in two calls."""
    yield list(row_chunks(inputs, context))[-1]


def several(case: JoinCase | ModuleCase) -> bool:
    """Enough rows to leave some out."""
    return case.tokens > 2 and case.regime == "normal"


def plain_rows(case: JoinCase) -> bool:
    """Neighbours may be NaN, which no quantiser takes."""
    return several(case) and not case.quantised


def plain_fp32(case: ModuleCase) -> bool:
    """What transformers has."""
    return case.plain and case.dtype == "fp32"


def slow(case: JoinCase) -> str | None:
    """What the interpreter cannot do in seconds."""
    if case.width > 256:
        return "a row of 7168 takes the interpreter minutes: judged on a device"
    if case.regime in ("peaked", "flat"):
        return "norm and product are judged like that by the cards of their components, and here on a device"
    return None


def one_regime(case: JoinCase) -> str | None:
    """Lowered kernels run in plain loops."""
    if case.regime != "normal" or case.tokens > 3 or case.width > 128:
        return "norm and product are run by the cards of their components"
    return None


JOIN_V3 = Op(
    name="mtp_join",
    reference="deeptwin.reference.mtp:mtp_join",
    outputs=(Output(name="x_tm", rule={torch.bfloat16: JOIN, torch.float32: F32_PRODUCT}),),
    cases=cases_join,
    draw=draw_join,
    rows={"e_tm": 0, "h_tm": 0},
    out_rows={"x_tm": 0},
    relations=(
        Relation(name="batch_invariant", axis="tokens", only=several),
        Relation(name="run_to_run", axis="repeat", only=several),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.mtp:mtp_join_triton",
            interpreter_declines=slow,
            lowered_declines=one_regime,
        ),
    ),
    mutants=(
        _mutant("join_hidden_first", "U61", "the hidden state stands before the embedding"),
        _mutant("join_norms_swapped", "U61", "the two norms are exchanged"),
        _mutant("join_hidden_not_normed", "U61", "the hidden state is not normalised"),
        _mutant("join_embedding_not_normed", "U61", "the embedding is not normalised"),
        _mutant("join_hidden_lost", "U62", "the hidden state is not read"),
    ),
    controls=(_control("join_right"),),
    golden=lambda: [JoinCase(tokens=2), JoinCase(tokens=2, cast="before")],
)

JOIN_V4 = Op(
    name="mtp_join_streams",
    reference="deeptwin.reference.mtp:mtp_join_streams",
    outputs=(Output(name="stream_tnm", rule=JOIN, dtype=torch.bfloat16),),
    cases=cases_streams,
    draw=draw_streams,
    rows={"e_tm": 0, "stream_tnm": 0},
    out_rows={"stream_tnm": 0},
    relations=(
        Relation(name="batch_invariant", axis="tokens", only=plain_rows),
        Relation(name="chunk_invariant", axis="tokens", hook=halves, only=several),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.mtp:mtp_join_streams_triton",
            interpreter_declines=slow,
            lowered_declines=one_regime,
        ),
    ),
    mutants=(
        _mutant("streams_normed_together", "U38", "one norm over the channels of all streams"),
        _mutant("streams_averaged", "U62", "the mean stream stands for every stream"),
        _mutant("streams_embedding_in_the_first", "U61", "only the first stream gets the embedding"),
        _mutant("streams_matrices_swapped", "U61", "the two matrices are exchanged"),
        _mutant("streams_norms_swapped", "U61", "the two norms are exchanged"),
        _mutant("streams_hidden_lost", "U62", "the streams are not read"),
    ),
    controls=(_control("join_streams_right"),),
    golden=lambda: [JoinCase(tokens=1, streams=4), JoinCase(tokens=1, streams=4, quantised=True)],
)

MODULE_V3 = Op(
    name="mtp_v3",
    reference="deeptwin.reference.mtp:mtp_v3",
    outputs=(
        Output(name="logits_tv", rule=Close(rtol=0.02), dtype=torch.float32),
        Output(name="x_tm", rule={torch.float32: Close(rtol=2e-6), torch.bfloat16: BLOCK}),
    ),
    cases=cases_v3,
    draw=draw_v3,
    rows={"next_t": 0, "h_tm": 0},
    out_rows={"logits_tv": 0, "x_tm": 0},
    relations=(Relation(name="causality", axis="later tokens", hook=later_tokens("h_tm"), only=several),),
    peers=(
        Peer(
            name="transformers",
            function="deeptwin.parity.peers.mtp:transformers_v3",
            needs=("transformers",),
            explains="fp32 products in library order: 1e-6",
            rules={"logits_tv": Close(rtol=4e-6), "x_tm": Close(rtol=4e-6)},
            only=plain_fp32,
        ),
    ),
    mutants=(
        _mutant("v3_token_of_the_row_after", "U61", "a row has the token two places on"),
        _mutant("v3_hidden_first", "U61", "the hidden state stands before the embedding"),
        _mutant("v3_last_norm_missing", "U39", "the head reads the row that was not normalised"),
        _mutant("v3_chains_the_raw_state", "U62", "a further module gets the row before its norm"),
    ),
    controls=(_control("module_v3_right"),),
    golden=lambda: [ModuleCase(tokens=4, dtype="bf16", plain=False)],
)

MODULE_V4 = Op(
    name="mtp_v4",
    reference="deeptwin.reference.mtp:mtp_v4",
    outputs=(
        Output(name="logits_tv", rule=BLOCK, dtype=torch.float32),
        Output(name="stream_tnm", rule=BLOCK, dtype=torch.bfloat16),
    ),
    cases=cases_v4,
    draw=draw_v4,
    rows={"next_t": 0, "stream_tnm": 0},
    out_rows={"logits_tv": 0, "stream_tnm": 0},
    relations=(Relation(name="causality", axis="later tokens", hook=later_tokens("stream_tnm"), only=several),),
    mutants=(
        _mutant("v4_token_of_the_row_after", "U61", "a row has the token two places on"),
        _mutant("v4_compressed_angles", "U63", "the block rotates as the compressed layers do"),
        _mutant("v4_window_one_short", "U36", "the window is one key short"),
        _mutant("v4_head_is_the_mean", "U39", "the head reads the mean stream"),
        _mutant("v4_last_norm_missing", "U39", "the head reads a row that was not normalised"),
        _mutant("v4_streams_averaged", "U62", "the mean stream stands for every stream"),
    ),
    controls=(_control("module_v4_right"),),
    golden=lambda: [ModuleCase(tokens=4, model="v4", dtype="bf16", plain=False)],
)

CARD = Card(
    component="mtp",
    summary="draft modules of V3, V3.2 and V4: a hidden state and the next token, joined, and one more block",
    contract={
        "rows": "row i: the state of token i and the embedding of token i + 1, at position i; predicts token i + 2",
        "join": "V3: embedding first, one product; V4: two products, added in bf16, the embedding to every stream",
        "state": "V3: after the main model's final norm; V4: the streams before its head",
        "schedule": "the block has the layer number behind the main model: V4 drafts have a window alone",
    },
    ops=(JOIN_V3, JOIN_V4, MODULE_V3, MODULE_V4),
)
