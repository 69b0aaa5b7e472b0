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
            found[field] = tensor
        return cls(**found)  # type: ignore[arg-type]
