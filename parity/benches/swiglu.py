"""SwiGLU with limit, routing weight and quantiser at V4.1's expert width."""

from __future__ import annotations

import torch

from deeptwin.reference.config import Q8

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws

TOKENS, WIDTH = 16384, 2304


def _draw(draws: DeviceDraws) -> Inputs:
    weight = draws.normal(TOKENS, dtype=torch.float32).abs()
    return {"h_ti": draws.normal(TOKENS, 2 * WIDTH), "weight_t": weight, "limit": 10.0, "fmt": Q8}


BENCHES = (
    Bench(
        component="swiglu",
        op="swiglu_quant",
        shape=f"t{TOKENS}-f{WIDTH}",
        draw=_draw,
        bytes=TOKENS * WIDTH * (4.0 + 1 + 1 / 32),
    ),
)
