"""How the compressor is checked: pooling of whole chunks, with state in chunks and decode steps, norm and rotation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.compressor import compress_rows
from deeptwin.reference.config import C1, C2, CSA4, HCA128, CompressorConfig, RopeConfig
from deeptwin.reference.rope import rope_frequencies, rope_table

from .. import draws
from ..builds.ascend_presets import VECTOR
from ..builds.presets import NO_PRODUCT
from ..builds.spec import BuildCase
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Peer, Relation, variants
from ..floats import ordered
from ..relations import CallFn, Context, Pick, Variant, row_chunks
from ..rules import Bitwise, Codes, OneRounding

_mutant, _control = variants("compressor")
CONFIGS = {
    "c1": C1,
    "c2": C2,
    "csa4": CSA4,
    "hca128": HCA128,
    "r5": CompressorConfig(ratio=5),
    "r3o": CompressorConfig(ratio=3, overlap=True),
}
# rows as draws.rows makes them; wide: gates up to 10^4, where an exponential without its maximum overflows
ALL_REGIMES = (*REGIMES, "zeros", "ties", "tiny", "huge", "subnormal", "cancel", "constant", "wide")
ROPE = RopeConfig(rope_dim=64, theta=160000.0, yarn=None)
U = 2.0**-20  # relative error of an honest fp32 rotation before its rounding, with room
PER_TOKEN = ("value_tw", "gate_tw", "state_slot_t", "position_t")
Pair = tuple[str, Outputs, Outputs]


@dataclass(frozen=True, kw_only=True)
class PoolCase:
    """Sequences of `lengths` new tokens after `starts` old ones; those in `holes` are padding (slot -1)."""

    config: str
    lengths: tuple[int, ...]
    starts: tuple[int, ...] = ()
    channels: int = 40
    backtrack: int = 6
    holes: tuple[int, ...] = ()
    bias: bool = False
    index: str = "int32"
    regime: str = "normal"

    @property
    def id(self) -> str:
        lengths, starts, holes = (".".join(map(str, x)) or "-" for x in (self.lengths, self.starts, self.holes))
        bias = "-bias" if self.bias else ""
        shape = f"{self.config}-n{lengths}-at{starts}-c{self.channels}-back{self.backtrack}-holes{holes}"
        return f"{shape}{bias}-{self.index}-{self.regime}"

    @property
    def tokens(self) -> int:
        """Tokens of the call."""
        return sum(self.lengths)

    @property
    def begins(self) -> tuple[int, ...]:
        """The first position of every sequence."""
        return self.starts or (0,) * len(self.lengths)


@dataclass(frozen=True, kw_only=True)
class TailCase:
    """`tokens` entries of `channels`, of which `rotary` turn."""

    tokens: int
    channels: int = 512
    rotary: int = 64
    ratio: int = 2
    eps: float = 1e-20
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"y{self.tokens}-c{self.channels}-r{self.rotary}-x{self.ratio}-eps{self.eps:g}-{self.regime}"


# inputs


def _gates(rng: np.random.Generator, tokens: int, width: int, regime: str) -> Tensor:
    scale = {"peaked": 20.0, "flat": 0.01, "zeros": 0.0, "constant": 0.0, "wide": 3000.0}.get(regime, 1.0)
    gate = draws.normal(rng, tokens, width, dtype=torch.float32, scale=scale, mean=float(regime == "mean1"))
    return gate.round() if regime == "ties" else gate


def _token_rows(case: PoolCase, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Values and gates as two views of the rows that one product leaves, with NaN behind them."""
    width = case.channels * CONFIGS[case.config].series
    regime = "normal" if case.regime == "wide" else case.regime
    roomy = draws.poisoned(case.tokens, 2 * width + 8, dtype=torch.float32)
    roomy[:, :width] = draws.rows(rng, case.tokens, width, dtype=torch.float32, regime=regime)
    roomy[:, width : 2 * width] = _gates(rng, case.tokens, width, case.regime)
    bounds = np.concatenate([[0], np.cumsum(case.lengths)]).astype(int)
    for hole in case.holes:
        roomy[bounds[hole] : bounds[hole + 1]] = torch.nan
    return roomy[:, :width], roomy[:, width : 2 * width]


def _bounds(case: PoolCase) -> dict[str, Tensor]:
    kind = getattr(torch, case.index)
    cu = torch.tensor([0, *np.cumsum(case.lengths).tolist()], dtype=kind)
    return {"start_b": torch.tensor(case.begins, dtype=kind), "cu_seqlens": cu}


def _bias(case: PoolCase, rng: np.random.Generator) -> Tensor | None:
    config = CONFIGS[case.config]
    if not case.bias:
        return None
    return draws.strided(
        draws.normal(rng, config.ratio, case.channels * config.series, dtype=torch.float32, scale=2.0), pad=4
    )


def draw_chunk(case: PoolCase, rng: np.random.Generator) -> Inputs:
    """A packed chunk without a state."""
    value, gate = _token_rows(case, rng)
    config = CONFIGS[case.config]
    gates = {"gate_tw": None if config.ratio == 1 else gate, "bias_rw": _bias(case, rng)}
    return {"value_tw": value, **gates, **_bounds(case), "config": config}


def _state(case: PoolCase, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Rings in scattered slots with gaps between, NaN in every row that no group needs; the slots, -1 for holes."""
    config = CONFIGS[case.config]
    width, ring, slots = case.channels * config.series, config.ring(case.backtrack), len(case.lengths) + 2
    state = draws.poisoned(slots, ring * 2 * width + 24, dtype=torch.float32)[:, : ring * 2 * width]
    state = state.unflatten(1, (ring, 2, width))
    slot = torch.from_numpy(rng.permutation(slots)[: len(case.lengths)].copy())
    for b, start in enumerate(case.begins):
        for position in range(max(0, start - config.span + 1), start):
            state[slot[b], position % ring, 0] = _gates(rng, 1, width, case.regime)[0]
            state[slot[b], position % ring, 1] = draws.normal(rng, width, dtype=torch.float32)
    slot[list(case.holes)] = -1
    return state, slot.to(getattr(torch, case.index))


def draw_prefill(case: PoolCase, rng: np.random.Generator) -> Inputs:
    """A packed chunk and the rings of what came before."""
    value, gate = _token_rows(case, rng)
    bias = _bias(case, rng)
    state, slot = _state(case, rng)
    rows = {"value_tw": value, "gate_tw": gate, "bias_rw": bias}
    return rows | {"state_": state, "state_slot_b": slot, **_bounds(case), "config": CONFIGS[case.config]}


def draw_decode(case: PoolCase, rng: np.random.Generator) -> Inputs:
    """The same, told token by token."""
    return as_step(draw_prefill(case, rng))


def as_step(chunk: Inputs) -> Inputs:
    """Decode inputs of a chunk; junk positions for padding."""
    length_b = chunk["cu_seqlens"].long().diff()
    seq_t = torch.arange(len(length_b)).repeat_interleave(length_b)
    slot_t = chunk["state_slot_b"][seq_t]
    position_t = chunk["start_b"][seq_t] + torch.arange(len(seq_t)) - chunk["cu_seqlens"][seq_t]
    position_t = torch.where(slot_t >= 0, position_t, -7).to(chunk["start_b"].dtype)
    kept = {name: chunk[name] for name in ("value_tw", "gate_tw", "bias_rw", "state_", "config")}
    return kept | {"state_slot_t": slot_t, "position_t": position_t}


def draw_tail(case: TailCase, rng: np.random.Generator) -> Inputs:
    """Rows as a view, entries in random order with every seventh -1 and a zero row; unused table rows are NaN."""
    x = draws.rows(rng, case.tokens, case.channels, dtype=torch.bfloat16, regime=case.regime)
    entry = rng.permutation(3 * case.tokens)[: case.tokens].astype(np.int32)
    entry[3::7] = -1
    x[3::7] = 0
    positions = np.maximum(entry, 0).astype(np.int64) * case.ratio
    table = draws.poisoned(int(positions.max(initial=0)) + 2, case.rotary + 4, dtype=torch.float32)[:, : case.rotary]
    config = replace(ROPE, rope_dim=case.rotary)
    table[positions] = rope_table(torch.from_numpy(positions) * 9973 % 2**20, rope_frequencies(config))
    weight = draws.normal(rng, case.channels, dtype=torch.bfloat16, scale=0.5, mean=1.0)
    weight[-2:] = torch.tensor([0.0, -1.9921875])
    return {
        "m_yc": draws.strided(x, pad=8),
        "weight_c": weight,
        "table_sr": table,
        "entry_y": torch.from_numpy(entry),
        "ratio": case.ratio,
        "eps": case.eps,
    }


# which cases


def cases_chunk(full: bool) -> list[PoolCase]:
    """Every regime with enough elements for the rate rule, every residue, overlap, bias, groups of 128, ratio 1."""
    base = PoolCase(config="c2", lengths=(17, 0, 1, 2, 5), channels=512)
    found = [replace(base, lengths=(40, 1), regime=r) for r in REGIMES]
    small = replace(base, lengths=(7, 0, 1, 2), channels=40)
    found += [replace(small, lengths=(6,), channels=300, regime=r) for r in ALL_REGIMES[4:]]
    found += [
        replace(small, starts=(4, 0, 6, 2), index="int64"),
        replace(small, lengths=()),
        replace(small, lengths=(0,)),
        replace(small, config="c1", lengths=(3, 0, 1), starts=(5, 2, 0)),
        replace(small, config="csa4", lengths=(9, 3), bias=True),
        replace(small, config="csa4", lengths=(9, 12), channels=128, bias=True, regime="peaked"),
        replace(small, config="csa4", lengths=(8,), regime="wide"),
        replace(small, config="r5", lengths=(11, 4, 5), channels=33, bias=True, regime="mean1"),
        replace(small, config="r3o", lengths=(7, 2), channels=300, regime="mean1"),
        replace(small, config="hca128", lengths=(129,), channels=24, bias=True),
    ]
    if full:
        shapes = {"c2": (19, 4), "csa4": (10, 9), "r5": (16, 3)}
        found += [replace(small, config=c, lengths=shapes[c], bias=True, regime=r) for c, r in product(shapes, REGIMES)]
        found += [replace(small, config=c, lengths=tuple(range(9))) for c in shapes]
    return list({case.id: case for case in found}.values())


def cases_prefill(full: bool) -> list[PoolCase]:
    """Starts and lengths of every residue, chunks shorter than a group and longer than the ring, padding, one short
    ring, production width."""
    base = PoolCase(config="c2", lengths=(1, 2, 9, 0), starts=(1, 3, 4, 5))
    wide = PoolCase(config="c2", lengths=(4, 3), starts=(5, 0), channels=512)
    found = [replace(wide, regime=r) for r in REGIMES]
    found += [
        base,
        replace(base, lengths=(1, 2, 3), starts=(4, 1, 7), holes=(1,)),
        replace(base, lengths=(2, 1, 1, 2, 1), starts=(0, 1, 2, 3, 4), holes=(0, 1, 2, 3, 4)),
        replace(base, lengths=(9,), starts=(1,), backtrack=1, index="int64"),
        replace(base, lengths=(), starts=()),
        replace(base, lengths=(0,), starts=(3,)),
        replace(base, config="csa4", lengths=(7, 2), starts=(3, 2), bias=True),
        replace(
            base, config="csa4", lengths=(2, 7, 11, 4, 1), starts=(0, 1, 14, 4, 3), bias=True, backtrack=1, holes=(1,)
        ),
        replace(base, config="r5", lengths=(3, 6, 12), starts=(3, 5, 4), bias=True, regime="ties"),
        replace(base, config="r3o", lengths=(2, 5), starts=(4, 5), channels=300, regime="wide"),
        replace(base, config="hca128", lengths=(2,), starts=(127,), channels=24, bias=True, backtrack=2),
    ]
    if full:
        # five sequences, one for each residue and more
        found += [
            replace(base, config=c, lengths=(n,) * 5, starts=tuple(range(s, s + 5)), bias=True)
            for c, n, s in product(("c2", "csa4"), (1, 3, 8), (0, 6))
        ]
        found += [replace(base, config=c, regime=r) for c, r in product(("c2", "r3o"), ("peaked", "huge", "wide"))]
    return list({case.id: case for case in found}.values())


def cases_decode(full: bool) -> list[PoolCase]:
    """Steps of 1 to 6 tokens at every residue, padding, one token, the ring that just fits, production width."""
    base = PoolCase(config="c2", lengths=(1, 2, 6, 1), starts=(0, 2, 7, 5))
    wide = PoolCase(config="c2", lengths=(6, 3), starts=(1, 8), channels=512)
    found = [replace(wide, regime=r) for r in REGIMES]
    found += [
        base,
        replace(base, lengths=(1, 2, 3), starts=(4, 1, 7), holes=(1,)),
        replace(base, lengths=(2, 1, 1, 2, 1), starts=(0, 1, 2, 3, 4), holes=(0, 1, 2, 3, 4), index="int64"),
        replace(base, lengths=(1, 1, 1), starts=(0, 1, 7), backtrack=1),
        replace(base, lengths=(), starts=()),
        replace(base, config="csa4", lengths=(5, 1), starts=(5, 0), bias=True),
        replace(base, config="csa4", lengths=(1, 4, 6, 1, 5), starts=(3, 4, 6, 0, 3), bias=True, holes=(3,)),
        replace(base, config="r5", lengths=(6, 2, 1), starts=(3, 8, 4), bias=True, regime="ties"),
        replace(base, config="r3o", lengths=(5, 2, 1), starts=(4, 1, 5), channels=300, regime="wide"),
        replace(base, config="hca128", lengths=(1,), starts=(127,), channels=24, bias=True),
    ]
    if full:
        found += [
            replace(base, config=c, lengths=(n,) * 5, starts=tuple(range(s, s + 5)), bias=True)
            for c, n, s in product(("c2", "csa4"), (1, 4, 6), (0, 6))
        ]
        found += [replace(base, config=c, regime=r) for c, r in product(("c2", "r3o"), ("peaked", "huge", "wide"))]
    return list({case.id: case for case in found}.values())


def cases_tail(full: bool) -> list[TailCase]:
    """Every regime with enough elements for the rate rule, the widths and ratios of V4 and V4.1, awkward ones."""
    base = TailCase(tokens=20)
    found = [replace(base, regime=r) for r in ALL_REGIMES[:-1]]
    found += [
        replace(base, tokens=0),
        replace(base, tokens=1, ratio=1),
        replace(base, tokens=9, channels=128, ratio=4, eps=1e-6),
        replace(base, tokens=9, channels=64, ratio=128, eps=1e-6),
        replace(base, tokens=9, channels=100, rotary=8),
        replace(base, tokens=9, channels=24, rotary=16, ratio=3, eps=1e-6, regime="mean1"),
    ]
    if full:
        found += [
            replace(base, tokens=10, channels=c, ratio=x, eps=e, regime=r)
            for c, x, e, r in product((128, 512), (4, 128), (1e-20, 1e-6), ALL_REGIMES[:-1])
            if e == 1e-20 or r not in ("tiny", "subnormal")
        ]
    return list({case.id: case for case in found}.values())


# relation hooks


def _sequences(inputs: Inputs, order: list[int], spoil: bool = False) -> Inputs:
    """The sequences of `order` alone; or, with `spoil`, all of them, the others' tokens NaN."""
    cu = inputs["cu_seqlens"].tolist()
    rows = [i for b in order for i in range(cu[b], cu[b + 1])]
    if spoil:
        others = [i for i in range(cu[-1]) if i not in rows]
        return inputs | {name: _with_rows(inputs[name], others, torch.nan) for name in ("value_tw", "gate_tw")}
    taken = {n: inputs[n][rows] if inputs[n] is not None else None for n in ("value_tw", "gate_tw")}
    lengths = [cu[b + 1] - cu[b] for b in order]
    taken["cu_seqlens"] = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=inputs["cu_seqlens"].dtype)
    return inputs | taken | {n: inputs[n][order] for n in ("start_b", "state_slot_b") if n in inputs}


def _with_rows(x: Tensor | None, rows: list[int], value: float) -> Tensor | None:
    if x is None:
        return None
    changed = x.clone()
    changed[rows] = value
    return changed


def _keeping(rows: Tensor | list[int], slots: list[int]) -> Pick:
    """What a call says about some of its rows and rings."""
    return lambda outputs: {name: x[slots] if name == "state_" else x[rows] for name, x in outputs.items()}


def _picked(label: str, call: Inputs, got: Pick, expect: Pick) -> Variant:
    return Variant(label=label, calls=(call,), join=lambda results: got(results[0]), expect=expect)


def _of_sequences(inputs: Inputs, order: list[int]) -> Pick:
    _, seq_y = compress_rows(inputs["start_b"], inputs["cu_seqlens"], ratio=inputs["config"].ratio)
    rows = [i for b in order for i in (seq_y == b).nonzero()[:, 0].tolist()]
    slots = [s for s in inputs["state_slot_b"][order].tolist() if s >= 0] if "state_slot_b" in inputs else []
    return _keeping(rows, slots)


def sequences_apart(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Every sequence alone, all in another order, one beside NaN."""
    count = len(inputs["start_b"])
    if not count:
        yield Variant(label="no sequences again", calls=(inputs,))
        return
    for order in [*([b] for b in range(count)), [int(b) for b in context.rng.permutation(count)]]:
        apart = _sequences(inputs, order)
        inside = _of_sequences(apart, list(range(len(order))))
        yield _picked(f"sequences {order}", apart, inside, _of_sequences(inputs, order))
    for keep in range(min(count, 2)):
        pick = _of_sequences(inputs, [keep])
        yield _picked(f"sequence {keep} beside NaN", _sequences(inputs, [keep], spoil=True), pick, pick)


def runs_apart(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Every sequence of a decode step alone, all in another order, one beside NaN."""
    slots = inputs["state_slot_t"].tolist()
    if not slots:
        yield Variant(label="no tokens again", calls=(inputs,))
        return
    edges = [*_heads(slots), len(slots)]
    runs = [list(range(a, b)) for a, b in pairwise(edges)]
    for order in [*([n] for n in range(len(runs))), [int(n) for n in context.rng.permutation(len(runs))]]:
        rows = [i for n in order for i in runs[n]]
        own = [slots[i] for i in rows if slots[i] >= 0]
        apart = inputs | {name: inputs[name][rows] for name in PER_TOKEN}
        yield _picked(f"runs {order}", apart, _keeping(list(range(len(rows))), own), _keeping(rows, own))
    for run in runs[:2]:
        others = [i for i in range(len(slots)) if i not in run]
        spoiled = {name: _with_rows(inputs[name], others, torch.nan) for name in ("value_tw", "gate_tw")}
        pick = _keeping(run, [slots[i] for i in run if slots[i] >= 0])
        yield _picked(f"tokens {run} beside NaN", inputs | spoiled, pick, pick)


def _heads(slots: list[int]) -> list[int]:
    """Where the runs of a step begin; every padding token is one."""
    return [i for i, slot in enumerate(slots) if i == 0 or slot != slots[i - 1] or slot < 0]


def poisoned_future(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Entries do not change when tokens behind them, unfinished groups too, become NaN."""
    ratio, cu = inputs["config"].ratio, inputs["cu_seqlens"].tolist()
    entry_y, _ = compress_rows(inputs["start_b"], inputs["cu_seqlens"], ratio=ratio)
    last = int(entry_y.max()) if len(entry_y) else 0
    for known in sorted({1, last + 1}):
        late = [
            i
            for b, start in enumerate(inputs["start_b"].tolist())
            for i in range(cu[b], cu[b + 1])
            if start + i - cu[b] >= known * ratio
        ]
        changed = {name: _with_rows(inputs[name], late, torch.nan) for name in ("value_tw", "gate_tw")}
        pick = _keeping(entry_y < known, [])
        yield _picked(f"tokens from entry {known} on", inputs | changed, pick, pick)


def shuffled_channels(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Channels have nothing to do with one another."""
    config: CompressorConfig = inputs["config"]
    c = inputs["value_tw"].shape[1] // config.series
    order = torch.from_numpy(context.rng.permutation(c))
    wide = torch.cat([order + s * c for s in range(config.series)])
    names = ("value_tw", "gate_tw", "bias_rw")
    changed = {name: inputs[name][:, wide] if inputs[name] is not None else None for name in names}
    yield Variant(
        label="channels in another order",
        calls=(inputs | changed,),
        expect=lambda out: out | {"m_yc": out["m_yc"][:, order]},
    )


def _piece(inputs: Inputs, state: Tensor, done: list[int], sizes: list[int]) -> Inputs:
    """The next `sizes` tokens of every sequence after `done` ones."""
    cu = inputs["cu_seqlens"].tolist()
    rows = [i for b, n in enumerate(sizes) for i in range(cu[b] + done[b], cu[b] + done[b] + n)]
    start = inputs["start_b"] + torch.tensor(done, dtype=inputs["start_b"].dtype)
    cu_new = torch.tensor([0, *np.cumsum(sizes).tolist()], dtype=inputs["cu_seqlens"].dtype)
    tokens = {name: inputs[name][rows] for name in ("value_tw", "gate_tw")}
    return inputs | tokens | {"state_": state, "start_b": start, "cu_seqlens": cu_new}


def _by_sequence(outputs: Outputs, seq_y: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    real = outputs["entry_y"] >= 0
    chosen = [real & (seq_y == b) for b in range(count)]
    return [(outputs["m_yc"][here], outputs["entry_y"][here]) for here in chosen]


def any_split(inputs: Inputs, call: CallFn, context: Context) -> Iterator[Pair]:
    """One chunk against pieces of every size, prefilled or decoded, with the state between: entries and state bytes."""
    config: CompressorConfig = inputs["config"]
    lengths = inputs["cu_seqlens"].long().diff().tolist()
    count, room = len(lengths), inputs["state_"].shape[1] - config.span + 1
    once = call(inputs)
    _, seq_y = compress_rows(inputs["start_b"], inputs["cu_seqlens"], ratio=config.ratio)
    expected = _by_sequence(once, seq_y, count)
    longest = max(lengths, default=0)
    sizes = [1, 2, 3, 5, 7, 11] if context.full else sorted({1, config.ratio + 1, 7})
    plans = [(f"chunks of {n}", n, n, False) for n in sizes]
    plans += [(f"steps of {n}", n, n, True) for n in sizes if n <= room and (n == 1 or context.full)]
    plans += [("mixed steps", 1, min(6, room), True)]
    for label, low, high, decode in plans if longest <= 20 or context.full else plans[-1:]:
        state, done = inputs["state_"], [0] * count
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(count)]
        while done != lengths:
            size = int(context.rng.integers(low, high + 1))
            sizes_now = [min(size, n - d) for n, d in zip(lengths, done, strict=True)]
            piece = _piece(inputs, state, done, sizes_now)
            if decode and context.partner is not None:
                out = context.partner(as_step(piece))
                seq = torch.arange(count).repeat_interleave(torch.tensor(sizes_now))
            else:
                out = call(piece)
                _, seq = compress_rows(piece["start_b"], piece["cu_seqlens"], ratio=config.ratio)
            for b, part in enumerate(_by_sequence(out, seq, count)):
                found[b].append(part)
            state = out["state_"]
            done = [d + n for d, n in zip(done, sizes_now, strict=True)]
        got: Outputs = {"state_": state}
        want: Outputs = {"state_": once["state_"]}
        for b, (m, entry) in enumerate(expected):
            parts = found[b] or [(m[:0], entry[:0])]
            got |= {f"m of {b}": torch.cat([p[0] for p in parts]), f"entries of {b}": torch.cat([p[1] for p in parts])}
            want |= {f"m of {b}": m, f"entries of {b}": entry}
        yield label, got, want


def rejected_tokens(inputs: Inputs, call: CallFn, context: Context) -> Iterator[Pair]:
    """A step of which the first j tokens are right, the rest run again: entries and state of single steps."""
    slot_t, tokens = inputs["state_slot_t"], len(inputs["state_slot_t"])
    place_t = torch.zeros(tokens, dtype=torch.int64)
    for i in range(1, tokens):
        place_t[i] = place_t[i - 1] + 1 if slot_t[i] == slot_t[i - 1] and slot_t[i] >= 0 else 0

    def step(kept: Tensor, state: Tensor, wrong: Tensor | None = None) -> Outputs:
        taken = {name: inputs[name][kept] for name in PER_TOKEN} | {"state_": state}
        if wrong is not None:
            for name in ("value_tw", "gate_tw"):
                taken[name] = torch.where(wrong[kept][:, None], 3.0 - taken[name], taken[name])
        return call(inputs | taken)

    longest = int(place_t.max()) + 1 if tokens else 0
    state = inputs["state_"]
    serial: dict[int, tuple[Tensor, Tensor]] = {}
    for n in range(longest):
        kept = (place_t == n).nonzero()[:, 0]
        out = step(kept, state)
        state = out["state_"]
        serial |= {int(i): (out["m_yc"][k], out["entry_y"][k]) for k, i in enumerate(kept)}
    want: Outputs = {"state_": state}
    if tokens:
        want |= {"m_yc": torch.stack([serial[i][0] for i in range(tokens)])}
        want |= {"entry_y": torch.stack([serial[i][1] for i in range(tokens)])}
    everything = torch.arange(tokens)
    for accepted in range(longest + 1):
        wrong = place_t >= accepted
        first = step(everything, inputs["state_"], wrong)
        again = wrong.nonzero()[:, 0]
        second = step(again, first["state_"])
        m, entry = first["m_yc"].clone(), first["entry_y"].clone()
        m[again], entry[again] = second["m_yc"], second["entry_y"]
        got = {"state_": second["state_"], "m_yc": m, "entry_y": entry}
        yield f"{accepted} accepted", {name: got[name] for name in want}, want


def as_prefill(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The step as a chunk: the same entries and state."""
    slot_t = inputs["state_slot_t"].tolist()
    heads = _heads(slot_t)
    kept = {name: inputs[name] for name in ("value_tw", "gate_tw", "bias_rw", "state_", "config")}
    kind = inputs["position_t"].dtype
    chunk = kept | {
        "state_slot_b": inputs["state_slot_t"][heads],
        "start_b": inputs["position_t"][heads].clamp(min=0),
        "cu_seqlens": torch.tensor([*heads, len(slot_t)] if heads else [0], dtype=kind),
    }

    def entries(out: Outputs) -> Outputs:
        real = out["entry_y"] >= 0
        return {"state_": out["state_"], "m_yc": out["m_yc"][real], "entry_y": out["entry_y"][real]}

    yield Variant(label="prefill", calls=(chunk,), join=lambda rs: entries(rs[0]), expect=entries)


def parked_rows(inputs: Inputs) -> Tensor:
    """Ring rows that a chunk, or a step, may write."""
    step = as_step(inputs) if "start_b" in inputs else inputs
    allowed = torch.zeros(inputs["state_"].shape, dtype=torch.bool)
    known = step["state_slot_t"] >= 0
    allowed[step["state_slot_t"][known].long(), step["position_t"][known].long() % allowed.shape[1]] = True
    return allowed


def few_calls(case: Any) -> bool:
    """Relations make many calls: they run on few channels and sequences."""
    if case.regime == "file":
        return True
    small = case.channels <= 40 and len(case.lengths) <= 4 and case.tokens <= 20 and case.config != "hca128"
    return small and case.regime == "normal"


def repeated(case: Any) -> bool:
    """Repeats are for the smallest of them."""
    return few_calls(case) and (case.regime == "file" or len(case.lengths) <= 3)


def few_entries(case: Any) -> bool:
    """The same for the tail."""
    return case.tokens <= 1 or case.channels <= 64 or case.regime == "file"


# what an honest evaluation may store


def key_interval(marks: list[tuple[str, Tensor]], arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """The lowest and highest rotated row, in value order, of the latent that the candidate itself returned."""
    latent: Tensor = arguments["latent_yc"].to(torch.float64)
    position = arguments["entry_y"].long().clamp(min=0) * arguments["ratio"]
    rows = arguments["table_sr"].to(torch.float64)[position]
    half = rows.shape[1] // 2
    cos, sin = rows[:, :half], rows[:, half:]
    pairs = latent[:, -2 * half :].unflatten(1, (half, 2))
    exact = torch.stack([pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 0] * sin + pairs[..., 1] * cos], -1)
    slack = u * torch.stack([(pairs * torch.stack([cos, sin], -1)).abs().sum(-1)] * 2, -1)
    slack = torch.maximum(slack, u * torch.stack([(pairs * torch.stack([sin, cos], -1)).abs().sum(-1)] * 2, -1))
    ends = []
    for sign in (-1, 1):
        whole = latent.clone()
        whole[:, -2 * half :] = (exact + sign * slack).flatten(1)
        ends.append(ordered(whole.to(torch.float32).to(torch.bfloat16)))
    return ends[0], ends[1]


# a weighted sum of values of both signs: an fp32 evaluation is off by some 2^-23 of the largest term, more than an ulp
# of a result that cancels. 3 640 judgements (4 honest forms, all regimes, 50 seeds): 2^-18.1 of the row's rms at worst,
# shares of at most 9e-5; an exponential of a device may be a few ulps worse
POOLED = OneRounding(cancellation=2.0**-15)
STATE = Output(name="state_", rule=Bitwise(), dtype=torch.float32)
ENTRIES = (
    Output(name="m_yc", rule=POOLED, dtype=torch.bfloat16),
    Output(name="entry_y", rule=Bitwise(), dtype=torch.int32),
)
NO_ROWS: dict[str, int] = {}  # rows of a packed chunk belong together: the relations repack whole sequences


def golden_chunk() -> list[PoolCase]:
    """One case a configuration."""
    small = PoolCase(config="c2", lengths=(5, 1, 2), channels=6)
    return [
        small,
        replace(small, regime="peaked"),
        replace(small, config="c1", starts=(3, 0, 1)),
        replace(small, config="csa4", lengths=(9, 3), bias=True),
        replace(small, config="hca128", lengths=(128,), channels=2, bias=True),
    ]


def golden_prefill() -> list[PoolCase]:
    """A chunk with a past, padding, and overlap."""
    small = PoolCase(config="c2", lengths=(3, 1, 2), starts=(3, 0, 8), channels=4, holes=(1,))
    return [small, replace(small, config="csa4", lengths=(5, 2, 4), bias=True)]


def golden_decode() -> list[PoolCase]:
    """Two steps."""
    small = PoolCase(config="c2", lengths=(1, 6, 2), starts=(3, 1, 8), channels=4)
    return [small, replace(small, config="csa4", lengths=(1, 4, 2), bias=True, holes=(2,))]


def golden_tail() -> list[TailCase]:
    """The two widths, cut down."""
    return [TailCase(tokens=4, channels=16, rotary=8), TailCase(tokens=4, channels=16, rotary=8, ratio=4, eps=1e-6)]


CHUNK = Op(
    name="compress",
    reference="deeptwin.reference.compressor:compress",
    outputs=ENTRIES,
    cases=cases_chunk,
    draw=draw_chunk,
    rows=NO_ROWS,
    out_rows=NO_ROWS,
    relations=(
        Relation(name="batch_invariant", axis="sequences", hook=sequences_apart, only=few_calls),
        Relation(name="run_to_run", axis="repeats", only=repeated),
        Relation(name="causality", axis="later tokens", hook=poisoned_future, only=few_calls),
        Relation(name="head_permutation", axis="channels", hook=shuffled_channels, only=few_calls),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.compressor:compress_triton"),),
    builds=(
        BuildCase(
            name="c1-c512",
            kernel="deeptwin.kernels.triton_ops.compressor:_pool_chunk",
            launch="deeptwin.parity.builds.launches.compressor:chunk_c1",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="torch",
            function="deeptwin.parity.peers.compressor:torch_fp64",
            needs=(),
            explains="torch.softmax in fp64 over unfolded windows, one sequence at a time, rounded through fp32",
        ),
        Peer(
            name="transformers",
            function="deeptwin.parity.peers.compressor:deepseek_v4",
            needs=("transformers",),
            explains="DeepseekV4 compressors with identity projections, norm and rotation, in fp32 and rounded once",
            only=lambda case: case.config != "c1" and not any(case.begins) and case.regime != "huge",
        ),
    ),
    mutants=(
        _mutant("one_weight_for_all_channels", "U25", "one softmax for all channels instead of one for each"),
        _mutant("gate_ignored", "U25", "the plain mean of the group"),
        _mutant("exponential_base_2", "U78", "2^z where e^z is asked"),
        _mutant("maximum_not_subtracted", "U27", "large logits overflow: the maximum is not subtracted"),
        _mutant("gate_bf16", "U17", "gates are rounded to bf16"),
        _mutant("value_bf16", "U17", "values are rounded to bf16"),
        _mutant("weights_bf16", "U17", "softmax weights are rounded to bf16"),
        _mutant("truncated", "R2", "the entry is truncated to bf16"),
        _mutant("rounded_through_fp16", "U86", "the entry is rounded to fp16 on the way"),
        _mutant("last_channel_overwritten", "U26", "an unaligned copy spoils the last channel of each row"),
        _mutant("bias_ignored", "U31", "the positional bias is left out"),
        _mutant("bias_one_place_off", "U31", "the bias of the next place in the group"),
        _mutant("bias_on_value", "U31", "the bias is added to the values"),
        _mutant("series_swapped", "U33", "overlap: the two series change places"),
        _mutant("own_window_twice", "U33", "overlap: both series of the own window"),
        _mutant("no_overlap", "U33", "overlap is ignored"),
        _mutant("first_group_pools_zeros", "U27", "overlap: the absent first group has logit 0 instead of none"),
        _mutant("group_one_token_early", "U25", "a group ends one token early"),
        _mutant("entries_numbered_by_chunk", "U61", "entries are counted from the chunk, not from the sequence"),
        _mutant("row_without_entry_unwritten", "U75", "the row of a sequence without an entry is left unwritten"),
        _mutant("row_without_entry_times_zero", "U74", "the row of a sequence without an entry is 0 times its tokens"),
        _mutant("unfinished_group_emitted", "U25", "an unfinished group is emitted"),
        _mutant("bits_depend_on_batch", "U73", "odd batches differ in the last bit of one element"),
        _mutant("not_deterministic", "U10", "a counter leaks into the output"),
    ),
    controls=(
        _control("right"),
        _control("right_divide_first"),
        _control("right_running_maximum"),
        _control("right_two_term"),
    ),
    golden=golden_chunk,
)

PREFILL = Op(
    name="compress_prefill",
    reference="deeptwin.reference.compressor:compress_prefill",
    outputs=(STATE, *ENTRIES),
    cases=cases_prefill,
    draw=draw_prefill,
    rows=NO_ROWS,
    out_rows=NO_ROWS,
    writes="state_",
    relations=(
        Relation(name="batch_invariant", axis="sequences", hook=sequences_apart, only=few_calls),
        Relation(name="run_to_run", axis="repeats", only=repeated),
        Relation(
            name="split_invariant", axis="chunks, steps", hook=any_split, partner="compress_decode", only=few_calls
        ),
        Relation(name="changed_slots", axis="ring rows", hook=parked_rows, only=few_calls),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.compressor:compress_prefill_triton"),),
    builds=(
        BuildCase(
            name="c2-c512",
            kernel="deeptwin.kernels.triton_ops.compressor:_pool_chunk",
            launch="deeptwin.parity.builds.launches.compressor:prefill_c2",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="csa4-c512",
            kernel="deeptwin.kernels.triton_ops.compressor:_pool_chunk",
            launch="deeptwin.parity.builds.launches.compressor:prefill_csa4",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="hca128-c512",
            kernel="deeptwin.kernels.triton_ops.compressor:_pool_chunk",
            launch="deeptwin.parity.builds.launches.compressor:prefill_hca128",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="park-c2-c512",
            kernel="deeptwin.kernels.triton_ops.compressor:_park_chunk",
            launch="deeptwin.parity.builds.launches.compressor:prefill_c2",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="park-csa4-c512",
            kernel="deeptwin.kernels.triton_ops.compressor:_park_chunk",
            launch="deeptwin.parity.builds.launches.compressor:prefill_csa4",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("chunk_forgets_the_ring", "U27", "a chunk does not see the tokens before it"),
        _mutant("chunk_continues_its_neighbour", "U37", "a chunk continues the packed sequence before it"),
        _mutant("groups_start_with_the_chunk", "U31", "groups are counted from the chunk"),
        _mutant("prefill_entries_numbered_by_chunk", "U61", "entries are counted from the chunk"),
        _mutant("bias_from_chunk_start", "U31", "the bias is counted from the chunk"),
        _mutant("stale_ring_before_the_sequence", "U34", "overlap: the first group reads what an older owner left"),
        _mutant("ring_written_before_it_is_read", "U36", "a long chunk overwrites what its first group needs"),
        _mutant("state_never_written", "U28", "the store is skipped"),
        _mutant("first_tokens_parked", "U33", "the first tokens of the chunk are parked, not the last"),
        _mutant(
            "unfinished_group_parked_only", "U33", "only the unfinished group is parked: nothing can be rolled back"
        ),
        _mutant("state_of_slot_0", "U09", "every state goes to slot 0"),
        _mutant("slot_of_first_sequence", "U09", "every sequence uses the slot of the first"),
        _mutant("gate_parked_without_bias", "U28", "the ring holds the gate without its bias"),
        _mutant("value_parked_before_gate", "U23", "the ring holds values before gates, its reader knows"),
        _mutant("state_bf16", "U32", "the ring is rounded to bf16"),
        _mutant("ring_counted_from_chunk", "U29", "ring places are counted from the chunk"),
        _mutant("ring_as_long_as_the_window", "U36", "the ring wraps at the window, without room to roll back"),
        _mutant("hole_wraps_to_last_slot", "U79", "slot -1 is the last slot"),
        _mutant("prefill_row_without_entry_unwritten", "U75", "the row of a sequence without an entry is unwritten"),
    ),
    controls=(
        _control("right_prefill"),
        _control("right_prefill_divide_first"),
    ),
    golden=golden_prefill,
)

DECODE = Op(
    name="compress_decode",
    reference="deeptwin.reference.compressor:compress_decode",
    outputs=(STATE, *ENTRIES),
    cases=cases_decode,
    draw=draw_decode,
    rows=NO_ROWS,
    out_rows=NO_ROWS,
    writes="state_",
    relations=(
        Relation(name="batch_invariant", axis="sequences", hook=runs_apart, only=few_calls),
        Relation(name="run_to_run", axis="repeats", only=repeated),
        Relation(name="rollback_equals_serial", axis="verify width", hook=rejected_tokens, only=few_calls),
        Relation(
            name="decode_equals_prefill", axis="path", hook=as_prefill, partner="compress_prefill", only=few_calls
        ),
        Relation(name="changed_slots", axis="ring rows", hook=parked_rows, only=few_calls),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.compressor:compress_decode_triton"),),
    builds=(
        BuildCase(
            name="c2-c512",
            kernel="deeptwin.kernels.triton_ops.compressor:_pool_step",
            launch="deeptwin.parity.builds.launches.compressor:decode_c2",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="csa4-c512",
            kernel="deeptwin.kernels.triton_ops.compressor:_pool_step",
            launch="deeptwin.parity.builds.launches.compressor:decode_csa4",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="hca128-c512",
            kernel="deeptwin.kernels.triton_ops.compressor:_pool_step",
            launch="deeptwin.parity.builds.launches.compressor:decode_hca128",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("step_does_not_see_itself", "U32", "a token reads the ring as it was before the step"),
        _mutant("decode_forgets_the_ring", "U27", "a step does not see the tokens before it"),
        _mutant("decode_one_token_early", "U25", "entries are emitted one token early"),
        _mutant("decode_state_never_written", "U28", "the store is skipped"),
        _mutant("verify_rounds_its_state", "U32", "a step of several tokens rounds its state to bf16"),
        _mutant("decode_unfinished_group_only", "U33", "only the unfinished group is parked"),
        _mutant("decode_ring_as_long_as_the_window", "U36", "the ring wraps at the window"),
        _mutant("decode_ring_one_short", "U36", "the ring wraps one place early"),
        _mutant("decode_value_before_gate", "U23", "the ring holds values before gates, its reader knows"),
        _mutant("decode_gate_without_bias", "U28", "the ring holds the gate without its bias"),
        _mutant("decode_bias_ignored", "U31", "the positional bias is left out"),
        _mutant("decode_hole_wraps", "U79", "slot -1 is the last slot"),
        _mutant("decode_padding_times_zero", "U74", "rows without an entry are 0 times the last token"),
        _mutant("decode_row_unwritten", "U75", "rows without an entry are left unwritten"),
        _mutant("decode_slot_of_first", "U09", "every sequence uses the slot of the first"),
        _mutant("decode_stale_before_sequence", "U34", "overlap: the first group reads what an older owner left"),
        _mutant("decode_bits_depend_on_batch", "U73", "odd batches differ in the last bit of one element"),
        _mutant("decode_not_deterministic", "U10", "a counter leaks into the output"),
    ),
    controls=(
        _control("right_decode"),
        _control("right_decode_divide_first"),
    ),
    golden=golden_decode,
)

TAIL = Op(
    name="compress_tail",
    reference="deeptwin.reference.compressor:compress_tail",
    outputs=(
        Output(name="latent_yc", rule=OneRounding(), dtype=torch.bfloat16),
        Output(name="key_yc", rule=Codes(u=U, allowed=key_interval, order=ordered), dtype=torch.bfloat16),
    ),
    cases=cases_tail,
    draw=draw_tail,
    rows={"m_yc": 0, "entry_y": 0},
    out_rows={"latent_yc": 0, "key_yc": 0},
    relations=(
        Relation(name="batch_invariant", axis="entries", only=few_entries),
        Relation(name="layout_invariant", axis="alignment of rows", only=few_entries),
        Relation(name="chunk_invariant", axis="chunks of entries", hook=row_chunks, only=few_entries),
        Relation(name="run_to_run", axis="repeats", only=few_entries),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.compressor:compress_tail_triton"),),
    builds=(
        BuildCase(
            name="c512",
            kernel="deeptwin.kernels.triton_ops.compressor:_tail",
            launch="deeptwin.parity.builds.launches.compressor:tail_512",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="c128",
            kernel="deeptwin.kernels.triton_ops.compressor:_tail",
            launch="deeptwin.parity.builds.launches.compressor:tail_128",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("position_of_last_token", "U61", "an entry is rotated at its last token"),
        _mutant("position_of_centre", "U61", "an entry is rotated at its centre"),
        _mutant("position_is_entry_number", "U61", "an entry is rotated by its own number"),
        _mutant("position_of_next_group", "U61", "an entry is rotated at the group behind it"),
        _mutant("hole_rotated_before_zero", "U79", "entry -1 reads the table before its start"),
        _mutant("half_split_pairs", "U12", "half-split pairs"),
        _mutant("first_channels_rotated", "U38", "the first channels rotate"),
        _mutant("rotation_inverted", "U30", "the angle is negative"),
        _mutant("unrounded_latent_rotated", "U86", "the key is made of the latent before its rounding"),
        _mutant("latent_rotated_in_place", "U93", "the latent is rotated in place: index keys would see the position"),
        _mutant("rotation_before_norm", "U30", "the row is rotated before its norm"),
        _mutant("tail_eps_missing", "U59", "a zero row divides by zero"),
        _mutant("tail_eps_1e_6", "U39", "eps is 1e-6 whatever is asked for"),
        _mutant("norm_without_rotary", "U39", "the mean square leaves the rotary channels out"),
        _mutant("norm_over_batch", "U76", "the mean square is taken over the batch"),
        _mutant("tail_truncated", "R2", "both outputs are truncated to bf16"),
        _mutant("tail_table_bf16", "U88", "cosines and sines are rounded to bf16"),
        _mutant("key_rest_unwritten", "U75", "channels that do not rotate are left unwritten"),
        _mutant("tail_not_deterministic", "U10", "a counter leaks into the output"),
    ),
    controls=(
        _control("right_tail"),
        _control("right_tail_lanes_of_32"),
    ),
    golden=golden_tail,
)

CARD = Card(
    component="compressor",
    summary="groups of tokens pooled into entries, with a ring of state; norm and rotation of entries",
    contract={
        "dtypes": "value, gate and bias fp32; state fp32; m, latent and key bf16; entry int32",
        "rounding": "gate + bias to fp32; m once to bf16; latent once; key once, of the rounded latent",
        "order": "any order of a group's sums that depends on nothing else; bits agree within one implementation",
        "state": "[slots, ring, 2, w]: logits, then values; token p at p mod ring; the last min(ring, n) tokens",
        "rows": "prefill: max(1, entries) a sequence; decode: one a token; no entry: zeros, entry -1",
        "padding": "slot -1 reads and writes nothing",
        "position": "an entry is rotated at ratio · entry, the first token of its own group",
    },
    ops=(CHUNK, PREFILL, DECODE, TAIL),
    equivalents=(
        Equivalent(
            name="divide before or after the sum, running maximum, two-term form",
            reason="the same function: within an ulp of each other, and the contract allows every one of them",
        ),
        Equivalent(
            name="a constant added to all gates of a group",
            reason="a softmax does not see it; a test of the reference asserts it",
        ),
    ),
)
