"""Production calls of sparse attention: V4 and V4.1 (d = 512, sink) and V3.2 (d = 576, values 512)."""

from __future__ import annotations

import torch

from deeptwin.optimized.sparse_attn import (
    sparse_attn_decode_triton,
    sparse_attn_triton,
    two_cache_attn_decode_triton,
    two_cache_attn_triton,
)
from deeptwin.reference.config import KV_FP4, KV_FP8, PageLayout, RecordFormat, TwoCaches

KEYS, PAGES, PAGE = 8192, 512, 64


def _prefill(tokens: int, heads: int, dim: int, topk: int, *, sink: bool, dtype: torch.dtype = torch.bfloat16) -> None:
    sparse_attn_triton(
        torch.empty(tokens, heads, dim, dtype=dtype),
        torch.empty(KEYS, dim, dtype=dtype),
        torch.empty(tokens, topk, dtype=torch.int32),
        torch.empty(heads) if sink else None,
        None,
        scale=dim**-0.5,
        value_dim=512,
        dtype=dtype,
    )


def _decode(tokens: int, heads: int, dim: int, topk: int, *, sink: bool) -> None:
    sparse_attn_decode_triton(
        torch.empty(tokens, heads, dim, dtype=torch.bfloat16),
        torch.empty(PAGES, PAGE, dim, dtype=torch.bfloat16),
        torch.empty(tokens, topk, dtype=torch.int32),
        torch.empty(heads) if sink else None,
        torch.empty(tokens, dtype=torch.int32),
        scale=dim**-0.5,
        value_dim=512,
    )


def prefill_h64_d512() -> None:
    """V4.1: 128 keys of the window and 512 picked ones fit one split."""
    _prefill(1024, 64, 512, 640, sink=True)


def prefill_h128_d512() -> None:
    """V4-Pro: 128 + 1024 keys, two splits."""
    _prefill(1024, 128, 512, 1152, sink=True)


def prefill_h128_d576() -> None:
    """V3.2: 2048 keys, no sink."""
    _prefill(1024, 128, 576, 2048, sink=False)


def prefill_h16_d512() -> None:
    """V4.1 with its heads over four ranks: the smallest tile of heads."""
    _prefill(1024, 16, 512, 640, sink=True)


def prefill_h64_d512_fp32() -> None:
    """The fp32 variant, for comparison on a device."""
    _prefill(64, 64, 512, 640, sink=True, dtype=torch.float32)


def decode_h64_d512() -> None:
    """V4.1 decode, one split, lengths on the device."""
    _decode(64, 64, 512, 640, sink=True)


def decode_h128_d576() -> None:
    """V3.2 decode, two splits."""
    _decode(64, 128, 576, 2048, sink=False)


def _caches(main: RecordFormat, layout: PageLayout) -> TwoCaches:
    return TwoCaches(window=KV_FP8, main=main, layout=layout, scale=512**-0.5)


def two_prefill_h64() -> None:
    """V4.1 prefill: window rows in bf16, FP4 entries."""
    two_cache_attn_triton(
        torch.empty(1024, 64, 512, dtype=torch.bfloat16),
        torch.empty(KEYS, 512, dtype=torch.bfloat16),
        torch.empty(1024, 128, dtype=torch.int32),
        torch.empty(PAGES, PAGE, 288, dtype=torch.uint8),
        torch.empty(1024, 512, dtype=torch.int32),
        torch.empty(64),
        caches=_caches(KV_FP4, PageLayout.INTERLEAVED),
    )


def _two_decode(main: RecordFormat, layout: PageLayout, ring: int = 134, page: int = PAGE) -> None:
    two_cache_attn_decode_triton(
        torch.empty(64, 64, 512, dtype=torch.bfloat16),
        torch.empty(65, ring, 528, dtype=torch.uint8),
        torch.empty(64, 128, dtype=torch.int32),
        torch.empty(PAGES, page, main.record_bytes, dtype=torch.uint8),
        torch.empty(64, 512, dtype=torch.int32),
        torch.empty(64),
        caches=_caches(main, layout),
    )


def two_decode_h64() -> None:
    """V4.1 decode: FP8 rings, FP4 entries, as DeepInfer lays them out."""
    _two_decode(KV_FP4, PageLayout.INTERLEAVED)


def two_decode_h64_fp8() -> None:
    """The MXFP8 option of the main cache, in sectioned pages."""
    _two_decode(KV_FP8, PageLayout.SECTIONED)


def two_decode_pages_of_one() -> None:
    """Rings and pages of one entry, sectioned."""
    _two_decode(KV_FP4, PageLayout.SECTIONED, ring=1, page=1)
