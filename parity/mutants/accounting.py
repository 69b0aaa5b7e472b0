"""Accounts of a V4.1 model that differ from the checkpoint in one reading of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from deeptwin.reference.presets import V41Config

from ..peers.accounting import SCALED, Entry, tensors

Change = Callable[[Entry, V41Config], Iterator[Entry]]


def account_with(change: Change, *, extra: Callable[[V41Config], list[Entry]] | None = None) -> Callable[..., object]:
    """The count over a changed list of tensors."""

    def totals(config: V41Config) -> tuple[Tensor, Tensor]:
        counts, size = dict.fromkeys(("I8", "F8", "BF16", "F32"), 0), 0
        listed = [found for entry in tensors(config) for found in change(entry, config)]
        for _, dtype, shape in listed + (extra(config) if extra else []):
            counts[dtype.removesuffix("_ROWS")] += prod(shape)
            size += prod(shape) * {"BF16": 4, "F32": 8, "I8": 1}.get(dtype, 2) // 2
            if dtype in SCALED:
                size += prod(-(-n // block) for n, block in zip(shape, SCALED[dtype], strict=True))
        return torch.tensor(list(counts.values())), torch.tensor([size])

    return totals


def _same(entry: Entry, config: V41Config) -> Iterator[Entry]:
    yield entry


def _stored_as(part: str, dtype: str) -> Change:
    def change(entry: Entry, config: V41Config) -> Iterator[Entry]:
        name, own, shape = entry
        yield name, dtype if part in name else own, shape

    return change


def _without(start: str, part: str) -> Change:
    def change(entry: Entry, config: V41Config) -> Iterator[Entry]:
        if not (entry[0].startswith(start) and part in entry[0]):
            yield entry

    return change


def _head_mix(config: V41Config) -> list[Entry]:
    n = config.mhc.streams
    return [
        ("hc_head_fn", "F32", (n, n * config.hidden)),
        ("hc_head_base", "F32", (n,)),
        ("hc_head_scale", "F32", (1,)),
    ]


def _convolution(config: V41Config) -> list[Entry]:
    return [(f"layers.{i}.engram.conv", "BF16", (config.mhc.streams * config.hidden, 4)) for i in config.engram.layers]


def _hash_table(config: V41Config) -> list[Entry]:
    return [("layers.0.ffn.gate.tid2eid", "BF16", (config.vocab_size, config.moe.topk))]


right_list = account_with(_same)
head_mix_counted = account_with(_same, extra=_head_mix)
convolution_counted = account_with(_same, extra=_convolution)
hash_table_counted = account_with(_same, extra=_hash_table)
no_image_bias_in_drafts = account_with(_without("mtp", "bias_vl"))
no_gate_at_ratio_two = account_with(_without("layers", "compressor.wgate"))
wo_a_in_bf16 = account_with(_stored_as("wo_a", "BF16"))
compressor_in_fp8 = account_with(_stored_as("compressor.wkv", "F8"))
tables_with_tile_scales = account_with(_stored_as("engram.embed", "F8"))
confidence_in_fp32 = account_with(_stored_as("confidence_head", "F32"))
