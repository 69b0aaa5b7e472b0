"""Wrong bounded replays: windows, cuts, rings and dropped rows. One emulation of each operation, with named faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import SlidingWindow, Truncation

MODULUS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a replay does wrong; the default is right."""

    cut: str = "known"  # known, late, chunk_end, never
    encoder_cut: bool = False
    short: int = 0
    restart: bool = True
    placeholder: str = "right"  # right, none, sees_itself, stored
    mask_drops: bool = False
    all_good: bool = False
    history: str = "right"  # right, late, lost, overwritten, other
    stored: int = 0  # rows of a chunk fewer than the ring
    wrap: str = "ring"  # ring, window
    totals: str = "all"  # all, kept
    offset: bool = True
    order: str = "oldest"  # oldest, newest, batch
    carried: bool = True  # running sums over steps
    batch_edge: int = 0  # from this many sequences on the first key of a window is left out


def _low(faults: Faults, p: int, known: int, end: int, valid: int, config: SlidingWindow) -> int:
    lowest = max(p - config.window + 1 + faults.short, 0)
    if faults.restart:
        lowest = max(lowest, valid)
    if config.truncation is Truncation.OFF or faults.cut == "never":
        return min(lowest, p)
    cut = {"late": known - config.keep + 1, "chunk_end": end - config.keep}.get(faults.cut, known - config.keep)
    if faults.placeholder == "sees_itself":
        return min(max(lowest, cut), p)
    return min(max(lowest, cut), p + 1)


def _cut(known: int, config: SlidingWindow) -> int:
    return 0 if config.truncation is Truncation.OFF else known - config.keep


def _is_dropped(faults: Faults, p: int, known: int, config: SlidingWindow) -> bool:
    drops = config.truncation is Truncation.COMPACT or (faults.mask_drops and config.truncation is Truncation.MASK)
    return drops and p < _cut(known, config)


def plan_with(faults: Faults) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The emulation with the signature of `replay_plan`."""

    def replay_plan(
        first_b: Tensor, end_b: Tensor, known_b: Tensor, valid_b: Tensor, *, config: SlidingWindow
    ) -> tuple[Tensor, Tensor, Tensor]:
        off = replace(config, truncation=Truncation.OFF)
        low, history, flags = [], [], []
        for q0, q1, known, v in zip(*(x.tolist() for x in (first_b, end_b, known_b, valid_b)), strict=True):
            for p in range(q0, q1):
                encoder = _low(faults, p, known, q1, v, config if faults.encoder_cut else off)
                decoder = _low(faults, p, known, q1, v, config)
                low.append([encoder, decoder])
                seen = [max(0, q0 - n) for n in low[-1]]
                history.append([min(n, p + 1 - q0) for n in seen] if faults.history == "late" else seen)
                dropped = _is_dropped(faults, p, known, config)
                kept = not dropped or (p == q1 - 1 and faults.placeholder != "none")
                good = faults.all_good or p >= _cut(known, config) or config.truncation is Truncation.OFF
                stored = q1 - p <= config.ring - faults.stored
                flags.append([kept, good, stored and (not dropped or (kept and faults.placeholder == "stored"))])
        pairs = [torch.tensor(x, dtype=torch.int32).reshape(-1, 2) for x in (low, history)]
        return pairs[0], pairs[1], torch.tensor(flags, dtype=torch.bool).reshape(-1, 3)

    return replay_plan


def exact_with(*, step: int = 0, free: int = 0, short_prompts: bool = True, off: bool = True) -> Callable[..., Tensor]:
    """The emulation with the signature of `exact_layers`; `step`: rows too many a layer costs, `free`: layers at no
    cost, `short_prompts`: prompts within K are exact, `off`: so is everything without truncation."""

    def exact_layers(
        positions_t: Tensor, seq_t: Tensor, known_b: Tensor, *, config: SlidingWindow, layers: int
    ) -> Tensor:
        counts = []
        for p, b in zip(positions_t.tolist(), seq_t.tolist(), strict=True):
            cut = int(known_b[b]) - config.keep
            if (config.truncation is Truncation.OFF and off) or (cut <= 0 and short_prompts):
                counts.append(layers)
                continue
            cost = config.window - 1 + step
            counts.append(sum(p >= cut and p - cut >= max(i - free, 0) * cost for i in range(1, layers + 1)))
        return torch.tensor(counts, dtype=torch.int32)

    return exact_layers


@dataclass(frozen=True, kw_only=True)
class LoadFaults:
    """What a block-load plan does wrong; the default is right."""

    split: bool = True
    zeros: bool = True
    state: str = "own"  # own, sequence
    row: bool = True
    ahead: int = 0
    wrap: str = "ring"  # ring, window
    order: str = "position"  # position, slot


def load_with(faults: LoadFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `ring_load_plan`."""

    def ring_load_plan(first_b: Tensor, state_b: Tensor, valid_b: Tensor, *, config: SlidingWindow) -> Tensor:
        plan = []
        for b, (q0, state, v) in enumerate(zip(*(x.tolist() for x in (first_b, state_b, valid_b)), strict=True)):
            base = b * config.window if faults.row else 0
            blank = [-1, 0, 0, base + config.window]
            start, stop = q0 - config.window + faults.ahead, q0 + faults.ahead
            live = max(start, 0, v) if faults.zeros else max(start, 0)
            live = min(live, stop)
            ring = config.window if faults.wrap == "window" else config.ring
            copies = [[-1, 0, live - start, base]] if live > start else []
            source, at, row = state if faults.state == "own" else b, live, base + live - start
            while at < stop:
                slot = at % ring
                count = min(stop - at, ring - slot) if faults.split else stop - at
                copies.append([source, slot, slot + count, row])
                at, row = at + count, row + count
            if faults.order == "slot":
                copies = sorted(copies, key=lambda c: c[1])
            plan.append((copies + [blank] * 3)[:3])
        return torch.tensor(plan, dtype=torch.int32).reshape(len(first_b), 3, 4)

    return ring_load_plan


def prefill_with(faults: Faults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `replay_prefill`: rings and chunks, one row after the other."""

    def replay_prefill(
        hidden_t: Tensor,
        global_b: Tensor,
        first_b: Tensor,
        counts_kb: Tensor,
        *,
        config: SlidingWindow,
        layers: int,
    ) -> tuple[Tensor, Tensor]:
        size = config.window if faults.wrap == "window" else config.ring
        total_b = counts_kb.sum(0).tolist()
        out = torch.full((len(hidden_t), layers), -1, dtype=torch.int64)
        rings = [[[7] * config.ring for _ in range(layers)] for _ in total_b]
        at, sums = first_b.tolist(), global_b.tolist()
        base = [sum(total_b[:b]) for b in range(len(total_b))]
        for count_b in counts_kb.tolist():
            for b, count in enumerate(count_b):
                if count:
                    rows = slice(base[b] + at[b] - int(first_b[b]), base[b] + at[b] - int(first_b[b]) + count)
                    chunk = _Chunk(
                        first=at[b], end=at[b] + count, known=int(first_b[b]) + total_b[b], valid=int(first_b[b])
                    )
                    crowded = len(total_b) if faults.order == "batch" else int(0 < faults.batch_edge <= len(total_b))
                    ring = rings[0] if faults.history == "other" else rings[b]
                    start = sums[b] if faults.carried else int(global_b[b])
                    x = hidden_t[rows].tolist()
                    got, sums[b] = _chunk(faults, chunk, x, start, ring, config, size, crowded)
                    for i, values in got.items():
                        out[rows.start + i] = torch.tensor(values)
                at[b] += count
        held = torch.full((len(total_b), layers, config.ring), -1, dtype=torch.int64)
        for b, count in enumerate(total_b):
            known = int(first_b[b]) + count
            for p in range(max(known - config.ring, int(first_b[b])), known):
                for layer in range(layers):
                    held[b, layer, p % config.ring] = rings[b][layer][p % config.ring]
        return out, held

    return replay_prefill


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    first: int
    end: int
    known: int
    valid: int


def _chunk(
    faults: Faults,
    chunk: _Chunk,
    x: list[int],
    total: int,
    ring: list[list[int]],
    config: SlidingWindow,
    size: int,
    crowded: int,
) -> tuple[dict[int, list[int]], int]:
    """Outputs of the good rows of one chunk by their number in it, and the sum behind the chunk."""
    dropped = {p for p in range(chunk.first, chunk.end) if _is_dropped(faults, p, chunk.known, config)}
    kept = [p for p in range(chunk.first, chunk.end) if p not in dropped]
    if not kept and faults.placeholder != "none":
        kept = [chunk.end - 1]
    sums = {}
    for p in range(chunk.first, chunk.end):
        if faults.totals == "all" or p in kept:
            total = (total + (2 * p + 3) * x[p - chunk.first]) % MODULUS
        sums[p] = total
    h = {p: x[p - chunk.first if faults.offset else kept.index(p)] for p in kept}
    out: dict[int, list[int]] = {p - chunk.first: [] for p in kept if p >= _cut(chunk.known, config)}
    for layer, slots in enumerate(ring):
        past = list(slots)
        for p in kept:
            if chunk.end - p <= size - faults.stored and (p not in dropped or faults.placeholder == "stored"):
                slots[p % size] = h[p]
        source = slots if faults.history == "overwritten" else past
        after = {}
        for p in kept:
            low = _low(faults, p, chunk.known, chunk.end, chunk.valid, config) + (crowded if faults.batch_edge else 0)
            keys = [h.get(j, 0) if j >= chunk.first else source[j % size] for j in range(low, p + 1)]
            if faults.history == "lost":
                keys = [h[j] for j in range(max(low, chunk.first), p + 1) if j in h]
            if faults.history == "late":
                keys = [h.get(j, 0) if j >= chunk.first else source[(j + 1) % size] for j in range(low, p + 1)]
            if faults.order == "newest":
                keys = keys[::-1]
            if faults.order == "batch" and keys:
                keys = keys[crowded % len(keys) :] + keys[: crowded % len(keys)]
            folded = 1
            for key in keys:
                folded = (folded * 48271 + key) % MODULUS
            after[p] = (69621 * h[p] + 40014 * folded + 16807 * sums[p] + layer + 1) % MODULUS
        h = after
        for p in kept:
            if p - chunk.first in out:
                out[p - chunk.first].append(h[p])
    return out, total


def _with(**changes: object) -> Faults:
    return replace(Faults(), **changes)  # type: ignore[arg-type]


right_plan = plan_with(Faults())
plan_not_cut = plan_with(_with(cut="never"))
plan_cut_one_late = plan_with(_with(cut="late"))
plan_cut_from_the_chunk_end = plan_with(_with(cut="chunk_end"))
plan_encoder_cut_too = plan_with(_with(encoder_cut=True))
plan_window_one_short = plan_with(_with(short=1))
plan_restart_ignored = plan_with(_with(restart=False))
plan_chunk_without_a_row = plan_with(_with(placeholder="none"))
plan_placeholder_sees_itself = plan_with(_with(placeholder="sees_itself"))
plan_placeholder_stored = plan_with(_with(placeholder="stored"))
plan_mask_drops_rows = plan_with(_with(mask_drops=True))
plan_degenerate_rows_used = plan_with(_with(all_good=True))
plan_history_clipped = plan_with(_with(history="late"))
plan_ring_one_short = plan_with(_with(stored=1))

right_exact = exact_with()
exact_at_a_whole_window_a_layer = exact_with(step=1)
exact_first_layer_free = exact_with(free=1)
exact_everywhere_behind_the_cut = exact_with(free=99)
exact_not_for_short_prompts = exact_with(short_prompts=False)
exact_not_without_truncation = exact_with(off=False)

right_load = load_with(LoadFaults())
load_over_the_ring_end = load_with(LoadFaults(split=False))
load_stale_keys = load_with(LoadFaults(zeros=False))
load_state_is_the_sequence = load_with(LoadFaults(state="sequence"))
load_one_history_for_all = load_with(LoadFaults(row=False))
load_with_the_chunk = load_with(LoadFaults(ahead=1))
load_ring_of_window = load_with(LoadFaults(wrap="window"))
load_in_slot_order = load_with(LoadFaults(order="slot"))

right_prefill = prefill_with(Faults())
prefill_not_cut = prefill_with(_with(cut="never"))
prefill_cut_from_the_chunk_end = prefill_with(_with(cut="chunk_end"))
prefill_restart_ignored = prefill_with(_with(restart=False))
prefill_global_keys_of_kept_rows = prefill_with(_with(totals="kept"))
prefill_sums_restart_at_a_chunk = prefill_with(_with(carried=False))
prefill_offset_of_dropped_rows_lost = prefill_with(_with(offset=False))
prefill_history_lost = prefill_with(_with(history="lost"))
prefill_history_one_late = prefill_with(_with(history="late"))
prefill_ring_written_first = prefill_with(_with(history="overwritten"))
prefill_ring_of_another = prefill_with(_with(history="other"))
prefill_ring_of_window = prefill_with(_with(wrap="window"))
prefill_ring_one_short = prefill_with(_with(stored=1))
prefill_newest_first = prefill_with(_with(order="newest"))
prefill_split_by_the_batch = prefill_with(_with(order="batch"))
prefill_window_depends_on_the_batch = prefill_with(_with(batch_edge=3))
