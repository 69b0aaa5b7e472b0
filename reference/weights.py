"""Containers: the weights of whole blocks with their names in checkpoints, and what a block keeps of a sequence.

Nothing here computes: tensors are taken and viewed in the shapes of the formulas, so the fast path may use it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .checks import expect_dtype, expect_shape
from .config import EngramConfig, MhcConfig, MlaConfig


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

        take = partial(_take, state, prefix)
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
class MhcSite:
    """Weights of one mixing site, or of a head: w coefficients from the x = n * m values of a token's streams."""

    fn_wx: Tensor  # the weight of the norm is folded into its columns
    scale_z: Tensor  # one factor for pre, post and comb each; a head has one
    base_w: Tensor

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], *, prefix: str, config: MhcConfig) -> MhcSite:
        """Take the tensors `prefix + "fn"`, `"scale"` and `"base"` (prefix `layers.3.hc_attn_` and the like).

        Raises:
            ValueError: a name is missing, a shape is not the one of `config`, or a norm weight is not folded in.
            TypeError: a tensor is not float32: these are stored unrounded.
        """
        if prefix + "norm.weight" in state:
            raise ValueError(f"state: expected no {prefix}norm.weight, its values belong into the columns of fn")
        found = {}
        for name in ("fn", "scale", "base"):
            if prefix + name not in state:
                raise ValueError(f"state: expected {prefix + name}, got only {sorted(state)[:4]} ...")
            found[name] = state[prefix + name]
            expect_dtype(prefix + name, found[name], torch.float32)
        dims = {"w": config.coefficients, "z": 3}
        expect_shape("state", found["fn"], "wx", dims)
        expect_shape("state", found["scale"], "z", dims)
        expect_shape("state", found["base"], "w", dims)
        return cls(fn_wx=found["fn"], scale_z=found["scale"], base_w=found["base"])


@dataclass(frozen=True, kw_only=True, eq=False)
class MhcCarry:
    """What passes from one sub-layer to the next; while `y_tm` waits, the stream is the one before its update."""

    stream_tnm: Tensor
    pre_tn: Tensor | None  # None: every sub-layer reads with its own
    post_tn: Tensor | None = None
    comb_tnn: Tensor | None = None
    y_tm: Tensor | None = None

    def left(self, y_tm: Tensor) -> MhcCarry:
        """With the output of the sub-layer that was entered, still to be added to the stream.

        Raises:
            ValueError: no sub-layer was entered, or its output is already there.
        """
        if self.post_tn is None or self.y_tm is not None:
            raise ValueError("carry: expected an entered sub-layer without output, got none or one with output")
        return replace(self, y_tm=y_tm)

    def rows(self, index_t: Tensor) -> MhcCarry:
        """Only the named tokens: every field is per token, so this commutes with all that is done to a carry."""
        parts = (self.pre_tn, self.post_tn, self.comb_tnn, self.y_tm)
        pre_tn, post_tn, comb_tnn, y_tm = (None if part is None else part[index_t] for part in parts)
        return MhcCarry(
            stream_tnm=self.stream_tnm[index_t], pre_tn=pre_tn, post_tn=post_tn, comb_tnn=comb_tnn, y_tm=y_tm
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class EngramWeights:
    """Weights of one n-gram memory but its table, as the checkpoint stores them.

    The projection has one UE8M0 byte for each 32 x 32 tile; `j` counts the keys of the streams and the value.
    """

    wkv_um: Tensor  # float8_e4m3fn; rows: the keys of stream 0, 1, …, then the value
    wkv_sf_ig: Tensor  # uint8
    q_weight_nm: Tensor
    k_weight_nm: Tensor

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], *, prefix: str, config: EngramConfig) -> EngramWeights:
        """Take the tensors named `prefix + "wkv.weight"` and so on, for example with prefix `layers.1.engram.`.

        Raises:
            ValueError: a name is missing, or a shape is not the one of `config`.
        """
        outputs, inputs = (config.streams + 1) * config.hidden, config.embed_dim

        take = partial(_take, state, prefix)
        return cls(
            wkv_um=take("wkv.weight", outputs, inputs),
            wkv_sf_ig=take("wkv.scale", -(-outputs // 32), inputs // 32).view(torch.uint8),
            q_weight_nm=take("q_weight", config.streams, config.hidden),
            k_weight_nm=take("k_weight", config.streams, config.hidden),
        )


def _take(state: Mapping[str, Tensor], prefix: str, name: str, *shape: int) -> Tensor:
    if prefix + name not in state:
        raise ValueError(f"state: expected {prefix + name}, got only {sorted(state)[:4]} ...")
    if state[prefix + name].shape != shape:
        raise ValueError(f"state: expected {prefix + name} {shape}, got {tuple(state[prefix + name].shape)}")
    return state[prefix + name]
