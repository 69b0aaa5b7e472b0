"""Production calls of the grouped output of CSA2."""

from __future__ import annotations

import torch


def _grouped(*, fused: bool) -> None:
    from deeptwin.kernels.triton_ops.csa2 import grouped_output

    dtype = torch.float8_e4m3fn if fused else torch.bfloat16
    grouped_output(
        torch.empty(1024, 64 * 512, dtype=dtype),
        torch.empty(1024, 1024, dtype=torch.uint8) if fused else None,
        torch.empty(8192, 4096, dtype=torch.float8_e4m3fn),
        torch.empty(256, 128, dtype=torch.uint8),
        groups=8,
        dtype=torch.float32 if fused else torch.bfloat16,
    )


def grouped_release() -> None:
    """bf16 rows, bf16 z."""
    _grouped(fused=False)


def grouped_fused() -> None:
    """Quantised rows, fp32 z."""
    _grouped(fused=True)
