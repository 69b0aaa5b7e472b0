"""What a chunk of V4.1 leaves in its caches: norm, rotation, quantiser and store in one launch, and reading it back."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.config import KV_FP4, KV_FP8, FusedStore, PageLayout, RecordFormat, RecordTap

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws

TOKENS, ROTARY, PAGE, PAGES = 8192, 64, 64, 256


def _cache(draws: DeviceDraws, fmt: RecordFormat) -> Tensor:
    # no code of it is a NaN, and a scale lies near one
    codes = draws.bytes(0, 127, PAGES, PAGE, fmt.data_bytes)
    return torch.cat([codes, draws.bytes(118, 122, PAGES, PAGE, fmt.record_bytes - fmt.data_bytes)], -1)


def _store(fmt: RecordFormat, tap: RecordTap) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        return {
            "cache_pow_": _cache(draws, fmt),
            "x_td": draws.normal(TOKENS, fmt.channels),
            "weight_d": draws.normal(fmt.channels),
            "table_sr": draws.normal(TOKENS, ROTARY, dtype=torch.float32),
            "positions_t": draws.order(TOKENS),
            "slots_t": draws.order(PAGES * PAGE)[:TOKENS],
            "store": FusedStore(eps=1e-20, layout=PageLayout.INTERLEAVED, tap=tap),
        }

    return Bench(
        component="kv_cache",
        op="norm_rope_store",
        shape=f"t{TOKENS}-{fmt.name}-{tap.value}",
        draw=draw,
        bytes=TOKENS * (4.0 * fmt.channels + fmt.record_bytes + 4 * ROTARY + 8) + 2.0 * fmt.channels,
    )


def _load(fmt: RecordFormat) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        return {
            "cache_pow": _cache(draws, fmt),
            "slots_t": draws.order(PAGES * PAGE)[:TOKENS],
            "layout": PageLayout.INTERLEAVED,
            "dtype": torch.bfloat16,
        }

    return Bench(
        component="kv_cache",
        op="load_records",
        shape=f"t{TOKENS}-{fmt.name}",
        draw=draw,
        bytes=TOKENS * (2.0 * fmt.channels + fmt.record_bytes + 4),
    )


BENCHES = (
    _store(KV_FP8, RecordTap.CAST_BACK),
    _store(KV_FP4, RecordTap.NORM),
    _load(KV_FP8),
    _load(KV_FP4),
)
