"""Production calls of SwiGLU: the experts of V4.1 (2304 wide) and V3 (2048 wide)."""

from __future__ import annotations

import torch

from deeptwin.optimized.swiglu import swiglu_quant_triton, swiglu_triton
from deeptwin.reference.config import FP8_1X128, Q8

TOKENS = 4096


def swiglu_2048() -> None:
    """V3: no limit, no weight."""
    swiglu_triton(torch.empty(TOKENS, 4096, dtype=torch.bfloat16), limit=None)


def swiglu_2304() -> None:
    """V4.1 with its limit and the routing weight."""
    swiglu_triton(torch.empty(TOKENS, 4608, dtype=torch.bfloat16), torch.empty(TOKENS), limit=10.0)


def swiglu_quant_2304() -> None:
    """A routed expert of V4.1."""
    swiglu_quant_triton(torch.empty(TOKENS, 4608, dtype=torch.bfloat16), torch.empty(TOKENS), limit=10.0, fmt=Q8)


def swiglu_quant_2048() -> None:
    """An expert of V3."""
    swiglu_quant_triton(torch.empty(TOKENS, 4096, dtype=torch.bfloat16), limit=None, fmt=FP8_1X128)
