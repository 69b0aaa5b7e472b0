"""Metamorphic relations: properties between calls of one function, each named and reusable.

A relation turns the base inputs into variants. Each variant is one or more calls, a way to join their outputs, and
what of the base output they must reproduce. `compare` runs them and reports the smallest failing pair it met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .card import Inputs, Op, Outputs, Relation
from .draws import strided
from .floats import raw_bytes, same_bytes, ulp_distance

CallFn = Callable[..., Outputs]
Pick = Callable[[Outputs], Outputs]


def whole(outputs: Outputs) -> Outputs:
    """All outputs, unchanged."""
    return outputs


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Calls that must reproduce a part of the base output."""

    label: str
    calls: tuple[Inputs, ...]
    join: Callable[[list[Outputs]], Outputs] = lambda results: results[0]
    expect: Pick = whole  # what of the base output the joined result must equal
    first: Inputs | None = None  # a call made before, its result ignored
    fresh_out: bool = False  # write to poisoned buffers where the candidate takes `out`


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a relation may use: the operation, its declared relation, randomness, thoroughness, the partner call."""

    op: Op
    relation: Relation
    rng: np.random.Generator
    full: bool
    partner: CallFn | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Outcome of a relation: "bit-equal", or "differs" with where; `others` are results to judge by the rules."""

    status: str
    detail: str = ""
    variants: int = 0
    others: dict[str, Outputs] = field(default_factory=dict)


def first_difference(got: Outputs, expected: Outputs) -> str | None:
    """The first differing element of the first differing output, with both values, or None."""
    for name, want in expected.items():
        have = got[name]
        if same_bytes(have, want):
            continue
        if have.shape != want.shape or have.dtype != want.dtype:
            return f"{name}: {have.dtype} {tuple(have.shape)} against {want.dtype} {tuple(want.shape)}"
        size = have.element_size()
        flat = int((raw_bytes(have) != raw_bytes(want)).reshape(-1, size).any(-1).nonzero()[0])
        index = tuple(int(i) for i in np.unravel_index(flat, have.shape))
        a, b = have.reshape(-1)[flat], want.reshape(-1)[flat]
        ulps = f", {ulp_distance(a.reshape(1), b.reshape(1)).item()} ulp apart" if a.is_floating_point() else ""
        return f"{name}{list(index)}: {a.to(torch.float64).item():.9g} against {b.to(torch.float64).item():.9g}{ulps}"
    return None


def compare(call: CallFn, inputs: Inputs, variants: Iterator[Variant], context: Context) -> Finding:
    """Run the base and every variant; stop at the first pair that differs where bit-equality is promised."""
    base = call(inputs)
    others: dict[str, Outputs] = {}
    count, differing = 0, ""
    for variant in variants:
        count += 1
        if variant.first is not None:
            call(variant.first)
        kwargs = {"out_like": base} if variant.fresh_out else {}
        run = context.partner if context.relation.partner and context.partner is not None else call
        got = variant.join([run(one, **kwargs) for one in variant.calls])
        problem = first_difference(got, variant.expect(base))
        if problem is None:
            continue
        if context.relation.promise == "bit-equal":
            return Finding(status="differs", detail=f"{variant.label}: {problem}", variants=count)
        differing = differing or f"{variant.label}: {problem}"
        others[variant.label] = got
    if count == 0:
        return Finding(status="differs", detail="the relation produced no variant for this case", variants=0)
    status = "within contract" if differing else "bit-equal"
    return Finding(status=status, detail=differing, variants=count, others=others)


# row selection, shared by the relations on the batch axis


def take(inputs: Inputs, op: Op, rows: list[int]) -> Inputs:
    """The inputs of the chosen rows, in that order (repeats allowed); inputs without a batch axis are kept."""
    index = torch.tensor(rows, dtype=torch.int64)
    chosen = dict(inputs)
    for name, axis in op.rows.items():
        value = inputs[name]
        if value is not None:
            chosen[name] = value.index_select(axis, index)
    return chosen


def pick_rows(op: Op, rows: list[int]) -> Pick:
    """Selects the outputs of the chosen rows."""
    index = torch.tensor(rows, dtype=torch.int64)
    return lambda outputs: {name: _select(x, op.out_rows[name], index) for name, x in outputs.items()}


def _select(x: Tensor, axis: int, index: Tensor) -> Tensor:
    return x.index_select(axis, index.to(x.device))


def num_rows(inputs: Inputs, op: Op) -> int:
    """Size of the batch axis; 0 for an operation without one, whose card brings its own variants."""
    return next((inputs[name].shape[axis] for name, axis in op.rows.items() if inputs[name] is not None), 0)


def row_bytes(inputs: Inputs, op: Op) -> int:
    """Bytes of one row of the batch, over all inputs: what a larger batch costs under the interpreter."""
    rows = [x for name in op.rows if (x := inputs[name]) is not None]
    return sum(x.numel() * x.element_size() for x in rows) // max(num_rows(inputs, op), 1)


def _garbage(inputs: Inputs, op: Op, keep: int) -> Inputs:
    spoiled = dict(inputs)
    for name, axis in op.rows.items():
        value = inputs[name]
        if value is None or not value.is_floating_point():
            continue
        spoiled[name] = value.clone()
        mates = [i for i in range(value.shape[axis]) if i != keep]
        rows = torch.tensor(mates, dtype=torch.int64)
        if value.element_size() == 1:  # no fp8 tensor can be filled on a CPU; byte 0xFF is its NaN
            spoiled[name].view(torch.uint8).index_fill_(axis, rows, 0xFF)
        else:
            spoiled[name].index_fill_(axis, rows, float("nan"))
    return spoiled


CHEAP_ROW_BYTES = 16 * 1024


def batch_invariant(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """A row gives the same bytes alone, in sub-batches, permuted, duplicated, and beside garbage (R8).

    The long list of batch sizes, up to 513 rows, is for `--full` and rows of at most 16 KiB: one row of production
    width is a tenth of a second under the interpreter.
    """
    op, rng, n = context.op, context.rng, num_rows(inputs, context.op)
    if n == 0:
        yield Variant(label="repeat of zero rows", calls=(inputs,))
        return
    everything = list(range(n))
    solo = everything if context.full else sorted({int(i) for i in np.linspace(0, n - 1, min(n, 8))})
    for row in solo:
        yield Variant(label=f"row {row} alone", calls=(take(inputs, op, [row]),), expect=pick_rows(op, [row]))
    edge = {1, 2, op.tile - 1, op.tile, op.tile + 1}
    many = context.full and row_bytes(inputs, op) <= CHEAP_ROW_BYTES
    if many:
        edge |= {7, 8, 9, 63, 64, 65, 127, 128, 129}
    for size in sorted(s for s in edge if s > 0):
        rows = [i % n for i in range(size)]
        yield Variant(label=f"batch of {size}", calls=(take(inputs, op, rows),), expect=pick_rows(op, rows))
    order = [int(i) for i in rng.permutation(n)]
    yield Variant(label="permuted batch", calls=(take(inputs, op, order),), expect=pick_rows(op, order))
    places = {1, op.tile - 1, op.tile, n} | ({63, 64, 511, 512} if many else set())
    rows = [i % n for i in range(max(places) + 1)]
    for place in places:
        rows[place] = 0
    yield Variant(label="row 0 duplicated at tile edges", calls=(take(inputs, op, rows),), expect=pick_rows(op, rows))
    keep = int(rng.integers(n))
    yield Variant(
        label=f"row {keep} beside NaN rows",
        calls=(_garbage(inputs, op, keep),),
        join=lambda results: pick_rows(op, [keep])(results[0]),
        expect=pick_rows(op, [keep]),
    )


CROWD = 130  # about as many requests as an H200 has multiprocessors


def in_a_crowd(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Hook of batch_invariant for decode: also among as many requests as a chip is wide, which a scheduler may see.

    For `--full` and rows of production width; the cheap ones meet large batches anyway.
    """
    yield from batch_invariant(inputs, context)
    op, n = context.op, num_rows(inputs, context.op)
    if n and context.full and row_bytes(inputs, op) > CHEAP_ROW_BYTES:
        rows = [i % n for i in range(CROWD)]
        yield Variant(label=f"batch of {CROWD}", calls=(take(inputs, op, rows),), expect=pick_rows(op, rows))


def row_chunks(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Hook of chunk_invariant where rows are independent: the batch in chunks of 1 and of about half."""
    op, n = context.op, num_rows(inputs, context.op)
    for size in sorted({1, (n + 1) // 2} - {0, n}) or [max(n, 1)]:
        parts = [take(inputs, op, list(range(i, min(i + size, n)))) for i in range(0, max(n, 1), size)]
        yield Variant(label=f"chunks of {size}", calls=tuple(parts), join=lambda results: join_rows(op, results))


def join_rows(op: Op, results: list[Outputs]) -> Outputs:
    """Concatenate the outputs of consecutive chunks along the batch axis."""
    return {name: torch.cat([r[name] for r in results], axis) for name, axis in op.out_rows.items()}


def other_layouts(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same numbers give the same bytes where rows begin at addresses and strides of another alignment.

    How wide a load is follows the alignment, and the order of a sum must not follow either.
    """
    wide = [name for name in context.op.rows if inputs[name] is not None and inputs[name].is_floating_point()]
    for pad in (1, 16):
        moved = {name: strided(inputs[name], pad=pad) for name in wide}
        yield Variant(label=f"rows with {pad} more between them", calls=(inputs | moved,))


def run_to_run(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same call gives the same bytes: repeated, after a call of another size, on poisoned outputs (R7)."""
    n = num_rows(inputs, context.op)
    half = take(inputs, context.op, list(range(n // 2))) if n > 1 else None
    for launch in range(1, 20 if context.full else 3):
        fresh = launch % 2 == 1
        first = half if launch % 2 == 0 else None
        yield Variant(label=f"launch {launch}", calls=(inputs,), first=first, fresh_out=fresh)


def _hooked(inputs: Inputs, context: Context) -> Iterator[Variant]:
    assert context.relation.hook is not None, f"{context.relation.name} needs a hook in the card"
    yield from context.relation.hook(inputs, context)


def _batch_invariant(inputs: Inputs, context: Context) -> Iterator[Variant]:
    # a card has its own variants where NaN is no input or a group spans several rows
    yield from (context.relation.hook or batch_invariant)(inputs, context)


def _run_to_run(inputs: Inputs, context: Context) -> Iterator[Variant]:
    # and its own repeats where half of the rows make no call
    yield from (context.relation.hook or run_to_run)(inputs, context)


VARIANTS: dict[str, Callable[[Inputs, Context], Iterator[Variant]]] = {
    "batch_invariant": _batch_invariant,
    "run_to_run": _run_to_run,
    "layout_invariant": other_layouts,
    # the card's hook yields the variants of these
    "page_permutation": _hooked,
    "chunk_invariant": _hooked,
    "decode_equals_prefill": _hooked,
    "causality": _hooked,
    "masked_equals_absent": _hooked,
    "head_permutation": _hooked,
    "stream_permutation": _hooked,
    "scale_equivariance": _hooked,
}


def changed_slots(call: CallFn, inputs: Inputs, context: Context) -> Finding:
    """Only the bytes that the hook names may change; it returns a bool mask of the written tensor."""
    assert context.op.writes is not None
    assert context.relation.hook is not None
    before = inputs[context.op.writes]
    after = call(inputs)[context.op.outputs[0].name]
    allowed: Tensor = context.relation.hook(inputs)
    size = before.element_size()
    moved = (raw_bytes(after) != raw_bytes(before)).reshape(-1, size).any(-1).reshape(before.shape)
    stray = moved & ~allowed
    if stray.any():
        where = tuple(int(i) for i in stray.nonzero()[0])
        return Finding(status="differs", detail=f"element {list(where)} changed outside the named slots", variants=1)
    return Finding(status="bit-equal", variants=1)


def layout_round_trip(call: CallFn, inputs: Inputs, context: Context) -> Finding:
    """What the writer stored, the reader returns: the hook maps (inputs, outputs, partner) to (got, expected)."""
    assert context.relation.hook is not None
    got, expected = context.relation.hook(inputs, call(inputs), context.partner)
    problem = first_difference(got, expected)
    if problem:
        return Finding(status="differs", detail=problem, variants=1)
    return Finding(status="bit-equal", variants=1)


def chained(call: CallFn, inputs: Inputs, context: Context) -> Finding:
    """Calls that depend on one another (state): the hook makes them and yields (label, got, expected)."""
    assert context.relation.hook is not None
    count = 0
    for label, got, expected in context.relation.hook(inputs, call, context):
        count += 1
        problem = first_difference(got, expected)
        if problem:
            return Finding(status="differs", detail=f"{label}: {problem}", variants=count)
    if count == 0:
        return Finding(status="differs", detail="the relation produced no variant for this case", variants=0)
    return Finding(status="bit-equal", variants=count)


def declared_difference(call: CallFn, inputs: Inputs, context: Context) -> Finding:
    """What is not promised differs: the hook yields (label, got, other); equal bytes mean that a fact has changed."""
    assert context.relation.hook is not None
    count = 0
    for label, got, other in context.relation.hook(inputs, call, context):
        count += 1
        if first_difference(got, other) is None:
            return Finding(status="differs", detail=f"{label}: expected other bytes, got the same", variants=count)
    return Finding(status="different as declared", variants=count)


# axes of an engine, on which what a request gets may not depend
SERVING = (
    *("batch_composition", "arrival_order", "chunk_size", "page_size", "page_order", "prefix_hit", "draft_width"),
    *("steps_in_flight", "preemption", "neighbour_parameters", "grammar_neighbours", "replay_modes", "continuation"),
)


CHECKS: dict[str, Callable[[CallFn, Inputs, Context], Finding]] = {
    "changed_slots": changed_slots,
    "layout_round_trip": layout_round_trip,
    # what a fused operation stored, its partner makes of the stored part: the hook is of the same kind
    "fused_equals_steps": layout_round_trip,
    "split_invariant": chained,
    "rollback_equals_serial": chained,
    **dict.fromkeys(SERVING, chained),
    "declared_difference": declared_difference,
}


def check(call: CallFn, inputs: Inputs, context: Context) -> Finding:
    """Run the relation that `context` names."""
    name = context.relation.name
    if name in CHECKS:
        return CHECKS[name](call, inputs, context)
    if name not in VARIANTS:
        known: list[Any] = sorted([*CHECKS, *VARIANTS])
        raise ValueError(f"relation: expected one of {', '.join(known)}, got {name!r}")
    return compare(call, inputs, VARIANTS[name](inputs, context), context)
