"""TileLang programs of RMSNorm at production widths: functions without arguments that return the program."""

from __future__ import annotations

from typing import Any


def ascend_7168_fp8_1x128() -> Any:
    """V3: rows of 7168, groups of 128 with an fp32 scale, rounded before the weight."""
    from deeptwin.kernels.ascend_ops.rms_norm import rms_norm_quant_program

    return rms_norm_quant_program(7168, 128, "f32", before_weight=True)


def ascend_7168_fp8_1x128_ue8m0() -> Any:
    """V4: rows of 7168, groups of 128 with a power of two."""
    from deeptwin.kernels.ascend_ops.rms_norm import rms_norm_quant_program

    return rms_norm_quant_program(7168, 128, "ue8m0")


def ascend_5120_q8() -> Any:
    """V4.1: rows of 5120, groups of 32 with a power of two."""
    from deeptwin.kernels.ascend_ops.rms_norm import rms_norm_quant_program

    return rms_norm_quant_program(5120, 32, "ue8m0")
