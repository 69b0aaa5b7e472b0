"""Production calls of the caches of V4.1-Flash: a prefill chunk of 4096 tokens, pages of the shared block, rings."""

from __future__ import annotations

import torch

from deeptwin.optimized.kv_cache import load_records_triton, norm_rope_store_triton, store_records_triton
from deeptwin.reference.config import INDEX_FP4, KV_FP4, KV_FP8, FusedStore, PageLayout, RecordFormat, RecordTap

TOKENS, PAGE_BYTES, STATE_BYTES = 4096, 114048, 3128928
INTERLEAVED, SECTIONED = PageLayout.INTERLEAVED, PageLayout.SECTIONED


def _cache(fmt: RecordFormat, slots: int, stride: int) -> torch.Tensor:
    size = slots * fmt.record_bytes
    return torch.empty(64, stride, dtype=torch.uint8)[:, :size].unflatten(1, (slots, fmt.record_bytes))


def _slots() -> torch.Tensor:
    return torch.empty(TOKENS, dtype=torch.int32)


def _store(fmt: RecordFormat, slots: int, stride: int, layout: PageLayout) -> None:
    x = torch.empty(TOKENS, fmt.channels, dtype=torch.bfloat16)
    store_records_triton(_cache(fmt, slots, stride), x, _slots(), layout=layout)


def _fused(fmt: RecordFormat, slots: int, stride: int, layout: PageLayout, tap: RecordTap) -> None:
    x, weight = torch.empty(TOKENS, fmt.channels, dtype=torch.bfloat16), torch.empty(fmt.channels, dtype=torch.bfloat16)
    table, positions = torch.empty(65536, 64), torch.empty(TOKENS, dtype=torch.int32)
    store = FusedStore(eps=1e-20, layout=layout, tap=tap)
    norm_rope_store_triton(_cache(fmt, slots, stride), x, weight, table, positions, _slots(), store=store)


def store_kv_fp8() -> None:
    """Rows of a sliding window into rings."""
    _store(KV_FP8, 134, STATE_BYTES, INTERLEAVED)


def store_kv_fp4() -> None:
    """Compressed entries into pages of the shared block."""
    _store(KV_FP4, 64, PAGE_BYTES, INTERLEAVED)


def store_index_fp4() -> None:
    """Index keys into pages of the shared block."""
    _store(INDEX_FP4, 64, PAGE_BYTES, SECTIONED)


def load_kv_fp8() -> None:
    """History windows out of rings."""
    load_records_triton(_cache(KV_FP8, 134, STATE_BYTES), _slots(), layout=INTERLEAVED)


def load_kv_fp4() -> None:
    """Compressed entries out of pages."""
    load_records_triton(_cache(KV_FP4, 64, PAGE_BYTES), _slots(), layout=INTERLEAVED)


def load_index_fp4() -> None:
    """Index keys out of pages."""
    load_records_triton(_cache(INDEX_FP4, 64, PAGE_BYTES), _slots(), layout=SECTIONED)


def fused_kv_fp8() -> None:
    """Rows of a sliding window; the chunk attends to what was stored."""
    _fused(KV_FP8, 134, STATE_BYTES, INTERLEAVED, RecordTap.CAST_BACK)


def fused_kv_fp4() -> None:
    """Compressed entries; index keys are made from the normalised latent."""
    _fused(KV_FP4, 64, PAGE_BYTES, INTERLEAVED, RecordTap.NORM)


def fused_index_fp4() -> None:
    """Index keys."""
    _fused(INDEX_FP4, 64, PAGE_BYTES, SECTIONED, RecordTap.NONE)
