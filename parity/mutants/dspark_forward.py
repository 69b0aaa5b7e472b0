"""A draft forward in fp32 torch: masks and dense keys instead of lists, experts in a loop, with faults to switch on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deeptwin.reference.config import PageLayout
from deeptwin.reference.dspark_state import DraftConfig, DraftLayer
from deeptwin.reference.weights import ExpertWeights, MhcSite

from . import csa2
from .csa2 import GRID, fake_e4m3


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the forward does wrong; the default is right."""

    mask: str = "block"  # block, causal, own, accepted_only, block_only
    position: int = 0
    ring: str = "own"  # own, first
    sink: bool = True
    head_norm: bool = False
    scale: float = 1.0
    pre: str = "before"  # before, own
    last_update: bool = True
    comb: str = "given"  # given, transposed
    norm: str = "both"  # both, attention, ffn
    shared: bool = True
    weigh: bool = True
    bias: bool = True
    request: str = "own"  # own, all: keys of all blocks are seen


def _bf(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return _bf((x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)).float() * w.float())


def _mixes(stream: Tensor, site: MhcSite, config: DraftConfig) -> tuple[Tensor, Tensor, Tensor]:
    n, mhc = stream.shape[1], config.mhc
    flat = stream.flatten(1).double()
    z = flat @ site.fn_wx.double().T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + mhc.norm_eps)
    factor = torch.cat([s.expand(k) for s, k in zip(site.scale_z.double(), (n, n, n * n), strict=True)])
    z = z * factor + site.base_w.double()
    comb = z[:, 2 * n :].unflatten(1, (n, n)).softmax(-1) + mhc.eps
    comb = comb / (comb.sum(-2, keepdim=True) + mhc.eps)
    for _ in range(mhc.sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + mhc.eps)
        comb = comb / (comb.sum(-2, keepdim=True) + mhc.eps)
    pre, post = torch.sigmoid(z[:, :n]) + mhc.eps, mhc.post_scale * torch.sigmoid(z[:, n : 2 * n])
    return pre.float(), post.float(), comb.float()


def _ring_values(ring_pow: Tensor, layout: PageLayout) -> Tensor:
    """All keys of a ring, in the order of their slots."""
    pages, slots, width = ring_pow.shape
    if layout is PageLayout.SECTIONED:
        flat = ring_pow.flatten(1)
        data, sf = flat[:, : slots * 512].reshape(-1, 512), flat[:, slots * 512 :].reshape(-1, 16)
    else:
        data, sf = ring_pow.reshape(-1, width)[:, :512], ring_pow.reshape(-1, width)[:, 512:]
    scale = torch.exp2(sf.float() - 127).repeat_interleave(32, 1)
    return data.contiguous().view(torch.float8_e4m3fn).float() * scale


def _attended(
    faults: Faults,
    x: Tensor,
    layer: DraftLayer,
    ring_pow: Tensor,
    table: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    config: DraftConfig,
) -> Tensor:
    position, slot, seen = rows  # [b, j], [b, j], [b, k]
    (b, j), w = position.shape, layer.attention
    angles = table[(position.flatten().long() + faults.position).clamp(0, len(table) - 1)]
    own = csa2.Faults(head_norm=faults.head_norm)
    q, key, _ = csa2.project(own, x, w, angles, config.csa2)
    kept, old = _ring_values(ring_pow, config.csa2.layout), seen.clone()
    block_keys = _bf(fake_e4m3(_bf(key))).unflatten(0, (b, j))
    out = torch.zeros(b, j, *q.shape[1:])
    for r in range(b):
        block = set(slot[r].tolist())
        accepted = kept[[s for s in old[r].tolist() if s >= 0 and s not in block]]
        for i in range(j):
            mine = {
                "causal": block_keys[r, : i + 1],
                "own": block_keys[r, i : i + 1],
                "accepted_only": block_keys[r, :0],
            }
            parts = [accepted, mine.get(faults.mask, block_keys[r])]
            if slot[r, 0] < 0:
                parts = [accepted[:0]]
            elif faults.mask == "block_only":
                parts = parts[1:]
            elif faults.request == "all":
                parts = [accepted, block_keys[slot[:, 0] >= 0].flatten(0, 1)]
            keys = torch.cat(parts).double()
            score = q.unflatten(0, (b, j))[r, i].double() @ keys.T * config.csa2.head_dim**-0.5 * faults.scale
            top = score.amax(-1, keepdim=True) if len(keys) else torch.zeros(len(q[0]), 1)
            p = torch.exp(score - top)
            total = p.sum(-1, keepdim=True)
            total = total + (torch.exp(w.sink_h.double()[:, None] - top) if faults.sink else 0)
            out[r, i] = (_bf(p.float()).double() @ keys / total).float() if len(keys) else 0.0
    return csa2.output(own, out.flatten(0, 1), w, angles, config.csa2)


def _expert(x: Tensor, experts: ExpertWeights, at: int | None, weight: Tensor | None, limit: float) -> Tensor:
    names = ("w13_q", "w13_sf", "w2_q", "w2_sf")
    w13_q, w13_sf, w2_q, w2_sf = (
        getattr(experts, n) if at is None else getattr(experts, n).view(torch.uint8)[at] for n in names
    )
    w13, w2 = (_values(q, sf, packed=at is not None) for q, sf in ((w13_q, w13_sf), (w2_q, w2_sf)))
    gate, up = _bf((fake_e4m3(x).double() @ w13.double().T).float()).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    v = gate / (1 + torch.exp(-gate)) * up
    v = v if weight is None else v * weight[:, None]
    return _bf((fake_e4m3(v).double() @ w2.double().T).float())


def _values(codes: Tensor, sf: Tensor, *, packed: bool) -> Tensor:
    if not packed:
        scale = torch.exp2(sf.view(torch.uint8).float() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
        return codes.float() * scale
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    value = torch.where(nibbles >= 8, -GRID[nibbles % 8], GRID[nibbles % 8])
    return value * torch.exp2(sf.float() - 127).repeat_interleave(32, -1)


def _fed(faults: Faults, x: Tensor, layer: DraftLayer, config: DraftConfig) -> Tensor:
    router, limit = config.router, config.moe.swiglu_limit or 1e30
    logits = (x.double() @ layer.gate_em.double().T).float()
    score = functional.softplus(logits.double()).sqrt()
    ranked = score + (layer.bias_e.double() if faults.bias else 0)
    idx = torch.argsort(ranked, dim=-1, descending=True, stable=True)[:, : router.topk]
    weight = score.gather(1, idx)
    weight = (weight / (weight.sum(-1, keepdim=True) + 1e-20) * router.route_scale).float()
    total = _expert(x, layer.shared, None, None, limit) if faults.shared else torch.zeros_like(x)
    for k in range(router.topk):
        slot = torch.zeros_like(x)
        for e in range(router.num_experts):
            rows = idx[:, k] == e
            if rows.any():
                slot[rows] = _expert(x[rows], layer.experts, e, weight[rows, k] if faults.weigh else None, limit)
        total = total + slot
    return _bf(total)


def _forward(faults: Faults) -> Callable[..., Tensor]:
    def draft_hidden(
        embed_bjm: Tensor,
        layers: Sequence[DraftLayer],
        rings: Sequence[Tensor],
        table_sr: Tensor,
        positions_bj: Tensor,
        slots_bj: Tensor,
        seen_bk: Tensor,
        *,
        config: DraftConfig,
    ) -> Tensor:
        n, eps = config.mhc.streams, config.csa2.eps
        stream = embed_bjm.flatten(0, 1).float()[:, None].repeat(1, n, 1)
        pre = torch.eye(n)[0].expand(len(stream), n)
        rows = positions_bj, slots_bj, seen_bk

        def read(pre: Tensor) -> Tensor:
            return _bf((pre[:, :, None] * stream).sum(1))

        def written(y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
            comb = comb.transpose(1, 2) if faults.comb == "transposed" else comb
            mixed = torch.einsum("tio,tim->tom", comb.double(), stream.double()).float()
            return _bf(post[:, :, None] * y[:, None] + mixed)

        for i, layer in enumerate(layers):
            for half in ("attention", "ffn"):
                site = layer.attention_site if half == "attention" else layer.ffn_site
                own, post, comb = _mixes(stream, site, config)
                x = read(own if faults.pre == "own" else pre)
                w = layer.attention.attn_norm_m if half == "attention" else layer.ffn_norm_m
                x = _rms(x, w, eps) if faults.norm in ("both", half) else x
                ring = rings[0 if faults.ring == "first" else i]
                if half == "attention":
                    y = _attended(faults, x, layer, ring, table_sr, rows, config)
                else:
                    y = _fed(faults, x, layer, config)
                pre = own
                if faults.last_update or i < len(layers) - 1 or half == "attention":
                    stream = written(y, post, comb)
        return read(pre).bfloat16().view_as(embed_bjm)

    return draft_hidden


right_forward = _forward(Faults())
causal_block = _forward(Faults(mask="causal"))
own_key_alone = _forward(Faults(mask="own"))
block_keys_unseen = _forward(Faults(mask="accepted_only"))
accepted_keys_unseen = _forward(Faults(mask="block_only"))
positions_late = _forward(Faults(position=1))
ring_of_first_layer = _forward(Faults(ring="first"))
sink_ignored = _forward(Faults(sink=False))
query_heads_normed = _forward(Faults(head_norm=True))
scale_off = _forward(Faults(scale=0.5))
own_pre = _forward(Faults(pre="own"))
last_update_missing = _forward(Faults(last_update=False))
comb_transposed = _forward(Faults(comb="transposed"))
attention_norm_missing = _forward(Faults(norm="ffn"))
ffn_norm_missing = _forward(Faults(norm="attention"))
shared_expert_missing = _forward(Faults(shared=False))
weights_missing = _forward(Faults(weigh=False))
bias_ignored = _forward(Faults(bias=False))
other_blocks_seen = _forward(Faults(request="all"))
