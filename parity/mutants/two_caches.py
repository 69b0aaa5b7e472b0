"""Attention over two caches as a fused kernel computes it: records decoded by table, with faults to switch on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deeptwin.reference.config import PageLayout, RecordFormat, TwoCaches

from .sparse_attn import Faults, emulate

NIBBLES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] + [-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@dataclass(frozen=True, kw_only=True)
class PairFaults:
    """What the reader of the caches does wrong; `attend` are the faults of the softmax behind it."""

    attend: Faults = field(default_factory=Faults)
    layout: str = "given"  # given, other
    nibbles: str = "low_first"  # low_first, high_first
    signs: bool = True
    main_scale: str = "e4m3"  # e4m3, exponent: the byte taken for a power of two; first: one scale for the record
    window_scale: int = 127  # bias of the exponent
    pad: str = "skipped"  # skipped, forgotten: sections of scales without the byte behind those of an entry
    tail: str = "read"  # read, zero
    stride: str = "given"  # given, contiguous
    softmax: str = "one"  # one, two_averaged
    sink: str = "once"  # once, per_cache
    duplicates: str = "kept"  # kept, dropped
    order: str = "given"  # given, swapped: main entries looked up in the window and the other way round
    values: str = "all"  # all, unrotated: the value has no rotary channels
    main_bound: str = "own"  # own, window
    main: str = "read"  # read, skipped, last_lost


def records(faults: PairFaults, cache_pow: Tensor, fmt: RecordFormat, layout: PageLayout) -> Tensor:
    """Every record of a cache as fp32, [p * o, channels]."""
    p, o, w = cache_pow.shape
    pages = cache_pow.as_strided((p, o * w), (o * w, 1)) if faults.stride == "contiguous" else cache_pow.reshape(p, -1)
    data, scale, tail = fmt.data_bytes, fmt.scale_bytes, 2 * fmt.tail
    sectioned = layout is PageLayout.SECTIONED
    if faults.layout == "other":
        sectioned = not sectioned
    if sectioned:
        codes, kept = pages[:, : o * (w - scale)].reshape(p * o, w - scale).split([data, tail], dim=1)
        scales = pages[:, o * (w - scale) :].reshape(p * o, scale)
    else:
        codes, scales, kept = pages.reshape(p * o, w).split([data, scale, tail], dim=1)
    if faults.pad == "forgotten" and sectioned:
        packed = pages[:, o * (w - scale) : o * (w - fmt.pad)]
        scales = packed.reshape(p * o, scale - fmt.pad)
    scales = scales[:, : scale - fmt.pad]
    if data < fmt.channels:
        low, high = NIBBLES[(codes & 15).long()], NIBBLES[(codes >> 4).long()]
        pair = (high, low) if faults.nibbles == "high_first" else (low, high)
        values = torch.stack(pair, -1).flatten(1)
        values = values if faults.signs else values.abs()
        factor = scales.contiguous().view(torch.float8_e4m3fn).float()
        if faults.main_scale == "exponent":
            factor = torch.exp2(scales.float() - 127)
        if faults.main_scale == "first":
            factor = factor[:, :1].expand_as(factor)
    else:
        values = codes.contiguous().view(torch.float8_e4m3fn).float()
        factor = torch.exp2(scales.float() - faults.window_scale)
        factor = torch.where(scales == 255, torch.nan, factor)
    values = values * factor.repeat_interleave(fmt.quant.group, 1)
    if not fmt.tail:
        return values
    rows = kept.contiguous().view(torch.bfloat16).float()
    return torch.cat([values, rows if faults.tail == "read" else torch.zeros_like(rows)], 1)


def _attend(
    faults: PairFaults,
    q_thd: Tensor,
    window: Tensor,
    window_idx: Tensor,
    main: Tensor,
    main_idx: Tensor,
    sink_h: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    s = window.shape[0]
    if faults.order == "swapped":
        window_idx, main_idx = main_idx, window_idx
    if faults.main_bound == "window":
        main_idx = torch.where(main_idx < s, main_idx, -1)
    if faults.duplicates == "dropped":
        seen = (main_idx[:, :, None] == window_idx[:, None, :]).any(-1)
        main_idx = torch.where(seen, -1, main_idx)
    if faults.main == "last_lost":
        last = torch.arange(main_idx.shape[1]).where(main_idx >= 0, torch.tensor(-1)).amax(-1, keepdim=True)
        main_idx = torch.where(torch.arange(main_idx.shape[1]) == last, -1, main_idx)
    if faults.main == "skipped":
        main_idx = torch.full_like(main_idx, -1)
    inside = (main_idx >= 0) & (main_idx < main.shape[0])
    window_idx = torch.where(window_idx < s, window_idx, -1)
    lists = (window_idx, torch.where(inside, main_idx + s, -1 if faults.attend.holes != "wrap" else main_idx))
    keys = torch.cat([window, main])
    attend = replace(faults.attend, stored=dtype)
    width = keys.shape[1]
    if faults.sink == "per_cache" and sink_h is not None:
        sink_h = sink_h + 0.6931471805599453
    if faults.softmax == "two_averaged":
        parts = [emulate(attend, q_thd, keys, i, sink_h, None, scale, width, torch.bfloat16) for i in lists]
        return ((parts[0][0].float() + parts[1][0].float()) / 2).to(dtype), torch.logaddexp(parts[0][1], parts[1][1])
    out, lse = emulate(attend, q_thd, keys, torch.cat(lists, 1), sink_h, None, scale, width, torch.bfloat16)
    if faults.values == "unrotated":
        out[..., -width // 8 :] = 0
    return out, lse


def prefill(faults: PairFaults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `two_cache_attn`."""

    def two_cache_attn(
        q_thd: Tensor,
        window_sd: Tensor,
        window_idx_tk: Tensor,
        main_pow: Tensor,
        main_idx_tk: Tensor,
        sink_h: Tensor | None,
        *,
        caches: TwoCaches,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[Tensor, Tensor]:
        main = records(faults, main_pow, caches.main, caches.layout)
        return _attend(faults, q_thd, window_sd.float(), window_idx_tk, main, main_idx_tk, sink_h, caches.scale, dtype)

    return two_cache_attn


def decode(faults: PairFaults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `two_cache_attn_decode`."""

    def two_cache_attn_decode(
        q_thd: Tensor,
        window_pow: Tensor,
        window_idx_tk: Tensor,
        main_pow: Tensor,
        main_idx_tk: Tensor,
        sink_h: Tensor | None,
        *,
        caches: TwoCaches,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[Tensor, Tensor]:
        window = records(faults, window_pow, caches.window, caches.layout)
        main = records(faults, main_pow, caches.main, caches.layout)
        return _attend(faults, q_thd, window, window_idx_tk, main, main_idx_tk, sink_h, caches.scale, dtype)

    return two_cache_attn_decode


_RIGHT = PairFaults()
right_prefill = prefill(_RIGHT)
right_decode = decode(_RIGHT)
right_decode_block_128 = decode(replace(_RIGHT, attend=Faults(block=128)))
right_decode_backwards = decode(replace(_RIGHT, attend=Faults(block=32, backwards=True)))
right_decode_lazy_maximum = decode(replace(_RIGHT, attend=Faults(lazy=6.0)))

two_softmaxes = prefill(replace(_RIGHT, softmax="two_averaged"))
sink_in_each_cache = prefill(replace(_RIGHT, sink="per_cache"))
sink_scaled = prefill(replace(_RIGHT, attend=Faults(sink="scaled")))
duplicates_dropped = prefill(replace(_RIGHT, duplicates="dropped"))
value_without_rotary_channels = prefill(replace(_RIGHT, values="unrotated"))
main_cache_skipped = prefill(replace(_RIGHT, main="skipped"))
last_main_entry_lost = prefill(replace(_RIGHT, main="last_lost"))

arrangements_mixed_up = decode(replace(_RIGHT, layout="other"))
page_stride_ignored = decode(replace(_RIGHT, stride="contiguous"))
nibbles_swapped = decode(replace(_RIGHT, nibbles="high_first"))
signs_lost = decode(replace(_RIGHT, signs=False))
scale_byte_as_exponent = decode(replace(_RIGHT, main_scale="exponent"))
one_scale_a_record = decode(replace(_RIGHT, main_scale="first"))
window_exponent_off_by_one = decode(replace(_RIGHT, window_scale=126))
pad_of_scales_forgotten = decode(replace(_RIGHT, pad="forgotten"))
tail_dropped = decode(replace(_RIGHT, tail="zero"))
lists_swapped = decode(replace(_RIGHT, order="swapped"))
main_bounded_by_the_window = decode(replace(_RIGHT, main_bound="window"))
hole_reads_the_last_record = decode(replace(_RIGHT, attend=Faults(holes="wrap")))
hole_times_nan = decode(replace(_RIGHT, attend=Faults(holes="zero_times_row")))
empty_row_unwritten = decode(replace(_RIGHT, attend=Faults(empty="stale")))
first_lists_for_all = decode(replace(_RIGHT, attend=Faults(rows="first_row_shared")))
weights_truncated = decode(replace(_RIGHT, attend=Faults(weights="truncated")))
split_depends_on_batch = decode(replace(_RIGHT, attend=Faults(split_by_batch=True)))
