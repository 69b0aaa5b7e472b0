"""Residual streams of V4.1: the boundary between two sub-layers, and the update alone."""

from __future__ import annotations

import torch

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws

WIDTH, STREAMS = 5120, 4


def _post(tokens: int) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        return {
            "stream_tnm": draws.normal(tokens, STREAMS, WIDTH),
            "y_tm": draws.normal(tokens, WIDTH),
            "post_tn": draws.normal(tokens, STREAMS, dtype=torch.float32).abs(),
            "comb_tnn": torch.softmax(draws.normal(tokens, STREAMS, STREAMS, dtype=torch.float32), -1),
        }

    return Bench(
        component="mhc",
        op="mhc_post",
        shape=f"t{tokens}-n{STREAMS}-m{WIDTH}",
        draw=draw,
        bytes=2.0 * tokens * WIDTH * (2 * STREAMS + 1),
    )


BENCHES = (_post(64), _post(16384))
