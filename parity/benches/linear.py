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


def _floating(tokens: int, features: int, width: int, out: torch.dtype) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        x_tm, w_fm = draws.normal(tokens, width), draws.normal(features, width)
        return {"x_tm": x_tm, "w_fm": w_fm, "bias_f": None, "dtype": out}

    return Bench(
        component="linear",
        op="linear",
        shape=f"t{tokens}-f{features}-m{width}-{'bf16' if out is torch.bfloat16 else 'fp32'}",
        draw=draw,
        flops=2.0 * tokens * features * width,
        bytes=2.0 * (tokens + features) * width + out.itemsize * tokens * features,
    )


def _expert_rows(inputs: Inputs, rows: list[int]) -> Inputs:
    """The same weights and a few rows, counted anew."""
    ends = inputs["group_sizes_e"].cumsum(0)
    expert = torch.bucketize(torch.tensor(rows), ends, right=True)
    sizes = torch.bincount(expert, minlength=len(ends)).to(torch.int32)
    picked = {name: inputs[name].view(torch.uint8)[rows].view(inputs[name].dtype) for name in ("x_q", "x_sf")}
    return inputs | picked | {"group_sizes_e": sizes}


def _experts(experts: int, each: int, features: int, width: int) -> Bench:
    """V3's formats; every expert has as many rows."""
    tokens = experts * each

    def draw(draws: DeviceDraws) -> Inputs:
        w_shape = (experts, -(-features // 128), width // 128)
        return {
            "x_q": draws.e4m3(tokens, width),
            "x_sf": draws.normal(tokens, width // 128, dtype=torch.float32).abs() * 0.01 + 0.001,
            "w_q": torch.stack([draws.e4m3(features, width).view(torch.uint8) for _ in range(experts)]).view(E4M3),
            "w_sf": draws.normal(*w_shape, dtype=torch.float32).abs() * 0.01 + 0.001,
            "group_sizes_e": draws.full(each, experts),
            "x_fmt": FP8_1X128,
            "w_fmt": FP8_128X128,
            "dtype": torch.bfloat16,
        }

    return Bench(
        component="linear",
        op="linear_grouped",
        shape=f"e{experts}-y{each}-f{features}-m{width}-fp8_1x128-fp8_128x128",
        draw=draw,
        flops=2.0 * tokens * features * width,
        bytes=float(tokens * width + experts * features * width + 2 * tokens * features),
        promises={"trusted": True, "sizes": (each,) * experts},
        pick=_expert_rows,
        sampled=2,
    )


E4M3 = torch.float8_e4m3fn
BENCHES = (
    *(_floating(4096, 4096, 7168, out) for out in (torch.bfloat16, torch.float32)),
    *(_experts(e, n, f, m) for e, n in ((4, 8192), (32, 192)) for f, m in ((6144, 7168), (7168, 3072))),
    *(_product(4096, f, m, FP8_1X128, FP8_128X128) for f, m in ((4096, 7168), (7168, 2048), (24576, 1536))),
    *(_product(64, f, m, FP8_1X128, FP8_128X128) for f, m in ((4096, 7168), (7168, 2048))),
    *(_product(t, 5120, 8192, Q8, FP8_32X32) for t in (64, 4096)),
    *(_product(t, 5120, 2304, Q8, MXFP4) for t in (64, 4096)),
)
