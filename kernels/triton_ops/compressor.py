"""Pooling of tokens into compressed entries with its ring of state, and the norm and rotation behind it.

Channels are independent and the tokens of a group are taken in ascending order by one helper, whatever the chunk or
the step: an entry has the same bits in a prefill of any length and in a decode step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer
from .rope import difference_of_products


@dataclass(frozen=True, kw_only=True)
class PoolLaunch:
    """Channels a program takes; it changes no result."""

    block: int
    num_warps: int


def pool_launch(channels: int) -> PoolLaunch:
    """Up to 256 channels a program, two a thread, whatever the number of tokens and the device."""
    block = min(max(triton.next_power_of_2(channels), 32), 256)
    return PoolLaunch(block=block, num_warps=max(1, block // 64))


@triton.jit
def _token_logit(
    gate_ptr,
    bias_ptr,
    row,
    place,
    column,
    mask,
    stride_gt,
    stride_gw,
    stride_br,
    stride_bw,
    BIAS: tl.constexpr,
):
    """Gate plus bias of one token of the chunk, as the ring holds it."""
    logit = tl.load(gate_ptr + row * stride_gt + column * stride_gw, mask=mask, other=0.0)
    if BIAS:
        logit += tl.load(bias_ptr + place * stride_br + column * stride_bw, mask=mask, other=0.0)
    return logit


@triton.jit
def _pool(
    value_ptr,
    gate_ptr,
    bias_ptr,
    ring_ptr,
    first,
    low,
    row_of_zero,
    ring,
    channel,
    channels,
    stride_vt,
    stride_vw,
    stride_gt,
    stride_gw,
    stride_br,
    stride_bw,
    stride_so,
    stride_sz,
    stride_sw,
    RATIO: tl.constexpr,
    SPAN: tl.constexpr,
    GIVEN: tl.constexpr,
    BIAS: tl.constexpr,
    STATE: tl.constexpr,
):
    """The softmax-weighted sum of positions first … first + SPAN - 1: from `low` on they are rows of the chunk, before
    it rows of the ring, below zero (and before the chunk, without a state) they are absent."""
    top = tl.full(channel.shape, float("-inf"), tl.float32)
    total = tl.zeros(channel.shape, tl.float32)
    pooled = tl.zeros(channel.shape, tl.float32)
    in_width = channel < channels
    # the maximum first, then the sums: a running maximum would round them again and again
    for step in range(2 * SPAN):
        i = step % SPAN
        position = first + i
        row = row_of_zero + position
        column = channel + (i // RATIO) * channels
        here = in_width & (position >= low)
        logit = tl.zeros(channel.shape, tl.float32)
        if GIVEN:
            logit = tl.load(gate_ptr + row * stride_gt + column * stride_gw, mask=here, other=0.0)
        if BIAS:
            logit += tl.load(bias_ptr + (i % RATIO) * stride_br + column * stride_bw, mask=here, other=0.0)
        parked = in_width & (position >= 0) & (position < low)
        ring_ptrs = ring_ptr + (position.to(tl.int32) % ring) * stride_so + column * stride_sw
        if STATE:
            logit = tl.where(here, logit, tl.load(ring_ptrs, mask=parked, other=float("-inf")))
        else:
            logit = tl.where(here, logit, float("-inf"))
        if step < SPAN:
            top = tl.maximum(top, logit)
        else:
            value = tl.load(value_ptr + row * stride_vt + column * stride_vw, mask=here, other=0.0)
            if STATE:
                value = tl.where(here, value, tl.load(ring_ptrs + stride_sz, mask=parked, other=0.0))
            weight = tl.exp(logit - top)
            total += weight
            pooled += weight * value
    return pooled / total


@triton.jit
def _pool_chunk(
    value_ptr,
    gate_ptr,
    bias_ptr,
    state_ptr,
    slot_ptr,
    start_ptr,
    cu_ptr,
    entry_ptr,
    seq_ptr,
    m_ptr,
    emitted_ptr,
    channels,
    slots,
    ring,
    stride_vt,
    stride_vw,
    stride_gt,
    stride_gw,
    stride_br,
    stride_bw,
    stride_sp,
    stride_so,
    stride_sz,
    stride_sw,
    RATIO: tl.constexpr,
    SPAN: tl.constexpr,
    GIVEN: tl.constexpr,
    BIAS: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. which entry this row is, and where its sequence lies
    out_row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    entry = tl.load(entry_ptr + out_row).to(tl.int64)
    seq = tl.load(seq_ptr + out_row).to(tl.int64)
    start = tl.load(start_ptr + seq).to(tl.int64)
    begin = tl.load(cu_ptr + seq).to(tl.int64)
    slot = start * 0
    if STATE:
        slot = tl.load(slot_ptr + seq).to(tl.int64)
    exists = (entry >= 0) & (slot >= 0) & (slot < slots)
    # 2. its tokens; a row without an entry has none
    first = tl.where(exists, (entry + 1) * RATIO, 0) - SPAN
    low = tl.where(exists, start, 0)
    m = _pool(
        value_ptr,
        gate_ptr,
        bias_ptr,
        state_ptr + tl.where(exists, slot, 0) * stride_sp,
        first,
        low,
        begin - start,
        ring,
        channel,
        channels,
        stride_vt,
        stride_vw,
        stride_gt,
        stride_gw,
        stride_br,
        stride_bw,
        stride_so,
        stride_sz,
        stride_sw,
        RATIO,
        SPAN,
        GIVEN,
        BIAS,
        STATE,
    )
    # 3. the only rounding
    m = tl.where(exists, m, 0.0).to(tl.bfloat16)
    tl.store(m_ptr + out_row * channels + channel, m, mask=channel < channels)
    tl.store(emitted_ptr + out_row, tl.where(exists, entry, -1).to(tl.int32), mask=tl.program_id(1) == 0)


@triton.jit
def _park_chunk(
    value_ptr,
    gate_ptr,
    bias_ptr,
    state_ptr,
    slot_ptr,
    start_ptr,
    cu_ptr,
    width,
    slots,
    ring,
    stride_vt,
    stride_vw,
    stride_gt,
    stride_gw,
    stride_br,
    stride_bw,
    stride_sp,
    stride_so,
    stride_sz,
    stride_sw,
    RATIO: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # one program a sequence, place behind its last token and block of columns
    seq = tl.program_id(0).to(tl.int64)
    back = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    slot = tl.load(slot_ptr + seq).to(tl.int64)
    begin = tl.load(cu_ptr + seq).to(tl.int64)
    row = tl.load(cu_ptr + seq + 1).to(tl.int64) - 1 - back
    known = (row >= begin) & (slot >= 0) & (slot < slots)
    mask = (column < width) & known
    position = tl.where(known, tl.load(start_ptr + seq).to(tl.int64) + row - begin, 0)
    logit = _token_logit(
        gate_ptr,
        bias_ptr,
        row,
        position.to(tl.int32) % RATIO,
        column,
        mask,
        stride_gt,
        stride_gw,
        stride_br,
        stride_bw,
        BIAS,
    )
    value = tl.load(value_ptr + row * stride_vt + column * stride_vw, mask=mask, other=0.0)
    state_ptrs = (
        state_ptr
        + tl.where(known, slot, 0) * stride_sp
        + (position.to(tl.int32) % ring) * stride_so
        + column * stride_sw
    )
    tl.store(state_ptrs, logit, mask=mask)
    tl.store(state_ptrs + stride_sz, value, mask=mask)


@triton.jit
def _pool_step(
    value_ptr,
    gate_ptr,
    bias_ptr,
    state_ptr,
    slot_ptr,
    position_ptr,
    m_ptr,
    emitted_ptr,
    channels,
    slots,
    ring,
    stride_vt,
    stride_vw,
    stride_gt,
    stride_gw,
    stride_br,
    stride_bw,
    stride_sp,
    stride_so,
    stride_sz,
    stride_sw,
    RATIO: tl.constexpr,
    SPAN: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. the token and its ring row
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    known = (slot >= 0) & (slot < slots)
    position = tl.where(known, tl.load(position_ptr + token).to(tl.int64), 0)
    ring_ptr = state_ptr + tl.where(known, slot, 0) * stride_sp
    mask = (channel < channels) & known
    for series in tl.static_range(SPAN // RATIO):
        column = channel + series * channels
        logit = _token_logit(
            gate_ptr,
            bias_ptr,
            token,
            position.to(tl.int32) % RATIO,
            column,
            mask,
            stride_gt,
            stride_gw,
            stride_br,
            stride_bw,
            BIAS,
        )
        value = tl.load(value_ptr + token * stride_vt + column * stride_vw, mask=mask, other=0.0)
        state_ptrs = ring_ptr + (position.to(tl.int32) % ring) * stride_so + column * stride_sw
        tl.store(state_ptrs, logit, mask=mask)
        tl.store(state_ptrs + stride_sz, value, mask=mask)
    # 2. tokens of the step stand before this one: they are read from the rows, never from what another program writes
    back = tl.arange(0, BLOCK_SPAN).to(tl.int64)
    near = (back < SPAN) & (back <= token)
    same = tl.load(slot_ptr + token - back, mask=near, other=-1).to(tl.int64) == slot
    run = tl.sum((near & same).to(tl.int32), axis=0).to(tl.int64)
    # 3. the entry that this token ends
    ends = known & ((position + 1) % RATIO == 0)
    m = tl.zeros([BLOCK], tl.float32)
    if ends:
        m = _pool(
            value_ptr,
            gate_ptr,
            bias_ptr,
            ring_ptr,
            position + 1 - SPAN,
            position + 1 - run,
            token - position,
            ring,
            channel,
            channels,
            stride_vt,
            stride_vw,
            stride_gt,
            stride_gw,
            stride_br,
            stride_bw,
            stride_so,
            stride_sz,
            stride_sw,
            RATIO,
            SPAN,
            True,
            BIAS,
            True,
        )
    tl.store(m_ptr + token * channels + channel, m.to(tl.bfloat16), mask=channel < channels)
    entry = tl.where(ends, position // RATIO, -1).to(tl.int32)
    tl.store(emitted_ptr + token, entry, mask=tl.program_id(1) == 0)


@triton.jit
def _tail(
    m_ptr,
    weight_ptr,
    table_ptr,
    entry_ptr,
    latent_ptr,
    key_ptr,
    channels,
    count,
    positions,
    ratio,
    eps,
    stride_my,
    stride_mc,
    stride_wc,
    stride_ts,
    stride_tr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. the norm of the whole row
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK).to(tl.int64)
    mask = channel < channels
    x = tl.load(m_ptr + row * stride_my + channel * stride_mc, mask=mask, other=0.0).to(tl.float32)
    # within two ulps on every device; the Ascend chain has no tl.div_rn of scalars
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / count + eps)
    weight = tl.load(weight_ptr + channel * stride_wc, mask=mask, other=0.0).to(tl.float32)
    latent = (x * rstd * weight).to(tl.bfloat16)
    tl.store(latent_ptr + row * channels + channel, latent, mask=mask)
    tl.store(key_ptr + row * channels + channel, latent, mask=channel < channels - ROTARY)
    # 2. the last channels once more, in pairs; a position outside the table gives NaN instead of a stray read
    rotary = channels - ROTARY + tl.arange(0, ROTARY).to(tl.int64)
    x = tl.load(m_ptr + row * stride_my + rotary * stride_mc).to(tl.float32)
    weight = tl.load(weight_ptr + rotary * stride_wc).to(tl.float32)
    rounded = (x * rstd * weight).to(tl.bfloat16).to(tl.float32)
    u, v = tl.split(tl.reshape(rounded, [ROTARY // 2, 2]))
    position = tl.maximum(tl.load(entry_ptr + row).to(tl.int64), 0) * ratio
    pair = tl.arange(0, ROTARY // 2).to(tl.int64)
    known = (pair >= 0) & (position < positions)
    table_ptrs = table_ptr + position * stride_ts + pair * stride_tr
    cos = tl.load(table_ptrs, mask=known, other=float("nan"))
    sin = tl.load(table_ptrs + (ROTARY // 2) * stride_tr, mask=known, other=float("nan"))
    # 3. rotated by the angle of the group's first token
    first = difference_of_products(u, cos, v, sin)
    second = difference_of_products(u, sin, v * -1.0, cos)
    key = tl.reshape(tl.join(first, second), [ROTARY])
    tl.store(key_ptr + row * channels + rotary, key.to(tl.bfloat16))


def pool_chunk(
    value_tw: torch.Tensor,
    gate_tw: torch.Tensor | None,
    bias_rw: torch.Tensor | None,
    state: torch.Tensor | None,
    slot_b: torch.Tensor | None,
    start_b: torch.Tensor,
    cu_seqlens: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    *,
    ratio: int,
    series: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of a chunk, bf16, and their numbers; `state` is read and left alone, without it nothing precedes.

    Raises:
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: value_tw is on the CPU and kernels are not interpreted.
    """
    entry_y, seq_y = rows
    channels = value_tw.shape[1] // series
    m_yc, emitted_y = _entry_buffers(out, len(entry_y), channels, value_tw)
    if not m_yc.numel():
        return m_yc, emitted_y
    require_runnable("value_tw", value_tw)
    launch = pool_launch(channels)
    gate, bias, ring = _or(gate_tw, value_tw), _or(bias_rw, value_tw), _or(state, value_tw[None, None])
    _pool_chunk[(len(entry_y), triton.cdiv(channels, launch.block))](
        value_tw,
        gate,
        bias,
        ring,
        start_b if slot_b is None else slot_b,
        start_b,
        cu_seqlens,
        entry_y,
        seq_y,
        m_yc,
        emitted_y,
        channels,
        ring.shape[0],
        ring.shape[1],
        *value_tw.stride(),
        *gate.stride(),
        *bias.stride(),
        *ring.stride(),
        RATIO=ratio,
        SPAN=ratio * series,
        GIVEN=gate_tw is not None,
        BIAS=bias_rw is not None,
        STATE=state is not None,
        BLOCK=launch.block,
        num_warps=launch.num_warps,
    )
    return m_yc, emitted_y


def park_chunk(
    value_tw: torch.Tensor,
    gate_tw: torch.Tensor,
    bias_rw: torch.Tensor | None,
    state_: torch.Tensor,
    slot_b: torch.Tensor,
    start_b: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    ratio: int,
) -> None:
    """Overwrite the ring rows of the last tokens of every sequence. A launch of its own: all reads come before it.

    Raises:
        RuntimeError: value_tw is on the CPU and kernels are not interpreted.
    """
    width, ring = value_tw.shape[1], state_.shape[1]
    if not value_tw.numel():
        return
    require_runnable("value_tw", value_tw)
    launch = pool_launch(width)
    bias = _or(bias_rw, value_tw)
    _park_chunk[(len(start_b), min(ring, len(value_tw)), triton.cdiv(width, launch.block))](
        value_tw,
        gate_tw,
        bias,
        state_,
        slot_b,
        start_b,
        cu_seqlens,
        width,
        state_.shape[0],
        ring,
        *value_tw.stride(),
        *gate_tw.stride(),
        *bias.stride(),
        *state_.stride(),
        RATIO=ratio,
        BIAS=bias_rw is not None,
        BLOCK=launch.block,
        num_warps=launch.num_warps,
    )


def pool_step(
    value_tw: torch.Tensor,
    gate_tw: torch.Tensor,
    bias_rw: torch.Tensor | None,
    state_: torch.Tensor,
    slot_t: torch.Tensor,
    position_t: torch.Tensor,
    *,
    ratio: int,
    series: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode step: ring rows written, entries that end here returned, in one launch.

    Raises:
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: value_tw is on the CPU and kernels are not interpreted.
    """
    channels = value_tw.shape[1] // series
    m_tc, emitted_t = _entry_buffers(out, len(value_tw), channels, value_tw)
    if not m_tc.numel():
        return m_tc, emitted_t
    require_runnable("value_tw", value_tw)
    launch = pool_launch(channels)
    bias = _or(bias_rw, value_tw)
    _pool_step[(len(value_tw), triton.cdiv(channels, launch.block))](
        value_tw,
        gate_tw,
        bias,
        state_,
        slot_t,
        position_t,
        m_tc,
        emitted_t,
        channels,
        state_.shape[0],
        state_.shape[1],
        *value_tw.stride(),
        *gate_tw.stride(),
        *bias.stride(),
        *state_.stride(),
        RATIO=ratio,
        SPAN=ratio * series,
        BIAS=bias_rw is not None,
        BLOCK_SPAN=triton.next_power_of_2(ratio * series),
        BLOCK=launch.block,
        num_warps=launch.num_warps,
    )
    return m_tc, emitted_t


def tail(
    m_yc: torch.Tensor,
    weight_c: torch.Tensor,
    table_sr: torch.Tensor,
    entry_y: torch.Tensor,
    *,
    ratio: int,
    eps: float,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised rows and their rotated form, bf16. A position that is no row of the table gives NaN.

    Raises:
        NotImplementedError: the rotary width is no power of two from 2 up, or rows are wider than 4096.
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: m_yc is on the CPU and kernels are not interpreted.
    """
    (y, channels), rotary = m_yc.shape, table_sr.shape[1]
    if rotary & (rotary - 1) or channels > 4096:
        raise NotImplementedError(f"table_sr: expected a power of two and rows up to 4096, got {rotary}, {channels}")
    latent_out, key_out = out or (None, None)
    latent_yc = output_buffer(latent_out, (y, channels), torch.bfloat16, m_yc)
    key_yc = output_buffer(key_out, (y, channels), torch.bfloat16, m_yc)
    if not m_yc.numel():
        return latent_yc, key_yc
    require_runnable("m_yc", m_yc)
    block = triton.next_power_of_2(channels)
    _tail[(y,)](
        m_yc,
        weight_c,
        table_sr,
        entry_y,
        latent_yc,
        key_yc,
        channels,
        float(channels),
        table_sr.shape[0],
        ratio,
        eps,
        *m_yc.stride(),
        weight_c.stride(0),
        *table_sr.stride(),
        ROTARY=rotary,
        BLOCK=block,
        num_warps=max(1, block // 512),
    )
    return latent_yc, key_yc


def _or(x: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A pointer that the kernel does not follow stands for what is not there."""
    return other if x is None else x


def _entry_buffers(
    out: tuple[torch.Tensor, torch.Tensor] | None, rows: int, channels: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    m_out, emitted_out = out or (None, None)
    m_yc = output_buffer(m_out, (rows, channels), torch.bfloat16, like)
    return m_yc, output_buffer(emitted_out, (rows,), torch.int32, like)
