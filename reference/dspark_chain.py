"""One whole draft: from the sampled token of every request to γ tokens, their distributions and confidences.

The forward of the block is one for all positions (`dspark.draft_hidden`); only the chain behind it is sequential. Each
draft is drawn like a token of the target, with the temperature and the filters of the request, but with the seed moved
by `DRAFT_SEED_OFFSET`, and without grammar masks and blacklists. The stream is named by the absolute position of the
draft, so a position that is drafted again in the next step draws the same words again.

Source: runtime.md sections 1.1, 2.4 (DeepInfer, models/mtp/dflash.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import expect_in_range, expect_shape
from .config import DRAFT_SEED_OFFSET, Draw, DrawUse
from .csa2_layer import layer_norm
from .dspark import confidence, draft_hidden, draft_rows, markov_step
from .dspark_state import DraftModel, DraftRequests
from .linear import linear
from .numerics import CONTRACT, Numerics
from .philox import subsequences
from .sampling import sample_logits


def draft_block(
    requests: DraftRequests,
    rings: Sequence[Tensor],
    table_sr: Tensor,
    *,
    model: DraftModel,
    draw: Draw,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft a block for every request.

    Shapes:
        rings, table_sr: as `draft_hidden`; returns token_bj int64 [b, j], the drafts; logprob_bjv fp32 [b, j, v], the
        logarithms of what they were drawn from; confidence_bj fp32 [b, j].

    Rounding:
        as the parts.

    Edges:
        a padding request drafts something of no meaning.

    Raises:
        ValueError, TypeError: as the parts; a sampled token lies outside the vocabulary; a row cannot be drawn.
    """
    given = requests.golden_b, requests.first_b, requests.accepted_b, requests.state_b, requests.valid_b
    ids_bj, positions_bj, slots_bj, seen_bk = draft_rows(*given, block=model.block)
    expect_in_range("golden_b", ids_bj, 0, len(model.embed_vm))
    embed_bjm = model.embed_vm[ids_bj.long()]
    rows = embed_bjm, model.layers, rings, table_sr, positions_bj, slots_bj, seen_bk
    h_bjm = draft_hidden(*rows, config=model.config, num=num)
    return draft_chain(h_bjm, ids_bj[:, 0], positions_bj + 1, requests, model=model, draw=draw, num=num)


def draft_chain(
    h_bjm: Tensor,
    golden_b: Tensor,
    positions_bj: Tensor,
    requests: DraftRequests,
    *,
    model: DraftModel,
    draw: Draw,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sequential half: token after token from the hidden rows of a block.

    Math:
        logits[j] = lin(RMSNorm(h[j]), head) + w1[t[j-1]] w2^T; t[j] ~ softmax pipeline(logits[j]); t[-1] = golden
        c[j] = confidence(h[j], t[j-1])

    Shapes:
        h_bjm: [b, j, m], before the norm; golden_b: [b]; positions_bj: [b, j], where the drafts will stand; returns as
        `draft_block`.

    Rounding:
        the norm to bf16, the logits of the head to fp32.

    Raises:
        ValueError, TypeError: as the parts; a row cannot be drawn.
    """
    dims: dict[str, int] = {}
    expect_shape("h_bjm", h_bjm, "bjm", dims)
    expect_shape("golden_b", golden_b, "b", dims)
    expect_shape("positions_bj", positions_bj, "bj", dims)
    head, seed_b = model.head, requests.seed_b + DRAFT_SEED_OFFSET
    filters = requests.temperature_b, requests.top_p_b, requests.top_k_b
    token_b, tokens, logprobs, confidences = golden_b.long(), [], [], []
    for j in range(dims["j"]):
        normed_bm = layer_norm(h_bjm[:, j], head.norm_m, model.config.csa2, num=num)
        base_bv = _logits_buffer(linear(normed_bm, head.head_vm, dtype=torch.float32, num=num))
        logits_bv = _logits_buffer(markov_step(base_bv, token_b, head.w1_vr, head.w2_vr, num=num))
        rate = confidence(
            h_bjm[:, j], token_b, head.w1_vr, head.confidence_x, temperature=head.temperatures[j], num=num
        )
        stream_b = subsequences(positions_bj[:, j].long(), torch.zeros_like(token_b), use=DrawUse.FRESH)
        token_b, error_b, logprob_bv, _ = sample_logits(logits_bv, *filters, seed_b, stream_b, draw=draw, num=num)
        if error_b.any():
            raise ValueError(f"h_bjm: expected rows that can be drawn, got errors {error_b.tolist()} at position {j}")
        tokens.append(token_b)
        logprobs.append(logprob_bv)
        confidences.append(rate)
    return torch.stack(tokens, 1), torch.stack(logprobs, 1), torch.stack(confidences, 1)


def _logits_buffer(logits_bv: Tensor) -> Tensor:
    """The fp32 buffer that logits wait in between two operations; under CONTRACT they are fp32 already."""
    return torch.empty(logits_bv.shape, dtype=torch.float32).copy_(logits_bv)
