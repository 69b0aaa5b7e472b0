"""A Triton kernel with a fault that is easily written: the tail of the key list is lost.

The loop runs over `k // BLOCK_K` whole blocks, so the last `k % BLOCK_K` entries of every list are never read. On
lists whose length is a multiple of the block the kernel is right. `make demo` judges it and prints the smallest
failing case.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_K = 32


@triton.jit
def _attend(
    q_ptr, kv_ptr, idx_ptr, sink_ptr, len_ptr, out_ptr, lse_ptr, scale, s, k, h, d, u, has_sink: tl.constexpr,
    has_len: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, channel, entry = tl.arange(0, H), tl.arange(0, D), tl.arange(0, BLOCK)
    inside = (head < h)[:, None] & (channel < d)[None, :]
    q = tl.load(q_ptr + (token * h + head)[:, None] * d + channel[None, :], mask=inside, other=0.0)
    length = tl.load(len_ptr + token) if has_len else k
    top = tl.full([H], -1e30, tl.float32)
    total = tl.zeros([H], tl.float32)
    acc = tl.zeros([H, D], tl.float32)
    for block in range(k // BLOCK):
        place = block * BLOCK + entry
        index = tl.load(idx_ptr + token * k + place).to(tl.int64)
        ok = (index >= 0) & (index < s) & (place < length)
        where = kv_ptr + index[:, None] * d + channel[None, :]
        key = tl.load(where, mask=ok[:, None] & (channel < d)[None, :], other=0.0)
        score = tl.where(ok[None, :], tl.dot(q, tl.trans(key)) * scale, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - new[:, None])
        decay = tl.exp(top - new)
        acc = acc * decay[:, None] + tl.dot(weight.to(key.dtype), key)
        total = total * decay + tl.sum(weight, 1)
        top = new
    mass = total
    if has_sink:
        mass = total + tl.exp(tl.load(sink_ptr + head, mask=head < h, other=0.0) - top)
    acc = tl.where((total == 0)[:, None], 0.0, acc / mass[:, None])
    stored = (head < h)[:, None] & (channel < u)[None, :]
    tl.store(out_ptr + (token * h + head)[:, None] * u + channel[None, :], acc.to(tl.bfloat16), mask=stored)
    lse = tl.where(total == 0, float("-inf"), top + tl.log(total))
    tl.store(lse_ptr + token * h + head, lse, mask=head < h)


def sparse_attn(
    q_thd: Tensor,
    kv_sd: Tensor,
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """Attention over index lists, bf16."""
    t, h, d = q_thd.shape
    out = torch.empty(t, h, value_dim, dtype=torch.bfloat16, device=q_thd.device)
    lse = torch.empty(t, h, dtype=torch.float32, device=q_thd.device)
    if not t:
        return out, lse
    q, kv, idx = q_thd.contiguous(), kv_sd.contiguous(), idx_tk.contiguous()
    sink, length = (sink_h if sink_h is not None else lse), (topk_length_t if topk_length_t is not None else idx)
    _attend[(t,)](
        q, kv, idx, sink, length, out, lse, scale, kv.shape[0], idx.shape[1], h, d, value_dim, sink_h is not None,
        topk_length_t is not None, max(16, triton.next_power_of_2(h)), max(16, triton.next_power_of_2(d)), BLOCK_K,
    )  # fmt: skip
    return out, lse
