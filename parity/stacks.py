"""Whole stacks of reference blocks, embedding to logits, as peers and the table of stages run them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deeptwin.reference.block import block_v3, v3_enter
from deeptwin.reference.block_weights import V3BlockWeights
from deeptwin.reference.config import RopeConfig
from deeptwin.reference.linear import linear
from deeptwin.reference.numerics import CONTRACT, Numerics
from deeptwin.reference.presets import V3Config
from deeptwin.reference.rope import rope_frequencies, rope_table, table_magnitude
from deeptwin.reference.taps import Tap, ignore, under


def table_of(config: RopeConfig, length: int) -> Tensor:
    """The angle table of `length` positions."""
    return rope_table(torch.arange(length), rope_frequencies(config), magnitude=table_magnitude(config.yarn))


def stack_v3(
    token_t: Tensor,
    state: Mapping[str, Tensor],
    *,
    config: V3Config,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> Tensor:
    """Logits of every position, from tensors under the names of transformers."""
    h_tm = num.wide(state["model.embed_tokens.weight"][token_t])
    tap("embed", h_tm)
    y_tm, table_sr = torch.zeros_like(h_tm), table_of(config.attention.rope, len(token_t))
    for layer in range(config.num_layers):
        weights = V3BlockWeights.from_state_dict(state, prefix=f"model.layers.{layer}.", config=config, layer=layer)
        own = under(f"layers.{layer}.", tap)
        h_tm, y_tm = block_v3(h_tm, y_tm, weights, table_sr, config=config, dtype=dtype, num=num, tap=own)
    _, x_tm = v3_enter(
        h_tm, y_tm, state["model.norm.weight"], config=config, dtype=dtype, num=num, tap=under("head.", tap)
    )
    logits_tv = linear(x_tm, state["lm_head.weight"], dtype=torch.float32, num=num)
    tap("logits", logits_tv)
    return logits_tv
