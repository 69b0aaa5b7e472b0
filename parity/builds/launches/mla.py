"""Production calls of latent attention with the sizes of V3: 128 heads, latent 512 + 64, heads 128 + 64."""

from __future__ import annotations

import torch

from deeptwin.optimized.mla import mla_decode_triton, mla_prefill_triton, store_latent_triton

PAGES, PAGE = 4096, 64


def _decode(requests: int, queries: int, heads: int, pages: int, dtype: torch.dtype = torch.bfloat16) -> None:
    mla_decode_triton(
        torch.empty(requests, queries, heads, 576, dtype=dtype),
        torch.empty(PAGES, PAGE, 576, dtype=dtype),
        torch.empty(requests, pages, dtype=torch.int32),
        torch.empty(requests, dtype=torch.int32),
        scale=192**-0.5,
        value_dim=512,
        dtype=dtype,
    )


def _prefill(tokens: int, keys: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> None:
    mla_prefill_triton(
        torch.empty(tokens, heads, 192, dtype=dtype),
        torch.empty(keys, heads, 192, dtype=dtype),
        torch.empty(keys, heads, 128, dtype=dtype),
        scale=192**-0.5,
        dtype=dtype,
    )


def decode_h128() -> None:
    """Decode over a table of 128 pages: eight splits."""
    _decode(64, 1, 128, 128)


def decode_h128_one_split() -> None:
    """Decode over a table that one split covers."""
    _decode(64, 1, 128, 16)


def decode_h16() -> None:
    """128 heads over eight ranks."""
    _decode(64, 1, 16, 128)


def verify_h128() -> None:
    """Six queries a request, as speculative verification has them."""
    _decode(64, 6, 128, 128)


def decode_h128_fp32() -> None:
    """The fp32 variant, for comparison on a device."""
    _decode(8, 1, 128, 128, torch.float32)


def prefill_h128() -> None:
    """A chunk of 4096 queries behind as many keys."""
    _prefill(4096, 8192, 128)


def prefill_h128_fp32() -> None:
    """The fp32 variant, for comparison on a device."""
    _prefill(512, 1024, 128, torch.float32)


def store_576() -> None:
    """Latent rows of a decode batch into the cache."""
    store_latent_triton(
        torch.empty(PAGES, PAGE, 576, dtype=torch.bfloat16),
        torch.empty(64, 576, dtype=torch.bfloat16),
        torch.empty(64, dtype=torch.int64),
    )
