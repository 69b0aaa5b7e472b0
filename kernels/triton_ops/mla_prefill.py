"""Dense causal attention of the naive MLA form: as many key heads as query heads, queries at the end of the keys.

Key blocks ascend from position 0, whatever the chunk, so a query has the same bits in any chunk and in any tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .split_softmax import (
    LOG2_E,
    LOWEST,
    arch_of,
    attention_outputs,
    finish_rows,
    load_query_tail,
    padded_tail,
    require_rows,
    require_value_dim,
)


@dataclass(frozen=True, kw_only=True)
class PrefillLaunch:
    """Tile of the prefill kernel. `block_keys` fixes the order of summation."""

    block_queries: int
    block_keys: int
    num_warps: int
    num_stages: int


def prefill_launch(dtype: torch.dtype, arch: str) -> PrefillLaunch:
    """The launch for a dtype and an architecture; it never looks at the sequence."""
    if dtype == torch.float32:  # no tensor cores: larger tiles spill
        return PrefillLaunch(block_queries=32, block_keys=32, num_warps=8, num_stages=1)
    if arch == "ascend950":  # 128 queries fit the cube path only: threads have 120 KiB of unified buffer
        return PrefillLaunch(block_queries=64, block_keys=64, num_warps=8, num_stages=1)
    return PrefillLaunch(block_queries=128, block_keys=64, num_warps=8, num_stages=2)


@triton.jit
def _prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    num_queries,
    num_keys,
    num_heads,
    stride_qt,
    stride_qh,
    stride_ks,
    stride_kh,
    stride_vs,
    stride_vh,
    MAIN_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    # 1. which queries and head this program owns
    head = tl.program_id(1).to(tl.int64)
    query = tl.program_id(0) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    in_queries = query < num_queries
    own = num_keys - num_queries + query  # position of each query
    end = tl.minimum(num_keys - num_queries + (tl.program_id(0) + 1) * BLOCK_QUERIES, num_keys)

    # 2. queries: the largest power of two of channels, then the rest
    main_cols = tl.arange(0, MAIN_DIM)
    q_at = q_ptr + query.to(tl.int64)[:, None] * stride_qt + head * stride_qh
    q = tl.load(q_at + main_cols[None, :], mask=in_queries[:, None], other=0.0)
    q_tail = q
    if TAIL_PAD > 0:
        q_tail = load_query_tail(q_at, in_queries, MAIN_DIM, TAIL_DIM, TAIL_PAD)

    # 3. online softmax over key blocks, ascending from position 0
    value_cols = tl.arange(0, VALUE_DIM)
    top = tl.full([BLOCK_QUERIES], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    acc = tl.zeros([BLOCK_QUERIES, VALUE_DIM], tl.float32)
    for start in range(0, end, BLOCK_KEYS):
        position = start + tl.arange(0, BLOCK_KEYS)
        in_keys = position < num_keys
        k_at = k_ptr + position.to(tl.int64)[:, None] * stride_ks + head * stride_kh
        k = tl.load(k_at + main_cols[None, :], mask=in_keys[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if TAIL_PAD > 0:
            tail_cols = tl.arange(0, TAIL_PAD)
            tail_mask = in_keys[:, None] & (tail_cols < TAIL_DIM)[None, :]
            k_tail = tl.load(k_at + MAIN_DIM + tail_cols[None, :], mask=tail_mask, other=0.0)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
        # position <= own implies position < num_keys
        scores = tl.where(position[None, :] <= own[:, None], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(p, 1)
        v_at = v_ptr + position.to(tl.int64)[:, None] * stride_vs + head * stride_vh
        v = tl.load(v_at + value_cols[None, :], mask=in_keys[:, None], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    # 4. the quotient and the LSE
    rows = query.to(tl.int64) * num_heads + head
    finish_rows(acc, total, top, rows, query, in_queries, lse_ptr, out_ptr, lse_ptr, False, VALUE_DIM)


def mla_prefill(
    q_thd: torch.Tensor,
    k_shd: torch.Tensor,
    v_shu: torch.Tensor,
    *,
    scale: float,
    launch: PrefillLaunch | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the causal prefill.

    Raises:
        NotImplementedError: the value width is no power of two from 16 up, heads are narrower than 16, or rows are not
            contiguous.
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
    """
    num_queries, num_heads, width = q_thd.shape
    value_dim = v_shu.shape[2]
    require_value_dim(value_dim)
    if width < 16:
        raise NotImplementedError(f"q_thd: expected heads of 16 channels or more, got {width}")
    for name, x in (("q_thd", q_thd), ("k_shd", k_shd), ("v_shu", v_shu)):
        require_rows(name, x)
    out_thu, lse_th = attention_outputs(out, (num_queries, num_heads, value_dim), q_thd)
    require_runnable("q_thd", q_thd)
    if num_queries == 0:
        return out_thu, lse_th
    launch = launch or prefill_launch(q_thd.dtype, arch_of(q_thd.device))
    main_dim = 1 << (width.bit_length() - 1)
    _prefill[(triton.cdiv(num_queries, launch.block_queries), num_heads)](
        q_thd,
        k_shd,
        v_shu,
        out_thu,
        lse_th,
        scale * LOG2_E.value,
        num_queries,
        k_shd.shape[0],
        num_heads,
        *q_thd.stride()[:2],
        *k_shd.stride()[:2],
        *v_shu.stride()[:2],
        MAIN_DIM=main_dim,
        TAIL_DIM=width - main_dim,
        TAIL_PAD=padded_tail(width - main_dim),
        VALUE_DIM=value_dim,
        BLOCK_QUERIES=launch.block_queries,
        BLOCK_KEYS=launch.block_keys,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out_thu, lse_th
