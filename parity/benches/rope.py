"""Rotation of query heads: V4.1's last 64 of 512 channels, V3's last 64 of 192, the indexer's first 64 of 128."""

from __future__ import annotations

import torch

from deeptwin.reference.config import Pairing, RopeSpan

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws

TOKENS, ROTARY = 8192, 64


def _rope(heads: int, dim: int, pairing: Pairing, span: RopeSpan) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        return {
            "x_thd": draws.normal(TOKENS, heads, dim),
            "table_sr": draws.normal(TOKENS, ROTARY, dtype=torch.float32),
            "positions_t": draws.order(TOKENS),
            "pairing": pairing,
            "span": span,
            "inverse": False,
            "dtype": torch.bfloat16,
        }

    return Bench(
        component="rope",
        op="rope",
        shape=f"t{TOKENS}-h{heads}-d{dim}-{span.value}",
        draw=draw,
        bytes=4.0 * TOKENS * (heads * dim + ROTARY + 1),
    )


BENCHES = (
    _rope(64, 512, Pairing.INTERLEAVED, RopeSpan.LAST),
    _rope(128, 192, Pairing.INTERLEAVED, RopeSpan.LAST),
    _rope(64, 128, Pairing.HALF_SPLIT, RopeSpan.FIRST),
)
