"""Norms of transformers and torch as peers of `reference/rms_norm.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.config import WeightCast


def deepseek_v3(
    x_tm: Tensor, weight_m: Tensor, *, eps: float, cast: WeightCast, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """transformers' DeepseekV3RMSNorm, whose output dtype is that of the input."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

    if cast is not WeightCast.BEFORE_WEIGHT or x_tm.dtype != dtype or weight_m.dtype != dtype:
        raise NotImplementedError(f"cast: expected BEFORE_WEIGHT and {dtype} tensors, got {cast}, {x_tm.dtype}")
    norm = DeepseekV3RMSNorm(weight_m.numel(), eps=eps)
    norm.weight = torch.nn.Parameter(weight_m, requires_grad=False)
    return norm(x_tm)


def torch_fp64(
    x_tm: Tensor, weight_m: Tensor, *, eps: float, cast: WeightCast, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """torch.nn.functional.rms_norm in fp64, rounded once (through fp32, as hardware does)."""
    if cast is not WeightCast.AFTER_WEIGHT:
        raise NotImplementedError(f"cast: expected AFTER_WEIGHT, got {cast}")
    y_tm = torch.nn.functional.rms_norm(x_tm.double(), weight_m.shape, weight_m.double(), eps)
    return y_tm.float().to(dtype)
