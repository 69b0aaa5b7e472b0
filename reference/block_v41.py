"""A decoder block of V4.1: memory, attention and experts around four streams, each read as the sub-layer before says.

`block.py` says what a tap hears. Attention keeps its entries and windows in bytes and its selection from layer to
layer, so a sequence has caches of its own, made by `start_v41` and filled by the blocks; they are not kept after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .block_ffn import routed_ffn
from .block_weights import V41BlockWeights
from .cache_plan import page_bytes, state_bytes
from .checks import expect_shape
from .config import (
    FP8_32X32,
    MXFP4,
    Q8,
    Combine,
    FfnConfig,
    MoeConfig,
    PageLayout,
    RopeConfig,
    RouterConfig,
    ScoreOrder,
    Scoring,
    WeighExperts,
    WeightCast,
    WeightSum,
)
from .csa2 import csa2_attention_, csa2_output
from .csa2_config import V41_YARN, CastPoints, Csa2Config
from .csa2_layer import csa2_compress_
from .csa2_state import Csa2Batch, Csa2Caches, Csa2Step
from .engram import engram
from .mhc import mhc_apply, mhc_expand, mhc_mixes, mhc_post
from .numerics import CONTRACT, Numerics
from .presets import V41Config
from .rms_norm import rms_norm
from .rope import rope_frequencies, rope_table
from .taps import Tap, ignore, under
from .topology import LayerMode, Topology
from .weights import MhcSite


@dataclass(frozen=True, kw_only=True)
class V41Stack:
    """A model of V4.1 with the choices in which implementations of its parts disagree."""

    model: V41Config
    csa2: Csa2Config
    ffn: FfnConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class V41Carry:
    """What passes from one block to the next: the streams, how they are read, and the selection."""

    stream_tnm: Tensor
    pre_tn: Tensor
    idx_tk: Tensor | None = None
    blocks_tk: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class V41Sequence:
    """One sequence from its first token on: caches, positions, image tokens, and its rows of the memory tables."""

    caches: Csa2Caches
    step: Csa2Step
    image_t: Tensor  # bool: an image token
    row_ltz: Tensor  # int32: rows of the table of every memory layer, all -1 for an image token
    tables: tuple[tuple[Tensor, Tensor], ...]  # codes and scales of every memory layer


def stack_of(
    model: V41Config, *, cast: CastPoints, score_order: ScoreOrder, layout: PageLayout, combine: Combine
) -> V41Stack:
    """The parts of a model, with pages of 128 tokens and steps that may take six back, as released."""
    a = model.attention
    csa2 = Csa2Config(
        hidden=model.hidden,
        num_heads=a.num_heads,
        q_rank=a.q_lora_rank,
        o_groups=a.o_groups,
        o_rank=a.o_lora_rank,
        window=a.window,
        backtracking=6,
        page_tokens=128,
        rope_window=RopeConfig(rope_dim=a.rope_dim, theta=model.rope_theta, yarn=None),
        rope_main=RopeConfig(rope_dim=a.rope_dim, theta=model.compress_rope_theta, yarn=V41_YARN),
        topology=Topology(
            ratios=a.compress_ratios,
            draft_layers=model.draft.layers,
            kv_sources=a.kv_source_layers,
            index_sources=a.index_source_layers,
            index_k_sources=a.kv_source_layers,
            index_heads=a.index_heads,
            index_dim=a.index_dim,
            index_topk=a.index_topk,
            candidate_source=a.candidate_source_layer,
            candidate_blocks=a.candidate_topk_blocks,
            candidate_size=a.candidate_block_size,
        ),
        cast=cast,
        score_order=score_order,
        layout=layout,
        eps=model.norm_eps,
    )
    return V41Stack(model=model, csa2=csa2, ffn=_ffn(model, combine))


def _ffn(model: V41Config, combine: Combine) -> FfnConfig:
    moe, limit = model.moe, model.moe.swiglu_limit
    router = RouterConfig(
        num_experts=moe.experts,
        topk=moe.topk,
        scoring=Scoring.SQRT_SOFTPLUS,
        weight_sum=WeightSum.PLUS_EPS,
        route_scale=moe.route_scale,
    )
    quantised = MoeConfig(routed=MXFP4, shared=FP8_32X32, activation=Q8, swiglu_limit=limit, combine=combine)
    return FfnConfig(router=router, swiglu_limit=limit, weigh=WeighExperts.BEFORE_DOWN, quantised=quantised)


def start_v41(
    image_t: Tensor, row_ltz: Tensor, tables: tuple[tuple[Tensor, Tensor], ...], *, config: V41Stack
) -> V41Sequence:
    """A sequence before its first block: empty caches for its t tokens, and one step that holds them all.

    Raises:
        ValueError: shapes disagree, or there is not one table for each memory layer.
    """
    csa2, memories = config.csa2, len(config.model.engram.layers)
    expect_shape("image_t", image_t, "t", {})
    expect_shape("row_ltz", row_ltz, "ltz", {"t": len(image_t), "l": memories})
    if len(tables) != memories:
        raise ValueError(f"tables: expected {memories}, got {len(tables)}")
    tokens, device = len(image_t), image_t.device
    pages = -(-tokens // csa2.page_tokens)
    batch = Csa2Batch(
        counts_kb=torch.tensor([[tokens]], dtype=torch.int32, device=device),
        decode_k=torch.tensor([False], device=device),
        start_b=torch.zeros(1, dtype=torch.int32, device=device),
        valid_b=torch.zeros(1, dtype=torch.int32, device=device),
        state_b=torch.zeros(1, dtype=torch.int32, device=device),
        table_bp=torch.arange(pages, dtype=torch.int32, device=device)[None],
    )
    ((step, _),) = batch.steps()
    position_s = torch.arange(tokens, device=device)
    caches = Csa2Caches(
        page_pq=torch.zeros(pages, page_bytes(csa2.plan), dtype=torch.uint8, device=device),
        state_sq=torch.zeros(1, state_bytes(csa2.plan), dtype=torch.uint8, device=device),
        window_table=rope_table(position_s, rope_frequencies(csa2.rope_window)),
        main_table=rope_table(position_s, rope_frequencies(csa2.rope_main)),
    )
    return V41Sequence(caches=caches, step=step, image_t=image_t, row_ltz=row_ltz, tables=tables)


def block_v41(
    carry: V41Carry,
    weights: V41BlockWeights,
    sequence: V41Sequence,
    *,
    config: V41Stack,
    layer: int,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> V41Carry:
    """One block of V4.1 over a sequence.

    Math:
        stream <- engram(stream) in memory layers; x = apply(pre, stream), pre', post, comb = mixes(stream);
        stream <- post attention(RMSNorm(x)) + comb^T stream; the same again with pre' and the experts

    Rounding:
        what is read and the streams to bf16, coefficients to fp32; the rest as the components.

    Edges:
        writes the entries and window keys of the layer into the caches of `sequence`, in place.

    Raises:
        ValueError: shapes disagree.

    Source:
        v41-blocks.md section 0.4
    """
    model, stream_tnm = config.model, carry.stream_tnm
    expect_shape("carry.stream_tnm", stream_tnm, "tnm", {"n": model.mhc.streams, "m": model.hidden})
    if weights.memory is not None:
        which = model.engram.layers.index(layer)
        rows_tz, table = sequence.row_ltz[which], sequence.tables[which]
        stream_tnm = engram(stream_tnm, rows_tz, *table, weights.memory, eps=model.norm_eps, num=num)
        tap("engram.stream", stream_tnm)
    own = under("attn.", tap)
    norm_m = weights.attention.attn_norm_m
    x_tm, pre_tn, post_tn, comb_tnn = _enter(stream_tnm, carry.pre_tn, weights.attn_site, norm_m, config, num, own)
    y_tm, idx_tk, blocks_tk = _attention(x_tm, carry, weights, sequence, config, layer, num, own)
    own("out", y_tm)
    stream_tnm = mhc_post(stream_tnm, y_tm, post_tn, comb_tnn, num=num)
    tap("stream.attn", stream_tnm)
    own = under("ffn.", tap)
    x_tm, pre_tn, post_tn, comb_tnn = _enter(stream_tnm, pre_tn, weights.ffn_site, weights.ffn_norm_m, config, num, own)
    y_tm = routed_ffn(
        x_tm, sequence.step.positions_t, sequence.image_t, weights.ffn, config=config.ffn, num=num, tap=own
    )
    own("out", y_tm)
    stream_tnm = mhc_post(stream_tnm, y_tm, post_tn, comb_tnn, num=num)
    tap("stream.ffn", stream_tnm)
    return V41Carry(stream_tnm=stream_tnm, pre_tn=pre_tn, idx_tk=idx_tk, blocks_tk=blocks_tk)


def _enter(
    stream_tnm: Tensor, read_tn: Tensor, site: MhcSite, norm_m: Tensor, config: V41Stack, num: Numerics, tap: Tap
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a sub-layer reads, normalised, and the coefficients that it computes: `pre` for the next one."""
    pre_tn, post_tn, comb_tnn = mhc_mixes(stream_tnm, site, config=config.model.mhc, num=num)
    x_tm = mhc_apply(read_tn, stream_tnm, num=num)
    for name, x in (("pre", pre_tn), ("post", post_tn), ("comb", comb_tnn), ("x", x_tm)):
        tap(name, x)
    x_tm = rms_norm(x_tm, norm_m, eps=config.model.norm_eps, cast=WeightCast.AFTER_WEIGHT, num=num)
    tap("norm", x_tm)
    return x_tm, pre_tn, post_tn, comb_tnn


def _attention(
    x_tm: Tensor,
    carry: V41Carry,
    weights: V41BlockWeights,
    sequence: V41Sequence,
    config: V41Stack,
    layer: int,
    num: Numerics,
    tap: Tap,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output of attention, and the selection that later layers reuse."""
    csa2, own, caches, step = config.csa2, weights.attention, sequence.caches, sequence.step
    if csa2.topology.mode(layer) is LayerMode.FULL:
        csa2_compress_(x_tm, own, caches, step, layer=layer, config=csa2, num=num)
    out_thd, idx_tk, blocks_tk = csa2_attention_(
        x_tm, own, caches, step, (carry.idx_tk, carry.blocks_tk), None, layer=layer, config=csa2, num=num
    )
    if layer in csa2.topology.index_sources:
        assert idx_tk is not None
        tap("picks", idx_tk)
    tap("heads", out_thd)
    y_tm = csa2_output(out_thd, own, caches.table(csa2, layer), step.positions_t, config=csa2, num=num)
    return y_tm, idx_tk, blocks_tk


def blocks_v41(
    embed_tm: Tensor,
    layers: Sequence[V41BlockWeights],
    sequence: V41Sequence,
    *,
    config: V41Stack,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> tuple[Tensor, Tensor]:
    """All blocks of the backbone over a sequence; `mhc_apply` of the two results is what the final norm reads.

    Shapes:
        embed_tm: [t, m]; layers: one for each backbone layer; returns stream_tnm, and the pre_tn of the last sub-layer.

    Rounding:
        as `block_v41`.

    Edges:
        the caches of `sequence` are not touched: the run fills copies.

    Raises:
        ValueError: shapes disagree; there is not one set of weights for each layer.
    """
    if len(layers) != config.model.num_layers:
        raise ValueError(f"layers: expected {config.model.num_layers}, got {len(layers)}")
    caches = sequence.caches
    caches = replace(caches, page_pq=caches.page_pq.clone(), state_sq=caches.state_sq.clone())
    stream_tnm, pre_tn = mhc_expand(num.wide(embed_tm), config=config.model.mhc)
    carry, own = V41Carry(stream_tnm=stream_tnm, pre_tn=pre_tn), replace(sequence, caches=caches)
    for layer, weights in enumerate(layers):
        heard = under(f"layers.{layer}.", tap)
        carry = block_v41(carry, weights, own, config=config, layer=layer, num=num, tap=heard)
    return carry.stream_tnm, carry.pre_tn
