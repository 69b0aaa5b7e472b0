"""Index scores, queries and records by others as peers of `reference/indexer.py`.

Written for transformers 5.24.0 (DeepSeek-V4 blocks) and tile_kernels 2.1.0.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from deeptwin.reference.config import ScoreOrder

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def v4_scorer(
    q_thw: Tensor,
    k_sw: Tensor,
    w_th: Tensor,
    first_t: Tensor,
    length_t: Tensor,
    blocks_tk: Tensor | None,
    *,
    block_size: int,
    order: ScoreOrder,
) -> Tensor:
    """transformers' DeepseekV4IndexerScorer in fp32 on the decoded records, one query at a time.

    Its factors heads^-0.5 and channels^-0.5 are a power of two together for 2, 8 and 32 heads: the weights are divided
    by that.
    """
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4IndexerScorer

    h = q_thw.shape[1]
    config = SimpleNamespace(index_head_dim=128, index_n_heads=h, hidden_size=h)
    scorer = DeepseekV4IndexerScorer(config).requires_grad_(False)
    scorer.weights_proj.weight.copy_(torch.eye(h))
    q, k = _decoded(q_thw), _decoded(k_sw)
    scores = torch.full((len(q), len(k)), -torch.inf)
    for token, (first, length) in enumerate(zip(first_t.tolist(), length_t.tolist(), strict=True)):
        rows = k[first : first + length]
        if len(rows):
            w = w_th[token].float() * (h * 128) ** 0.5
            scores[token, : len(rows)] = scorer(q[None, None, token], rows[None], w[None, None])[0, 0]
    if blocks_tk is None:
        return scores
    return _compact(scores, blocks_tk, block_size)


def v4_rope_and_cast(q_thd: Tensor, table_ir: Tensor, positions_t: Tensor) -> Tensor:
    """transformers' interleaved rotation of V4 in fp32, rounded to bf16, then tile_kernels' e2m1 cast."""
    from tile_kernels.torch.cast import cast
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    t, h, _ = q_thd.shape
    if not t:
        return torch.zeros(0, h, 68, dtype=torch.uint8)
    half = table_ir.shape[1] // 2
    rows = table_ir[positions_t.long()]
    turned = apply_rotary_pos_emb(q_thd.float().transpose(0, 1)[None], rows[None, :, :half], rows[None, :, half:])[
        0
    ].transpose(0, 1)
    codes, sf = cast(turned.bfloat16().reshape(t * h, -1), "e2m1", (1, 32), round_sf=True, use_e4m3_sf=False)
    scales = (sf.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return torch.cat([codes.view(torch.uint8), scales], 1).unflatten(0, (t, h))


def _decoded(records: Tensor) -> Tensor:
    nibbles = torch.stack([records[..., :64] & 15, records[..., :64] >> 4], -1).flatten(-2).long()
    value = torch.tensor([*E2M1, *(-x for x in E2M1)])[nibbles]
    return value * torch.exp2(records[..., 64:].float() - 127).repeat_interleave(32, -1)


def _compact(scores: Tensor, blocks: Tensor, size: int) -> Tensor:
    entry = (blocks.long()[:, :, None] * size + torch.arange(size)).flatten(1)
    known = (entry >= 0) & (entry < scores.shape[1])
    found = scores.gather(1, torch.where(known, entry, 0)) if scores.shape[1] else torch.zeros(entry.shape)
    return torch.where(known, found, -torch.inf)
