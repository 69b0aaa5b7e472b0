"""TileKernels' torch SwiGLU and transformers' V4 experts as peers; written for 2.1.0 and 5.24.0."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.config import QuantFormat

from .quant import tile_kernels_cast


def tile_kernels_swiglu(
    h_ti: Tensor, weight_t: Tensor | None = None, *, limit: float | None, dtype: torch.dtype
) -> Tensor:
    """`swiglu_forward`, which stays in fp32, rounded once."""
    return _forward(h_ti, weight_t, limit).to(dtype)


def tile_kernels_swiglu_quant(
    h_ti: Tensor, weight_t: Tensor | None = None, *, limit: float | None, fmt: QuantFormat
) -> tuple[Tensor, Tensor]:
    """`swiglu_forward` followed by `cast`."""
    return tile_kernels_cast(_forward(h_ti, weight_t, limit), fmt=fmt)


def _forward(h_ti: Tensor, weight_t: Tensor | None, limit: float | None) -> Tensor:
    from tile_kernels.torch.swiglu import swiglu_forward

    return swiglu_forward(h_ti.contiguous(), topk_weights=weight_t, clamp_value=limit)


def transformers_swiglu(
    h_ti: Tensor, weight_t: Tensor | None = None, *, limit: float | None, dtype: torch.dtype
) -> Tensor:
    """`DeepseekV4Experts._apply_gate` in fp32, rounded once; it weighs rows after the down projection, so not here."""
    from types import SimpleNamespace

    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    experts = SimpleNamespace(limit=limit, act_fn=torch.nn.functional.silu)
    return DeepseekV4Experts._apply_gate(experts, h_ti.float()).to(dtype)
