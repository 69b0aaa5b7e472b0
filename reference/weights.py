"""Containers: the weights of whole blocks with their names in checkpoints, and what a block keeps of a sequence.

Nothing here computes: tensors are taken and viewed in the shapes of the formulas, so the fast path may use it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import expect_shape
from .config import MlaConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class MlaWeights:
    """Weights of one block, in the shapes of the formulas; `a` is the query latent, or `m` without one."""

    w_qa_am: Tensor | None  # None: direct query projection
    q_norm_a: Tensor | None
    w_qb_hda: Tensor
    w_kv_dm: Tensor  # rows: c latent channels, then r rotary channels
    kv_norm_c: Tensor
    w_uk_hnc: Tensor
    w_uv_huc: Tensor
    w_o_mhu: Tensor

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], *, prefix: str, config: MlaConfig) -> MlaWeights:
        """Take the tensors named `prefix + "q_a_proj.weight"` and so on (names of transformers V3 and V3.2).

        Raises:
            ValueError: a name is missing, or a shape is not the one of `config`.
        """
        n, u, a = config.nope_dim, config.value_dim, config.q_lora_rank

        def take(name: str, *shape: int) -> Tensor:
            if prefix + name not in state:
                raise ValueError(f"state: expected {prefix + name}, got only {sorted(state)[:4]} ...")
            if state[prefix + name].shape != shape:
                raise ValueError(f"state: expected {prefix + name} {shape}, got {tuple(state[prefix + name].shape)}")
            return state[prefix + name]

        heads, m, c = config.num_heads, config.hidden, config.kv_lora_rank
        w_q = take("q_b_proj.weight" if a else "q_proj.weight", heads * config.head_dim, a or m)
        w_kv_b_hdc = take("kv_b_proj.weight", heads * (n + u), c).view(heads, n + u, c)
        return cls(
            w_qa_am=take("q_a_proj.weight", a, m) if a else None,
            q_norm_a=take("q_a_layernorm.weight", a) if a else None,
            w_qb_hda=w_q.view(heads, config.head_dim, a or m),
            w_kv_dm=take("kv_a_proj_with_mqa.weight", config.latent_dim, m),
            kv_norm_c=take("kv_a_layernorm.weight", c),
            w_uk_hnc=w_kv_b_hdc[:, :n],
            w_uv_huc=w_kv_b_hdc[:, n:],
            w_o_mhu=take("o_proj.weight", m, heads * u).view(m, heads, u),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Latents:
    """Cached rows [c | k_rope] and the absolute position of each."""

    rows_sd: Tensor
    positions_s: Tensor

    def then(self, later: Latents) -> Latents:
        """These rows followed by later ones.

        Raises:
            ValueError: the rows differ in width.
        """
        expect_shape("rows_sd", self.rows_sd, "sd", {"d": later.rows_sd.shape[1]})
        return Latents(
            rows_sd=torch.cat([self.rows_sd, later.rows_sd]),
            positions_s=torch.cat([self.positions_s, later.positions_s]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class VisionBlockWeights:
    """Weights of one block of the image tower; `i` counts gate then up channels."""

    norm1_m: Tensor
    w_qkv_zm: Tensor  # queries, keys, values of all heads
    b_qkv_z: Tensor
    w_o_mm: Tensor
    b_o_m: Tensor
    norm2_m: Tensor
    w1_im: Tensor
    w2_mf: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class VisionWeights:
    """Weights of the image tower and of the projector behind it."""

    w_patch_mi: Tensor
    b_patch_m: Tensor
    blocks: tuple[VisionBlockWeights, ...]
    norm_m: Tensor
    w_in_fi: Tensor
    b_in_f: Tensor
    w_out_ff: Tensor
    b_out_f: Tensor
