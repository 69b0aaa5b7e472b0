"""Norms of V4.1's width, alone and with a quantiser."""

from __future__ import annotations

import torch

from deeptwin.reference.config import Q8, WeightCast

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws

WIDTH = 5120


def _norm(tokens: int, *, quant: bool) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        inputs: Inputs = {
            "x_tm": draws.normal(tokens, WIDTH),
            "weight_m": draws.normal(WIDTH),
            "eps": 1e-6,
            "cast": WeightCast.AFTER_WEIGHT,
        }
        return inputs | ({"fmt": Q8} if quant else {"dtype": torch.bfloat16})

    return Bench(
        component="rms_norm",
        op="rms_norm_quant" if quant else "rms_norm",
        shape=f"t{tokens}-m{WIDTH}",
        draw=draw,
        bytes=tokens * WIDTH * (4.0 + (1 + 1 / 32 if quant else 0)),
    )


BENCHES = tuple(_norm(tokens, quant=quant) for tokens in (64, 8192) for quant in (False, True))
