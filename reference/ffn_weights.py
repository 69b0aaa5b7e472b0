"""Containers: the feed-forward weights of a block, plain or quantised, with their names. Nothing here computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .presets import V3Config, V4Config
from .weights import ExpertWeights, _take, stored


@dataclass(frozen=True, kw_only=True, eq=False)
class GatedWeights:
    """Plain weights of one gated network: gate above up, and down."""

    w13_im: Tensor
    w2_mf: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainExperts:
    """Plain weights of routed experts: gate above up, and down."""

    w13_eim: Tensor
    w2_emf: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class MoeWeights:
    """A router and its experts; a router has a bias or a table of token ids, and in V4.1 a bias for images too."""

    gate_em: Tensor
    bias_e: Tensor | None
    table_vk: Tensor | None
    experts: PlainExperts | ExpertWeights
    shared: GatedWeights | ExpertWeights
    bias_vl_e: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.bias_e is None) == (self.table_vk is None):
            raise ValueError(
                f"bias_e: expected either a bias or a table, got {'no' if self.bias_e is None else 'both'}"
            )
        if isinstance(self.experts, PlainExperts) != isinstance(self.shared, GatedWeights):
            raise ValueError("shared: expected plain or quantised weights as for the experts, got the other")


@dataclass(frozen=True, kw_only=True)
class MoeSizes:
    """Sizes of a router and its experts as a released checkpoint of V4 or V4.1 stores them."""

    hidden: int
    experts: int
    width: int
    shared: int  # experts that see every token, stored as one
    table: tuple[int, int] | None = None  # vocabulary and experts of a token, where a table routes
    image: bool = False  # a second bias for image tokens


def gated_weights(state: Mapping[str, Tensor], prefix: str, m: int, f: int) -> GatedWeights:
    """A gated network stored as three matrices `prefix + "gate_proj.weight"` and so on."""
    gate, up = (_take(state, prefix, f"{name}_proj.weight", f, m) for name in ("gate", "up"))
    return GatedWeights(w13_im=torch.cat([gate, up]), w2_mf=_take(state, prefix, "down_proj.weight", m, f))


def moe_weights(state: Mapping[str, Tensor], prefix: str, config: V3Config | V4Config, *, table: bool) -> MoeWeights:
    """A router and plain experts under the names of transformers' modules, or of checkpoints of V3.

    Raises:
        ValueError: a name is missing, or a shape is not the one of `config`.
    """
    m, f, e = config.hidden, config.expert_width, config.router.num_experts
    topk, shared = config.router.topk, config.shared_experts * f
    return MoeWeights(
        gate_em=_take(state, prefix, "gate.weight", e, m),
        bias_e=None if table else _take(state, prefix, "gate.e_score_correction_bias", e),
        table_vk=_take(state, prefix, "gate.tid2eid", config.vocab_size, topk) if table else None,
        experts=_stacked(state, prefix + "experts.", e, m, f),
        shared=gated_weights(state, prefix + "shared_experts.", m, shared),
    )


def _stacked(state: Mapping[str, Tensor], prefix: str, e: int, m: int, f: int) -> PlainExperts:
    if prefix + "gate_up_proj" in state:
        return PlainExperts(
            w13_eim=_take(state, prefix, "gate_up_proj", e, 2 * f, m),
            w2_emf=_take(state, prefix, "down_proj", e, m, f),
        )
    each = [gated_weights(state, f"{prefix}{expert}.", m, f) for expert in range(e)]
    return PlainExperts(
        w13_eim=torch.stack([one.w13_im for one in each]), w2_emf=torch.stack([one.w2_mf for one in each])
    )


def released_moe(state: Mapping[str, Tensor], prefix: str, sizes: MoeSizes) -> MoeWeights:
    """A router and its experts under the names of released checkpoints, `prefix + "experts.0.w1.weight"` and so on.

    Experts with a scale beside each matrix are quantised, others plain.

    Raises:
        ValueError: a name is missing, or a shape is not the one of `sizes`.
    """
    e, m = sizes.experts, sizes.hidden
    each = [_released(state, f"{prefix}experts.{expert}.", m, sizes.width) for expert in range(e)]
    parts = [torch.stack(part) for part in zip(*each, strict=True)]
    shared = _released(state, prefix + "shared_experts.", m, sizes.shared * sizes.width)
    plain = len(parts) == 2
    table = sizes.table
    return MoeWeights(
        gate_em=_take(state, prefix, "gate.weight", e, m),
        bias_e=_take(state, prefix, "gate.bias", e) if table is None else None,
        bias_vl_e=_take(state, prefix, "gate.bias_vl", e) if sizes.image else None,
        table_vk=None if table is None else _take(state, prefix, "gate.tid2eid", *table),
        experts=PlainExperts(w13_eim=parts[0], w2_emf=parts[1])
        if plain
        else ExpertWeights(w13_q=parts[0], w13_sf=parts[1], w2_q=parts[2], w2_sf=parts[3]),
        shared=GatedWeights(w13_im=shared[0], w2_mf=shared[1])
        if plain
        else ExpertWeights(w13_q=shared[0], w13_sf=shared[1], w2_q=shared[2], w2_sf=shared[3]),
    )


def _released(state: Mapping[str, Tensor], prefix: str, m: int, f: int) -> list[Tensor]:
    """W1 above W3, and W2; with scales the codes and scales of each. Packed codes are half as wide."""
    found = []
    for names, rows, columns in ((("w1", "w3"), f, m), (("w2",), m, f)):
        for kind in ("weight", "scale") if prefix + "w1.scale" in state else ("weight",):
            parts = [state.get(f"{prefix}{name}.{kind}") for name in names]
            if any(part is None for part in parts):
                raise ValueError(f"state: expected {prefix}{names[0]}.{kind}, got only {sorted(state)[:4]} ...")
            joined = torch.cat([stored(part) for part in parts if part is not None])
            fits = (len(names) * rows, columns), (len(names) * rows, columns // 2)
            if kind == "weight" and joined.shape not in fits:
                raise ValueError(f"state: expected {prefix}{names[0]}.weight {fits[0]}, got {tuple(joined.shape)}")
            found.append(joined)
    return found
