"""Feed-forward networks with plain weights on the fast kernels: the contract is `reference/block_ffn.py`.

Experts are added in fp32 in the order of their numbers and the shared one last, whatever rows are in the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_shape
from deeptwin.reference.config import FfnConfig, WeighExperts
from deeptwin.reference.ffn_weights import GatedWeights, PlainExperts

from .linear import linear_triton
from .swiglu import swiglu_triton


def gated_triton(
    x_tm: Tensor,
    weights: GatedWeights,
    weight_t: Tensor | None = None,
    *,
    limit: float | None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """One gated network.

    Raises:
        TypeError: rows, weights or dtype are not bf16, fp16 or fp32.
        ValueError: shapes disagree.
        NotImplementedError: rows and weights differ in dtype.
    """
    v_tf = swiglu_triton(linear_triton(x_tm, weights.w13_im, dtype=dtype), weight_t, limit=limit, dtype=dtype)
    return linear_triton(v_tf, weights.w2_mf, dtype=dtype)


def plain_experts_triton(
    x_tm: Tensor,
    idx_tk: Tensor,
    weights_tk: Tensor,
    experts: PlainExperts,
    shared: GatedWeights,
    *,
    config: FfnConfig,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The routed experts of every token, and the shared one. Which experts there are is read back from the device.

    Raises:
        TypeError: as `gated_triton`; idx_tk is not int64.
        ValueError: shapes disagree.
        NotImplementedError: as `gated_triton`.
    """
    dims = {"e": experts.w13_eim.shape[0]}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("idx_tk", idx_tk, "tk", dims)
    expect_shape("weights_tk", weights_tk, "tk", dims)
    expect_dtype("idx_tk", idx_tk, torch.int64)
    y_tm = torch.zeros(x_tm.shape, dtype=torch.float32, device=x_tm.device)
    before = config.weigh is WeighExperts.BEFORE_DOWN
    for e in idx_tk.unique().tolist():
        if not 0 <= e < dims["e"]:
            continue
        token_y, slot_y = (idx_tk == e).nonzero(as_tuple=True)
        weight_y = weights_tk[token_y, slot_y]
        own = GatedWeights(w13_im=experts.w13_eim[e], w2_mf=experts.w2_emf[e])
        rows_ym = x_tm[token_y]
        o_ym = gated_triton(rows_ym, own, weight_y if before else None, limit=config.swiglu_limit, dtype=dtype).float()
        y_tm[token_y] += o_ym if before else o_ym * weight_y[:, None]
    return (y_tm + gated_triton(x_tm, shared, limit=config.swiglu_limit, dtype=dtype).float()).to(dtype)
