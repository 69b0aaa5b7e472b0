"""TileKernels' torch casts, and loops over bytes, as peers of the caches; written for tile_kernels 2.1.0."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.config import INDEX_FP4, KV_FP4, KV_FP8, PageLayout, RecordFormat

from .quant import tile_kernels_cast, tile_kernels_cast_back


def _format(width: int) -> RecordFormat:
    return {528: KV_FP8, 288: KV_FP4, 68: INDEX_FP4}[width]


def _spans(slot: int, cache: Tensor, layout: PageLayout) -> tuple[int, slice, slice]:
    """Page of a slot, and where its codes and scales stand in the page."""
    size, width = cache.shape[1:]
    data = {528: 512, 288: 256, 68: 64}[width]
    page, offset = divmod(slot, size)
    if layout is PageLayout.INTERLEAVED:
        start = offset * width
        return page, slice(start, start + data), slice(start + data, start + width)
    scales = width - data
    start = size * data + offset * scales
    return page, slice(offset * data, (offset + 1) * data), slice(start, start + scales)


def tile_kernels_store(
    cache_pow_: Tensor, x_td: Tensor, slots_t: Tensor, *, layout: PageLayout, fmt: RecordFormat | None = None
) -> Tensor:
    """Cast, then copy codes and scales of one row after the other; a width has one writer, `fmt` says nothing new."""
    pages = cache_pow_.view(cache_pow_.shape[0], -1)
    for row, slot in zip(x_td, slots_t.tolist(), strict=True):
        if not 0 <= slot < cache_pow_.shape[0] * cache_pow_.shape[1]:
            continue
        codes, sf = tile_kernels_cast(row[None], fmt=(fmt or _format(cache_pow_.shape[2])).quant)
        page, data, scales = _spans(slot, cache_pow_, layout)
        pages[page, data], pages[page, scales] = codes.view(torch.uint8)[0], sf.view(torch.uint8)[0]
    return cache_pow_


def tile_kernels_load(cache_pow: Tensor, slots_t: Tensor, *, layout: PageLayout, dtype: torch.dtype) -> Tensor:
    """Copy codes and scales of one row after the other, then cast back."""
    fmt = _format(cache_pow.shape[2])
    pages = cache_pow.reshape(cache_pow.shape[0], -1)
    x = torch.zeros(len(slots_t), fmt.channels, dtype=dtype)
    for row, slot in enumerate(slots_t.tolist()):
        if not 0 <= slot < cache_pow.shape[0] * cache_pow.shape[1]:
            continue
        page, data, scales = _spans(slot, cache_pow, layout)
        codes, sf = pages[page, data][None].clone(), pages[page, scales][None].clone()
        codes = codes.view(torch.float8_e4m3fn) if fmt is KV_FP8 else codes
        sf = sf.view(torch.float8_e4m3fn) if fmt is KV_FP4 else sf
        x[row] = tile_kernels_cast_back(codes, sf, fmt=fmt.quant, dtype=dtype)[0]
    return x
