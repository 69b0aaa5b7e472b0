"""Dense decode of V3 over a paged bf16 latent cache."""

from __future__ import annotations

import torch

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws

HEADS, DIM, VALUES, PAGE = 128, 576, 512, 64


def _decode(batch: int, length: int) -> Bench:
    pages = length // PAGE

    def draw(draws: DeviceDraws) -> Inputs:
        return {
            "q_bthd": draws.normal(batch, 1, HEADS, DIM),
            "cache_pod": draws.normal(batch * pages, PAGE, DIM),
            "block_table_bp": draws.order(batch * pages).view(batch, pages),
            "lengths_b": draws.full(length, batch),
            "scale": DIM**-0.5,
            "value_dim": VALUES,
            "dtype": torch.bfloat16,
        }

    return Bench(
        component="mla",
        op="mla_decode",
        shape=f"b{batch}-h{HEADS}-d{DIM}-s{length}",
        draw=draw,
        flops=2.0 * batch * HEADS * length * (DIM + VALUES),
        bytes=2.0 * batch * (length * DIM + HEADS * (DIM + VALUES)),
    )


BENCHES = tuple(_decode(batch, length) for batch, length in ((1, 4096), (8, 4096), (64, 4096), (128, 4096), (8, 32768)))
