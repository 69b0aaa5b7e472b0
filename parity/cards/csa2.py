"""How CSA2 is checked: both sides of a layer, whole stacks on forced picks, and free stacks by their relations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.cache_plan import page_bytes, state_bytes
from deeptwin.reference.config import FP8_32X32, PageLayout, RopeConfig, ScoreOrder, Truncation
from deeptwin.reference.csa2_config import CastPoints, Csa2Config, tiny_csa2
from deeptwin.reference.csa2_state import Csa2Batch, Csa2Caches
from deeptwin.reference.quant import quantize
from deeptwin.reference.rope import rope_frequencies, rope_table
from deeptwin.reference.topology import TINY_TOPOLOGY, V41_TOPOLOGY, LayerMode, Topology
from deeptwin.reference.weights import Csa2Weights

from .. import draws
from ..builds.ascend_presets import MATRIX
from ..builds.presets import PRODUCT
from ..builds.spec import BuildCase
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Relation, variants
from ..relations import Context, Variant, row_chunks
from ..rules import CSA2_SIDE, CSA2_STACK, Close
from ..stored_state import CSA2_STORED, CSA2_STORED_FREE, StoredState

_mutant, _control = variants("csa2")

# the modes of the tiny stack with a layer, heads and ranks less: what the interpreter runs in a second
MICRO = Topology(
    ratios=(0, 2, 1, 1),
    draft_layers=0,
    kv_sources=(1, 2),
    index_sources=(1, 2, 3),
    index_k_sources=(1, 2),
    index_heads=2,
    index_dim=128,
    index_topk=4,
    candidate_source=2,
    candidate_blocks=8,
    candidate_size=8,
)

# one layer: what a stack amplifies until faults drown in it is plain here
MONO = replace(MICRO, ratios=(2,), kv_sources=(0,), index_sources=(0,), index_k_sources=(0,), candidate_source=None)

# ten decoder layers: what a cut of the prompt does to the deeper ones
DEEP = replace(TINY_TOPOLOGY, ratios=(0, 2, 2, *(1,) * 10), index_sources=(1, 3, 5, 9))


def config_of(name: str, cast: str, layout: str, truncation: str = "off") -> Csa2Config:
    """A named configuration."""
    config = tiny_csa2(cast=CastPoints(cast), score_order=ScoreOrder.BF16_CHAINS, layout=PageLayout(layout))
    if name in ("micro", "mono", "window"):
        config = replace(config, hidden=32, num_heads=2, q_rank=32, topology=MICRO if name == "micro" else MONO)
    if name == "released":  # the layer map of V4.1-Flash over narrow rows
        narrow = replace(config, hidden=32, num_heads=2, q_rank=32)
        config = replace(narrow, window=128, page_tokens=128, topology=V41_TOPOLOGY)
    if name == "deep":
        config = replace(config, topology=DEEP)
    if name == "window":
        none = replace(MONO, ratios=(0,), kv_sources=(), index_sources=(), index_k_sources=())
        config = replace(config, topology=none)
    if truncation != "off":
        config = replace(config, truncation=Truncation(truncation), keep=10)
    return config


# cases


@dataclass(frozen=True, kw_only=True)
class SideCase:
    """One side of a layer: `tokens` rows at positions from `start` on."""

    tokens: int
    config: str = "micro"
    cast: str = "release"
    start: int = 0
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"{self.config}-t{self.tokens}-at{self.start}-{self.cast}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class RunCase:
    """Packed sequences of `lengths`; `schedule`: one, chunksN, decode, mixed (a prefill step, then decode) or last_two.

    With last_two all but two tokens are one prefill step, and the two are one decode step.
    """

    lengths: tuple[int, ...]
    config: str = "micro"
    cast: str = "release"
    layout: str = "interleaved"
    truncation: str = "off"
    schedule: str = "one"
    regime: str = "normal"
    free: bool = False

    @property
    def id(self) -> str:
        shape = f"{self.config}-t{'.'.join(str(n) for n in self.lengths)}-{self.schedule}"
        how = f"{self.cast}-{self.layout}-{self.truncation}-{self.regime}"
        return f"{shape}-{how}{'-free' if self.free else ''}"

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)


# inputs


def _weights(config: Csa2Config, layer: int, rng: np.random.Generator, regime: str) -> Csa2Weights:
    m, d, a, heads, map_ = config.hidden, config.head_dim, config.q_rank, config.num_heads, config.topology
    mode, name = map_.mode(layer), f"layers.{layer}.attn"
    state: dict[str, Tensor] = {f"{name}.attn_sink": draws.normal(rng, heads, dtype=torch.float32)}
    bf16 = torch.bfloat16

    def fp8(key: str, rows: int, columns: int, gain: float = 1.0) -> None:
        w = draws.normal(rng, rows, columns, dtype=bf16, scale=columns**-0.5 * gain)
        state[f"{key}.weight"], state[f"{key}.scale"] = quantize(w, fmt=FP8_32X32)

    def norm(key: str, width: int) -> None:
        state[key] = draws.normal(rng, width, dtype=bf16, scale=0.1, mean=1.0)

    # the rotary channels outweigh the others: positions show
    tail = torch.where(torch.arange(d) < d - 64, 1.0, 8.0 if regime == "rotary" else 1.0).to(bf16)
    norm(f"layers.{layer}.attn_norm.weight", m)
    norm(f"{name}.q_norm.weight", a)
    norm(f"{name}.kv_norm.weight", d)
    state[f"{name}.kv_norm.weight"] *= tail
    fp8(f"{name}.wq_a", a, m)
    fp8(f"{name}.wq_b", heads * d, a, {"peaked": 4.0, "flat": 0.1}.get(regime, 1.0))
    fp8(f"{name}.wkv", d, m)
    fp8(f"{name}.wo_a", config.o_groups * config.o_rank, heads * d // config.o_groups)
    fp8(f"{name}.wo_b", m, config.o_groups * config.o_rank)
    if mode is LayerMode.FULL:
        for part in ("wkv", "wgate")[: map_.ratios[layer]]:
            state[f"{name}.compressor.{part}.weight"] = draws.normal(rng, d, m, dtype=bf16, scale=m**-0.5)
        norm(f"{name}.compressor.norm.weight", d)
        state[f"{name}.compressor.norm.weight"] *= tail
        state[f"{name}.indexer.wk.weight"] = draws.normal(rng, map_.index_dim, d, dtype=bf16, scale=d**-0.5)
        norm(f"{name}.indexer.k_norm.weight", map_.index_dim)
    if mode in (LayerMode.FULL, LayerMode.REINDEX):
        fp8(f"{name}.indexer.wq_b", map_.index_heads * map_.index_dim, a)
        weights = draws.normal(rng, map_.index_heads, m, dtype=bf16, scale=m**-0.5)
        state[f"{name}.indexer.weights_proj.weight"] = weights
    return Csa2Weights.from_state_dict(state, layer=layer, config=config)


def _rows(case: SideCase | RunCase, rng: np.random.Generator, *shape: int) -> Tensor:
    return draws.normal(rng, *shape, dtype=torch.bfloat16, mean=1.0 if case.regime == "mean1" else 0.0)


def _table(rope: RopeConfig, length: int) -> Tensor:
    return rope_table(torch.arange(length), rope_frequencies(rope))


def draw_project(case: SideCase, rng: np.random.Generator) -> Inputs:
    """Rows of a compressed layer."""
    config = config_of(case.config, case.cast, "interleaved")
    return {
        "x_tm": draws.strided(_rows(case, rng, case.tokens, config.hidden), pad=8),
        "weights": _weights(config, 1, rng, case.regime),
        "table_sr": _table(config.rope_main, case.start + case.tokens + 1),
        "positions_t": torch.arange(case.start, case.start + case.tokens, dtype=torch.int32),
        "config": config,
    }


def draw_output(case: SideCase, rng: np.random.Generator) -> Inputs:
    """What attention leaves: bf16 heads, or fp32 ones for the fused cast points."""
    config = config_of(case.config, case.cast, "interleaved")
    out = _rows(case, rng, case.tokens, config.num_heads, config.head_dim) * (100 if case.regime == "peaked" else 1)
    if case.cast == "fused":
        out = out.float() * (1 + 2.0**-11)
    return {
        "out_thd": out,
        "weights": _weights(config, 1, rng, case.regime),
        "table_sr": _table(config.rope_main, case.start + case.tokens + 1),
        "positions_t": torch.arange(case.start, case.start + case.tokens, dtype=torch.int32),
        "config": config,
    }


def counts_of(lengths: tuple[int, ...], schedule: str, most: int) -> tuple[list[list[int]], list[bool]]:
    """Tokens a step and sequence, and which steps are decode steps."""
    left, counts, decode = list(lengths), [], []

    def take(sizes: list[int], is_decode: bool) -> None:
        step = [min(n, size) for n, size in zip(left, sizes, strict=True)]
        if any(step):
            counts.append(step)
            decode.append(is_decode)
        for b, n in enumerate(step):
            left[b] -= n

    if schedule == "one":
        take(list(lengths), False)
    if schedule == "mixed":
        take([n // 2 for n in lengths], False)
    if schedule == "last_two":
        take([max(n - 2, 0) for n in lengths], False)
    size = (
        {"decode": 1, "mixed": 3, "last_two": 2}.get(schedule, 0) or int(schedule.removeprefix("chunks") or 1)
        if any(left)
        else 1
    )
    while any(left):
        turn = len(counts)
        sizes = [(1 + (b + turn) % most if schedule == "mixed" else size) for b in range(len(left))]
        take(sizes, not schedule.startswith("chunks"))
    return counts or [[0] * len(lengths)], decode or [False]


def draw_run(case: RunCase, rng: np.random.Generator) -> Inputs:
    """Pages and states of 0xFF bytes, pages in random order, picks that every query may see."""
    config = config_of(case.config, case.cast, case.layout, case.truncation)
    map_, longest = config.topology, max(case.lengths)
    layers = tuple(_weights(config, i, rng, case.regime) for i in range(map_.num_layers - map_.draft_layers))
    pages = [-(-n // config.page_tokens) for n in case.lengths]
    order = rng.permutation(sum(pages) + 2)
    table = np.full((len(pages), max(pages) + 1), -1)
    for b, n in enumerate(pages):
        table[b, :n] = order[sum(pages[:b]) : sum(pages[:b]) + n]
    picks = np.full((len(map_.index_sources), case.tokens, map_.index_topk), -1)
    positions = np.concatenate([np.arange(n) for n in case.lengths])
    for source, layer in enumerate(map_.index_sources):
        for row, p in enumerate(positions):
            seen = (int(p) + 1) // map_.ratios[layer]
            found = np.sort(rng.permutation(seen)[: map_.index_topk])
            picks[source, row, : len(found)] = found
    counts, decode = counts_of(case.lengths, case.schedule, config.backtracking)
    zeros = torch.zeros(len(pages), dtype=torch.int32)
    states = torch.from_numpy(rng.permutation(len(pages) + 1)[: len(pages)].astype(np.int32))
    return {
        "h_tm": draws.strided(_rows(case, rng, case.tokens, config.hidden), pad=8),
        "layers": layers,
        "caches": Csa2Caches(
            page_pq=draws.poisoned(sum(pages) + 2, page_bytes(config.plan), dtype=torch.uint8),
            state_sq=draws.poisoned(len(pages) + 1, state_bytes(config.plan), dtype=torch.uint8),
            window_table=_table(config.rope_window, longest),
            main_table=_table(config.rope_main, longest),
        ),
        "batch": Csa2Batch(
            counts_kb=torch.tensor(counts, dtype=torch.int32),
            decode_k=torch.tensor(decode),
            start_b=zeros,
            valid_b=zeros.clone(),
            state_b=states,
            table_bp=torch.from_numpy(table.astype(np.int32)),
        ),
        "picks_ltk": None if case.free else torch.from_numpy(picks.astype(np.int32)),
        "config": config,
    }


# which cases


def cases_side(full: bool) -> list[SideCase]:
    """Regimes, both cast points, positions far out."""
    base = SideCase(tokens=3)
    found = [replace(base, regime=r) for r in REGIMES]
    found += [replace(base, cast="fused", tokens=5), replace(base, tokens=0), replace(base, tokens=1, start=70000)]
    found += [replace(base, config="tiny", tokens=2)]
    if full:
        found += [
            replace(base, config="tiny", tokens=17, cast=c, regime=r) for c, r in product(("release", "fused"), REGIMES)
        ]
    return list({case.id: case for case in found}.values())


def cases_run(full: bool) -> list[RunCase]:
    """Both cast points and arrangements, schedules, packed sequences, truncation, the tiny stack."""
    base = RunCase(lengths=(5,))
    found = [
        # single layers first: they show most faults, and soonest
        *(replace(base, lengths=(9,), config=c, regime="rotary") for c in ("mono", "window")),
        replace(base, lengths=(9,), config="mono", schedule="chunks3"),
        *(replace(base, regime=r) for r in REGIMES),
        replace(base, lengths=(4, 3), cast="fused", layout="sectioned", schedule="mixed"),
        replace(base, lengths=(1,)),
        replace(base, lengths=(12,), config="tiny"),
        replace(base, lengths=(9, 5, 4), config="tiny", schedule="mixed", layout="sectioned"),
        replace(base, lengths=(14,), config="tiny", schedule="chunks7", cast="fused", regime="mean1"),
        replace(base, lengths=(17, 6), truncation="mask"),
        replace(base, lengths=(17, 6), truncation="compact", schedule="chunks9"),
    ]
    if full:
        found += [
            replace(base, lengths=(40, 17), config="tiny", schedule=s, cast=c, regime=r)
            for s, c, r in product(("one", "mixed", "chunks5"), ("release", "fused"), REGIMES)
        ]
        found += [replace(base, lengths=(25, 9), config="tiny", schedule="decode")]
    return list({case.id: case for case in found}.values())


def cases_free(full: bool) -> list[RunCase]:
    """Long enough that the selection and its candidates bite."""
    base = RunCase(lengths=(3,), free=True)
    found = [
        base,
        replace(base, lengths=(12,), schedule="decode"),
        replace(base, config="tiny", lengths=(70,)),
    ]
    if full:
        found += [
            replace(base, config="tiny", lengths=(100, 41), layout="sectioned", cast="fused"),
            replace(base, config="tiny", lengths=(24,), schedule="decode"),
        ]
    return found


# relation hooks


def halves(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The rows in two calls."""
    yield list(row_chunks(inputs, context))[-1]


def other_schedules(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same tokens in other steps: outputs, pages and states keep their bytes."""
    lengths = tuple(inputs["batch"].counts_kb.sum(0).tolist())
    schedules = ["last_two"] if sum(lengths) < 6 else ["mixed"] if sum(lengths) < 70 else ["chunks35"]
    for schedule in [*schedules, "mixed", "chunks1", "decode", "chunks16"] if context.full else schedules:
        counts, decode = counts_of(lengths, schedule, inputs["config"].backtracking)
        batch = replace(
            inputs["batch"], counts_kb=torch.tensor(counts, dtype=torch.int32), decode_k=torch.tensor(decode)
        )
        yield Variant(label=f"schedule {schedule}", calls=(inputs | {"batch": batch},))


def moved_pages(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The pages of all sequences elsewhere; moved back, they hold the same bytes."""
    batch, pages = inputs["batch"], len(inputs["caches"].page_pq)
    order = torch.from_numpy(context.rng.permutation(pages))
    table = torch.where(batch.table_bp >= 0, order[batch.table_bp.clamp(min=0).long()], -1).to(torch.int32)

    def back(results: list[Outputs]) -> Outputs:
        return results[0] | {"page_pq": results[0]["page_pq"][order]}

    yield Variant(label="other pages", calls=(inputs | {"batch": replace(batch, table_bp=table)},), join=back)


def alone(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Each packed sequence without its neighbours."""
    batch, start = inputs["batch"], 0
    for b, n in enumerate(batch.counts_kb.sum(0).tolist()):
        rows = slice(start, start + n)
        start += n
        steps = batch.counts_kb[:, b] > 0
        own = Csa2Batch(
            counts_kb=batch.counts_kb[steps][:, b : b + 1],
            decode_k=batch.decode_k[steps],
            **{f: getattr(batch, f)[b : b + 1] for f in ("start_b", "valid_b", "state_b", "table_bp")},
        )
        picks = None if inputs["picks_ltk"] is None else inputs["picks_ltk"][:, rows]
        call = inputs | {"h_tm": inputs["h_tm"][rows], "batch": own, "picks_ltk": picks}

        def picked(outputs: Outputs, rows: slice = rows) -> Outputs:
            return {"h_tm": outputs["h_tm"][rows]}

        yield Variant(
            label=f"sequence {b} alone", calls=(call,), join=lambda rs: {"h_tm": rs[0]["h_tm"]}, expect=picked
        )


def later_tokens(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The second half of a sequence replaced by garbage."""
    kept = len(inputs["h_tm"]) // 2

    def first(outputs: Outputs) -> Outputs:
        return {"h_tm": outputs["h_tm"][:kept]}

    h = inputs["h_tm"].clone()
    h[kept:] = 30.0 * h[kept:].flip(-1)
    yield Variant(label="other future", calls=(inputs | {"h_tm": h},), join=lambda rs: first(rs[0]), expect=first)


def mask_or_compact(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Rows that truncation keeps do not depend on whether the others are computed."""
    config, counts_b = inputs["config"], inputs["batch"].counts_kb.sum(0).tolist()
    other = Truncation.MASK if config.truncation is Truncation.COMPACT else Truncation.COMPACT
    kept = torch.cat([torch.arange(n) >= n - config.keep for n in counts_b])

    def rows(outputs: Outputs) -> Outputs:
        return {"h_tm": outputs["h_tm"][kept]}

    call = inputs | {"config": replace(config, truncation=other)}
    yield Variant(label=other.value, calls=(call,), join=lambda rs: rows(rs[0]), expect=rows)


def micro(case: RunCase) -> bool:
    """What the interpreter repeats in time."""
    return case.config == "micro" and case.tokens == 5


def packed(case: RunCase) -> bool:
    """Several sequences."""
    return len(case.lengths) == 3 and case.truncation == "off"


def truncated(case: RunCase) -> bool:
    """Decoder rows are left out or narrowed."""
    return case.truncation != "off"


def whole(case: RunCase) -> bool:
    """One sequence without truncation on the tiny stack."""
    return len(case.lengths) == 1 and case.truncation == "off" and case.config == "tiny" and case.regime == "normal"


def relation_cases(case: RunCase) -> bool:
    """Schedules of small stacks and of one tiny one."""
    return (micro(case) and case.regime == "normal") or whole(case)


def too_long(case: RunCase) -> str | None:
    """What the interpreter cannot do in seconds."""
    if case.config != "micro" or case.tokens > 8:
        return "the interpreter needs a second a token and layer: judged on a device"
    if case.regime != "normal" or len(case.lengths) > 1:
        return "one regime and sequence are enough for the interpreter: the others are judged on a device"
    return None


def many_kernels(case: RunCase) -> str | None:
    """No stack runs lowered on a CPU."""
    return "some twenty kernels in a row, which take minutes to lower: each is run by the card of its component"


def one_regime(case: SideCase) -> str | None:
    """A row costs the interpreter two seconds."""
    if case.regime in ("peaked", "flat") or case.config == "tiny":
        return "the products are judged like that by the card of linear, and here on a device"
    return None


# golden vectors


def golden_side() -> list[SideCase]:
    """Both cast points."""
    return [SideCase(tokens=2), SideCase(tokens=2, cast="fused", start=9)]


def golden_run() -> list[RunCase]:
    """A stack of four layers with its bytes."""
    return [RunCase(lengths=(5,), schedule="mixed")]


def golden_free() -> list[RunCase]:
    """The tiny stack of the spec (8), selecting for itself."""
    return [RunCase(config="tiny", lengths=(90,), free=True)]


# rows

PROJECT = Op(
    name="csa2_project",
    reference="deeptwin.reference.csa2:csa2_project",
    outputs=tuple(Output(name=name, rule=CSA2_SIDE, dtype=torch.bfloat16) for name in ("q_thd", "key_td", "latent_ta")),
    cases=cases_side,
    draw=draw_project,
    rows={"x_tm": 0, "positions_t": 0},
    out_rows={"q_thd": 0, "key_td": 0, "latent_ta": 0},
    relations=(Relation(name="chunk_invariant", axis="tokens", hook=halves, only=lambda case: case.tokens == 5),),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.csa2:csa2_project_triton",
            interpreter_declines=one_regime,
            lowered_declines=one_regime,
        ),
    ),
    mutants=(
        _mutant("project_half_split_pairs", "U12", "RoPE turns channels i and i + 32 together"),
        _mutant("project_head_norm", "U11", "every query head is normalised, as in V4"),
        _mutant("project_key_norm_without_tail", "U30", "the key norm leaves the rotary channels out"),
    ),
    controls=(_control("right_project"),),
    golden=golden_side,
)

OUTPUT = Op(
    name="csa2_output",
    reference="deeptwin.reference.csa2:csa2_output",
    outputs=(Output(name="y_tm", rule=CSA2_SIDE, dtype=torch.bfloat16),),
    cases=cases_side,
    draw=draw_output,
    rows={"out_thd": 0, "positions_t": 0},
    out_rows={"y_tm": 0},
    relations=(Relation(name="chunk_invariant", axis="tokens", hook=halves, only=lambda case: case.tokens == 5),),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.csa2:csa2_output_triton",
            interpreter_declines=one_regime,
            lowered_declines=one_regime,
        ),
    ),
    builds=(
        BuildCase(
            name="v41-release",
            kernel="deeptwin.kernels.triton_ops.csa2:_grouped_output",
            launch="deeptwin.parity.builds.launches.csa2:grouped_release",
            expect=PRODUCT | MATRIX,
        ),
        BuildCase(
            name="v41-fused",
            kernel="deeptwin.kernels.triton_ops.csa2:_grouped_output",
            launch="deeptwin.parity.builds.launches.csa2:grouped_fused",
            expect=PRODUCT | MATRIX,
        ),
    ),
    mutants=(
        _mutant("output_not_turned_back", "U30", "the output keeps the rotation of its keys"),
        _mutant("output_turned_forward", "U30", "the output is rotated forward once more"),
        _mutant("output_turned_at_first_row", "U30", "every row is turned back by the angles of the first"),
        _mutant("output_half_split_pairs", "U12", "the inverse rotation turns channels i and i + 32 together"),
        _mutant("output_other_cast", "R1", "RELEASE and FUSED cast points are swapped"),
        _mutant("output_groups_interleaved", "U38", "heads go round the groups instead of filling them"),
    ),
    controls=(_control("right_output"),),
    golden=golden_side,
)

STATE = (
    Output(name="page_pq", rule=StoredState(before="page_pq", limits=CSA2_STORED), dtype=torch.uint8),
    Output(name="state_sq", rule=StoredState(before="state_sq", limits=CSA2_STORED), dtype=torch.uint8),
)

RUN = Op(
    name="csa2_run",
    reference="deeptwin.reference.csa2:csa2_run",
    outputs=(Output(name="h_tm", rule=CSA2_STACK, dtype=torch.bfloat16), *STATE),
    cases=cases_run,
    draw=draw_run,
    rows={"h_tm": 0},
    out_rows={"h_tm": 0},
    relations=(
        Relation(name="chunk_invariant", axis="steps", hook=other_schedules, only=relation_cases),
        Relation(
            name="batch_invariant", axis="packed sequences", hook=alone, only=lambda c: packed(c) and not micro(c)
        ),
        Relation(name="masked_equals_absent", axis="truncation", hook=mask_or_compact, only=truncated),
        Relation(name="page_permutation", axis="pages", hook=moved_pages, only=whole),
        Relation(name="causality", axis="later tokens", hook=later_tokens, only=whole),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.csa2:csa2_run_triton",
            interpreter_declines=too_long,
            lowered_declines=many_kernels,
        ),
    ),
    mutants=(
        _mutant("window_table_everywhere", "U30", "compressed layers rotate with the table of the window layers"),
        _mutant("main_table_everywhere", "U30", "window layers rotate with the table of the compressed ones"),
        _mutant("window_tail_not_quantised", "U86", "rotary channels of window keys are stored as bf16, as in V4"),
        _mutant("entry_at_its_last_token", "U25", "an entry stands at the position of its last token"),
        _mutant("entry_at_its_number", "U25", "an entry stands at position j instead of r j"),
        _mutant("sink_scaled", "U78", "the sink is multiplied by the softmax scale"),
        _mutant("sink_ignored", "U78", "the sink is not in the denominator"),
        _mutant("two_softmaxes", "U02", "window and entries have a softmax each"),
        _mutant("duplicates_dropped", "U08", "an entry of a token in the window is not attended again"),
        _mutant("value_without_rotary_channels", "U30", "the rotary channels of the key are no value"),
        _mutant("head_norm_of_v4", "U11", "every query head is normalised, as in V4"),
        _mutant("output_turn_missing", "U30", "the output keeps the rotation of its keys"),
        _mutant("groups_interleaved", "U38", "heads go round the groups of wo_a"),
        _mutant("entries_not_quantised", "U86", "compressed entries are attended before their quantiser"),
        _mutant("previous_segment_read", "U23", "consumers read the cache of the segment before"),
        _mutant("window_one_short", "U36", "the window is one key short"),
        _mutant("window_one_long", "U36", "the window is one key long"),
        _mutant("history_lost_at_a_chunk", "U27", "window keys of earlier steps are not seen"),
        _mutant("group_split_at_a_chunk", "U27", "a group that a step cuts loses its first token"),
        _mutant("mean_instead_of_softmax", "U25", "the compressor averages"),
        _mutant("entries_never_stored", "U28", "compressed entries are never written"),
        _mutant("index_pages_interleaved", "U23", "index pages are written interleaved"),
        _mutant("ring_shifted", "U36", "rings start one slot late"),
    ),
    controls=(_control("right_run"), _control("right_run_forwards")),
    golden=golden_run,
)

FREE = Op(
    name="csa2_run_free",
    reference="deeptwin.reference.csa2:csa2_run",
    outputs=(
        # a near tie picks other keys: a third of the first index layer's rows; only relations are exact here
        Output(name="h_tm", rule=Close(rtol=1.0), dtype=torch.bfloat16),
        Output(name="page_pq", rule=StoredState(before="page_pq", limits=CSA2_STORED_FREE), dtype=torch.uint8),
        Output(name="state_sq", rule=StoredState(before="state_sq", limits=CSA2_STORED_FREE), dtype=torch.uint8),
    ),
    cases=cases_free,
    draw=draw_run,
    rows={"h_tm": 0},
    out_rows={"h_tm": 0},
    relations=(
        Relation(name="chunk_invariant", axis="steps", hook=other_schedules),
        Relation(name="page_permutation", axis="pages", hook=moved_pages, only=lambda case: case.schedule == "decode"),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.csa2:csa2_run_triton",
            interpreter_declines=too_long,
            lowered_declines=many_kernels,
        ),
    ),
    mutants=(_mutant("stale_index_keys", "U93", "steps that end no group score another layer's index keys"),),
    golden=golden_free,
)

CARD = Card(
    component="csa2",
    summary="window and picked compressed entries in one softmax, caches shared by layers (V4.1)",
    contract={
        "dtypes": "h, q, keys bf16; weights e4m3 in 32 x 32 tiles with UE8M0 scales; caches are bytes",
        "rounding": "bf16 after every product, norm and rotation; CastPoints says where the output side rounds",
        "selection": "entries j < floor((p + 1) / r); ties to the lower index",
        "state": "pages and states of cache_plan; equal bytes after any cut of the text into steps",
        "sharing": "keys and index keys of the nearest owner, picks of the nearest index source; topology.RULES",
        "NaN": "pages and states may hold anything before their first write",
    },
    ops=(PROJECT, OUTPUT, RUN, FREE),
    equivalents=(
        Equivalent(name="eps 1e-6 on normal rows", reason="an eps far below the mean square is lost in fp32"),
        Equivalent(name="the factor c of the head weights", reason="a power of two above zero changes no ranking"),
    ),
)
