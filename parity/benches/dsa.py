"""Sparse decode of V3.2 over records of 656 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws

HEADS, DIM, VALUES, PAGE, PAGES, RECORD = 128, 576, 512, 64, 1024, 656


def _records(draws: DeviceDraws) -> Tensor:
    """Codes, scales that are powers of two, rotary channels."""
    codes = draws.e4m3(PAGES, PAGE, VALUES).view(torch.uint8)
    scales = torch.exp2(draws.integers(-8, -4, PAGES, PAGE, VALUES // 128).to(torch.float32)).view(torch.uint8)
    tail = draws.normal(PAGES, PAGE, DIM - VALUES).view(torch.uint8)
    return torch.cat([codes, scales, tail], -1)


def _decode(batch: int, topk: int) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        return {
            "q_thd": draws.normal(batch, HEADS, DIM),
            "cache_pow": _records(draws),
            "idx_tk": draws.integers(0, PAGES * PAGE, batch, topk),
            "topk_length_t": None,
            "scale": DIM**-0.5,
        }

    return Bench(
        component="dsa",
        op="sparse_mla",
        shape=f"b{batch}-h{HEADS}-k{topk}",
        draw=draw,
        flops=2.0 * batch * HEADS * topk * (DIM + VALUES),
        bytes=float(batch * (topk * (RECORD + 4) + 2 * HEADS * (DIM + VALUES))),
    )


BENCHES = tuple(_decode(batch, 2048) for batch in (1, 128))
