"""Production calls of linear layers: V4.1 (32 x 32 tiles, MXFP4 experts) and V3 (128 x 128 blocks)."""

from __future__ import annotations

import torch

from deeptwin.optimized.linear import (
    SCALE_DTYPES,
    linear_codes_triton,
    linear_codes_triton_native,
    linear_grouped_triton,
    linear_slots_triton,
    linear_triton,
)
from deeptwin.reference.config import FP8_1X128, FP8_32X32, FP8_128X128, MXFP4, Q8, CodeKind, QuantFormat

TOKENS, EXPERTS = 4096, 48  # 384 experts over eight ranks


def _operand(rows: int, width: int, fmt: QuantFormat, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    packed = fmt.code is CodeKind.E2M1
    dtype = torch.uint8 if packed else torch.float8_e4m3fn
    codes = torch.empty(*lead, rows, width // 2 if packed else width, dtype=dtype)
    return codes, torch.empty(*lead, -(-rows // fmt.rows), -(-width // fmt.group), dtype=SCALE_DTYPES[fmt.scale])


def _codes(features: int, width: int, x_fmt: QuantFormat, w_fmt: QuantFormat) -> None:
    linear_codes_triton(*_operand(TOKENS, width, x_fmt), *_operand(features, width, w_fmt), x_fmt=x_fmt, w_fmt=w_fmt)


def lin16_5120() -> None:
    """The compressor of V4.1."""
    linear_triton(torch.empty(TOKENS, 5120, dtype=torch.bfloat16), torch.empty(512, 5120, dtype=torch.bfloat16))


def lin32_5120_bias() -> None:
    """The router's logits, and a bias as the vision tower has it."""
    x, w = torch.empty(TOKENS, 5120, dtype=torch.bfloat16), torch.empty(384, 5120, dtype=torch.bfloat16)
    linear_triton(x, w, torch.empty(384, dtype=torch.bfloat16), dtype=torch.float32)


def lin32_fp32() -> None:
    """The fp32 variant, for comparison on a device."""
    linear_triton(torch.empty(64, 1024), torch.empty(384, 1024), dtype=torch.float32)


def codes_32x32() -> None:
    """wq_b of V4.1."""
    _codes(32768, 1280, Q8, FP8_32X32)


def codes_mxfp4() -> None:
    """One routed expert of V4.1: w1 above w3."""
    _codes(4608, 5120, Q8, MXFP4)


def codes_128x128() -> None:
    """The down projection of a dense V3 layer."""
    _codes(7168, 18432, FP8_1X128, FP8_128X128)


def native_32x32() -> None:
    """wo_b of V4.1."""
    x, w = _operand(TOKENS, 8192, Q8), _operand(5120, 8192, FP8_32X32)
    linear_codes_triton_native(*x, *w, x_fmt=Q8, w_fmt=FP8_32X32)


def native_mxfp4() -> None:
    """One routed expert of V4.1: w2."""
    x, w = _operand(TOKENS, 2304, Q8), _operand(5120, 2304, MXFP4)
    linear_codes_triton_native(*x, *w, x_fmt=Q8, w_fmt=MXFP4)


def grouped_mxfp4() -> None:
    """The routed experts of one rank: w1 above w3."""
    x, w = _operand(TOKENS, 5120, Q8), _operand(4608, 5120, MXFP4, EXPERTS)
    sizes = torch.empty(EXPERTS, dtype=torch.int32)
    linear_grouped_triton(*x, *w, sizes, x_fmt=Q8, w_fmt=MXFP4, trusted=True)


def grouped_128x128() -> None:
    """The routed experts of one rank of V3: down projection."""
    x, w = _operand(TOKENS, 2048, FP8_1X128), _operand(7168, 2048, FP8_128X128, 32)
    sizes = torch.empty(32, dtype=torch.int64)
    linear_grouped_triton(*x, *w, sizes, x_fmt=FP8_1X128, w_fmt=FP8_128X128, trusted=True)


def slots_128x128() -> None:
    """The routed experts of one rank of V3 in a buffer with room for 256 rows each: gate and up projection."""
    x, w = _operand(32 * 256, 7168, FP8_1X128), _operand(4096, 7168, FP8_128X128, 32)
    expert_y = torch.empty(32 * 256, dtype=torch.int32)
    before_yf = torch.empty(32 * 256, 4096, dtype=torch.bfloat16)
    linear_slots_triton(*x, *w, expert_y, before_yf, x_fmt=FP8_1X128, w_fmt=FP8_128X128)


def widen_expert() -> None:
    """w2 of a routed expert of V4.1."""
    from deeptwin.kernels.triton_ops import linear

    w_q, w_sf = _operand(5120, 2304, MXFP4)
    linear.widen_fp4(w_q, w_sf, group=32, out_block=(32, 32))
