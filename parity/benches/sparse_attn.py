"""Sparse attention at the widths of V3.2 (576) and V4 (512), and over two caches of records (V4, V4.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deeptwin.reference.config import KV_V4, Q4K, Q8, PageLayout, RecordFormat, TwoCaches

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws

KEYS = 65536
VALUES = 512


def _prefill(heads: int, dim: int, tokens: int, topk: int) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        return {
            "q_thd": draws.normal(tokens, heads, dim),
            "kv_sd": draws.normal(KEYS, dim),
            "idx_tk": draws.integers(0, KEYS, tokens, topk),
            "sink_h": draws.normal(heads, dtype=torch.float32),
            "topk_length_t": None,
            "scale": dim**-0.5,
            "value_dim": VALUES,
            "dtype": torch.bfloat16,
        }

    return Bench(
        component="sparse_attn",
        op="sparse_attn",
        shape=f"t{tokens}-h{heads}-d{dim}-k{topk}",
        draw=draw,
        flops=2.0 * tokens * heads * topk * (dim + VALUES),
        bytes=2.0 * (tokens * heads * (dim + VALUES) + KEYS * dim) + 4.0 * tokens * topk,
    )


def _records(draws: DeviceDraws, fmt: RecordFormat, pages: int, page: int) -> Tensor:
    """Random codes with scales near one, so that every record is finite."""
    codes = draws.bytes(0, 256, pages, page, fmt.data_bytes)
    groups = fmt.record_bytes - fmt.data_bytes
    if fmt.quant == Q8:
        return torch.cat([codes & 0xF7, draws.bytes(118, 122, pages, page, groups)], -1)  # no NaN code
    return torch.cat([codes, draws.bytes(40, 56, pages, page, groups)], -1)


def _two_caches(batch: int, queries: int) -> Bench:
    heads, dim, window, main, page = 64, 512, 128, 512, 128
    caches = TwoCaches(
        window=RecordFormat(name="kv_fp8", channels=dim, quant=Q8),
        main=RecordFormat(name="kv_fp4", channels=dim, quant=Q4K),
        layout=PageLayout.INTERLEAVED,
        scale=dim**-0.5,
    )
    tokens = batch * queries
    pages = max(64, math.ceil(batch * 4096 / page))

    def draw(draws: DeviceDraws) -> Inputs:
        return {
            "q_thd": draws.normal(tokens, heads, dim),
            "window_pow": _records(draws, caches.window, batch, 134),
            "window_idx_tk": draws.integers(0, batch * 134, tokens, window),
            "main_pow": _records(draws, caches.main, pages, page),
            "main_idx_tk": draws.integers(0, pages * page, tokens, main),
            "sink_h": draws.normal(heads, dtype=torch.float32),
            "caches": caches,
            "dtype": torch.bfloat16,
        }

    read = window * caches.window.record_bytes + main * caches.main.record_bytes
    return Bench(
        component="sparse_attn",
        op="two_cache_attn_decode",
        shape=f"b{batch}-q{queries}-h{heads}-w{window}-m{main}",
        draw=draw,
        flops=2.0 * tokens * heads * (window + main) * 2 * dim,
        bytes=float(tokens * (read + 2 * 2 * heads * dim)),
    )


def _v4_pages(draws: DeviceDraws, pages: int, page: int) -> Tensor:
    """Sectioned pages of V4: codes and rotary channels of all entries, then their scales."""
    codes = draws.bytes(0, 256, pages, page, KV_V4.channels) & 0xF7  # no NaN code
    tail = draws.normal(pages, page, KV_V4.tail).view(torch.uint8)
    scales = draws.bytes(118, 122, pages, page * KV_V4.scale_bytes)
    rows = torch.cat([codes, tail], -1).flatten(1)
    return torch.cat([rows, scales], 1).unflatten(1, (page, KV_V4.record_bytes))


def _v4(batch: int, queries: int, heads: int, main: int) -> Bench:
    dim, window, ring, page = KV_V4.width, 128, 134, 64
    caches = TwoCaches(window=KV_V4, main=KV_V4, layout=PageLayout.SECTIONED, scale=dim**-0.5)
    tokens, pages = batch * queries, max(64, batch * 2048 // page)

    def draw(draws: DeviceDraws) -> Inputs:
        return {
            "q_thd": draws.normal(tokens, heads, dim),
            "window_pow": _v4_pages(draws, batch, ring),
            "window_idx_tk": draws.integers(0, batch * ring, tokens, window),
            "main_pow": _v4_pages(draws, pages, page),
            "main_idx_tk": draws.integers(0, pages * page, tokens, main),
            "sink_h": draws.normal(heads, dtype=torch.float32),
            "caches": caches,
            "dtype": torch.bfloat16,
        }

    return Bench(
        component="sparse_attn",
        op="two_cache_attn_decode",
        shape=f"v4-b{batch}-q{queries}-h{heads}-w{window}-m{main}",
        draw=draw,
        flops=2.0 * tokens * heads * (window + main) * 2 * dim,
        bytes=float(tokens * ((window + main) * (KV_V4.record_bytes + 4) + 2 * 2 * heads * dim)),
        promises={"clean_lists": True},
    )


def _two_prefill(tokens: int) -> Bench:
    heads, dim, window, main, rows, page, pages = 64, 512, 128, 512, 8192, 128, 256
    caches = TwoCaches(
        window=RecordFormat(name="kv_fp8", channels=dim, quant=Q8),
        main=RecordFormat(name="kv_fp4", channels=dim, quant=Q4K),
        layout=PageLayout.INTERLEAVED,
        scale=dim**-0.5,
    )

    def draw(draws: DeviceDraws) -> Inputs:
        return {
            "q_thd": draws.normal(tokens, heads, dim),
            "window_sd": draws.normal(rows, dim),
            "window_idx_tk": draws.integers(0, rows, tokens, window),
            "main_pow": _records(draws, caches.main, pages, page),
            "main_idx_tk": draws.integers(0, pages * page, tokens, main),
            "sink_h": draws.normal(heads, dtype=torch.float32),
            "caches": caches,
            "dtype": torch.bfloat16,
        }

    cached = 2 * rows * dim + pages * page * caches.main.record_bytes
    return Bench(
        component="sparse_attn",
        op="two_cache_attn",
        shape=f"t{tokens}-h{heads}-w{window}-m{main}",
        draw=draw,
        flops=2.0 * tokens * heads * (window + main) * 2 * dim,
        bytes=float(cached + tokens * (4 * heads * dim + 4 * (window + main))),
    )


BENCHES = (
    *(_prefill(h, d, 1024, k) for h, d in ((128, 576), (128, 512), (64, 512)) for k in (512, 1024, 2048)),
    _prefill(128, 576, 4096, 2048),
    _prefill(64, 512, 4096, 512),
    *(_two_prefill(tokens) for tokens in (1024, 4096)),
    *(_two_caches(batch, queries) for batch, queries in ((1, 1), (8, 1), (64, 1), (128, 1), (128, 6))),
    *(_v4(batch, queries, 64, 512) for batch, queries in ((1, 1), (128, 1), (128, 6))),
    *(_v4(batch, 1, 128, 1024) for batch in (1, 128)),
)
