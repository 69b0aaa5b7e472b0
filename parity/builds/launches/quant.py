"""Production calls of the quantisers and their inverse, for each format that a released model stores."""

from __future__ import annotations

import torch

from deeptwin.optimized.quant import SCALE_DTYPES, dequantize_triton, quantize_triton
from deeptwin.reference.config import (
    FP8_1X128,
    FP8_1X128_UE8M0,
    FP8_32X32,
    FP8_128X128,
    MXFP4,
    Q4I,
    Q4K,
    Q8,
    CodeKind,
    QuantFormat,
)

TOKENS, WIDTH = 4096, 7168


def _quantize(fmt: QuantFormat, width: int = WIDTH) -> None:
    quantize_triton(torch.empty(TOKENS, width, dtype=torch.bfloat16), fmt=fmt)


def _dequantize(fmt: QuantFormat, width: int = WIDTH) -> None:
    packed = fmt.code is CodeKind.E2M1
    codes = torch.empty(TOKENS, width // 2 if packed else width, dtype=torch.uint8 if packed else torch.float8_e4m3fn)
    sf = torch.empty(-(-TOKENS // fmt.rows), -(-width // fmt.group), dtype=SCALE_DTYPES[fmt.scale])
    dequantize_triton(codes, sf, fmt=fmt)


def quantize_fp8_1x128() -> None:
    """Activations of V3."""
    _quantize(FP8_1X128)


def quantize_fp8_1x128_ue8m0() -> None:
    """Activations of V3.1 and V3.2."""
    _quantize(FP8_1X128_UE8M0)


def quantize_q8() -> None:
    """Activations of V4.1, rows of 5120."""
    _quantize(Q8, 5120)


def quantize_mxfp4() -> None:
    """Expert weights of V4."""
    _quantize(MXFP4)


def quantize_q4i() -> None:
    """Indexer keys of V4.1: rows of 128."""
    _quantize(Q4I, 128)


def quantize_q4k() -> None:
    """Cached rows of V4.1, 288 bytes each."""
    _quantize(Q4K, 512)


def quantize_fp8_128x128() -> None:
    """Weights of V3 in blocks."""
    _quantize(FP8_128X128)


def dequantize_fp8_1x128() -> None:
    """Activations of V3, back to bf16."""
    _dequantize(FP8_1X128)


def dequantize_q8() -> None:
    """Activations of V4.1, back to bf16."""
    _dequantize(Q8, 5120)


def dequantize_mxfp4() -> None:
    """Expert weights of V4, back to bf16."""
    _dequantize(MXFP4)


def dequantize_q4k() -> None:
    """Cached rows of V4.1, back to bf16."""
    _dequantize(Q4K, 512)


def dequantize_fp8_128x128() -> None:
    """Weights of V3, back to bf16."""
    _dequantize(FP8_128X128)


def quantize_fp8_32x32() -> None:
    """Weights of V4.1 in tiles."""
    _quantize(FP8_32X32, 5120)


def dequantize_fp8_32x32() -> None:
    """Weights of V4.1, back to bf16."""
    _dequantize(FP8_32X32, 5120)
