"""Pillow's resize and padding, and torch's own attention and activations in fp64, as peers of vision."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention, silu

from deeptwin.reference.config import VisionConfig
from deeptwin.reference.weights import VisionWeights


def pillow_resize(pixels_hwc: Tensor, *, width: int, height: int) -> Tensor:
    """Image.resize with its bicubic filter."""
    import numpy as np
    from PIL import Image

    image = Image.fromarray(pixels_hwc.numpy(), "RGB").resize((width, height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image))


def torch_tower(
    patches_ni: Tensor, weights: VisionWeights, grids: tuple[tuple[int, int], ...], *, config: VisionConfig
) -> Tensor:
    """The tower in fp64 without a rounding inside, rotations as complex products, one image at a time."""
    found = [torch.zeros(0, config.hidden, dtype=torch.float64)]
    quarter, done = config.head_dim // 4, 0
    freq = 1 / config.theta ** (torch.arange(quarter, dtype=torch.float64) / quarter)
    for h, w in grids:
        row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        angle = torch.cat([row.reshape(-1, 1) * freq, column.reshape(-1, 1) * freq], 1)
        turn = torch.polar(torch.ones_like(angle), angle)
        x = patches_ni[done : done + h * w].double() @ weights.w_patch_mi.double().T + weights.b_patch_m.double()
        done += h * w
        for b in weights.blocks:
            n = rms_norm(x, (config.hidden,), b.norm1_m.double(), config.norm_eps)
            qkv = (n @ b.w_qkv_zm.double().T + b.b_qkv_z.double()).unflatten(1, (3, config.num_heads, config.head_dim))
            q, k, v = qkv.permute(1, 2, 0, 3)
            q, k = (_turned(part, turn) for part in (q, k))
            out = scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1).flatten(1)
            x = x + out @ b.w_o_mm.double().T + b.b_o_m.double()
            n = rms_norm(x, (config.hidden,), b.norm2_m.double(), config.norm_eps)
            gate, up = (n @ b.w1_im.double().T).chunk(2, -1)
            x = x + (silu(gate) * up) @ b.w2_mf.double().T
        found.append(rms_norm(x, (config.hidden,), weights.norm_m.double(), config.norm_eps))
    return torch.cat(found).to(torch.bfloat16)


def _turned(x_hnd: Tensor, turn: Tensor) -> Tensor:
    first, second = x_hnd.chunk(2, -1)
    turned = torch.complex(first, second) * turn
    return torch.cat([turned.real, turned.imag], -1)


def torch_project(x_yi: Tensor, weights: VisionWeights) -> Tensor:
    """The projector in fp64."""
    h = gelu(x_yi.double() @ weights.w_in_fi.double().T + weights.b_in_f.double())
    return (h @ weights.w_out_ff.double().T + weights.b_out_f.double()).to(torch.bfloat16)
