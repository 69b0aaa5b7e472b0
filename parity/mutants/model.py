"""Whole models put together once more, with faults between the blocks; the blocks themselves are the components'.

Embedding, last norm and head are written out in plain torch, the rows of the n-gram memory in Python's integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from deeptwin.reference.block import block_v3, block_v4
from deeptwin.reference.block_v41 import V41Carry, V41Stack, block_v41, start_v41
from deeptwin.reference.config import ResidualNorm, RopeConfig, Truncation, WeightCast
from deeptwin.reference.engram_vocab import hash_layout
from deeptwin.reference.model_weights import V3Model, V4Model, V41Model
from deeptwin.reference.numerics import CONTRACT, Numerics
from deeptwin.reference.presets import V3Config, V4Config, V41Config
from deeptwin.reference.rope import rope_frequencies, rope_table, table_magnitude

from .block import HONEST

Layer = TypeVar("Layer")


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a model does wrong; the default is right."""

    num: Numerics = CONTRACT
    order: str = "own"  # own, exchanged: the second and the third layer; short: the last one is left out; last_twice
    embed: str = "own"  # own, scaled: by the root of its width; next: the row of the id after
    ending: str = "added"  # added, lost: what the last block leaves to be added
    norm: str = "own"  # own, missing, unweighted, early: of what passed by before the last block
    eps: str = "config"  # config, fixed
    head: str = "own"  # own, embedding
    parts: str = "whole"  # whole, two: the second half of a prompt does not see the first
    residue: int = -1  # lengths with this rest modulo 4 lose their last token
    angles: str = "own"  # own, plain: without YaRN; first: those of the first layer
    read: str = "own"  # own, mean, first: how the last streams become a row
    streams: str = "copies"  # copies, first: the others begin with zeros
    ids: str = "own"  # own, next: what a hash router is told
    rows: str = "own"  # own, before: a token has the memory of the one before it
    images: str = "given"  # given, ignored: the rows of their ids; text: image tokens are routed and looked up as text
    truncated: bool = False  # the decoder forgets all but the last tokens


def in_order(layers: Sequence[Layer], faults: Faults) -> list[tuple[int, Layer]]:
    """The blocks that run, each with the number under which it does."""
    found = list(layers)
    if faults.order == "exchanged":
        found[1], found[2] = found[2], found[1]
    numbered = list(enumerate(found))
    return {"short": numbered[:-1], "last_twice": [*numbered, numbered[-1]]}.get(faults.order, numbered)


def rows_of(token: Tensor, embed: Tensor, faults: Faults) -> Tensor:
    """Embedded tokens."""
    ids = (token + 1) % len(embed) if faults.embed == "next" else token
    x = embed.double()[ids.long().clamp(0, len(embed) - 1)] * ((ids >= 0) & (ids < len(embed)))[:, None]
    return x * embed.shape[1] ** 0.5 if faults.embed == "scaled" else x


def ended(x: Tensor, weights: Any, eps: float, cast: WeightCast, dtype: torch.dtype, faults: Faults) -> Tensor:
    """Last norm and head."""
    eps = 1e-6 if faults.eps == "fixed" else eps
    if faults.norm != "missing":
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        x = x.to(dtype).double() if cast is WeightCast.BEFORE_WEIGHT else x
        x = x if faults.norm == "unweighted" else x * weights.norm_m.double()
    head = weights.embed_vm if faults.head == "embedding" else weights.head_vm
    return (x.to(dtype).double() @ head.double().T).float()


def cut(whole: Callable[[Tensor, int], Tensor], tokens: int, faults: Faults) -> Tensor:
    """Logits of a sequence, in the parts that a fault makes of it."""
    every = torch.arange(tokens)
    if faults.parts == "two" and tokens > 1:
        half = tokens // 2
        return torch.cat([whole(every[:half], 0), whole(every[half:], half)])
    if tokens > 1 and tokens % 4 == faults.residue:
        logits = whole(every[:-1], 0)
        return torch.cat([logits, logits[-1:]])
    return whole(every, 0)


def angles(config: RopeConfig, first: int, count: int, faults: Faults) -> Tensor:
    """The table of the positions from `first` on."""
    config = replace(config, yarn=None) if faults.angles == "plain" else config
    return rope_table(
        torch.arange(first, first + count), rope_frequencies(config), magnitude=table_magnitude(config.yarn)
    )


def v3(**faults: object) -> Callable[..., Tensor]:
    """`model_v3` with faults."""
    f = Faults(**faults)  # type: ignore[arg-type]

    def model(token_t: Tensor, weights: V3Model, *, config: V3Config, dtype: torch.dtype) -> Tensor:
        def whole(kept: Tensor, first: int) -> Tensor:
            table = angles(config.attention.rope, first, len(kept), f)
            h = rows_of(token_t[kept], weights.embed_vm, f)
            y, before = torch.zeros_like(h), h
            for _, block in in_order(weights.layers, f):
                before = h + y
                h, y = block_v3(h, y, block, table, config=config, dtype=dtype, num=f.num)
            total = before if f.norm == "early" else h + y * (f.ending == "added")
            x = total.to(dtype).double() if config.residual is ResidualNorm.ROUNDED else total
            return ended(x, weights, config.norm_eps, config.attention.weight_cast, dtype, f)

        return cut(whole, len(token_t), f)

    return model


def v4(**faults: object) -> Callable[..., Tensor]:
    """`model_v4` with faults."""
    f = Faults(**faults)  # type: ignore[arg-type]

    def model(token_t: Tensor, weights: V4Model, *, config: V4Config) -> Tensor:
        def whole(kept: Tensor, first: int) -> Tensor:
            stream = copied(rows_of(token_t[kept], weights.embed_vm, f), config.mhc.streams, f)
            ids = token_t[kept].roll(-1) if f.ids == "next" else token_t[kept]
            for layer, block in in_order(weights.layers, f):
                rope = config.rope(0) if f.angles == "first" else config.rope(layer)
                table = angles(rope, 0, max(first + len(kept), 1), f)
                kind = layer if f.order != "exchanged" else {1: 2, 2: 1}.get(layer, layer)
                stream = block_v4(stream, ids, block, table, config=config, layer=kind, num=f.num)
            x = collapsed(stream, weights, config, f).bfloat16().double()
            return ended(x, weights, config.norm_eps, WeightCast.AFTER_WEIGHT, torch.bfloat16, f)

        return cut(whole, len(token_t), f)

    return model


def copied(x: Tensor, streams: int, f: Faults) -> Tensor:
    """What the first block begins with."""
    stream = x[:, None].repeat(1, streams, 1)
    if f.streams == "first":
        stream[:, 1:] = 0
    return stream


def collapsed(stream: Tensor, weights: V4Model, config: V4Config, f: Faults) -> Tensor:
    """The row that the last norm of V4 reads."""
    if f.read in ("mean", "first"):
        return stream.mean(1) if f.read == "mean" else stream[:, 0]
    flat, site = stream.flatten(1), weights.site
    rho = torch.rsqrt(flat.square().mean(1, keepdim=True) + config.mhc.norm_eps)
    mixed = (flat @ site.fn_wx.double().T) * rho * site.scale_z.double() + site.base_w.double()
    return torch.einsum("tn,tnm->tm", torch.sigmoid(mixed) + config.mhc.eps, stream)


def v41(**faults: object) -> Callable[..., Tensor]:
    """`model_v41` with faults."""
    f = Faults(**faults)  # type: ignore[arg-type]

    def model(
        token_t: Tensor, image_t: Tensor, weights: V41Model, *, config: V41Stack, embed_tm: Tensor | None = None
    ) -> Tensor:
        if f.truncated:
            csa2 = replace(config.csa2, truncation=Truncation.MASK, keep=config.csa2.window + config.csa2.backtracking)
            config = replace(config, csa2=csa2)

        def whole(kept: Tensor, first: int) -> Tensor:
            image = image_t[kept] & (f.images != "text")
            rows = looked_up(token_t[kept], image, weights.class_v, config.model, "")
            rows = rows.roll(1, 1) if f.rows == "before" else rows
            rows = rows if f.rows == "own" else torch.where(image[None, :, None], -1, rows.clamp(min=0))
            run = start_v41(image, rows, weights.tables, config=config)
            x = rows_of(token_t[kept], weights.embed_vm, f)
            if embed_tm is not None and f.images != "ignored":
                x = embed_tm[kept].double()
            pre = torch.zeros(len(kept), config.model.mhc.streams)
            pre[:, 0] = 1
            carry = V41Carry(stream_tnm=copied(x, pre.shape[1], f), pre_tn=pre)
            for layer, block in in_order(weights.layers, f):
                carry = block_v41(carry, block, run, config=config, layer=layer, num=f.num)
            read = pre if f.read == "first" else carry.pre_tn
            x = torch.einsum("tn,tnm->tm", read.double(), carry.stream_tnm).bfloat16().double()
            return ended(x, weights, config.model.norm_eps, WeightCast.AFTER_WEIGHT, torch.bfloat16, f)

        return cut(whole, len(token_t), f) if len(token_t) else torch.zeros(0, config.model.vocab_size)

    return model


def looked_up(token_t: Tensor, image_t: Tensor, class_v: Tensor, config: V41Config, fault: str) -> Tensor:
    """The rows of a sequence in Python's integers."""
    memory, layout = config.memory, hash_layout(config.memory)
    classes = [int(c) for c in class_v]
    if fault == "swapped":
        classes[5], classes[6] = classes[6], classes[5]
    if fault == "ids":
        classes = [v % memory.num_classes for v in range(len(classes))]
    pad = memory.pad_id if fault == "pad_id" else 0 if fault == "zeros" else classes[memory.pad_id]
    ids, image = token_t.tolist(), image_t.tolist()
    found = []
    for which in range(len(memory.layer_ids)):
        constants = 0 if fault == "first_layer" else which
        for p in range(len(ids)):
            if image[p] and fault != "image_class":
                found.append([-1] * memory.num_columns)
                continue
            window = _window(p, ids, image, classes, pad, memory.max_ngram, fault)
            h, row = window[0] * layout.multipliers[constants][0], []
            for n in range(2, memory.max_ngram + 1):
                h ^= window[n - 1] * layout.multipliers[constants][n - 1]
                row += [h] * memory.num_heads
            primes, offsets = layout.primes[which], layout.offsets[which]
            found.append([h % prime + offset for h, prime, offset in zip(row, primes, offsets, strict=True)])
    shape = (len(memory.layer_ids), len(ids), memory.num_columns)
    return torch.tensor(found, dtype=torch.int32).reshape(shape)


def _window(
    p: int, ids: list[int], image: list[bool], classes: list[int], pad: int, places: int, fault: str
) -> list[int]:
    window, broken = [], False
    p = p - 1 if fault == "late" else p
    for s in range(places):
        if p - s < 0:
            window.append(pad)
            continue
        broken = broken or (image[p - s] and fault != "image_class")
        here = classes[-1] if image[p - s] else classes[ids[p - s]]
        window.append(pad if broken else here)
        broken = False if fault == "not_latched" else broken or (fault == "barrier" and ids[p - s] == 0)
    return window


def rows(fault: str) -> Callable[..., Tensor]:
    """`memory_rows` with a fault."""

    def found(token_t: Tensor, image_t: Tensor, class_v: Tensor, *, config: V41Config) -> Tensor:
        return looked_up(token_t, image_t, class_v, config, fault)

    return found


v3_right, v3_right_honest = v3(), v3(num=HONEST)
v3_layers_exchanged, v3_last_layer_missing = v3(order="exchanged"), v3(order="short")
v3_embedding_scaled, v3_next_embedding = v3(embed="scaled"), v3(embed="next")
v3_last_output_lost = v3(ending="lost")
v3_last_norm_missing, v3_last_norm_unweighted = v3(norm="missing"), v3(norm="unweighted")
v3_last_norm_early = v3(norm="early")
v3_last_norm_fixed_eps = v3(eps="fixed")
v3_head_is_the_embedding = v3(head="embedding")
v3_second_pass_blind = v3(parts="two")
v3_residue_three_loses_a_token = v3(residue=3)
v3_plain_angles = v3(angles="plain")

v4_right, v4_right_honest = v4(), v4(num=HONEST)
v4_layers_exchanged, v4_last_layer_missing = v4(order="exchanged"), v4(order="short")
v4_next_embedding = v4(embed="next")
v4_last_norm_missing, v4_last_norm_unweighted = v4(norm="missing"), v4(norm="unweighted")
v4_last_norm_fixed_eps = v4(eps="fixed")
v4_head_is_the_embedding = v4(head="embedding")
v4_head_reads_the_mean, v4_head_reads_the_first = v4(read="mean"), v4(read="first")
v4_one_stream_begins = v4(streams="first")
v4_second_pass_blind = v4(parts="two")
v4_residue_three_loses_a_token = v4(residue=3)
v4_angles_of_the_first_layer = v4(angles="first")
v4_hash_of_the_next_token = v4(ids="next")

v41_right, v41_right_honest = v41(), v41(num=HONEST)
v41_last_layer_twice, v41_last_layer_missing = v41(order="last_twice"), v41(order="short")
v41_next_embedding = v41(embed="next")
v41_last_norm_missing, v41_last_norm_unweighted = v41(norm="missing"), v41(norm="unweighted")
v41_head_is_the_embedding = v41(head="embedding")
v41_head_reads_the_first = v41(read="first")
v41_one_stream_begins = v41(streams="first")
v41_second_pass_blind = v41(parts="two")
v41_memory_of_the_token_before = v41(rows="before")
v41_image_rows_ignored, v41_images_are_text = v41(images="ignored"), v41(images="text")
v41_decoder_truncated = v41(truncated=True)

rows_right = rows("")
rows_barrier_at_bos = rows("barrier")
rows_image_not_latched, rows_image_has_a_class = rows("not_latched"), rows("image_class")
rows_pad_is_its_id, rows_zero_before_the_sequence = rows("pad_id"), rows("zeros")
rows_ids_are_classes, rows_two_classes_swapped = rows("ids"), rows("swapped")
rows_one_place_late = rows("late")
rows_constants_of_the_first_layer = rows("first_layer")
