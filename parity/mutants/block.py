"""Whole blocks put together once more, with faults in the seams; attention, mixing and routing are the components'.

What those do is checked where they live. Here sub-layers are wired wrongly, weights come from elsewhere, and the
feed-forward half is written out again in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.block_v41 import V41Sequence, V41Stack
from deeptwin.reference.block_weights import V3BlockWeights, V4BlockWeights, V41BlockWeights
from deeptwin.reference.config import FfnConfig, ResidualNorm, V4Kind, WeighExperts, WeightCast
from deeptwin.reference.csa import csa_attention
from deeptwin.reference.csa2 import csa2_output, csa2_project
from deeptwin.reference.csa2_layer import csa2_attend_, csa2_compress_, csa2_select
from deeptwin.reference.dsa import dsa_attention
from deeptwin.reference.engram import engram
from deeptwin.reference.ffn_weights import GatedWeights, MoeWeights, PlainExperts
from deeptwin.reference.hca import hca_attention, sliding_attention
from deeptwin.reference.mhc import mhc_mixes
from deeptwin.reference.mla import mla_absorbed
from deeptwin.reference.moe import moe
from deeptwin.reference.numerics import CONTRACT, Numerics
from deeptwin.reference.presets import V3Config, V4Config
from deeptwin.reference.quant import quantize
from deeptwin.reference.rope import rope_frequencies, rope_table
from deeptwin.reference.router import route, route_hash
from deeptwin.reference.topology import LayerMode
from deeptwin.reference.weights import MhcSite, MlaWeights

HONEST = Numerics(name="honest", carrier=torch.float64, marks=True, free_scale=0.7)


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a block does wrong; the default is right."""

    num: Numerics = CONTRACT
    pending: str = "added"  # added, lost: what the block before left
    attention: str = "added"  # added, lost, twice, after: the experts read what passed by before it
    norms: str = "own"  # own, swapped
    eps: str = "config"  # config, fixed: 1e-6 whatever the configuration says
    shared: str = "added"  # added, missing, unclamped
    weighing: str = "once"  # once, never, twice
    up: str = "second"  # second, first: which half of the stacked matrix is the gate
    clamp: str = "both"  # both, gate_symmetric, missing
    expert: int = 0  # added to the number of every expert
    router: str = "own"  # own, other: a hash-routed layer selects, a selecting one reads no bias
    comb: str = "transposed"  # transposed, plain
    post: float = 1.0  # factor
    table: str = "own"  # own, plain, compressed
    read: str = "right"  # right, other: V4 as the site before did; own_site: V4.1 as V4 does; first_stream
    memory: str = "before"  # before, after, missing, other_rows
    image: str = "seen"  # seen, ignored
    picks: str = "latest"  # latest, first


def expert_sum(
    x: Tensor, idx: Tensor, weight: Tensor, w: MoeWeights, faults: Faults, config: FfnConfig, dtype: torch.dtype
) -> Tensor:
    """Plain experts, one after the other over all tokens, the shared one first."""
    assert isinstance(w.experts, PlainExperts)
    assert isinstance(w.shared, GatedWeights)
    limit, shared = config.swiglu_limit, faults.shared
    y = torch.zeros_like(x)
    if shared != "missing":
        y = feed(x, w.shared.w13_im, w.shared.w2_mf, None, faults, None if shared == "unclamped" else limit, dtype)
    experts = len(w.experts.w13_eim)
    before = config.weigh is WeighExperts.BEFORE_DOWN
    for e in range(experts):
        here = (idx + faults.expert) % experts == e
        share = (weight.double() * here).sum(1)
        share = here.any(1).double() if faults.weighing == "never" else share
        own = w.experts.w13_eim[e], w.experts.w2_emf[e]
        twice = faults.weighing == "twice"
        out = feed(x, *own, share if before or twice else None, faults, limit, dtype)
        y = y + torch.where(here.any(1)[:, None], out if before and not twice else out * share[:, None], 0)
    return y.to(dtype).double()


def feed(
    x: Tensor, w13: Tensor, w2: Tensor, share: Tensor | None, faults: Faults, limit: float | None, dtype: torch.dtype
) -> Tensor:
    """One gated network."""
    h = (x @ w13.double().T).to(dtype).double()
    gate, up = h.chunk(2, dim=-1)
    if faults.up == "first":
        gate, up = up, gate
    if limit is not None and faults.clamp != "missing":
        low = -limit if faults.clamp == "gate_symmetric" else None
        gate, up = gate.clamp(min=low, max=limit), up.clamp(-limit, limit)
    v = gate * torch.sigmoid(gate) * up
    v = v if share is None else v * share[:, None]
    return (v.to(dtype).double() @ w2.double().T).to(dtype).double()


def norm(x: Tensor, weight: Tensor, eps: float, faults: Faults, cast: WeightCast, dtype: torch.dtype) -> Tensor:
    """RMSNorm in fp64."""
    eps = 1e-6 if faults.eps == "fixed" else eps
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = y.to(dtype).double() if cast is WeightCast.BEFORE_WEIGHT else y
    return (y * weight.double()).to(dtype).double()


def v3(**faults: object) -> Callable[..., tuple[Tensor, Tensor]]:
    """`block_v3` with faults."""
    f = Faults(**faults)  # type: ignore[arg-type]

    def block(
        h_tm: Tensor, y_tm: Tensor, weights: V3BlockWeights, table_sr: Tensor, *, config: V3Config, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        first, second = weights.attn_norm_m, weights.ffn_norm_m
        if f.norms == "swapped":
            first, second = second, first

        def entered(h: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            total = h + y
            kept = total.to(dtype).double()
            read = kept if config.residual is ResidualNorm.ROUNDED else total
            return kept, norm(read, weight, config.norm_eps, f, config.attention.weight_cast, dtype)

        before, x = entered(h_tm.double(), y_tm.double() * (f.pending == "added"), first)
        where = (torch.arange(len(x)), table_sr)
        if isinstance(weights.attention, MlaWeights):
            a = mla_absorbed(x, weights.attention, *where, config=config.attention, dtype=dtype, num=f.num)
        else:
            a = dsa_attention(x, weights.attention, *where, None, config=config.dsa, dtype=dtype, num=f.num)
        kept, x = entered(before, a * {"lost": 0, "twice": 2}.get(f.attention, 1), second)
        if f.attention == "after":
            x = entered(before, torch.zeros_like(a), second)[1]
        if isinstance(weights.ffn, GatedWeights):
            return kept.to(dtype), feed(x, weights.ffn.w13_im, weights.ffn.w2_mf, None, f, None, dtype).to(dtype)
        logits, bias = (x @ weights.ffn.gate_em.double().T).float(), weights.ffn.bias_e
        assert bias is not None
        idx, weight = route(logits, bias * (f.router == "own"), None, None, None, config=config.router)
        return kept.to(dtype), expert_sum(x, idx, weight, weights.ffn, f, config.ffn, dtype).to(dtype)

    return block


def v4(**faults: object) -> Callable[..., Tensor]:
    """`block_v4` with faults."""
    f = Faults(**faults)  # type: ignore[arg-type]

    def block(
        stream_tnm: Tensor,
        token_t: Tensor,
        weights: V4BlockWeights,
        table_sr: Tensor,
        *,
        config: V4Config,
        layer: int,
    ) -> Tensor:
        attn, ends, dtype = config.attn(layer), torch.tensor([0, len(token_t)]), torch.bfloat16
        rope = {"plain": config.rope_window, "compressed": config.rope_main}.get(f.table)
        if rope is not None:
            table_sr = rope_table(torch.arange(len(table_sr)), rope_frequencies(rope))
        mhc = replace(config.mhc, eps=1e-6, norm_eps=1e-6) if f.eps == "fixed" else config.mhc
        first, second = weights.attn_norm_m, weights.ffn_norm_m
        if f.norms == "swapped":
            first, second = second, first

        def entered(stream: Tensor, site: MhcSite, weight: Tensor, pre: Tensor | None) -> tuple[Tensor, ...]:
            own, post, comb = mhc_mixes(stream, site, config=mhc)
            read = own if pre is None else pre
            x = torch.einsum("tn,tnm->tm", read, stream).to(dtype).double()
            return own, post, comb, norm(x, weight, config.norm_eps, f, WeightCast.AFTER_WEIGHT, dtype)

        stream = stream_tnm.double()
        pre, post, comb, x = entered(stream, weights.attn_site, first, None)
        if attn.kind is V4Kind.CSA:
            y = csa_attention(x, weights.attention, table_sr, ends, None, config=attn, num=f.num)
        else:
            attend = hca_attention if attn.kind is V4Kind.HCA else sliding_attention
            y = attend(x, weights.attention, table_sr, ends, config=attn, num=f.num)
        y = y * {"lost": 0, "twice": 2}.get(f.attention, 1)
        after = mixed(stream, y, post, comb, f)
        _, post, comb, x = entered(
            stream if f.attention == "after" else after, weights.ffn_site, second, pre if f.read == "other" else None
        )
        logits, own = (x @ weights.ffn.gate_em.double().T).float(), weights.ffn
        if (own.bias_e is None) == (f.router == "own"):
            table = own.table_vk if own.table_vk is not None else torch.arange(config.router.topk)[None]
            token = token_t if own.table_vk is not None else torch.zeros_like(token_t)
            idx, weight = route_hash(logits, token, table, None, config=config.router)
        else:
            bias = own.bias_e if own.bias_e is not None else torch.zeros(config.router.num_experts)
            idx, weight = route(logits, bias, None, None, None, config=config.router)
        return mixed(after, expert_sum(x, idx, weight, own, f, config.ffn, dtype), post, comb, f).to(dtype)

    return block


def mixed(stream: Tensor, y: Tensor, post: Tensor, comb: Tensor, faults: Faults) -> Tensor:
    """The streams with an output written to them, as bf16 values."""
    equation = "tij,tim->tjm" if faults.comb == "transposed" else "tij,tjm->tim"
    y = faults.post * post[:, :, None].double() * y[:, None].double()
    return (y + torch.einsum(equation, comb.double(), stream)).bfloat16().double()


def v41(**faults: object) -> Callable[..., tuple[Tensor, Tensor]]:
    """`blocks_v41` with faults."""
    f = Faults(**faults)  # type: ignore[arg-type]

    def blocks(
        embed_tm: Tensor, layers: tuple[V41BlockWeights, ...], sequence: V41Sequence, *, config: V41Stack
    ) -> tuple[Tensor, Tensor]:
        caches = replace(
            sequence.caches, page_pq=sequence.caches.page_pq.clone(), state_sq=sequence.caches.state_sq.clone()
        )
        run, streams = replace(sequence, caches=caches), config.model.mhc.streams
        stream = embed_tm.double()[:, None].repeat(1, streams, 1)
        one_hot = torch.zeros(len(embed_tm), streams, dtype=torch.float64)
        one_hot[:, 0] = 1
        picked: tuple[Tensor | None, Tensor | None] = (None, None)
        pre = one_hot
        for layer, w in enumerate(layers):
            stream = _memory(stream, w, run, config, layer, f) if f.memory in ("before", "other_rows") else stream
            own, post, comb = mhc_mixes(stream, w.attn_site, config=config.model.mhc)
            x = _read41(own if f.read == "own_site" else pre, stream, w.attention.attn_norm_m, config, f)
            y, picked = _attention41(x, w, run, picked, config, layer, f)
            stream = _memory(stream, w, run, config, layer, f) if f.memory == "after" else stream
            stream, pre = mixed(stream, y * {"lost": 0}.get(f.attention, 1), post, comb, f), own
            own, post, comb = mhc_mixes(stream, w.ffn_site, config=config.model.mhc)
            x = _read41(own if f.read == "own_site" else pre, stream, w.ffn_norm_m, config, f)
            stream, pre = mixed(stream, _experts41(x, run, w.ffn, config, f), post, comb, f), own
            pre = one_hot if f.read == "first_stream" else pre
        return stream.bfloat16(), pre.float()

    return blocks


def _memory(stream: Tensor, w: V41BlockWeights, run: V41Sequence, config: V41Stack, layer: int, f: Faults) -> Tensor:
    if w.memory is None:
        return stream
    which = config.model.engram.layers.index(layer)
    rows = run.row_ltz[which]
    rows = rows.roll(1, 0) if f.memory == "other_rows" else rows
    return engram(stream, rows, *run.tables[which], w.memory, eps=config.model.norm_eps, num=f.num)


def _read41(pre: Tensor, stream: Tensor, weight: Tensor, config: V41Stack, f: Faults) -> Tensor:
    x = torch.einsum("tn,tnm->tm", pre.double(), stream).bfloat16().double()
    return norm(x, weight, config.model.norm_eps, f, WeightCast.AFTER_WEIGHT, torch.bfloat16)


def _attention41(
    x: Tensor,
    w: V41BlockWeights,
    run: V41Sequence,
    picked: tuple[Tensor | None, Tensor | None],
    config: V41Stack,
    layer: int,
    f: Faults,
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    csa2, caches, step = config.csa2, run.caches, run.step
    table, mode = caches.table(csa2, layer), csa2.topology.mode(layer)
    if mode is LayerMode.FULL:
        csa2_compress_(x, w.attention, caches, step, layer=layer, config=csa2, num=f.num)
    q, key, latent = csa2_project(x, w.attention, table, step.positions_t, config=csa2, num=f.num)
    if layer in csa2.topology.index_sources and (f.picks == "latest" or picked[0] is None):
        picked = csa2_select(x, latent, w.attention, caches, step, picked[1], layer=layer, config=csa2, num=f.num)
    own = None if mode is LayerMode.SWA else picked[0]
    out = csa2_attend_(q, key, w.attention.sink_h, own, caches, step, layer=layer, config=csa2, num=f.num)
    return csa2_output(out, w.attention, table, step.positions_t, config=csa2, num=f.num), picked


def _experts41(x: Tensor, run: V41Sequence, w: MoeWeights, config: V41Stack, f: Faults) -> Tensor:
    assert w.bias_e is not None
    assert not isinstance(w.experts, PlainExperts)
    assert not isinstance(w.shared, GatedWeights)
    image = run.image_t & (f.image == "seen")
    logits = (x @ w.gate_em.double().T).float()
    idx, weight = route(logits, w.bias_e, w.bias_vl_e, image, None, config=config.ffn.router)
    moe_config = config.ffn.quantised
    assert moe_config is not None
    x_q, x_sf = quantize(x, fmt=moe_config.activation)
    shared = None if f.shared == "missing" else w.shared
    weight = torch.ones_like(weight) if f.weighing == "never" else weight
    return moe(x_q, x_sf, idx, weight.float(), None, w.experts, shared, config=moe_config, num=f.num)


v3_right, v3_right_honest = v3(), v3(num=HONEST)
v3_pending_lost = v3(pending="lost")
v3_attention_lost, v3_attention_twice = v3(attention="lost"), v3(attention="twice")
v3_experts_beside_attention = v3(attention="after")
v3_norms_swapped = v3(norms="swapped")
v3_fixed_eps = v3(eps="fixed")
v3_shared_expert_missing = v3(shared="missing")
v3_not_weighed, v3_weighed_twice = v3(weighing="never"), v3(weighing="twice")
v3_gate_and_up_swapped = v3(up="first")
v3_next_expert = v3(expert=1)
v3_bias_ignored = v3(router="other")

v4_right, v4_right_honest = v4(), v4(num=HONEST)
v4_comb_not_transposed = v4(comb="plain")
v4_post_not_doubled = v4(post=0.5)
v4_plain_angles, v4_compressed_angles = v4(table="plain"), v4(table="compressed")
v4_attention_lost = v4(attention="lost")
v4_experts_beside_attention = v4(attention="after")
v4_read_as_before = v4(read="other")
v4_norms_swapped = v4(norms="swapped")
v4_fixed_eps = v4(eps="fixed")
v4_shared_expert_unclamped = v4(shared="unclamped")
v4_gate_clamped_on_both_sides, v4_not_clamped = v4(clamp="gate_symmetric"), v4(clamp="missing")
v4_not_weighed, v4_weighed_twice = v4(weighing="never"), v4(weighing="twice")
v4_other_router = v4(router="other")

v41_right, v41_right_honest = v41(), v41(num=HONEST)
v41_reads_as_v4, v41_reads_first_stream = v41(read="own_site"), v41(read="first_stream")
v41_comb_not_transposed = v41(comb="plain")
v41_memory_after_attention, v41_memory_missing = v41(memory="after"), v41(memory="missing")
v41_memory_of_the_token_before = v41(memory="other_rows")
v41_image_bias_ignored = v41(image="ignored")
v41_first_selection_kept = v41(picks="first")
v41_shared_expert_missing = v41(shared="missing")
v41_not_weighed = v41(weighing="never")
v41_attention_lost = v41(attention="lost")
