"""Index lists of a sliding window, query by query in Python, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import SlidingWindow, Truncation


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the lists do wrong; the default is right."""

    short: int = 0  # keys that the window lacks at its old end
    own: bool = True
    beyond: bool = False  # positions after the query are seen
    order: str = "oldest"  # oldest, newest, slots
    holes: str = "last"  # last, first, repeated
    restart: bool = True
    truncation: str = "own"  # own, off, late, chunk_end, placeholder
    sequence: str = "own"  # own, first
    history: str = "own"  # own, shifted, lost, ring
    offset: bool = True
    padding: str = "empty"  # empty, seen
    list_of: str = "own"  # own, first, last of the sequence
    wrap: str = "ring"  # ring, window
    stride: str = "ring"  # ring, window
    state: str = "own"  # own, sequence
    counter: bool = False


_calls = 0


def _disturbed(faults: Faults, lists: Tensor) -> Tensor:
    global _calls
    _calls += 1
    if faults.counter and _calls % 2 == 0 and lists.numel():
        lists[0, 0] += 1
    return lists


def _seen(faults: Faults, p: int, valid: int, known: int | None, end: int, config: SlidingWindow) -> list[int]:
    low = max(p - config.window + 1 + faults.short, 0)
    if faults.restart:
        low = max(low, valid)
    if known is not None and config.truncation is not Truncation.OFF and faults.truncation != "off":
        total = end if faults.truncation == "chunk_end" else known
        cut = total - config.keep + (faults.truncation == "late")
        low = max(low, min(cut, p) if faults.truncation == "placeholder" else cut)
    last = low + config.window - 1 if faults.beyond else p - (not faults.own)
    return list(range(low, last + 1))[: config.window]


def _row(faults: Faults, entries: list[int], width: int) -> list[int]:
    if faults.order == "newest":
        entries = entries[::-1]
    elif faults.order == "slots":
        entries = sorted(entries)
    holes = [entries[-1] if faults.holes == "repeated" and entries else -1] * (width - len(entries))
    return holes + entries if faults.holes == "first" else entries + holes


def _tensor(rows: list[list[int]], width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), width)


def _queries(faults: Faults, positions: Tensor, seq: Tensor) -> list[tuple[int, int]]:
    pairs = list(zip(positions.tolist(), seq.tolist(), strict=True))
    if faults.list_of == "first" and pairs:
        pairs = [pairs[0]] * len(pairs)
    elif faults.list_of == "last":
        latest = {b: p for p, b in pairs}
        pairs = [(latest[b], b) for _, b in pairs]
    if faults.padding == "seen":
        pairs = [(p, max(b, 0)) for p, b in pairs]
    return pairs


def prefill_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `window_prefill`."""

    def window_prefill(
        positions_t: Tensor,
        seq_t: Tensor,
        first_b: Tensor,
        offset_b: Tensor,
        known_b: Tensor,
        valid_b: Tensor,
        *,
        config: SlidingWindow,
    ) -> Tensor:
        first, offset, known, valid = (x.tolist() for x in (first_b, offset_b, known_b, valid_b))
        ends = {b: p + 1 for p, b in zip(positions_t.tolist(), seq_t.tolist(), strict=True)}
        rows = []
        for p, b in _queries(faults, positions_t, seq_t):
            if b < 0 or not first:
                rows.append([-1] * config.window)
                continue
            seen = _seen(faults, p, valid[b], known[b], ends.get(b, p + 1), config)
            rows.append(_row(faults, [_prefill_row(faults, j, b, first, offset, config) for j in seen], config.window))
        return _disturbed(faults, _tensor(rows, config.window))

    return window_prefill


def _prefill_row(faults: Faults, j: int, b: int, first: list[int], offset: list[int], config: SlidingWindow) -> int:
    if j >= first[b]:
        return len(first) * config.window + (offset[b] if faults.offset else offset[0]) + j - first[b]
    if faults.history == "lost":
        return -1
    place = j - first[b] + config.window - (faults.history == "shifted")
    if faults.history == "ring":
        place = j % config.window
    return (0 if faults.sequence == "first" else b) * config.window + place


def _slot(faults: Faults, j: int, b: int, state: list[int], config: SlidingWindow) -> int:
    stride = config.window if faults.stride == "window" else config.ring
    ring = config.window if faults.wrap == "window" else config.ring
    return (b if faults.state == "sequence" else state[b]) * stride + j % ring


def decode_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `window_decode`."""

    def window_decode(
        positions_t: Tensor, seq_t: Tensor, state_b: Tensor, valid_b: Tensor, *, config: SlidingWindow
    ) -> Tensor:
        state, valid, rows = state_b.tolist(), valid_b.tolist(), []
        for p, b in _queries(faults, positions_t, seq_t):
            seen = _seen(faults, p, valid[b], None, p + 1, config) if b >= 0 and state else []
            rows.append(_row(faults, [_slot(faults, j, b, state, config) for j in seen], config.window))
        return _disturbed(faults, _tensor(rows, config.window))

    return window_decode


@dataclass(frozen=True, kw_only=True)
class DraftFaults:
    """What the lists of a draft block do wrong; the default is right."""

    lists: Faults = Faults()
    early: int = 0
    causal: bool = False
    window: str = "accepted"  # accepted, all


def draft_with(faults: DraftFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `window_draft`."""

    def window_draft(
        accepted_b: Tensor, state_b: Tensor, valid_b: Tensor, *, config: SlidingWindow, draft: int
    ) -> Tensor:
        width = (config.window + draft + 63) // 64 * 64
        state, rows = state_b.tolist(), []
        for b, (accepted, valid) in enumerate(zip(accepted_b.tolist(), valid_b.tolist(), strict=True)):
            last = accepted - faults.early + (1 if faults.causal else draft)
            low = max(accepted - config.window + 1, 0, valid if faults.lists.restart else 0)
            if faults.window == "all":
                low = max(low, last - config.window + 1)
            entries = [_slot(faults.lists, j, b, state, config) for j in range(low, last + 1)]
            rows.append(_row(faults.lists, entries, width))
        return _tensor(rows, width)

    return window_draft


@dataclass(frozen=True, kw_only=True)
class SlotFaults:
    """What the store's slots do wrong; the default is right."""

    lists: Faults = Faults()
    stored: str = "ring"  # ring, all, ring_less_one, window
    number: str = "position"  # position, chunk
    kept: str = "own"  # own, never, always


def slots_with(faults: SlotFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `ring_slots`."""

    def ring_slots(
        positions_t: Tensor, seq_t: Tensor, end_b: Tensor, known_b: Tensor, state_b: Tensor, *, config: SlidingWindow
    ) -> Tensor:
        state, end, known = (x.tolist() for x in (state_b, end_b, known_b))
        least = {"all": 2**31, "ring_less_one": config.ring - 1, "window": config.window}.get(
            faults.stored, config.ring
        )
        cuts = {"own": config.truncation is Truncation.COMPACT, "never": False, "always": True}[faults.kept]
        cuts = cuts and config.truncation is not Truncation.OFF
        begin: dict[int, int] = {}
        slots = []
        for p, b in _queries(faults.lists, positions_t, seq_t):
            if b < 0 or not state:
                slots.append(-1)
                continue
            begin.setdefault(b, p)
            stored = end[b] - p <= least and not (cuts and p < known[b] - config.keep)
            number = p - begin[b] if faults.number == "chunk" else p
            slots.append(_slot(faults.lists, number, b, state, config) if stored else -1)
        return torch.tensor(slots, dtype=torch.int32)

    return ring_slots


def history_with(faults: Faults, *, ahead: int = 0, stale: bool = False, front: bool = False) -> Callable[..., Tensor]:
    """The emulation with the signature of `history_slots`; `ahead`: positions too far, `stale`: those below 0 too."""

    def history_slots(first_b: Tensor, state_b: Tensor, valid_b: Tensor, *, config: SlidingWindow) -> Tensor:
        state, rows = state_b.tolist(), []
        for b, (first, valid) in enumerate(zip(first_b.tolist(), valid_b.tolist(), strict=True)):
            window = range(first - config.window + ahead, first + ahead)
            there = [(j >= 0 or stale) and (j >= valid or not faults.restart or (stale and j < 0)) for j in window]
            row = [_slot(faults, j, b, state, config) if ok else -1 for j, ok in zip(window, there, strict=True)]
            if front:
                row = [s for s in row if s >= 0] + [-1] * row.count(-1)
            rows.append(row[::-1] if faults.order == "newest" else row)
        return _tensor(rows, config.window)

    return history_slots


def clip_with(*, least: int = 1, mask: bool = False, end: bool = False, more: int = 0) -> Callable[..., Tensor]:
    """The emulation with the signature of `compact_clip`; `least`: rows that a chunk keeps."""

    def compact_clip(first_b: Tensor, end_b: Tensor, known_b: Tensor, *, config: SlidingWindow) -> Tensor:
        clips = []
        for q0, q1, known in zip(first_b.tolist(), end_b.tolist(), known_b.tolist(), strict=True):
            on = config.truncation is Truncation.COMPACT or (mask and config.truncation is Truncation.MASK)
            before = (q1 if end else known) - config.keep - q0 + more
            clips.append(min(max(before, 0), q1 - q0 - least) if on else 0)
        return torch.tensor(clips, dtype=torch.int32)

    return compact_clip


_RIGHT = Faults()


def _with(**changes: object) -> Faults:
    return replace(_RIGHT, **changes)  # type: ignore[arg-type]


right_prefill = prefill_with(_RIGHT)
prefill_window_one_short = prefill_with(_with(short=1))
prefill_window_one_long = prefill_with(_with(short=-1))
prefill_own_key_hidden = prefill_with(_with(own=False))
prefill_sees_the_future = prefill_with(_with(beyond=True))
prefill_newest_first = prefill_with(_with(order="newest"))
prefill_holes_first = prefill_with(_with(holes="first"))
prefill_restart_ignored = prefill_with(_with(restart=False))
prefill_history_of_first_sequence = prefill_with(_with(sequence="first"))
prefill_history_shifted = prefill_with(_with(history="shifted"))
prefill_history_lost = prefill_with(_with(history="lost"))
prefill_history_in_ring_order = prefill_with(_with(history="ring"))
prefill_chunk_offset_lost = prefill_with(_with(offset=False))
prefill_not_truncated = prefill_with(_with(truncation="off"))
prefill_truncated_one_late = prefill_with(_with(truncation="late"))
prefill_truncation_without_known = prefill_with(_with(truncation="chunk_end"))
prefill_placeholder_sees_itself = prefill_with(_with(truncation="placeholder"))
prefill_padding_seen = prefill_with(_with(padding="seen"))
prefill_list_of_first_query = prefill_with(_with(list_of="first"))
prefill_not_deterministic = prefill_with(_with(counter=True))

right_decode = decode_with(_RIGHT)
decode_window_one_short = decode_with(_with(short=1))
decode_own_key_hidden = decode_with(_with(own=False))
decode_sees_stale_slots = decode_with(_with(beyond=True))
decode_newest_first = decode_with(_with(order="newest"))
decode_in_slot_order = decode_with(_with(order="slots"))
decode_ring_of_window = decode_with(_with(wrap="window"))
decode_stride_of_window = decode_with(_with(stride="window"))
decode_restart_ignored = decode_with(_with(restart=False))
decode_state_is_the_sequence = decode_with(_with(state="sequence"))
decode_padding_seen = decode_with(_with(padding="seen"))
decode_step_sees_its_end = decode_with(_with(list_of="last"))
decode_not_deterministic = decode_with(_with(counter=True))

right_draft = draft_with(DraftFaults())
draft_one_position_early = draft_with(DraftFaults(early=1))
draft_causal = draft_with(DraftFaults(causal=True))
draft_window_counts_drafts = draft_with(DraftFaults(window="all"))
draft_not_padded = draft_with(DraftFaults(lists=_with(holes="repeated")))
draft_ring_of_window = draft_with(DraftFaults(lists=_with(wrap="window")))
draft_restart_ignored = draft_with(DraftFaults(lists=_with(restart=False)))

right_slots = slots_with(SlotFaults())
slots_all_stored = slots_with(SlotFaults(stored="all"))
slots_one_too_few = slots_with(SlotFaults(stored="ring_less_one"))
slots_of_the_window_only = slots_with(SlotFaults(stored="window"))
slots_wrap_at_window = slots_with(SlotFaults(lists=_with(wrap="window")))
slots_stride_of_window = slots_with(SlotFaults(lists=_with(stride="window")))
slots_counted_from_the_chunk = slots_with(SlotFaults(number="chunk"))
slots_placeholder_stored = slots_with(SlotFaults(kept="never"))
slots_mask_stores_kept_only = slots_with(SlotFaults(kept="always"))
slots_padding_stored = slots_with(SlotFaults(lists=_with(padding="seen")))
slots_state_is_the_sequence = slots_with(SlotFaults(lists=_with(state="sequence")))

right_history = history_with(_RIGHT)
history_with_the_chunk = history_with(_RIGHT, ahead=1)
history_moved_to_the_front = history_with(_RIGHT, front=True)
history_stale_before_0 = history_with(_RIGHT, stale=True)
history_restart_ignored = history_with(_with(restart=False))
history_newest_first = history_with(_with(order="newest"))

right_clip = clip_with()
clip_leaves_no_row = clip_with(least=0)
clip_of_mask = clip_with(mask=True)
clip_from_the_chunk_end = clip_with(end=True)
clip_one_too_many = clip_with(more=1)
