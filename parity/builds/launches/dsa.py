"""Production calls of V3.2: 64 index heads of 128 channels, 128 heads over records of 656 bytes, pages of 64."""

from __future__ import annotations

from dataclasses import replace

import torch

from deeptwin.optimized.dsa import (
    dsa_index_keys_triton,
    dsa_index_scores_paged_triton,
    dsa_index_scores_triton,
    sparse_mla_triton,
)
from deeptwin.optimized.kv_cache import load_records_triton, store_records_triton
from deeptwin.reference.config import INDEX_FP8_POW2, KV_V32_FMLA, PageLayout, RopeConfig

from ...peers.dsa import TINY

TOKENS, HEADS, POSITIONS, PAGE = 4096, 64, 163840, 64
_MLA = replace(TINY.mla, rope=RopeConfig(rope_dim=64, theta=10000.0, yarn=None))
CONFIG = replace(TINY, mla=_MLA, index_heads=HEADS, index_dim=128, index_key=INDEX_FP8_POW2)


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def _int32(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int32)


def keys() -> None:
    """Index keys of a chunk."""
    table, positions = torch.empty(POSITIONS, 64), torch.empty(TOKENS, dtype=torch.int64)
    dsa_index_keys_triton(_bf16(TOKENS, 128), _bf16(128), _bf16(128), table, positions, config=CONFIG)


def scores() -> None:
    """Prefill: a chunk against a sequence of 65536."""
    q = torch.empty(TOKENS, HEADS, 128, dtype=torch.float8_e4m3fn)
    k = torch.empty(65536, 128, dtype=torch.float8_e4m3fn)
    dsa_index_scores_triton(q, k, torch.empty(65536), torch.empty(TOKENS, HEADS), _int32(TOKENS))


def scores_paged() -> None:
    """Decode: 64 requests."""
    q = torch.empty(64, HEADS, 128, dtype=torch.float8_e4m3fn)
    cache = torch.empty(8192, PAGE, 132, dtype=torch.uint8)
    dsa_index_scores_paged_triton(q, cache, torch.empty(64, HEADS), _int32(64, 1024), _int32(64))


def attend_h128() -> None:
    """Decode: 2048 picked records, two splits."""
    cache = torch.empty(8192, PAGE, 656, dtype=torch.uint8)
    sparse_mla_triton(_bf16(64, 128, 576), cache, _int32(64, 2048), _int32(64), scale=0.1)


def store_656() -> None:
    """Latents of a chunk into pages."""
    cache = torch.empty(8192, PAGE, 656, dtype=torch.uint8)
    store_records_triton(cache, _bf16(TOKENS, 576), _int32(TOKENS), layout=PageLayout.INTERLEAVED, fmt=KV_V32_FMLA)


def load_656() -> None:
    """Latents out of pages."""
    cache = torch.empty(8192, PAGE, 656, dtype=torch.uint8)
    load_records_triton(cache, _int32(TOKENS), layout=PageLayout.INTERLEAVED)


def absorb_h128() -> None:
    """W_UK of 128 heads on the queries of a chunk."""
    from deeptwin.kernels.triton_ops.head_product import head_product

    head_product(_bf16(TOKENS, 128, 192)[..., :128], _bf16(128, 256, 512)[:, :128])
