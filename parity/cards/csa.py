"""How CSA is checked: query heads, output, selection, whole sequences against transformers, and steps over caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import KV_V4, KV_V4_FMLA, FusedStore, HeadNorm, PageLayout, RecordTap, V4Kind
from deeptwin.reference.csa import csa_run, csa_scores
from deeptwin.reference.kv_cache import load_records, store_records
from deeptwin.reference.numerics import CONTRACT
from deeptwin.reference.quant import fake_quantize
from deeptwin.reference.v4_attend import SECTIONED, entry_slots
from deeptwin.reference.v4_layer import v4_project
from deeptwin.reference.v4_state import page_bytes

from .. import draws
from ..builds.ascend_presets import MATRIX, VECTOR
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
from ..relations import CallFn, Context, Variant, row_chunks
from ..rules import V4_LAYER, Bitwise, Close, OneRounding, TopK
from ..stored_state import CSA2_STORED
from ..v4_draws import (
    Selected,
    StoredPages,
    StoredPool,
    V4Case,
    alone,
    draw_run,
    draw_whole,
    later_tokens,
    moved_pages,
    other_schedules,
    sequences_alone,
    taken_back,
    v4_config,
    v4_table,
    v4_weights,
)
from .linear import F32_PRODUCT
from .sparse_attn import DECODED

_mutant, _control = variants("csa")
WRITERS = {fmt.name: fmt for fmt in (KV_V4, KV_V4_FMLA)}


# cases


@dataclass(frozen=True, kw_only=True)
class HeadCase:
    """`tokens` rows of `heads` heads of 512 channels."""

    tokens: int
    heads: int = 2
    cast: str = "release"
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-h{self.heads}-{self.cast}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class SideCase:
    """The output side for `tokens` rows."""

    tokens: int
    form: str = "micro"
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"{self.form}-t{self.tokens}-{self.regime}"


def few_heads(case: HeadCase) -> bool:
    """Relations make many calls: they run on one cast."""
    return case.cast == "release" and case.regime == "normal"


def cases_heads(full: bool) -> list[HeadCase]:
    """Casts × regimes, heads that break coincidences, no row."""
    base = HeadCase(tokens=3)
    found = [replace(base, cast=cast.value, regime=r) for cast in HeadNorm for r in ("normal", "peaked")]
    found += [replace(base, regime=r) for r in ("flat", "mean1", "zeros", "tiny")]
    found += [replace(base, tokens=0), replace(base, tokens=1, heads=5, cast="fused")]
    if full:
        found += [replace(base, tokens=9, cast=c.value, regime=r) for c in HeadNorm for r in (*REGIMES, "huge", "ties")]
        found += [replace(base, tokens=2, heads=64)]
    return list({case.id: case for case in found}.values())


def cases_side(full: bool) -> list[SideCase]:
    """Both casts, regimes."""
    found = [SideCase(tokens=3), SideCase(tokens=3, form="fused"), SideCase(tokens=0)]
    found += [SideCase(tokens=2, regime=r) for r in REGIMES[1:]]
    found += [SideCase(tokens=65, form="fused", regime=r) for r in REGIMES]
    if full:
        found += [SideCase(tokens=40, form=f, regime=r) for f in ("micro", "fused") for r in REGIMES]
    return found


CSA = V4Case(kind=V4Kind.CSA, lengths=(9,))


def cases_select(full: bool) -> list[V4Case]:
    """Every residue of the length, all choices of cast, ties at zero, no entry."""
    free = replace(CSA, picks="free")
    found = [replace(free, lengths=(19,)), replace(free, lengths=(3,))]
    found += [replace(free, lengths=(21, 14), form=f) for f in ("fused", "fp8", "fmla")]
    found += [replace(free, lengths=(30,), form="ties"), replace(free, lengths=(0, 5))]
    found += [replace(free, lengths=(17,), regime=r) for r in REGIMES[1:]]
    if full:
        found += [replace(free, lengths=(60 + n,), form=f) for n in range(4) for f in ("micro", "fused", "ties")]
    return found


def cases_whole(full: bool) -> list[V4Case]:
    """Lengths around the group, packed ones, forms, regimes, and those that transformers takes."""
    found = [replace(CSA, lengths=(n,)) for n in (3, 4, 5, 7)]
    found += [replace(CSA, lengths=(3, 0, 9, 4)), replace(CSA, lengths=(0,))]
    found += [replace(CSA, lengths=(22,), regime=r) for r in (*REGIMES, "rotary")]
    found += [replace(CSA, lengths=(13,), form=f) for f in ("fused", "fmla")]
    if full:
        found += [replace(CSA, lengths=(n,), form="wide", regime=r) for n in (127, 130, 141) for r in REGIMES]
        found += [replace(CSA, lengths=(n,)) for n in range(10, 24)]
    return found


def cases_exact(full: bool) -> list[V4Case]:
    """What transformers takes: nothing is quantised, the layer selects for itself; a large eps shows its place."""
    free = replace(CSA, picks="free", lengths=(40, 13, 3))
    found = [replace(free, form=f) for f in ("hf", "hf_eps")]
    if full:
        found += [replace(free, form="hf", lengths=(n,)) for n in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 20)]
    return found


def cases_run(full: bool) -> list[V4Case]:
    """Schedules of one and several sequences."""
    found = [replace(CSA, lengths=(9,), schedule="mixed"), replace(CSA, lengths=(6,), schedule="decode", form="fused")]
    found += [replace(CSA, lengths=(7, 0, 11), schedule="chunks3")]
    found += [replace(CSA, lengths=(14,), schedule="chunks5", form=f) for f in ("fmla", "fp8")]
    found += [replace(CSA, lengths=(18, 7), schedule="mixed", regime="rotary")]
    if full:
        found += [replace(CSA, lengths=(n, 20 - n), schedule=s) for n in range(8) for s in ("mixed", "chunks3")]
        found += [replace(CSA, lengths=(141,), form="wide", schedule=s) for s in ("one", "mixed", "chunks50")]
    return found


def cases_free(full: bool) -> list[V4Case]:
    """Long enough that the selection bites."""
    found = [
        replace(CSA, lengths=(30,), picks="free", schedule="mixed"),
        replace(CSA, lengths=(30,), picks="free", schedule="mixed", form="ties"),
    ]
    if full:
        found += [replace(CSA, lengths=(41, 17), picks="free", schedule="mixed", form=f) for f in ("fused", "fp8")]
    return found


# inputs


def draw_heads(case: HeadCase, rng: np.random.Generator) -> Inputs:
    """Heads of a regime at near and far positions."""
    rows = draws.rows(rng, case.tokens * case.heads, 512, dtype=torch.bfloat16, regime=case.regime)
    config = v4_config(V4Kind.CSA, "micro")
    return {
        "q_thd": draws.strided(rows.unflatten(0, (case.tokens, case.heads)), pad=8),
        "table_sr": v4_table(config, 50),
        "positions_t": torch.from_numpy(rng.integers(0, 50, case.tokens)).to(torch.int32),
        "cast": HeadNorm(case.cast),
        "eps": 1e-6,
    }


def draw_output(case: SideCase, rng: np.random.Generator) -> Inputs:
    """What attention leaves: bf16 heads, or fp32 ones for the fused cast points."""
    config = v4_config(V4Kind.CSA, case.form)
    mean = 1.0 if case.regime == "mean1" else 0.0
    scale = {"peaked": 100.0, "flat": 0.01}.get(case.regime, 1.0)
    out = draws.normal(rng, case.tokens, config.num_heads, 512, dtype=torch.bfloat16, mean=mean, scale=scale)
    return {
        "out_thd": out.float() * (1 + 2.0**-11) if case.form == "fused" else out,
        "weights": v4_weights(config, rng),
        "table_sr": v4_table(config, 50),
        "positions_t": torch.from_numpy(rng.integers(0, 50, case.tokens)).to(torch.int32),
        "config": config,
    }


def draw_select(case: V4Case, rng: np.random.Generator) -> Inputs:
    """Index keys as `csa_run` stores them, and the rows that made them; the rest of the pages is 0xFF."""
    run = draw_run(case, rng)
    config, batch, x = case.config, run["batch"], run["x_tm"]
    _, _, _, _, index_pow, _ = csa_run(**run)
    positions = torch.cat([torch.arange(n) for n in case.lengths]).to(torch.int32)
    seq = torch.arange(len(case.lengths)).repeat_interleave(torch.tensor(case.lengths))
    _, _, latent = v4_project(x, run["weights"], run["table_sr"], positions, config=config)
    return {
        "x_tm": x,
        "latent_ta": latent.to(torch.bfloat16),
        "weights": run["weights"],
        "table_sr": run["table_sr"],
        "positions_t": positions,
        "index_pow": index_pow,
        "table_tp": batch.table_bp[seq],
        "config": config,
    }


def honest_scores(arguments: dict[str, Any]) -> Tensor:
    """The scores that CONTRACT selects by."""
    x_tm, latent_ta, weights = arguments["x_tm"], arguments["latent_ta"], arguments["weights"]
    table_sr, positions_t, config = arguments["table_sr"], arguments["positions_t"], arguments["config"]
    index_pow = arguments["index_pow"].cpu()
    every = torch.arange(index_pow.shape[0] * index_pow.shape[1])
    keys = load_records(index_pow, every, layout=SECTIONED, dtype=torch.float32, num=CONTRACT)
    slots = entry_slots(positions_t, arguments["table_tp"], config=config)
    return csa_scores(x_tm, latent_ta, weights, table_sr, positions_t, keys, slots, config=config, num=CONTRACT)


# relation hooks


def halves(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The rows in two calls."""
    yield list(row_chunks(inputs, context))[-1]


def packed(case: V4Case) -> bool:
    """Several sequences of the micro form."""
    return len(case.lengths) > 1 and case.form == "micro" and case.regime == "normal"


def single(case: V4Case) -> bool:
    """One sequence, short enough for many calls."""
    return len(case.lengths) == 1 and case.regime == "normal" and case.tokens in (9, 22) and case.form == "micro"


def too_long(case: V4Case) -> str | None:
    """What the interpreter cannot do in seconds."""
    if case.tokens > 9 or case.form != "micro" or case.regime != "normal":
        return "the interpreter needs a third of a second a token: judged on a device"
    return None


def unquantised(case: V4Case) -> str | None:
    """What the kernels do not have."""
    return "index keys as e4m3 rows are not in this twin" if case.form == "fp8" else None


def whole_too_long(case: V4Case) -> str | None:
    """The steps of `csa_run` are judged already: two lengths are enough."""
    return too_long(case) or (None if case.lengths in ((4,), (0,)) else "the same kernels run under csa_run")


def select_too_long(case: V4Case) -> str | None:
    """Two cases in the interpreter."""
    if case.lengths == (19,) or (case.form == "ties" and case.tokens == 30):
        return None
    return "two cases are enough for the interpreter: the others are judged on a device"


def many_kernels(case: Any) -> str | None:
    """No layer runs lowered on a CPU."""
    return "some twenty kernels in a row, which take minutes to lower: each is run by the card of its component"


def one_regime(case: SideCase) -> str | None:
    """A row costs the interpreter a second."""
    few = case.regime == "normal" and case.tokens < 10
    return None if few else "the products are judged like that by the card of linear"


# records


@dataclass(frozen=True, kw_only=True)
class RecordCase:
    """`tokens` rows, the last without an entry, into `pages` sectioned or interleaved pages of `slots` entries."""

    tokens: int = 4
    pages: int = 2
    slots: int = 5
    writer: str = "kv_v4"
    layout: str = "sectioned"
    dtype: str = "bf16"
    tap: str = "cast_back"
    regime: str = "normal"

    @property
    def id(self) -> str:
        shape = f"t{self.tokens}-p{self.pages}x{self.slots}"
        return f"{shape}-{self.writer}-{self.layout}-{self.dtype}-{self.tap}-{self.regime}"


def cases_records(full: bool) -> list[RecordCase]:
    """Writers × layouts, regimes at and between the floors, pages of one entry, no row."""
    base = RecordCase()
    found = [replace(base, writer=w, layout=lay) for w in WRITERS for lay in ("sectioned", "interleaved")]
    found += [replace(base, writer=w, regime=r) for w in WRITERS for r in ("floors", "zeros")]
    found += [replace(base, regime=r) for r in REGIMES[1:]]
    found += [replace(base, slots=1, pages=7), replace(base, tokens=0), replace(base, dtype="fp32")]
    if full:
        found += [replace(base, tokens=9, slots=n, regime=r) for n in (53, 64, 134) for r in (*REGIMES, "ties", "huge")]
    return found


def cases_fused_records(full: bool) -> list[RecordCase]:
    """Writers and layouts, both taps, regimes."""
    base = RecordCase()
    found = [base, replace(base, writer="kv_v4_fmla", layout="interleaved", tap="rope"), replace(base, tokens=0)]
    found += [replace(base, regime=r, tap="rope", tokens=9) for r in REGIMES[1:]]
    found += [replace(base, regime="small", writer=w) for w in WRITERS]
    return found


def _record_cache(case: RecordCase) -> Tensor:
    fmt = WRITERS[case.writer]
    block = draws.poisoned(case.pages, page_bytes(fmt, case.slots) + 576, dtype=torch.uint8)
    return block[:, : case.slots * 584].unflatten(1, (case.slots, 584))


def _record_slots(case: RecordCase, rng: np.random.Generator) -> Tensor:
    slots = draws.distinct(rng, case.pages * case.slots, case.tokens).astype(np.int32)
    slots[-1:] = -1
    return torch.from_numpy(slots)


def draw_store_records(case: RecordCase, rng: np.random.Generator) -> Inputs:
    """Poisoned pages further apart than they are long; the row without an entry is NaN."""
    dtype = draws.DTYPES[case.dtype]
    if case.regime == "floors":  # amax on both sides of either floor, and between them
        x = draws.normal(rng, case.tokens, 512, dtype=torch.float32).clamp(-1, 1)
        size = torch.tensor([2.0**-30, 1e-4, 1e-3, 0.02, 0.05, 0.06, 1.0, 3.0])
        x = (x * size.repeat_interleave(64)).to(dtype)
    else:
        x = draws.rows(rng, case.tokens, 512, dtype=dtype, regime=case.regime)
    x[-1:] = torch.nan
    where = {"layout": PageLayout(case.layout), "fmt": WRITERS[case.writer]}
    cache, slots = _record_cache(case), _record_slots(case, rng)
    return {"cache_pow_": cache, "x_td": draws.strided(x, pad=8), "slots_t": slots, **where}


def draw_load_records(case: RecordCase, rng: np.random.Generator) -> Inputs:
    """Entries that a store left, among poisoned ones."""
    stored = draw_store_records(case, rng)
    slots = stored["slots_t"]
    store_records(**stored)
    back = torch.cat([slots.flip(0), slots[:1]]) if len(slots) else slots
    dtype = draws.DTYPES[case.dtype]
    return {"cache_pow": stored["cache_pow_"], "slots_t": back, "layout": stored["layout"], "dtype": dtype}


def draw_fused_records(case: RecordCase, rng: np.random.Generator) -> Inputs:
    """Rows of a regime at near positions."""
    regime, small = ("normal", 2.0**-8) if case.regime == "small" else (case.regime, 1.0)
    x = draws.rows(rng, case.tokens, 512, dtype=torch.bfloat16, regime=regime)
    store = FusedStore(eps=1e-6, layout=PageLayout(case.layout), tap=RecordTap(case.tap), fmt=WRITERS[case.writer])
    return {
        "cache_pow_": _record_cache(case),
        "x_td": draws.strided(x, pad=8),
        "weight_d": draws.normal(rng, 512, dtype=torch.bfloat16, scale=0.1 * small, mean=small),
        "table_sr": v4_table(v4_config(V4Kind.CSA, "micro"), 50),
        "positions_t": torch.from_numpy(rng.integers(0, 50, case.tokens)).to(torch.int32),
        "slots_t": _record_slots(case, rng),
        "store": store,
    }


def read_back(inputs: Inputs, outputs: Outputs, load: CallFn | None) -> tuple[Outputs, Outputs]:
    """What the load returns of stored slots: the grid value of coded channels, the tail as it was."""
    assert load is not None
    got = load(
        {
            "cache_pow": outputs["cache_pow_"],
            "slots_t": inputs["slots_t"],
            "layout": inputs["layout"],
            "dtype": torch.bfloat16,
        }
    )
    expected = torch.zeros(len(inputs["x_td"]), 512, dtype=torch.bfloat16)
    named = inputs["slots_t"] >= 0
    rows, fmt = inputs["x_td"][named], inputs["fmt"]
    coded = fake_quantize(rows[:, :448], fmt=fmt.quant)
    expected[named] = torch.cat([coded, rows[:, 448:].double()], 1).to(torch.bfloat16)
    return got, {"x_td": expected}


def plain(case: RecordCase) -> bool:
    """Cases whose relations say something."""
    return case.regime == "normal" and case.slots == 5 and case.tokens > 0 and case.dtype == "bf16"


# golden vectors


def golden_heads() -> list[HeadCase]:
    """Every cast."""
    return [HeadCase(tokens=1, cast=cast.value) for cast in HeadNorm]


def golden_side() -> list[SideCase]:
    """Both casts."""
    return [SideCase(tokens=1), SideCase(tokens=1, form="fused")]


def golden_select() -> list[V4Case]:
    """Ties and none."""
    return [replace(CSA, picks="free", lengths=(19,)), replace(CSA, picks="free", lengths=(30,), form="ties")]


def golden_whole() -> list[V4Case]:
    """One of every form."""
    return [replace(CSA, lengths=(6,), form=f) for f in ("micro", "fused")]


def golden_run() -> list[V4Case]:
    """Records of both writers, with the state behind them."""
    return [replace(CSA, lengths=(5,), schedule="mixed")]


# index scores behind honest queries: one last bit of a latent moves codes of e2m1, and with them a score by up to 0.021
# of the largest (20 seeds, 800 scores, evidence/v4-scores.json); the crossing is one and a half such movements. Right
# selections cross by nothing (200 judgements, evidence/v4-select.json)
SELECTED = Selected(rule=TopK(scores="scores_tj", ties="any", crossing=2.0**-5, ascending=True), scores=honest_scores)

STATE = (
    Output(name="ring_pow", rule=StoredPages(part="ring_pow", limit=CSA2_STORED["ring"]), dtype=torch.uint8),
    Output(name="main_pow", rule=StoredPages(part="main_pow", limit=CSA2_STORED["ring"]), dtype=torch.uint8),
    Output(name="pool", rule=StoredPool(limit=F32_PRODUCT), dtype=torch.float32),
    Output(name="index_pow", rule=StoredPages(part="index_pow", limit=CSA2_STORED["index"]), dtype=torch.uint8),
    Output(name="index_pool", rule=StoredPool(limit=F32_PRODUCT), dtype=torch.float32),
)

HEADS = Op(
    name="head_norm_rope",
    reference="deeptwin.reference.v4_layer:head_norm_rope",
    outputs=(Output(name="y_thd", rule=OneRounding(cancellation=2.0**-14), dtype=torch.bfloat16),),
    cases=cases_heads,
    draw=draw_heads,
    rows={"q_thd": 0, "positions_t": 0},
    out_rows={"y_thd": 0},
    relations=(
        Relation(name="batch_invariant", axis="tokens", only=few_heads),
        Relation(name="layout_invariant", axis="alignment of rows", only=few_heads),
        Relation(name="run_to_run", axis="repeats", only=few_heads),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.csa:head_norm_rope_triton"),),
    builds=(
        BuildCase(
            name="v4",
            kernel="deeptwin.kernels.triton_ops.csa:_head_norm_rope",
            launch="deeptwin.parity.builds.launches.csa:heads",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("heads_not_normed", "U11", "the norm of a head is missing, as in V4.1"),
        _mutant("heads_normed_together", "U11", "one norm for all heads of a token"),
        _mutant("heads_without_rotary_channels", "U11", "the mean square leaves the rotary channels out"),
        _mutant("heads_sum_of_squares", "U11", "the sum of squares instead of their mean"),
        _mutant("heads_release_in_fp32", "U86", "RELEASE in fp32 throughout"),
        _mutant("heads_factor_unrounded", "U86", "the factor is not rounded to bf16"),
        _mutant("heads_factor_rounded", "U86", "the factor of FUSED is rounded to bf16"),
        _mutant("heads_half_split", "U12", "RoPE turns channels i and i + 32 together"),
        _mutant("heads_first_channels", "U30", "RoPE turns the first channels"),
        _mutant("heads_turned_back", "U30", "RoPE turns backwards"),
        _mutant("heads_next_position", "U61", "the table is read one row further"),
    ),
    controls=(_control("right_heads"),),
    golden=golden_heads,
)


def not_fused(case: SideCase) -> str | None:
    """Why DeepGEMM's FP8 einsum does not take a case."""
    return None if case.form == "fused" and case.tokens else "tokens at the fused cast points only"


OUTPUT = Op(
    name="v4_output",
    reference="deeptwin.reference.v4_layer:v4_output",
    outputs=(Output(name="y_tm", rule=V4_LAYER, dtype=torch.bfloat16),),
    cases=cases_side,
    draw=draw_output,
    rows={"out_thd": 0, "positions_t": 0},
    out_rows={"y_tm": 0},
    relations=(Relation(name="chunk_invariant", axis="tokens", hook=halves, only=lambda c: c.tokens == 3),),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.csa:v4_output_triton",
            interpreter_declines=one_regime,
            lowered_declines=many_kernels,
        ),
        Sm90Candidate(
            name="deep-gemm",
            function="deeptwin.optimized.csa:v4_output_deep_gemm",
            needs=("deep_gemm",),
            declines=not_fused,
        ),
    ),
    mutants=(
        _mutant("output_not_turned_back", "U30", "the output keeps the rotation of its keys"),
        _mutant("output_turned_forward", "U30", "the output is rotated forward once more"),
        _mutant("output_half_split", "U12", "the inverse rotation turns channels i and i + 32 together"),
        _mutant("output_groups_interleaved", "U38", "heads go round the groups instead of filling them"),
        _mutant("output_other_cast", "R1", "RELEASE and FUSED cast points are swapped"),
    ),
    controls=(_control("right_output"),),
    golden=golden_side,
)

SELECT = Op(
    name="csa_select",
    reference="deeptwin.reference.csa:csa_select",
    outputs=(Output(name="picks_tk", rule=SELECTED, dtype=torch.int32),),
    cases=cases_select,
    draw=draw_select,
    rows={"x_tm": 0, "latent_ta": 0, "positions_t": 0, "table_tp": 0},
    out_rows={"picks_tk": 0},
    relations=(Relation(name="chunk_invariant", axis="tokens", hook=halves, only=lambda c: c.lengths == (19,)),),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.csa:csa_select_triton",
            declines=unquantised,
            interpreter_declines=select_too_long,
            lowered_declines=many_kernels,
        ),
    ),
    mutants=(
        _mutant("select_query_not_transformed", "U16", "keys are Hadamard transformed, queries are not"),
        _mutant("select_first_channels", "U14", "RoPE turns the first channels, as in V3.2"),
        _mutant("select_half_split", "U12", "RoPE turns channels i and i + 32 together"),
        _mutant("select_first_half_split", "U14", "the RoPE of V3.2"),
        _mutant("select_without_relu", "U24", "dot products are not clipped at zero"),
        _mutant("select_relu_after_the_sum", "U24", "the weighted sum is clipped, not each dot product"),
        _mutant("select_sigmoid_mean", "U25", "the mean of sigmoids"),
        _mutant("select_ties_to_the_higher", "U89", "a tie, mostly at zero, goes to the higher index"),
        _mutant("select_block_one_early", "U25", "an entry is visible before its last token"),
        _mutant("select_block_one_late", "U25", "the entry that ends at the query is not visible"),
        _mutant("select_one_too_few", "U19", "an entry too few is chosen"),
        _mutant("select_interleaved_pages", "U23", "index pages are read interleaved"),
        _mutant("select_query_one_position_on", "U61", "queries are rotated one position too far"),
        _mutant("select_weights_ignored", "U24", "head weights are one"),
        _mutant("select_weights_absolute", "U24", "head weights lose their sign"),
        _mutant("select_pages_of_twice_the_size", "U29", "entries are split by pages of twice their number"),
    ),
    controls=(_control("right_select"),),
    golden=golden_select,
)

WHOLE = Op(
    name="csa_attention",
    reference="deeptwin.reference.csa:csa_attention",
    outputs=(Output(name="y_tm", rule=V4_LAYER, dtype=torch.bfloat16),),
    cases=cases_whole,
    draw=draw_whole,
    rows={"x_tm": 0},
    out_rows={"y_tm": 0},
    relations=(
        Relation(name="batch_invariant", axis="packed sequences", hook=sequences_alone, only=packed),
        Relation(name="causality", axis="later tokens", hook=later_tokens, only=lambda c: single(c) and c.tokens > 9),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.csa:csa_attention_triton",
            declines=unquantised,
            interpreter_declines=whole_too_long,
            lowered_declines=many_kernels,
        ),
    ),
    mutants=(
        _mutant("plain_base", "U30", "base 10000 without YaRN in a compressed layer"),
        _mutant("window_plain_base", "U30", "window keys have the plain base, everything else the compressed one"),
        _mutant("half_split_pairs", "U12", "queries, keys and output turn channels i and i + 32 together"),
        _mutant("output_kept_turned", "U30", "the output keeps the rotation of its keys"),
        _mutant("head_norm_missing", "U11", "the norm of a head is missing, as in V4.1"),
        _mutant("sink_scaled", "U78", "the sink is multiplied by the softmax scale"),
        _mutant("sink_ignored", "U78", "the sink is not in the denominator"),
        _mutant("window_one_short", "U36", "the window is one key short"),
        _mutant("window_one_long", "U36", "the window is one key long"),
        _mutant("two_softmaxes", "U02", "window and entries have a softmax each"),
        _mutant("duplicates_dropped", "U08", "an entry of a token in the window is not attended again"),
        _mutant("value_without_rotary_channels", "U30", "the rotary channels of the key are no value"),
        _mutant("groups_interleaved", "U38", "heads go round the groups of wo_a"),
        _mutant("series_swapped", "U33", "the two series change places"),
        _mutant("own_group_twice", "U33", "both series of the own group"),
        _mutant("no_overlap", "U33", "the group before is left out"),
        _mutant("bias_missing", "U31", "the positional bias is left out"),
        _mutant("bias_one_place_on", "U31", "the bias of the next place in the group"),
        _mutant("first_entry_pools_zeros", "U27", "the absent first group has logit 0 instead of none"),
        _mutant("one_softmax_for_all_channels", "U25", "channels share a softmax of their mean logit"),
        _mutant("mean_instead_of_softmax", "U25", "the compressor averages"),
        _mutant("entry_at_its_last_token", "U25", "an entry stands at the position of its last token"),
        _mutant("entry_at_its_centre", "U25", "an entry stands at the centre of its group"),
        _mutant("entry_at_its_number", "U25", "an entry stands at position j instead of r j"),
        _mutant("entry_at_the_group_before", "U33", "an entry stands at the first token that it pools"),
        _mutant("entry_visible_late", "U25", "the entry that ends at the query is not visible"),
        _mutant("residue_three_misses_an_entry", "U31", "lengths of 3 (mod 4) do not see the last entry"),
    ),
    controls=(_control("right_whole"),),
    golden=golden_whole,
)

_record, _record_control = variants("csa_records")
STORE = Op(
    name="store_v4_records",
    reference="deeptwin.reference.kv_cache:store_records",
    outputs=(Output(name="cache_pow_", rule=Bitwise(), dtype=torch.uint8),),
    cases=cases_records,
    draw=draw_store_records,
    rows={"x_td": 0, "slots_t": 0},
    out_rows={},
    writes="cache_pow_",
    relations=(
        Relation(name="run_to_run", axis="repeats", only=plain),
        Relation(
            name="layout_round_trip", axis="writer → reader", hook=read_back, partner="load_v4_records", only=plain
        ),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.kv_cache:store_records_triton"),),
    mutants=(
        _record("store_other_floor", "U94", "the floor of the other writer"),
        _record("store_no_floor", "U59", "an all-zero group divides 0 by 0"),
        _record("store_tail_quantised", "U86", "rotary channels go through e4m3, as in V4.1"),
        _record("store_tail_truncated", "R2", "fp32 rotary channels are truncated to bf16"),
        _record("store_tail_in_front", "U23", "rotary channels stand before the codes"),
        _record("store_pad_is_one", "U58", "the byte behind the scales is not zero"),
        _record("store_other_layout", "U23", "the other layout is written"),
        _record("store_minus_one_wraps", "U79", "slot −1 wraps to the last entry"),
        _record("store_ignores_page_stride", "U22", "pages are written as if they followed one another"),
    ),
    controls=(_record_control("right_store"),),
)
LOAD = Op(
    name="load_v4_records",
    reference="deeptwin.reference.kv_cache:load_records",
    outputs=(Output(name="x_td", rule=Bitwise()),),
    cases=cases_records,
    draw=draw_load_records,
    rows={"slots_t": 0},
    out_rows={"x_td": 0},
    relations=(Relation(name="run_to_run", axis="repeats", only=plain),),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.kv_cache:load_records_triton"),),
    mutants=(
        _record("load_tail_through_e4m3", "U86", "rotary channels are read through e4m3"),
        _record("load_tail_in_front", "U23", "rotary channels are read before the codes"),
        _record("load_other_layout", "U23", "the other layout is read"),
        _record("load_minus_one_wraps", "U79", "−1 reads the last entry"),
        _record("load_ignores_page_stride", "U22", "pages are read as if they followed one another"),
    ),
    controls=(_record_control("right_load"),),
)
FUSED = Op(
    name="store_v4_fused",
    reference="deeptwin.reference.kv_cache:norm_rope_store",
    outputs=(
        Output(name="cache_pow_", rule=StoredPages(part="cache_pow_", limit=CSA2_STORED["ring"]), dtype=torch.uint8),
        Output(name="tap_td", rule=V4_LAYER, dtype=torch.bfloat16),
    ),
    cases=cases_fused_records,
    draw=draw_fused_records,
    rows={"x_td": 0, "positions_t": 0, "slots_t": 0},
    out_rows={"tap_td": 0},
    writes="cache_pow_",
    candidates=(Candidate(name="triton", function="deeptwin.optimized.kv_cache:norm_rope_store_triton"),),
    builds=(
        BuildCase(
            name="v4",
            kernel="deeptwin.kernels.triton_ops.v4_cache:_norm_rope_store_v4",
            launch="deeptwin.parity.builds.launches.csa:fused_v4",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _record("fused_tail_quantised", "U86", "rotary channels are quantised, as in V4.1"),
        _record("fused_not_turned", "U30", "no channel is rotated"),
        _record("fused_turned_back", "U30", "the rotation has the opposite sense"),
        _record("fused_other_layout", "U23", "the other layout is written"),
    ),
    controls=(_record_control("right_fused"),),
)

EXACT = Op(
    name="csa_attention_exact",
    reference="deeptwin.reference.csa:csa_attention",
    # rounded as kernels do, the layer may choose another entry at a near tie: only SEMANTIC and the peers are exact
    outputs=(Output(name="y_tm", rule=Close(rtol=0.5), dtype=torch.float32),),
    cases=cases_exact,
    draw=draw_whole,
    rows={"x_tm": 0},
    out_rows={"y_tm": 0},
    peers=tuple(
        Peer(
            name=name,
            function=f"deeptwin.parity.peers.csa:{function}",
            needs=("transformers",),
            explains="fp32 throughout, no quantiser, no Hadamard transform: 3.7e-7 from SEMANTIC by the order of sums; "
            "its tie rule does not show with 16 index heads. Cached: a chunk of five tokens, then token by token",
            rules={"y_tm": Close(rtol=2e-6)},
        )
        for name, function in (("transformers", "transformers_csa"), ("transformers-cached", "transformers_csa_cached"))
    ),
)

RUN = Op(
    name="csa_run",
    reference="deeptwin.reference.csa:csa_run",
    outputs=(Output(name="y_tm", rule=V4_LAYER, dtype=torch.bfloat16), *STATE),
    cases=cases_run,
    draw=draw_run,
    rows={"x_tm": 0},
    out_rows={"y_tm": 0},
    relations=(
        Relation(name="chunk_invariant", axis="steps", hook=other_schedules, only=single),
        Relation(name="batch_invariant", axis="packed sequences", hook=alone, only=packed),
        Relation(name="page_permutation", axis="pages", hook=moved_pages, only=packed),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.csa:csa_run_triton",
            declines=unquantised,
            interpreter_declines=too_long,
            lowered_declines=many_kernels,
        ),
    ),
    builds=(
        BuildCase(
            name="v4-decode",
            kernel="deeptwin.kernels.triton_ops.two_cache:_attend_two_caches",
            launch="deeptwin.parity.builds.launches.csa:two_caches_v4",
            expect=DECODED | MATRIX,
        ),
    ),
    mutants=(
        _mutant("run_history_lost", "U27", "window keys of earlier steps are not seen"),
        _mutant("run_group_split", "U27", "a group that a step cuts loses its first tokens"),
        _mutant("run_overlap_lost", "U33", "the group before is lost at a step"),
        _mutant("run_plain_base", "U30", "base 10000 without YaRN in a compressed layer"),
        _mutant("run_entries_never_stored", "U28", "compressed entries are never written"),
        _mutant("run_index_keys_never_stored", "U28", "index keys are never written"),
        _mutant("run_index_pages_interleaved", "U23", "index pages are written interleaved"),
        _mutant("run_ring_shifted", "U36", "rings start one slot late"),
        _mutant("run_pad_byte_written", "U58", "the byte behind the scales is not zero"),
        _mutant("run_tail_in_front", "U23", "the rotary channels stand before the codes"),
        _mutant("run_tail_through_e4m3", "U86", "rotary channels went through e4m3"),
        _mutant("run_previous_group_not_kept", "U33", "only the unfinished group is kept for later steps"),
        _mutant("run_stale_pool", "U34", "entry 0 pools the rows of a pool that another request left"),
    ),
    controls=(_control("right_run"),),
    golden=golden_run,
)

FREE = Op(
    name="csa_run_free",
    reference="deeptwin.reference.csa:csa_run",
    outputs=(
        # a near tie picks other entries: only relations are exact here
        Output(name="y_tm", rule=Close(rtol=1.0), dtype=torch.bfloat16),
        *STATE,
    ),
    cases=cases_free,
    draw=draw_run,
    rows={"x_tm": 0},
    out_rows={"y_tm": 0},
    relations=(
        Relation(name="chunk_invariant", axis="steps, ties at zero", hook=other_schedules),
        Relation(name="rollback_equals_serial", axis="rejected tokens", hook=taken_back),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.csa:csa_run_triton",
            declines=unquantised,
            interpreter_declines=too_long,
            lowered_declines=many_kernels,
        ),
    ),
    mutants=(_mutant("select_differently_in_decode", "U89", "prefill keeps another number of entries than decode"),),
)

CARD = Card(
    component="csa",
    summary="window and chosen compressed entries of overlapping groups in one softmax (V4)",
    contract={
        "dtypes": "x, q, keys bf16; matrices e4m3 in 128 x 128 tiles with UE8M0 scales, rows e4m3 in groups of 128",
        "rounding": "bf16 after every product, norm and rotation; HeadNorm, OutputCast and ScoreOrder say the rest",
        "records": "584 bytes, sectioned pages at multiples of 576 bytes; the floor is that of config.cache",
        "selection": "entries j < floor((p + 1) / 4); ties to the lower index; chosen ones in ascending order",
        "state": "rings, pages and fp32 pools of one layer; equal bytes after any cut of the text into steps",
        "index": "Hadamard transform, then e2m1 in groups of 32 (FP4) or e4m3 rows with an fp32 scale (FP8)",
        "NaN": "caches may hold anything before their first write",
    },
    ops=(RUN, HEADS, OUTPUT, SELECT, WHOLE, EXACT, FREE, STORE, LOAD, FUSED),
    equivalents=(
        Equivalent(name="order of the chosen entries", reason="a softmax is a sum: only its last bits know the order"),
        Equivalent(name="Hadamard on neither side without a quantiser", reason="the transform is orthonormal"),
    ),
)
