"""The compressor as kernels compute it, in fp32 on the CPU, one sequence at a time, with faults to switch on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import CompressorConfig

Entries = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What pooling and its state do wrong; the default is right. `form` is an honest choice."""

    form: str = "divide_last"  # divide_last, divide_first, running, two_term
    nudged_by_batch: bool = False  # odd batches differ in the last bit of one element
    softmax: str = "channel"  # channel, token, none, base_2
    maximum: bool = True
    logits: torch.dtype = torch.float32
    values: torch.dtype = torch.float32
    weights: torch.dtype = torch.float32
    store: str = "nearest"  # nearest, truncated, fp16_first
    last_channel: str = "own"  # own, neighbour
    bias: str = "added"  # added, ignored, next_place, from_chunk_start, on_value
    series: str = "both"  # both, swapped, own_window, first_only
    absent: str = "nothing"  # nothing, zero_logit, stale
    group: str = "aligned"  # aligned, one_early, from_chunk_start
    number: str = "absolute"  # absolute, in_chunk
    history: str = "ring"  # ring, forgotten, neighbour
    park: str = "last"  # last, first, never, unfinished_group, before_reading, every_slot_0
    parked: str = "as_pooled"  # as_pooled, bare_gate, swapped, bf16, bf16_when_many
    place: str = "position"  # position, in_chunk, mod_span, mod_next
    hole: str = "skipped"  # skipped, wraps
    nothing: str = "zero"  # zero, stale, times_zero, unfinished
    slots: str = "own"  # own, of_first
    step: str = "seen"  # seen, stale: whether a token sees the others of its step
    counter: bool = False


_calls = 0


def _exp(x: Tensor) -> Tensor:
    # fp64 and one rounding: torch's fp32 exp gives other bits in the vector body than in its tail
    return torch.exp(x.double()).float()


def _pool(faults: Faults, z: Tensor, v: Tensor) -> Tensor:
    """Softmax-weighted sums of [y, i, c]."""
    z, v = z.to(faults.logits).float(), v.to(faults.values).float()
    if faults.softmax == "token":
        z = z.double().mean(-1, keepdim=True).float().expand_as(z)
    elif faults.softmax == "none":
        z = torch.where(z > -torch.inf, 0.0, z)
    elif faults.softmax == "base_2":
        z = (z.double() * 0.6931471805599453).float()
    top = z.amax(1, keepdim=True) if faults.maximum else torch.zeros(())
    if faults.form == "two_term" and z.shape[1] == 2:
        e = _exp(-(z[:, 0] - z[:, 1]).abs())
        first = z[:, 0] >= z[:, 1]
        one = torch.ones_like(e)
        return (v[:, 0] * torch.where(first, one, e) + v[:, 1] * torch.where(first, e, one)) / (one + e)
    if faults.form == "running":
        return _running(z, v)
    e = _exp(z - top)
    total = e.double().sum(1).float()
    if faults.form == "divide_first":
        e = (e / total[:, None]).to(faults.weights).float()
        return (e * v).double().sum(1).float()
    return (e.to(faults.weights).float() * v).double().sum(1).float() / total


def _running(z: Tensor, v: Tensor) -> Tensor:
    top, total, acc = z[:, 0], torch.ones_like(z[:, 0]), v[:, 0].clone()
    for i in range(1, z.shape[1]):
        new = torch.maximum(top, z[:, i])
        old, e = torch.where(top == new, 1.0, _exp(top - new)), torch.where(z[:, i] == new, 1.0, _exp(z[:, i] - new))
        top, total, acc = new, total * old + e, acc * old + e * v[:, i]
    return acc / total


@dataclass
class _Sequence:
    """The tokens of one sequence in one call, the ring it may read, and where it starts."""

    z: Tensor
    v: Tensor
    ring: Tensor | None
    start: int
    neighbour: tuple[Tensor, Tensor] | None = None


def _ring_place(faults: Faults, position: Tensor, start: int, ring: int, span: int) -> Tensor:
    if faults.place == "in_chunk":
        position = position - start
    return position % {"mod_span": span, "mod_next": ring - 1}.get(faults.place, ring)


def _history(faults: Faults, seq: _Sequence, config: CompressorConfig) -> tuple[Tensor, Tensor]:
    """Logits and values of the span - 1 positions before the chunk."""
    back, width = config.span - 1, seq.v.shape[1]
    position = torch.arange(seq.start - back, seq.start)
    nothing = -torch.inf if faults.absent != "zero_logit" else 0.0
    z, v = torch.full((back, width), nothing), torch.zeros(back, width)
    if seq.ring is None or faults.history == "forgotten":
        return z, v
    if faults.history == "neighbour" and seq.neighbour is not None and len(seq.neighbour[0]) >= back:
        return seq.neighbour[0][len(seq.neighbour[0]) - back :], seq.neighbour[1][len(seq.neighbour[1]) - back :]
    known = (position >= 0) | (faults.absent == "stale")
    rows = seq.ring[_ring_place(faults, position, seq.start, len(seq.ring), config.span)]
    zi, vi = (1, 0) if faults.parked == "swapped" else (0, 1)
    return torch.where(known[:, None], rows[:, zi], z), torch.where(known[:, None], rows[:, vi], v)


def _windows(faults: Faults, seq: _Sequence, config: CompressorConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Entry numbers, and logits and values [y, span, c] of their tokens."""
    r, end = config.ratio, seq.start + len(seq.v)
    shift = {"aligned": 0, "one_early": 1, "from_chunk_start": -(seq.start % r)}[faults.group]
    entries = torch.arange((seq.start + shift) // r, max((end + shift) // r, (seq.start + shift) // r))
    before = _history(faults, seq, config)
    z, v = torch.cat([before[0], seq.z]), torch.cat([before[1], seq.v])
    first = (entries + 1) * r - config.span - shift
    index = (first[:, None] + torch.arange(config.span) - (seq.start - (config.span - 1))).clamp(0, len(v) - 1)
    if not config.overlap:
        return entries, z[index], v[index]
    c = v.shape[1] // 2
    early, late = index[:, :r], index[:, r:]
    if faults.series == "own_window":
        early = late
    a, b = (slice(c, None), slice(0, c)) if faults.series == "swapped" else (slice(0, c), slice(c, None))
    if faults.series == "first_only":
        return entries, z[late][..., b], v[late][..., b]
    both_z, both_v = (torch.cat([x[early][..., a], x[late][..., b]], 1) for x in (z, v))
    return entries, both_z, both_v


def _logits(faults: Faults, value: Tensor, gate: Tensor | None, bias: Tensor | None, position: Tensor) -> Entries:
    z, v = (torch.zeros_like(value) if gate is None else gate.clone()), value.clone()
    if bias is None or faults.bias == "ignored":
        return z, v
    place = position + 1 if faults.bias == "next_place" else position
    if faults.bias == "from_chunk_start" and len(position):
        place = position - position[0]
    if faults.bias == "on_value":
        return z, v + bias[place % len(bias)]
    return z + bias[place % len(bias)], v


def _rounded(faults: Faults, m: Tensor) -> Tensor:
    if faults.store == "truncated":
        m = (m.contiguous().view(torch.int32) & -65536).view(torch.float32)
    elif faults.store == "fp16_first":
        m = m.half().float()
    m = m.to(torch.bfloat16)
    if faults.last_channel == "neighbour" and m.shape[1] > 1:
        m[:, -1] = m[:, -2]
    return m


def _park(faults: Faults, seq: _Sequence, gate: Tensor, value: Tensor, ring: Tensor, config: CompressorConfig) -> None:
    n, size = len(value), len(ring)
    keep = torch.arange(n)[:size] if faults.park == "first" else torch.arange(n)[max(0, n - size) :]
    if faults.park == "unfinished_group":
        keep = keep[seq.start + keep >= (seq.start + n) // config.ratio * config.ratio]
    place = _ring_place(faults, seq.start + keep, seq.start, size, config.span)
    z, v = (gate if faults.parked == "bare_gate" else seq.z)[keep], seq.v[keep]
    if faults.parked == "bf16" or (faults.parked == "bf16_when_many" and n > 1):
        z, v = z.bfloat16().float(), v.bfloat16().float()
    pair = torch.stack([v, z] if faults.parked == "swapped" else [z, v], 1)
    for row, at in enumerate(place.tolist()):  # in order: a wrong place may come twice
        ring[at] = pair[row]


def _one(
    faults: Faults,
    rows: tuple[Tensor, Tensor | None, Tensor | None],
    state: Tensor | None,
    slot: int,
    start: int,
    config: CompressorConfig,
    neighbour: tuple[Tensor, Tensor] | None,
) -> Entries:
    """Entries of one sequence; its ring is updated."""
    value, gate, bias = rows
    z, v = _logits(faults, value, gate, bias, start + torch.arange(len(value)))
    ring = state[slot] if state is not None else None
    seq = _Sequence(z, v, ring, start, neighbour)
    if ring is not None and faults.park == "before_reading":
        _park(faults, seq, gate if gate is not None else z, value, ring, config)
    entries, zs, vs = _windows(faults, seq, config)
    m = _rounded(faults, _pool(faults, zs, vs)) if len(entries) else value.new_zeros(0, zs.shape[2]).bfloat16()
    if ring is not None and faults.park not in ("never", "before_reading"):
        target = state[0] if faults.park == "every_slot_0" and state is not None else ring
        _park(faults, seq, gate if gate is not None else z, value, target, config)
    if faults.number == "in_chunk":
        entries = entries - start // config.ratio
    return m, entries.to(torch.int32)


def _nothing(faults: Faults, value: Tensor, channels: int) -> Tensor:
    if faults.nothing == "stale":
        return torch.full((1, channels), torch.nan, dtype=torch.bfloat16)
    if faults.nothing == "unfinished" and len(value):
        return value[-1:, -channels:].bfloat16()
    if faults.nothing == "times_zero" and len(value):
        return (value[-1:, -channels:] * 0).bfloat16()
    return torch.zeros(1, channels, dtype=torch.bfloat16)


def _finished(faults: Faults, m: Tensor, entry: Tensor, batch: int) -> Entries:
    global _calls
    if faults.nudged_by_batch and batch % 2 and m.numel():
        m.view(torch.int16).view(-1)[0] += 1
    if faults.counter and m.numel():
        _calls += 1
        m.view(-1)[0] += _calls * 2.0**-6
    return m, entry


def chunk_with(
    faults: Faults,
    value: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
    slots: list[int],
    start_b: Tensor,
    cu_seqlens: Tensor,
    config: CompressorConfig,
) -> Entries:
    """A packed chunk: a row for every entry, and one for a sequence without any."""
    ms: list[Tensor] = []
    numbers: list[Tensor] = []
    last = None
    channels = value.shape[1] // config.series
    for b, slot in enumerate(slots):
        begin, end = int(cu_seqlens[b]), int(cu_seqlens[b + 1])
        own = (value[begin:end], None if gate is None else gate[begin:end], bias)
        start = int(start_b[b])
        count = max((start + end - begin) // config.ratio - start // config.ratio, 1)
        if slot < 0 and faults.hole == "skipped":
            ms.append(_nothing(faults, own[0], channels).expand(count, -1))
            numbers.append(torch.full((count,), -1, dtype=torch.int32))
            continue
        slot = slots[0] if faults.slots == "of_first" and slots[0] >= 0 else slot
        m, number = _one(faults, own, state, slot, start, config, last)
        if not len(number):
            m, number = _nothing(faults, own[0], channels), torch.full((1,), -1, dtype=torch.int32)
        ms.append(m)
        numbers.append(number)
        last = (own[1] if own[1] is not None else torch.zeros_like(own[0]), own[0])
    empty = torch.zeros(0, channels, dtype=torch.bfloat16)
    entry = torch.cat([torch.zeros(0, dtype=torch.int32), *numbers])
    return _finished(faults, torch.cat([empty, *ms]), entry, len(slots))


def compress_with(faults: Faults) -> Callable[..., Entries]:
    """The emulation with the signature of `compress`."""

    def compress(
        value_tw: Tensor,
        gate_tw: Tensor | None,
        bias_rw: Tensor | None,
        start_b: Tensor,
        cu_seqlens: Tensor,
        *,
        config: CompressorConfig,
    ) -> Entries:
        slots = [0] * len(start_b)
        return chunk_with(faults, value_tw, gate_tw, bias_rw, None, slots, start_b, cu_seqlens, config)

    return compress


def prefill_with(faults: Faults) -> Callable[..., Entries]:
    """The emulation with the signature of `compress_prefill`."""

    def compress_prefill(
        value_tw: Tensor,
        gate_tw: Tensor,
        bias_rw: Tensor | None,
        state_: Tensor,
        state_slot_b: Tensor,
        start_b: Tensor,
        cu_seqlens: Tensor,
        *,
        config: CompressorConfig,
    ) -> Entries:
        slots = state_slot_b.tolist()
        return chunk_with(faults, value_tw, gate_tw, bias_rw, state_, slots, start_b, cu_seqlens, config)

    return compress_prefill


def decode_with(faults: Faults) -> Callable[..., Entries]:
    """The emulation with the signature of `compress_decode`."""

    def compress_decode(
        value_tw: Tensor,
        gate_tw: Tensor,
        bias_rw: Tensor | None,
        state_: Tensor,
        state_slot_t: Tensor,
        position_t: Tensor,
        *,
        config: CompressorConfig,
    ) -> Entries:
        tokens, channels = len(value_tw), value_tw.shape[1] // config.series
        m = _nothing(faults, value_tw, channels).repeat(tokens, 1)
        entry = torch.full((tokens,), -1, dtype=torch.int32)
        slots = state_slot_t.tolist()
        before = state_.clone()
        first = 0
        while first < tokens:
            last = first
            alone = faults.step == "stale"
            while last + 1 < tokens and slots[last + 1] == slots[first] and slots[first] >= 0 and not alone:
                last += 1
            run, slot = slice(first, last + 1), slots[first]
            if slot >= 0 or faults.hole == "wraps":
                slot = slots[0] if faults.slots == "of_first" and slots[0] >= 0 else slot
                rows = (value_tw[run], gate_tw[run], bias_rw)
                start = int(position_t[first])
                # a stale token reads the ring as it was before the step
                state = state_ if not alone else before.clone()
                found, numbers = _one(faults, rows, state, slot, start, config, None)
                if alone:
                    state_[slot, start % state_.shape[1]] = state[slot, start % state_.shape[1]]
                at = first + (numbers.long() + 1) * config.ratio - 1 - start
                at = torch.arange(first, last + 1)[: len(numbers)] if faults.number == "in_chunk" else at
                inside = (at >= first) & (at <= last)
                m[at[inside]], entry[at[inside]] = found[inside], numbers[inside]
            first = last + 1
        return _finished(faults, m, entry, tokens)

    return compress_decode


@dataclass(frozen=True, kw_only=True)
class TailFaults:
    """What norm and rotation of an entry do wrong; the default is right."""

    position: str = "first"  # first, last, centre, entry, next_group, token_after
    hole: str = "zero"  # zero, wraps
    pairing: str = "interleaved"  # interleaved, half_split
    span: str = "last"  # last, first
    rotated: str = "rounded"  # rounded, unrounded
    latent: str = "before"  # before, after_rotation
    order: str = "norm_first"  # norm_first, rotation_first
    eps: str = "given"  # given, missing, 1e-6
    statistics: str = "row"  # row, without_rotary, batch
    store: str = "nearest"  # nearest, truncated
    inverse: bool = False
    table: torch.dtype = torch.float32
    rest: str = "copied"  # copied, unwritten
    lanes: int = 0  # an honest order of the sum of squares
    counter: bool = False


def _bf16(faults: TailFaults, x: Tensor) -> Tensor:
    if faults.store == "truncated":
        x = (x.contiguous().view(torch.int32) & -65536).view(torch.float32)
    return x.to(torch.bfloat16)


def _normed(faults: TailFaults, x: Tensor, weight: Tensor, eps: float, rotary: int) -> Tensor:
    counted = x[:, :-rotary] if faults.statistics == "without_rotary" else x
    squares = (counted * counted).double()
    if faults.lanes:
        lanes = torch.nn.functional.pad(squares, (0, -squares.shape[1] % faults.lanes)).unflatten(1, (-1, faults.lanes))
        squares = lanes.sum(1).float().double()
    mean = squares.sum(-1, keepdim=True).float() / counted.shape[1]
    if faults.statistics == "batch" and len(mean):
        mean = mean.mean(0, keepdim=True)
    added = {"given": eps, "missing": 0.0}.get(faults.eps)
    return x * (1 / torch.sqrt((mean + (1e-6 if added is None else added)).double())).float() * weight


def _turned(faults: TailFaults, x: Tensor, table: Tensor, position: Tensor) -> Tensor:
    rotary = table.shape[1]
    rows = table.to(faults.table).double()[position]
    cos, sin = rows[:, : rotary // 2], rows[:, rotary // 2 :]
    sin = -sin if faults.inverse else sin
    start = 0 if faults.span == "first" else x.shape[1] - rotary
    part = x[:, start : start + rotary].double()
    y = x.clone()
    if faults.pairing == "interleaved":
        u, v = part[:, 0::2], part[:, 1::2]
        turned = torch.stack([u * cos - v * sin, u * sin + v * cos], -1).flatten(1)
    else:
        u, v = part[:, : rotary // 2], part[:, rotary // 2 :]
        turned = torch.cat([u * cos - v * sin, u * sin + v * cos], 1)
    y[:, start : start + rotary] = turned.float()
    return y


def tail_with(faults: TailFaults) -> Callable[..., Entries]:
    """The emulation with the signature of `compress_tail`."""

    def compress_tail(
        m_yc: Tensor, weight_c: Tensor, table_sr: Tensor, entry_y: Tensor, *, ratio: int, eps: float
    ) -> Entries:
        global _calls
        entry, rotary = entry_y.long(), table_sr.shape[1]
        entry = entry.clamp(min=0) if faults.hole == "zero" else entry
        step = {"last": ratio - 1, "centre": ratio // 2, "next_group": ratio, "token_after": 1}
        position = entry * (1 if faults.position == "entry" else ratio) + step.get(faults.position, 0)
        position = position % len(table_sr)
        x, weight = m_yc.float(), weight_c.float()
        if faults.order == "rotation_first":
            key = _bf16(faults, _normed(faults, _turned(faults, x, table_sr, position), weight, eps, rotary))
            return _bf16(faults, _normed(faults, x, weight, eps, rotary)), key
        wide = _normed(faults, x, weight, eps, rotary)
        latent = _bf16(faults, wide)
        key = _bf16(
            faults, _turned(faults, wide if faults.rotated == "unrounded" else latent.float(), table_sr, position)
        )
        if faults.rest == "unwritten":
            key[:, : key.shape[1] - rotary] = torch.nan
        latent = key.clone() if faults.latent == "after_rotation" else latent
        if faults.counter and latent.numel():
            _calls += 1
            latent.view(-1)[0] += _calls * 2.0**-6
        return latent, key

    return compress_tail


_RIGHT = Faults()
right = compress_with(_RIGHT)
right_divide_first = compress_with(replace(_RIGHT, form="divide_first"))
right_running_maximum = compress_with(replace(_RIGHT, form="running"))
right_two_term = compress_with(replace(_RIGHT, form="two_term"))

one_weight_for_all_channels = compress_with(replace(_RIGHT, softmax="token"))
gate_ignored = compress_with(replace(_RIGHT, softmax="none"))
exponential_base_2 = compress_with(replace(_RIGHT, softmax="base_2"))
maximum_not_subtracted = compress_with(replace(_RIGHT, maximum=False))
gate_bf16 = compress_with(replace(_RIGHT, logits=torch.bfloat16))
value_bf16 = compress_with(replace(_RIGHT, values=torch.bfloat16))
weights_bf16 = compress_with(replace(_RIGHT, weights=torch.bfloat16, form="divide_first"))
truncated = compress_with(replace(_RIGHT, store="truncated"))
rounded_through_fp16 = compress_with(replace(_RIGHT, store="fp16_first"))
last_channel_overwritten = compress_with(replace(_RIGHT, last_channel="neighbour"))
bias_ignored = compress_with(replace(_RIGHT, bias="ignored"))
bias_one_place_off = compress_with(replace(_RIGHT, bias="next_place"))
bias_on_value = compress_with(replace(_RIGHT, bias="on_value"))
series_swapped = compress_with(replace(_RIGHT, series="swapped"))
own_window_twice = compress_with(replace(_RIGHT, series="own_window"))
no_overlap = compress_with(replace(_RIGHT, series="first_only"))
first_group_pools_zeros = compress_with(replace(_RIGHT, absent="zero_logit"))
group_one_token_early = compress_with(replace(_RIGHT, group="one_early"))
entries_numbered_by_chunk = compress_with(replace(_RIGHT, number="in_chunk"))
row_without_entry_unwritten = compress_with(replace(_RIGHT, nothing="stale"))
row_without_entry_times_zero = compress_with(replace(_RIGHT, nothing="times_zero"))
unfinished_group_emitted = compress_with(replace(_RIGHT, nothing="unfinished"))
bits_depend_on_batch = compress_with(replace(_RIGHT, nudged_by_batch=True))
not_deterministic = compress_with(replace(_RIGHT, counter=True))

right_prefill = prefill_with(_RIGHT)
right_prefill_divide_first = prefill_with(replace(_RIGHT, form="divide_first"))
chunk_forgets_the_ring = prefill_with(replace(_RIGHT, history="forgotten"))
chunk_continues_its_neighbour = prefill_with(replace(_RIGHT, history="neighbour"))
groups_start_with_the_chunk = prefill_with(replace(_RIGHT, group="from_chunk_start"))
prefill_entries_numbered_by_chunk = prefill_with(replace(_RIGHT, number="in_chunk"))
bias_from_chunk_start = prefill_with(replace(_RIGHT, bias="from_chunk_start"))
stale_ring_before_the_sequence = prefill_with(replace(_RIGHT, absent="stale"))
ring_written_before_it_is_read = prefill_with(replace(_RIGHT, park="before_reading"))
state_never_written = prefill_with(replace(_RIGHT, park="never"))
first_tokens_parked = prefill_with(replace(_RIGHT, park="first"))
unfinished_group_parked_only = prefill_with(replace(_RIGHT, park="unfinished_group"))
state_of_slot_0 = prefill_with(replace(_RIGHT, park="every_slot_0"))
slot_of_first_sequence = prefill_with(replace(_RIGHT, slots="of_first"))
gate_parked_without_bias = prefill_with(replace(_RIGHT, parked="bare_gate"))
value_parked_before_gate = prefill_with(replace(_RIGHT, parked="swapped"))
state_bf16 = prefill_with(replace(_RIGHT, parked="bf16"))
ring_counted_from_chunk = prefill_with(replace(_RIGHT, place="in_chunk"))
ring_as_long_as_the_window = prefill_with(replace(_RIGHT, place="mod_span"))
hole_wraps_to_last_slot = prefill_with(replace(_RIGHT, hole="wraps"))
prefill_row_without_entry_unwritten = prefill_with(replace(_RIGHT, nothing="stale"))

right_decode = decode_with(_RIGHT)
right_decode_divide_first = decode_with(replace(_RIGHT, form="divide_first"))
step_does_not_see_itself = decode_with(replace(_RIGHT, step="stale"))
decode_forgets_the_ring = decode_with(replace(_RIGHT, history="forgotten"))
decode_one_token_early = decode_with(replace(_RIGHT, group="one_early"))
decode_state_never_written = decode_with(replace(_RIGHT, park="never"))
verify_rounds_its_state = decode_with(replace(_RIGHT, parked="bf16_when_many"))
decode_unfinished_group_only = decode_with(replace(_RIGHT, park="unfinished_group"))
decode_ring_as_long_as_the_window = decode_with(replace(_RIGHT, place="mod_span"))
decode_ring_one_short = decode_with(replace(_RIGHT, place="mod_next"))
decode_value_before_gate = decode_with(replace(_RIGHT, parked="swapped"))
decode_gate_without_bias = decode_with(replace(_RIGHT, parked="bare_gate"))
decode_bias_ignored = decode_with(replace(_RIGHT, bias="ignored"))
decode_hole_wraps = decode_with(replace(_RIGHT, hole="wraps"))
decode_padding_times_zero = decode_with(replace(_RIGHT, nothing="times_zero"))
decode_row_unwritten = decode_with(replace(_RIGHT, nothing="stale"))
decode_slot_of_first = decode_with(replace(_RIGHT, slots="of_first"))
decode_stale_before_sequence = decode_with(replace(_RIGHT, absent="stale"))
decode_bits_depend_on_batch = decode_with(replace(_RIGHT, nudged_by_batch=True))
decode_not_deterministic = decode_with(replace(_RIGHT, counter=True))

_TAIL = TailFaults()
right_tail = tail_with(_TAIL)
right_tail_lanes_of_32 = tail_with(replace(_TAIL, lanes=32))
position_of_last_token = tail_with(replace(_TAIL, position="last"))
position_of_centre = tail_with(replace(_TAIL, position="centre"))
position_is_entry_number = tail_with(replace(_TAIL, position="entry"))
position_of_next_group = tail_with(replace(_TAIL, position="next_group"))
hole_rotated_before_zero = tail_with(replace(_TAIL, hole="wraps"))
half_split_pairs = tail_with(replace(_TAIL, pairing="half_split"))
first_channels_rotated = tail_with(replace(_TAIL, span="first"))
rotation_inverted = tail_with(replace(_TAIL, inverse=True))
unrounded_latent_rotated = tail_with(replace(_TAIL, rotated="unrounded"))
latent_rotated_in_place = tail_with(replace(_TAIL, latent="after_rotation"))
rotation_before_norm = tail_with(replace(_TAIL, order="rotation_first"))
tail_eps_missing = tail_with(replace(_TAIL, eps="missing"))
tail_eps_1e_6 = tail_with(replace(_TAIL, eps="1e-6"))
norm_without_rotary = tail_with(replace(_TAIL, statistics="without_rotary"))
norm_over_batch = tail_with(replace(_TAIL, statistics="batch"))
tail_truncated = tail_with(replace(_TAIL, store="truncated"))
tail_table_bf16 = tail_with(replace(_TAIL, table=torch.bfloat16))
key_rest_unwritten = tail_with(replace(_TAIL, rest="unwritten"))
tail_not_deterministic = tail_with(replace(_TAIL, counter=True))
