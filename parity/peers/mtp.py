"""transformers' MtpLayer around a layer of V3 or V3.2 as a peer of `reference/mtp.py`; written for transformers 5.24.0.

It applies the last norm itself and hands the normalised row on, as `mtp_v3` does.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deeptwin.reference.mtp_weights import MtpV3Weights
from deeptwin.reference.presets import V3Config

from .block import causal_mask, layer_state_v3, made_v3


def transformers_v3(
    next_t: Tensor,
    h_tm: Tensor,
    weights: MtpV3Weights,
    table_sr: Tensor,
    *,
    config: V3Config,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """One module; its angles are its own."""
    from transformers.modeling_layers import MtpLayer

    made, layer_class, norm_class, rotary = made_v3(replace(config, dense_layers=0))
    module = MtpLayer(made, layer_class, norm_class, 0).float().eval().requires_grad_(False)
    state = {f"mtp_block.{name}": x for name, x in layer_state_v3(weights.block, config).items()}
    state |= {
        "enorm.weight": weights.join.enorm_m,
        "hnorm.weight": weights.join.hnorm_m,
        "eh_proj.weight": weights.join.w_mj,
        "post_norm.weight": weights.norm_m,
    }
    module.load_state_dict(state)
    embedded, position = weights.embed_vm[next_t][None], torch.arange(len(next_t))[None]
    mask = causal_mask(len(next_t), len(next_t))
    angles = rotary(embedded, position)
    (x,) = module(embedded, h_tm[None], angles, mask, position, None)
    return torch.nn.functional.linear(x, weights.head_vm), x
