"""Production calls of the selection in V4.1: 512 of up to 65536 entries, 2048 candidate blocks of 8, pages of 128."""

from __future__ import annotations

import torch

from deeptwin.optimized.topk import (
    candidate_blocks_triton,
    compact_lengths_triton,
    physical_slots_triton,
    restore_indices_triton,
    topk_triton,
)

TOKENS, ENTRIES, TOPK, BLOCKS, SIZE, PAGE = 4096, 65536, 512, 2048, 8, 128


def _int32(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int32)


def topk_bf16() -> None:
    """The entries of an index source."""
    topk_triton(torch.empty(TOKENS, ENTRIES, dtype=torch.bfloat16), _int32(TOKENS), k=TOPK)


def topk_fp32() -> None:
    """The same from fp32 scores."""
    topk_triton(torch.empty(TOKENS, ENTRIES), _int32(TOKENS), k=TOPK)


def topk_at_once() -> None:
    """Rows that fit the registers of a program."""
    topk_triton(torch.empty(TOKENS, 8192), _int32(TOKENS), k=TOPK)


def topk_wide() -> None:
    """More than parts in registers narrow down: the row is walked."""
    topk_triton(torch.empty(TOKENS, ENTRIES), _int32(TOKENS), k=16384)


def candidates() -> None:
    """The blocks that the candidate source publishes: block scores, then a selection."""
    candidate_blocks_triton(
        torch.empty(TOKENS, ENTRIES, dtype=torch.bfloat16), _int32(TOKENS), block_size=SIZE, k=BLOCKS
    )


def compact() -> None:
    """The lengths of compact rows."""
    compact_lengths_triton(_int32(TOKENS, BLOCKS), _int32(TOKENS), block_size=SIZE)


def restore() -> None:
    """Entries of compact indices."""
    restore_indices_triton(_int32(TOKENS, TOPK), _int32(TOKENS, BLOCKS), block_size=SIZE)


def slots() -> None:
    """Slots of a decode batch."""
    physical_slots_triton(_int32(64, TOPK), _int32(64, 1024), page_entries=PAGE)
