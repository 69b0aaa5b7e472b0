"""Draft modules joined once more in plain torch, with faults; behind the join stand the blocks of `block.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import FP8_1X128_UE8M0, FP8_128X128_UE8M0, WeightCast
from deeptwin.reference.mhc import mhc_head
from deeptwin.reference.mtp_weights import MtpJoin, MtpStreamJoin, MtpV3Weights, MtpV4Weights
from deeptwin.reference.presets import V3Config, V4Config
from deeptwin.reference.quant import dequantize, quantize
from deeptwin.reference.rope import rope_frequencies, rope_table

from .block import Faults as BlockFaults
from .block import norm, v3, v4

RIGHT = BlockFaults()


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a draft module does wrong; the default is right."""

    order: str = "embedding_first"  # embedding_first, hidden_first
    norms: str = "own"  # own, swapped, no_hidden, no_embedding
    streams: str = "each"  # each, joint: one norm over all streams, mean: of the streams, once
    embedding: str = "every"  # every, first: only one stream gets it
    halves: str = "both"  # both, no_hidden, no_embedding
    shift: int = 0  # rows between a row and its token
    last_norm: str = "own"  # own, missing
    head: str = "own"  # own, mean: of the streams
    chained: str = "normed"  # normed, raw: what a further module of V3 reads
    angles: str = "plain"  # plain, compressed
    short_window: bool = False  # one key less


def join(**faults: object) -> Callable[..., Tensor]:
    """`mtp_join` with faults."""
    f = Faults(**faults)  # type: ignore[arg-type]

    def joined(
        e_tm: Tensor, h_tm: Tensor, weights: MtpJoin, *, eps: float, cast: WeightCast, dtype: torch.dtype
    ) -> Tensor:
        first, second = weights.enorm_m, weights.hnorm_m
        if f.norms == "swapped":
            first, second = second, first
        e = e_tm.double() if f.norms == "no_embedding" else norm(e_tm.double(), first, eps, RIGHT, cast, dtype)
        h = h_tm.double() if f.norms == "no_hidden" else norm(h_tm.double(), second, eps, RIGHT, cast, dtype)
        e, h = e * (f.halves != "no_embedding"), h * (f.halves != "no_hidden")
        rows = torch.cat([h, e] if f.order == "hidden_first" else [e, h], 1)
        return (rows @ weights.w_mj.double().T).to(dtype)

    return joined


def join_streams(**faults: object) -> Callable[..., Tensor]:
    """`mtp_join_streams` with faults."""
    f = Faults(**faults)  # type: ignore[arg-type]

    def joined(e_tm: Tensor, stream_tnm: Tensor, weights: MtpStreamJoin, *, eps: float) -> Tensor:
        def normed(x: Tensor, weight: Tensor) -> Tensor:
            return norm(x.double(), weight, eps, RIGHT, WeightCast.AFTER_WEIGHT, torch.bfloat16)

        def projected(x: Tensor, w: Tensor, sf: Tensor | None) -> Tensor:
            if sf is not None:
                w = dequantize(w, sf, fmt=FP8_128X128_UE8M0, dtype=torch.float32)
                codes = quantize(x.flatten(0, -2), fmt=FP8_1X128_UE8M0)
                x = dequantize(*codes, fmt=FP8_1X128_UE8M0, dtype=torch.float32).view(x.shape)
            return (x.double() @ w.double().T).bfloat16().double()

        first, second = weights.enorm_m, weights.hnorm_m
        if f.norms == "swapped":
            first, second = second, first
        streams = stream_tnm.double()
        if f.streams == "joint":
            h = normed(streams.flatten(1), second.repeat(streams.shape[1])).view(streams.shape)
        elif f.streams == "mean":
            h = normed(streams.mean(1), second)[:, None].expand_as(streams)
        else:
            h = normed(streams, second)
        h = projected(h, weights.h_mm, weights.h_sf)
        e = projected(normed(e_tm, first), weights.e_mm, weights.e_sf)[:, None].expand_as(h).clone()
        if f.embedding == "first":
            e[:, 1:] = 0
        if f.order == "hidden_first":
            h, e = (
                projected(normed(streams, second), weights.e_mm, weights.e_sf),
                projected(normed(e_tm, first), weights.h_mm, weights.h_sf)[:, None],
            )
        return (e * (f.halves != "no_embedding") + h * (f.halves != "no_hidden")).bfloat16()

    return joined


def module_v3(**faults: object) -> Callable[..., tuple[Tensor, Tensor]]:
    """`mtp_v3` with faults."""
    f = Faults(**faults)  # type: ignore[arg-type]

    def module(
        next_t: Tensor, h_tm: Tensor, weights: MtpV3Weights, table_sr: Tensor, *, config: V3Config, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        eps, cast = config.norm_eps, config.attention.weight_cast
        e = weights.embed_vm[next_t.roll(-f.shift)]
        x = join(order=f.order, norms=f.norms)(e, h_tm, weights.join, eps=eps, cast=cast, dtype=dtype)
        h, y = v3()(x, torch.zeros_like(x), weights.block, table_sr, config=config, dtype=dtype)
        raw = (h.double() + y.double()).to(dtype).double()
        x = raw if f.last_norm == "missing" else norm(raw, weights.norm_m, eps, RIGHT, cast, dtype)
        out = raw if f.chained == "raw" else x
        return (x @ weights.head_vm.double().T).float(), out.to(dtype)

    return module


def module_v4(**faults: object) -> Callable[..., tuple[Tensor, Tensor]]:
    """`mtp_v4` with faults."""
    f = Faults(**faults)  # type: ignore[arg-type]

    def module(
        next_t: Tensor, stream_tnm: Tensor, weights: MtpV4Weights, table_sr: Tensor, *, config: V4Config
    ) -> tuple[Tensor, Tensor]:
        e = weights.embed_vm[next_t.roll(-f.shift)]
        stream = join_streams(streams=f.streams, embedding=f.embedding)(
            e, stream_tnm, weights.join, eps=config.norm_eps
        )
        if f.angles == "compressed":
            table_sr = rope_table(torch.arange(len(table_sr)), rope_frequencies(config.rope_main))
        window = config.attention.window - 1 if f.short_window else config.attention.window
        shown = replace(config, attention=replace(config.attention, window=window))
        out = v4()(stream, next_t, weights.block, table_sr, config=shown, layer=config.num_layers)
        x = mhc_head(out, weights.site, config=config.mhc) if f.head == "own" else out.double().mean(1).bfloat16()
        if f.last_norm != "missing":
            x = norm(x.double(), weights.norm_m, config.norm_eps, RIGHT, WeightCast.AFTER_WEIGHT, torch.bfloat16)
        return (x.double() @ weights.head_vm.double().T).float(), out

    return module


join_right, join_streams_right = join(), join_streams()
join_hidden_first, join_norms_swapped = join(order="hidden_first"), join(norms="swapped")
join_hidden_not_normed, join_embedding_not_normed = join(norms="no_hidden"), join(norms="no_embedding")
join_hidden_lost = join(halves="no_hidden")

streams_normed_together, streams_averaged = join_streams(streams="joint"), join_streams(streams="mean")
streams_embedding_in_the_first, streams_matrices_swapped = (
    join_streams(embedding="first"),
    join_streams(order="hidden_first"),
)
streams_norms_swapped, streams_hidden_lost = join_streams(norms="swapped"), join_streams(halves="no_hidden")

module_v3_right, module_v4_right = module_v3(), module_v4()
v3_token_of_the_row_after, v3_hidden_first = module_v3(shift=1), module_v3(order="hidden_first")
v3_last_norm_missing, v3_chains_the_raw_state = module_v3(last_norm="missing"), module_v3(chained="raw")
v4_token_of_the_row_after, v4_head_is_the_mean = module_v4(shift=1), module_v4(head="mean")
v4_compressed_angles, v4_window_one_short = module_v4(angles="compressed"), module_v4(short_window=True)
v4_last_norm_missing, v4_streams_averaged = module_v4(last_norm="missing"), module_v4(streams="mean")
