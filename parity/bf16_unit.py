"""What the bf16 matrix unit of SM90 makes of a dot, bit for bit, and what becomes of an LSE behind it.

The unit takes sixteen products and the sum so far, aligns them to the largest exponent among them (that of a product
is the sum of its factors' exponents), cuts each toward zero 25 bits below it, adds, and cuts the sum to fp32 toward
zero. So the error of a long dot grows with the number of steps and has a sign. Where a kernel adds fresh sums of a part
of the channels in fp32, each of them stops early.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STEP = 16  # products of one instruction
KEPT = 25  # bits below the largest exponent
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def unit_dots(q_hd: Tensor, k_kd: Tensor, *, part: int | None = None) -> Tensor:
    """The fp32 products of bf16 rows, [h, k]: one chain, or the sum of chains of `part` channels."""
    if part is not None:
        parts = [unit_dots(q, k) for q, k in zip(q_hd.split(part, 1), k_kd.split(part, 1), strict=True)]
        return sum(parts[1:], parts[0])
    sum_hk = torch.zeros(len(q_hd), len(k_kd), dtype=torch.float64)
    for q, k in zip(q_hd.double().split(STEP, 1), k_kd.double().split(STEP, 1), strict=True):
        product_hkd = q[:, None] * k[None]
        exponent = torch.where(product_hkd == 0, -2000, _exponent(q)[:, None] + _exponent(k)[None]).amax(-1)
        last = torch.exp2((torch.maximum(exponent, _exponent(sum_hk)).clamp_min(-900) - KEPT).double())
        total = torch.trunc(product_hkd / last[..., None]).sum(-1) * last + torch.trunc(sum_hk / last) * last
        ulp = torch.exp2((_exponent(total).clamp_min(-900) - 23).double())
        sum_hk = torch.trunc(total / ulp) * ulp
    return sum_hk.float()


def _exponent(x: Tensor) -> Tensor:
    """e with 2^e ≤ |x| < 2^(e + 1); far below all others for zero."""
    return torch.where(x == 0, -2000, torch.frexp(x).exponent - 1)


def lse_on_sm90(inputs: dict[str, Any], *, part: int | None = None) -> Tensor:
    """The LSE of `sparse_attn` from such scores, every later step rounded to the nearest fp32 number."""
    q_thd, kv_sd, idx_tk, length_t = (inputs[name] for name in ("q_thd", "kv_sd", "idx_tk", "topk_length_t"))
    valid_tk = (idx_tk >= 0) & (idx_tk < len(kv_sd))
    if length_t is not None:
        valid_tk &= torch.arange(idx_tk.shape[1]) < length_t[:, None]
    rows = []
    for q_hd, idx_k, valid_k in zip(q_thd, idx_tk, valid_tk, strict=True):
        if not valid_k.any():
            rows.append(torch.full((len(q_hd),), -torch.inf))
            continue
        dots_hk = unit_dots(q_hd, kv_sd[idx_k[valid_k].long()], part=part)
        scores_hk = dots_hk * torch.tensor(inputs["scale"] * LOG2_E)
        top_h1 = scores_hk.amax(1, keepdim=True)
        weights_hk = torch.exp2((scores_hk - top_h1).double()).float()
        total_h = weights_hk.sum(1, dtype=torch.float64).float()
        rows.append((top_h1[:, 0] + torch.log2(total_h.double()).float()) * torch.tensor(LN_2))
    return torch.stack(rows)
