"""Peers of the mixture of experts: TileKernels' reduction, a loop after DeepEP's description, transformers V4."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import CodeKind, Combine, MoeConfig, QuantFormat


def reduce_fused(
    expert_ym: Tensor,
    row_tk: Tensor,
    rank_tk: Tensor | None,
    node_tk: Tensor | None,
    shared_tm: Tensor | None,
    *,
    rule: Combine,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`reduce_fused` of tile_kernels 2.1.0, its compiled multiply-add run eagerly: the factors are 1."""
    from tile_kernels.torch.reduce_fused import reduce_fused

    with torch.compiler.set_stance("force_eager"):
        return reduce_fused(expert_ym.contiguous(), None, row_tk)


def combine_by_token(
    expert_ym: Tensor,
    row_tk: Tensor,
    rank_tk: Tensor | None,
    node_tk: Tensor | None,
    shared_tm: Tensor | None,
    *,
    rule: Combine,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Dictionaries of partial sums, token by token, in numpy's fp32."""
    rows = expert_ym.float().numpy()
    y = np.zeros((len(row_tk), rows.shape[1]), dtype=np.float32)
    for t, listed in enumerate(row_tk.tolist()):
        terms = {j: rows[row] for j, row in enumerate(listed) if row >= 0}
        for group_tk in (rank_tk, node_tk):
            if group_tk is not None:
                terms = _merged(terms, group_tk[t].tolist(), dtype)
        if shared_tm is not None:
            y[t] += shared_tm[t].float().numpy()
        for j in sorted(terms):
            y[t] = y[t] + terms[j]
    return torch.from_numpy(y).to(dtype)


def _merged(terms: dict[int, np.ndarray], group: list[int], dtype: torch.dtype) -> dict[int, np.ndarray]:
    merged: dict[int, np.ndarray] = {}
    for name in {group[j] for j in terms}:
        members = sorted(j for j in terms if group[j] == name)
        total = np.zeros_like(terms[members[0]])
        for j in members:
            total = total + terms[j]
        merged[members[-1]] = torch.from_numpy(total).to(dtype).float().numpy()
    return merged


def transformers_v4(
    x_q: Tensor,
    x_sf: Tensor,
    idx_tk: Tensor,
    weights_tk: Tensor,
    rank_e: Tensor | None,
    experts: Any,
    shared: Any,
    *,
    config: MoeConfig,
) -> Tensor:
    """DeepseekV4Experts and DeepseekV4MLP in fp32, on the values of the bytes."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts, DeepseekV4MLP

    x = _values(x_q, x_sf, config.activation)
    up = torch.stack([_values(*pair, config.routed) for pair in zip(experts.w13_q, experts.w13_sf, strict=True)])
    down = torch.stack([_values(*pair, config.routed) for pair in zip(experts.w2_q, experts.w2_sf, strict=True)])
    fields = SimpleNamespace(
        num_local_experts=len(up),
        hidden_size=x.shape[1],
        intermediate_size=down.shape[2],
        hidden_act="silu",
        swiglu_limit=config.swiglu_limit,
        mlp_bias=False,
        _experts_implementation="eager",
    )
    routed = DeepseekV4Experts(fields)
    # weights of experts that nothing is routed to are poisoned; it skips them
    routed.gate_up_proj.data, routed.down_proj.data = up, down
    block = DeepseekV4MLP(fields)
    gate, lift = _values(shared.w13_q, shared.w13_sf, config.shared).chunk(2)
    block.gate_proj.weight.data, block.up_proj.weight.data = gate, lift
    block.down_proj.weight.data = _values(shared.w2_q, shared.w2_sf, config.shared)
    with torch.no_grad():
        return (routed(x, idx_tk, weights_tk) + block(x)).bfloat16()


def _values(codes: Tensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    scale = torch.ldexp(torch.ones(sf.shape), sf.to(torch.int32) - 127)
    spread = scale.repeat_interleave(fmt.rows, 0).repeat_interleave(fmt.group, 1)
    if fmt.code is CodeKind.E4M3:
        return codes.float() * spread[: codes.shape[0], : codes.shape[1]]
    size = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibble = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    return torch.where(nibble > 7, -1.0, 1.0) * size[nibble & 7] * spread[: codes.shape[0]]
