"""torch's own attention as a peer: fp64, a mask built from the index lists, the sink as a key with a zero value."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def sdpa_fp64(
    q_thd: Tensor,
    kv_sd: Tensor,
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Output and natural-log LSE, one token at a time with the keys of its list gathered."""
    t, h, _ = q_thd.shape
    out = torch.zeros(t, h, value_dim, dtype=torch.float64)
    lse = torch.full((t, h), -torch.inf, dtype=torch.float64)
    for token in range(t):
        entries = idx_tk[token] if topk_length_t is None else idx_tk[token][: int(topk_length_t[token])]
        rows = entries[(entries >= 0) & (entries < kv_sd.shape[0])].to(torch.int64)
        if not rows.numel():
            continue
        keys = kv_sd[rows].double()
        q = q_thd[token].double()[:, None, :]
        k = keys.expand(h, -1, -1)
        bias = torch.zeros(h, 1, rows.numel(), dtype=torch.float64)
        v = k[..., :value_dim]
        if sink_h is not None:
            k, v = (torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in (k, v))
            bias = torch.cat([bias, sink_h.double().clamp(-1e300, 1e300)[:, None, None]], -1)
        out[token] = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)[:, 0]
        lse[token] = torch.logsumexp((q @ keys.T)[:, 0] * scale, -1)
    return out.to(dtype), lse.float()
