"""Products of block-scaled bytes: V3's FP8, V4.1's FP8 and MXFP4."""

from __future__ import annotations

import torch

from deeptwin.reference.config import FP8_1X128, FP8_32X32, FP8_128X128, MXFP4, Q8, QuantFormat

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws


def _product(tokens: int, features: int, width: int, x_fmt: QuantFormat, w_fmt: QuantFormat) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        def scales(rows: int, fmt: QuantFormat) -> torch.Tensor:
            shape = (-(-rows // fmt.rows), width // fmt.group)
            if fmt in (FP8_1X128, FP8_128X128):
                return draws.normal(*shape, dtype=torch.float32).abs() * 0.01 + 0.001
            return draws.bytes(116, 121, *shape)

        w_q = draws.e4m3(features, width)
        if w_fmt == MXFP4:
            w_q = draws.bytes(0, 256, features, width // 2)
        return {
            "x_q": draws.e4m3(tokens, width),
            "x_sf": scales(tokens, x_fmt),
            "w_q": w_q,
            "w_sf": scales(features, w_fmt),
            "add_tf": None,
            "x_fmt": x_fmt,
            "w_fmt": w_fmt,
            "dtype": torch.bfloat16,
        }

    weight = width / 2 if w_fmt == MXFP4 else width
    return Bench(
        component="linear",
        op="linear_codes",
        shape=f"t{tokens}-f{features}-m{width}-{x_fmt.name}-{w_fmt.name}",
        draw=draw,
        flops=2.0 * tokens * features * width,
        bytes=tokens * width + features * weight + 2.0 * tokens * features,
    )


BENCHES = (
    *(_product(4096, f, m, FP8_1X128, FP8_128X128) for f, m in ((4096, 7168), (7168, 2048), (24576, 1536))),
    *(_product(64, f, m, FP8_1X128, FP8_128X128) for f, m in ((4096, 7168), (7168, 2048))),
    *(_product(t, 5120, 8192, Q8, FP8_32X32) for t in (64, 4096)),
    *(_product(t, 5120, 2304, Q8, MXFP4) for t in (64, 4096)),
)
