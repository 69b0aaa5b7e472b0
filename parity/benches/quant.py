"""Group quantisers on 16 384 rows of V4.1's width."""

from __future__ import annotations

from deeptwin.reference.config import FP8_1X128, Q4I, Q4K, Q8, QuantFormat

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws

TOKENS, WIDTH = 16384, 5120


def _quantize(op: str, fmt: QuantFormat) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        return {"x_tm": draws.normal(TOKENS, WIDTH), "fmt": fmt}

    code = 1.0 if fmt.max_value > 6 else 0.5
    scale = 4.0 if fmt == FP8_1X128 else 1.0
    return Bench(
        component="quant",
        op=op,
        shape=f"t{TOKENS}-m{WIDTH}-{fmt.name}",
        draw=draw,
        bytes=TOKENS * WIDTH * (2.0 + code + scale / fmt.group),
    )


BENCHES = (
    _quantize("quantize_e4m3_ue8m0", Q8),
    _quantize("quantize_e4m3_f32", FP8_1X128),
    _quantize("quantize_e2m1_ue8m0", Q4I),
    _quantize("quantize_e2m1_e4m3", Q4K),
)
