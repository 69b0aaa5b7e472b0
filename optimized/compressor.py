"""Pooling of tokens into compressed entries, fast; the contract is `reference/compressor.py`.

Values on the device are not inspected here: which rows a chunk has, slots and positions are the caller's promise. A
slot that is none leaves memory untouched and gives zero rows with entry -1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import (
    expect_chunk_shape,
    expect_dtype,
    expect_pooling_state,
    expect_positive,
    expect_rows_to_pool,
    expect_shape,
)
from deeptwin.reference.config import CompressorConfig

STORAGE = (torch.bfloat16, torch.float16, torch.float32)
Rows = tuple[Tensor, Tensor]


def compress_triton(
    value_tw: Tensor,
    gate_tw: Tensor | None,
    bias_rw: Tensor | None,
    start_b: Tensor,
    cu_seqlens: Tensor,
    *,
    config: CompressorConfig,
    rows: Rows | None = None,
    out: Rows | None = None,
) -> Rows:
    """`reference.compressor.compress`. `rows` are those of `compress_rows`; made here, they cost a synchronisation.

    Edges:
        starts are not inspected: what precedes a chunk counts as absent.

    Raises:
        TypeError: a tensor or an `out` buffer has a wrong dtype.
        ValueError: shapes disagree; the gate is missing for a ratio above 1; an `out` buffer does not fit.
    """
    _check(value_tw, gate_tw, bias_rw, start_b, cu_seqlens, config)
    from deeptwin.kernels.triton_ops import compressor

    rows = _rows(start_b, cu_seqlens, config.ratio) if rows is None else rows
    return compressor.pool_chunk(
        value_tw,
        gate_tw,
        bias_rw,
        None,
        None,
        start_b,
        cu_seqlens,
        rows,
        ratio=config.ratio,
        series=config.series,
        out=out,
    )


def compress_prefill_triton(
    value_tw: Tensor,
    gate_tw: Tensor,
    bias_rw: Tensor | None,
    state_: Tensor,
    state_slot_b: Tensor,
    start_b: Tensor,
    cu_seqlens: Tensor,
    *,
    config: CompressorConfig,
    rows: Rows | None = None,
    out: Rows | None = None,
) -> Rows:
    """`reference.compressor.compress_prefill`: one launch pools, the next one overwrites the ring.

    Raises:
        TypeError: a tensor or an `out` buffer has a wrong dtype.
        ValueError: shapes disagree; ratio is 1; the ring is shorter than span - 1; an `out` buffer does not fit.
    """
    width = _check(value_tw, gate_tw, bias_rw, start_b, cu_seqlens, config)
    expect_pooling_state(state_, width, config)
    _expect_index("state_slot_b", state_slot_b, len(start_b))
    from deeptwin.kernels.triton_ops import compressor

    found = compressor.pool_chunk(
        value_tw,
        gate_tw,
        bias_rw,
        state_,
        state_slot_b,
        start_b,
        cu_seqlens,
        _rows(start_b, cu_seqlens, config.ratio) if rows is None else rows,
        ratio=config.ratio,
        series=config.series,
        out=out,
    )
    compressor.park_chunk(value_tw, gate_tw, bias_rw, state_, state_slot_b, start_b, cu_seqlens, ratio=config.ratio)
    return found


def compress_decode_triton(
    value_tw: Tensor,
    gate_tw: Tensor,
    bias_rw: Tensor | None,
    state_: Tensor,
    state_slot_t: Tensor,
    position_t: Tensor,
    *,
    config: CompressorConfig,
    out: Rows | None = None,
) -> Rows:
    """`reference.compressor.compress_decode`, in one launch.

    Raises:
        TypeError: a tensor or an `out` buffer has a wrong dtype.
        ValueError: shapes disagree; ratio is 1; the ring is shorter than span - 1; an `out` buffer does not fit.
    """
    width = expect_rows_to_pool(value_tw, gate_tw, bias_rw, config)
    expect_dtype("value_tw", value_tw, torch.float32)
    expect_dtype("gate_tw", gate_tw, torch.float32)
    expect_pooling_state(state_, width, config)
    _expect_index("state_slot_t", state_slot_t, len(value_tw))
    _expect_index("position_t", position_t, len(value_tw))
    from deeptwin.kernels.triton_ops import compressor

    return compressor.pool_step(
        value_tw,
        gate_tw,
        bias_rw,
        state_,
        state_slot_t,
        position_t,
        ratio=config.ratio,
        series=config.series,
        out=out,
    )


def compress_tail_triton(
    m_yc: Tensor,
    weight_c: Tensor,
    table_sr: Tensor,
    entry_y: Tensor,
    *,
    ratio: int,
    eps: float,
    out: Rows | None = None,
) -> Rows:
    """`reference.compressor.compress_tail`. Positions are not inspected: one beyond the table gives NaN.

    Raises:
        TypeError: a tensor or an `out` buffer has a wrong dtype.
        ValueError: shapes disagree; the rotary width is odd or above c; ratio or eps is not positive; an `out` buffer
            does not fit.
        NotImplementedError: the rotary width is no power of two, or rows are wider than 4096.
    """
    dims: dict[str, int] = {}
    expect_shape("m_yc", m_yc, "yc", dims)
    expect_shape("weight_c", weight_c, "c", dims)
    expect_shape("table_sr", table_sr, "sr", dims)
    expect_shape("entry_y", entry_y, "y", dims)
    expect_dtype("m_yc", m_yc, *STORAGE)
    expect_dtype("weight_c", weight_c, *STORAGE)
    expect_dtype("table_sr", table_sr, torch.float32)
    expect_dtype("entry_y", entry_y, torch.int32, torch.int64)
    expect_positive("ratio", ratio)
    expect_positive("eps", eps)
    if dims["r"] % 2 or not 0 < dims["r"] <= dims["c"]:
        raise ValueError(f"table_sr: expected an even width up to c={dims['c']}, got r={dims['r']}")
    from deeptwin.kernels.triton_ops import compressor

    return compressor.tail(m_yc, weight_c, table_sr, entry_y, ratio=ratio, eps=eps, out=out)


def _check(
    value_tw: Tensor,
    gate_tw: Tensor | None,
    bias_rw: Tensor | None,
    start_b: Tensor,
    cu_seqlens: Tensor,
    config: CompressorConfig,
) -> int:
    width = expect_rows_to_pool(value_tw, gate_tw, bias_rw, config)
    expect_dtype("value_tw", value_tw, torch.float32)
    if gate_tw is not None:
        expect_dtype("gate_tw", gate_tw, torch.float32)
    expect_chunk_shape(start_b, cu_seqlens)
    return width


def _expect_index(name: str, x: Tensor, count: int) -> None:
    expect_dtype(name, x, torch.int32, torch.int64)
    expect_shape(name, x, "n", {"n": count})


def _rows(start_b: Tensor, cu_seqlens: Tensor, ratio: int) -> Rows:
    """Entry and sequence of every row, from the row at which each sequence ends."""
    ends = start_b.long() + cu_seqlens.long().diff()
    first, last = start_b.long() // ratio, ends // ratio
    until_b = torch.clamp_min(last - first, 1).cumsum(0)
    row_y = torch.arange(int(until_b[-1]) if len(until_b) else 0, device=start_b.device)
    seq_y = torch.searchsorted(until_b, row_y, right=True)
    entry_y = last[seq_y] - until_b[seq_y] + row_y
    return torch.where(last[seq_y] > first[seq_y], entry_y, -1).to(torch.int32), seq_y.to(torch.int32)
