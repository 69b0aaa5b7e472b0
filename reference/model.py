"""Whole models of every generation, from token ids to logits, made of the blocks of this room.

A model reads a sequence from its first token on and keeps nothing: a longer sequence is computed anew. So every cache
of an engine can be checked against its absence.

    V3, V3.2    embedding -> blocks, one row a token -> norm -> head
    V4          embedding, four times -> blocks around four streams -> streams read through a site of the head -> norm
                -> head
    V4.1        as V4, with rows of the n-gram memory found for every token first, and the streams read at the end as
                the last sub-layer says

What a tap hears, beside the names of `block.py` under `layers.0.`, `layers.1.` and so on:

    [memory.rows] embed             rows of the memory tables (V4.1); what the first block begins with
    head.x head.norm logits         what the last norm reads, what the head reads, and the result

Source of everything: v3-v32-v4.md sections 3 to 7, v41-blocks.md sections 0.4 and 4.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .block import block_v3, block_v4, embedding, v3_enter, v4_head
from .block_v41 import V41Stack, blocks_v41, start_v41
from .checks import expect_dtype, expect_in_range, expect_shape
from .config import OutsideVocabulary, Truncation, WeightCast
from .engram import engram_hash, engram_window
from .engram_vocab import hash_layout
from .linear import linear
from .mhc import mhc_apply, mhc_expand
from .model_weights import V3Model, V4Model, V41Model
from .numerics import CONTRACT, Numerics
from .presets import V3Config, V4Config, V41Config
from .rms_norm import rms_norm
from .rope import table_of
from .taps import Tap, ignore, under


def model_v3(
    token_t: Tensor,
    weights: V3Model,
    *,
    config: V3Config,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> Tensor:
    """Logits of V3 or V3.2 at every position of a sequence.

    Math:
        h, y = embedding, 0; h, y = block(h, y) for every layer; logits = head RMSNorm(h + y)

    Shapes:
        token_t: int32 or int64 [t]; returns [t, v].

    Rounding:
        as `block_v3` and `v3_enter`; logits to fp32.

    Edges:
        t = 0 gives no logits.

    Raises:
        ValueError: a token lies outside the vocabulary; shapes disagree; there are not as many layers as in `config`.
        TypeError: tokens are no integers; `dtype` is no storage dtype.

    Source:
        v3-v32-v4.md sections 2 to 4, 7
    """
    _expect_layers(weights.layers, config.num_layers)
    h_tm = embedding("token_t", token_t, weights.embed_vm, num=num)
    tap("embed", h_tm)
    y_tm, table_sr = torch.zeros_like(h_tm), table_of(config.attention.rope, len(token_t))
    for layer, block in enumerate(weights.layers):
        own = under(f"layers.{layer}.", tap)
        h_tm, y_tm = block_v3(h_tm, y_tm, block, table_sr, config=config, dtype=dtype, num=num, tap=own)
    _, x_tm = v3_enter(h_tm, y_tm, weights.norm_m, config=config, dtype=dtype, num=num, tap=under("head.", tap))
    return _logits(x_tm, weights.head_vm, num, tap)


def model_v4(
    token_t: Tensor, weights: V4Model, *, config: V4Config, num: Numerics = CONTRACT, tap: Tap = ignore
) -> Tensor:
    """Logits of V4 at every position of a sequence.

    Math:
        stream[n] = embedding; stream = block(stream) for every layer; logits = head RMSNorm(read(stream))

    Shapes:
        token_t: int32 or int64 [t]; returns [t, v].

    Rounding:
        as `block_v4` and `v4_head`; logits to fp32.

    Edges:
        t = 0 gives no logits.

    Raises:
        ValueError: a token lies outside the vocabulary; shapes disagree; there are not as many layers as in `config`.
        TypeError: tokens are no integers.

    Source:
        v3-v32-v4.md sections 5 to 7
    """
    _expect_layers(weights.layers, config.num_layers)
    embed_tm = embedding("token_t", token_t, weights.embed_vm, num=num)
    tap("embed", embed_tm)
    stream_tnm, _ = mhc_expand(embed_tm, config=config.mhc)
    rows = max(len(token_t), 1)  # a group without tokens is rotated too, at position 0
    for layer, block in enumerate(weights.layers):
        table_sr, own = table_of(config.rope(layer), rows), under(f"layers.{layer}.", tap)
        stream_tnm = block_v4(stream_tnm, token_t, block, table_sr, config=config, layer=layer, num=num, tap=own)
    x_tm = v4_head(stream_tnm, weights.site, weights.norm_m, config=config, num=num, tap=under("head.", tap))
    return _logits(x_tm, weights.head_vm, num, tap)


def model_v41(
    token_t: Tensor,
    image_t: Tensor,
    weights: V41Model,
    *,
    config: V41Stack,
    embed_tm: Tensor | None = None,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> Tensor:
    """Logits of V4.1 at every position of a sequence: nothing is left out, every layer computes every row.

    Math:
        stream[n] = embedding, pre = the first stream; stream, pre = block(stream, pre) for every layer;
        logits = head RMSNorm(sum_n pre[n] stream[n])

    Shapes:
        token_t: int32 or int64 [t]; image_t: bool [t], a token of an image span; embed_tm: [t, m], rows with the spans
        put in (`insert_images`), or None for the rows of the ids; returns [t, v].

    Rounding:
        as `block_v41`; what the last norm reads, and what it makes of that, to bf16; logits to fp32.

    Edges:
        t = 0 gives no logits. The id of an image token is looked at only without embed_tm: a row of zeros if the
        vocabulary does not have it.

    Raises:
        ValueError: a token that is no image lies outside the vocabulary; shapes disagree; there are not as many layers
            as in `config`, or it truncates.
        TypeError: tokens are no integers, or image_t is not bool.

    Source:
        v41-blocks.md sections 0.4, 3.3, 4.1, 4.3
    """
    model = config.model
    _expect_layers(weights.layers, model.num_layers)
    if config.csa2.truncation is not Truncation.OFF:
        raise ValueError(f"config: expected a stack that does not truncate, got {config.csa2.truncation}")
    row_ltz = memory_rows(token_t, image_t, weights.class_v, config=model)
    tap("memory.rows", row_ltz)
    if embed_tm is None:
        outside_t = (token_t < 0) | (token_t >= model.vocab_size)
        embed_tm = embedding("token_t", token_t.masked_fill(outside_t, 0), weights.embed_vm, num=num)
        embed_tm = embed_tm.masked_fill(outside_t[:, None], 0)
    expect_shape("embed_tm", embed_tm, "tm", {"t": len(token_t), "m": model.hidden})
    embed_tm = num.wide(embed_tm)
    tap("embed", embed_tm)
    if not len(token_t):
        return _logits(embed_tm, weights.head_vm, num, tap)
    sequence = start_v41(image_t, row_ltz, weights.tables, config=config)
    stream_tnm, pre_tn = blocks_v41(embed_tm, weights.layers, sequence, config=config, num=num, tap=tap)
    x_tm = mhc_apply(pre_tn, stream_tnm, num=num)
    tap("head.x", x_tm)
    x_tm = rms_norm(x_tm, weights.norm_m, eps=model.norm_eps, cast=WeightCast.AFTER_WEIGHT, num=num)
    tap("head.norm", x_tm)
    return _logits(x_tm, weights.head_vm, num, tap)


def memory_rows(token_t: Tensor, image_t: Tensor, class_v: Tensor, *, config: V41Config) -> Tensor:
    """The rows that the tokens of one sequence, from its first on, look up in the table of every memory layer.

    Shapes:
        token_t: int32 or int64 [t]; image_t: bool [t]; class_v: int32 [v]; returns int32 [l, t, z], -1 for an image.

    Edges:
        before the first token lies padding; neither special tokens nor document boundaries break a window.

    Raises:
        ValueError: shapes disagree; a token that is no image lies outside the vocabulary.
        TypeError: tokens are no integers, image_t is not bool, or class_v is not int32.

    Source:
        v41-blocks.md sections 3.1 to 3.3
    """
    memory, device = config.memory, token_t.device
    dims = {"v": config.vocab_size}
    expect_shape("token_t", token_t, "t", dims)
    expect_dtype("token_t", token_t, torch.int64, torch.int32)
    expect_shape("image_t", image_t, "t", dims)
    expect_dtype("image_t", image_t, torch.bool)
    expect_shape("class_v", class_v, "v", dims)
    text_t = token_t.masked_fill(image_t, 0)
    expect_in_range("token_t", text_t, 0, dims["v"])
    pad, tokens = int(class_v[memory.pad_id]), len(token_t)
    window_tw, image_t, _ = engram_window(
        text_t.to(torch.int32),
        image_t,
        torch.tensor([0, tokens], dtype=torch.int32, device=device),
        torch.tensor([tokens], dtype=torch.int32, device=device),
        torch.full((1, memory.max_ngram - 1), pad, dtype=torch.int32, device=device),
        class_v,
        pad_class=pad,
        outside=OutsideVocabulary.REFUSE,
    )
    return engram_hash(window_tw, image_t, layout=hash_layout(memory))


def _expect_layers(layers: Sequence[object], count: int) -> None:
    if len(layers) != count:
        raise ValueError(f"weights.layers: expected {count}, got {len(layers)}")


def _logits(x_tm: Tensor, head_vm: Tensor, num: Numerics, tap: Tap) -> Tensor:
    logits_tv = linear(x_tm, head_vm, dtype=torch.float32, num=num)
    tap("logits", logits_tv)
    return logits_tv
