"""Production calls of RMSNorm: hidden rows of V3 (7168) and V4.1 (5120), the latent norms, the fused quantiser."""

from __future__ import annotations

import torch

from deeptwin.optimized.rms_norm import rms_norm_quant_triton, rms_norm_triton
from deeptwin.reference.config import FP8_1X128, Q8, QuantFormat, WeightCast

TOKENS = 4096


def _norm(width: int, dtype: torch.dtype = torch.bfloat16, cast: WeightCast = WeightCast.AFTER_WEIGHT) -> None:
    x = torch.empty(TOKENS, width, dtype=dtype)
    rms_norm_triton(x, torch.empty(width, dtype=torch.bfloat16), eps=1e-6, cast=cast, dtype=dtype)


def _norm_quant(width: int, fmt: QuantFormat) -> None:
    x, weight = torch.empty(TOKENS, width, dtype=torch.bfloat16), torch.empty(width, dtype=torch.bfloat16)
    rms_norm_quant_triton(x, weight, eps=1e-6, cast=WeightCast.AFTER_WEIGHT, fmt=fmt)


def norm_7168() -> None:
    """Hidden rows of V3."""
    _norm(7168)


def norm_5120() -> None:
    """Hidden rows of V4.1."""
    _norm(5120)


def norm_512() -> None:
    """The latent norm, rounded before the weight."""
    _norm(512, cast=WeightCast.BEFORE_WEIGHT)


def norm_5120_fp32() -> None:
    """Rows kept in fp32."""
    _norm(5120, torch.float32)


def norm_quant_7168_1x128() -> None:
    """V3: e4m3 codes, fp32 scales of 128."""
    _norm_quant(7168, FP8_1X128)


def norm_quant_5120_1x32() -> None:
    """V4.1: e4m3 codes, UE8M0 scales of 32."""
    _norm_quant(5120, Q8)
