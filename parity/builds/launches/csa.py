"""Production calls of V4 attention: query heads of V4-Flash, records of 584 bytes, two caches in one softmax."""

from __future__ import annotations

import torch

from deeptwin.optimized.csa import head_norm_rope_triton
from deeptwin.optimized.kv_cache import norm_rope_store_triton
from deeptwin.optimized.sparse_attn import two_cache_attn_decode_triton
from deeptwin.reference.config import KV_V4, FusedStore, HeadNorm, PageLayout, RecordTap, TwoCaches

TOKENS, SECTIONED = 4096, PageLayout.SECTIONED


def _pages(count: int, slots: int) -> torch.Tensor:
    stride = -(-slots * 584 // 576) * 576
    return torch.empty(count, stride, dtype=torch.uint8)[:, : slots * 584].unflatten(1, (slots, 584))


def _integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def heads() -> None:
    """64 heads of 512 channels, release rounding."""
    q = torch.empty(TOKENS, 64, 512, dtype=torch.bfloat16)
    head_norm_rope_triton(q, torch.empty(65536, 64), _integers(TOKENS), cast=HeadNorm.RELEASE, eps=1e-6)


def fused_v4() -> None:
    """Window keys into their rings, values back for the chunk."""
    rows, weight = torch.empty(TOKENS, 512, dtype=torch.bfloat16), torch.empty(512, dtype=torch.bfloat16)
    store = FusedStore(eps=1e-6, layout=SECTIONED, tap=RecordTap.CAST_BACK, fmt=KV_V4)
    table, slots = torch.empty(65536, 64), _integers(TOKENS)
    norm_rope_store_triton(_pages(64, 134), rows, weight, table, _integers(TOKENS), slots, store=store)


def two_caches_v4() -> None:
    """Decode of V4-Flash: 128 window records and 512 entries of 584 bytes."""
    q = torch.empty(64, 64, 512, dtype=torch.bfloat16)
    caches = TwoCaches(window=KV_V4, main=KV_V4, layout=SECTIONED, scale=512**-0.5)
    window, main = _integers(64, 128), _integers(64, 512)
    two_cache_attn_decode_triton(q, _pages(64, 134), window, _pages(64, 64), main, torch.empty(64), caches=caches)
