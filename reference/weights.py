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
from .csa2_config import Csa2Config
from .topology import LayerMode


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
            wkv_sf_ig=take("wkv.scale", -(-outputs // 32), inputs // 32),
            q_weight_nm=take("q_weight", config.streams, config.hidden),
            k_weight_nm=take("k_weight", config.streams, config.hidden),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Csa2Weights:
    """Weights of one CSA2 layer; `_q`, `_sf`: e4m3 codes and UE8M0 scales of 32 x 32 tiles. None where not owned."""

    attn_norm_m: Tensor
    wq_a_q: Tensor
    wq_a_sf: Tensor
    q_norm_a: Tensor
    wq_b_q: Tensor  # [h * d, a]
    wq_b_sf: Tensor
    wkv_q: Tensor
    wkv_sf: Tensor
    kv_norm_d: Tensor
    sink_h: Tensor
    wo_a_q: Tensor  # [groups * rank, h * d / groups]
    wo_a_sf: Tensor
    wo_b_q: Tensor
    wo_b_sf: Tensor
    entry_value_dm: Tensor | None = None  # compressor
    entry_gate_dm: Tensor | None = None  # ratio 2 only
    entry_norm_d: Tensor | None = None
    index_wk: Tensor | None = None  # [index width, d]
    index_norm: Tensor | None = None
    index_wq_q: Tensor | None = None  # [index heads * index width, a]
    index_wq_sf: Tensor | None = None
    index_head_hm: Tensor | None = None

    def own(self, name: str) -> Tensor:
        """A weight that not every layer has.

        Raises:
            ValueError: this layer has none.
        """
        found = getattr(self, name)
        if found is None:
            raise ValueError(f"weights: expected {name}, got a layer without it")
        return found

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], *, layer: int, config: Csa2Config) -> Csa2Weights:
        """Take the tensors `layers.{layer}.attn.wq_a.weight` and so on; a scale stands beside its weight.

        Raises:
            ValueError: a name is missing or one that the layer does not own is there, or a shape is not of `config`.
        """
        map_, m, d = config.topology, config.hidden, config.head_dim
        heads, a, mode = config.num_heads, config.q_rank, config.topology.mode(layer)
        full, indexes = mode is LayerMode.FULL, mode in (LayerMode.FULL, LayerMode.REINDEX)
        shapes: dict[str, tuple[bool, str, tuple[int, ...]]] = {
            "attn_norm_m": (True, "attn_norm.weight", (m,)),
            "q_norm_a": (True, "attn.q_norm.weight", (a,)),
            "kv_norm_d": (True, "attn.kv_norm.weight", (d,)),
            "sink_h": (True, "attn.attn_sink", (heads,)),
            "entry_value_dm": (full, "attn.compressor.wkv.weight", (d, m)),
            "entry_gate_dm": (full and map_.ratios[layer] > 1, "attn.compressor.wgate.weight", (d, m)),
            "entry_norm_d": (full, "attn.compressor.norm.weight", (d,)),
            "index_wk": (full, "attn.indexer.wk.weight", (map_.index_dim, d)),
            "index_norm": (full, "attn.indexer.k_norm.weight", (map_.index_dim,)),
            "index_head_hm": (indexes, "attn.indexer.weights_proj.weight", (map_.index_heads, m)),
        }
        for field, owned, name, rows, columns in (
            ("wq_a", True, "attn.wq_a", a, m),
            ("wq_b", True, "attn.wq_b", heads * d, a),
            ("wkv", True, "attn.wkv", d, m),
            ("wo_a", True, "attn.wo_a", config.o_groups * config.o_rank, heads * d // config.o_groups),
            ("wo_b", True, "attn.wo_b", m, config.o_groups * config.o_rank),
            ("index_wq", indexes, "attn.indexer.wq_b", map_.index_heads * map_.index_dim, a),
        ):
            shapes[f"{field}_q"] = (owned, f"{name}.weight", (rows, columns))
            shapes[f"{field}_sf"] = (owned, f"{name}.scale", (-(-rows // 32), -(-columns // 32)))
        found: dict[str, Tensor | None] = {}
        for field, (owned, name, shape) in shapes.items():
            tensor = state.get(f"layers.{layer}.{name}")
            if (tensor is not None) != owned or (tensor is not None and tensor.shape != shape):
                got = None if tensor is None else tuple(tensor.shape)
                wanted = shape if owned else None
                raise ValueError(f"state: expected layers.{layer}.{name} {wanted}, got {got}")
            found[field] = None if tensor is None else stored(tensor)
        return cls(**found)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """Quantised weights of experts: w1 (gate) above w3 (up), and w2 (down), each as codes and scales.

    Routed experts have a leading axis of experts, the shared expert has none.
    """

    w13_q: Tensor
    w13_sf: Tensor
    w2_q: Tensor
    w2_sf: Tensor


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


def stored(x: Tensor) -> Tensor:
    """UE8M0 scales and packed e2m1 codes, which a checkpoint has dtypes of its own for, as the bytes they are."""
    return x.view(torch.uint8) if x.dtype in (torch.float8_e8m0fnu, torch.int8) else x


def _take(state: Mapping[str, Tensor], prefix: str, name: str, *shape: int) -> Tensor:
    if prefix + name not in state:
        raise ValueError(f"state: expected {prefix + name}, got only {sorted(state)[:4]} ...")
    found = state[prefix + name]  # once: it may be made when asked for
    if found.shape != shape:
        raise ValueError(f"state: expected {prefix + name} {shape}, got {tuple(found.shape)}")
    return stored(found)
