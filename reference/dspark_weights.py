"""The drafting weights of a checkpoint of V4.1, `mtp.0.…` to the last module, as containers. Nothing here computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from .block_v41 import V41Stack
from .config import ROUTER_V41_DRAFT, DraftBlock
from .dspark_state import DraftConfig, DraftHead, DraftLayer, DraftMain, DraftModel
from .ffn_weights import MoeSizes, released_moe
from .weights import Csa2Weights, ExpertWeights, MhcSite, _take


def draft_config(config: V41Stack) -> DraftConfig:
    """What the draft layers of a model compute with.

    Raises:
        ValueError: the experts of the model are not quantised, or its streams are not read as the sub-layer before
            says.
    """
    draft, quantised = config.model.draft, config.ffn.quantised
    if quantised is None:
        raise ValueError("config: expected formats for quantised experts, got None")
    router = replace(ROUTER_V41_DRAFT, num_experts=draft.experts, topk=draft.topk)
    return DraftConfig(csa2=config.csa2, mhc=config.model.mhc, router=router, moe=quantised)


def draft_model(
    state: Mapping[str, Tensor], *, config: V41Stack, block: DraftBlock, temperatures: tuple[float, ...]
) -> DraftModel:
    """Take the tensors `mtp.0.attn.wq_a.weight` and so on, and the main model's `embed.weight` and `head.weight`.

    Raises:
        ValueError: a name is missing, or a shape is not the one of `config`; there is not one temperature for each
            position of a block.
    """
    model, draft = config.model, config.model.draft
    m, v, last = model.hidden, model.vocab_size, f"mtp.{draft.layers - 1}."
    return DraftModel(
        embed_vm=_take(state, "", "embed.weight", v, m),
        layers=tuple(_layer(state, i, config) for i in range(draft.layers)),
        head=DraftHead(
            norm_m=_take(state, last, "norm.weight", m),
            head_vm=_take(state, "", "head.weight", v, m),
            w1_vr=_take(state, last, "markov_head.embed.weight", v, draft.markov_rank),
            w2_vr=_take(state, last, "markov_head.head.weight", v, draft.markov_rank),
            confidence_x=_take(state, last, "confidence_head.proj.weight", 1, m + draft.markov_rank)[0],
            temperatures=temperatures,
        ),
        config=draft_config(config),
        block=block,
    )


def draft_main(state: Mapping[str, Tensor], *, config: V41Stack) -> DraftMain:
    """Take the tensors `mtp.0.main_proj.weight`, its scales, and `mtp.0.main_norm.weight`.

    Raises:
        ValueError: a name is missing, or a shape is not the one of `config`.
    """
    m, z = config.model.hidden, config.model.hidden * len(config.model.draft.target_layers)
    return DraftMain(
        proj_q=_take(state, "mtp.0.", "main_proj.weight", m, z),
        proj_sf=_take(state, "mtp.0.", "main_proj.scale", -(-m // 32), -(-z // 32)),
        norm_m=_take(state, "mtp.0.", "main_norm.weight", m),
    )


def _layer(state: Mapping[str, Tensor], i: int, config: V41Stack) -> DraftLayer:
    """One draft layer; its attention is that of a layer behind the backbone's, under another name."""
    model, prefix, number = config.model, f"mtp.{i}.", config.model.num_layers + i
    names = [name for name in state if name.startswith(prefix + "attn")]
    attention = {f"layers.{number}.{name.removeprefix(prefix)}": state[name] for name in names}
    sizes = MoeSizes(
        hidden=model.hidden,
        experts=model.draft.experts,
        width=model.moe.width,
        shared=model.moe.shared_experts,
        image=True,
    )
    ffn = released_moe(state, prefix + "ffn.", sizes)
    if not isinstance(ffn.experts, ExpertWeights) or not isinstance(ffn.shared, ExpertWeights):
        raise ValueError(f"state: expected {prefix}ffn.experts.0.w1.scale beside its weight, got none")
    assert ffn.bias_e is not None  # no table was asked for
    return DraftLayer(
        attention=Csa2Weights.from_state_dict(attention, layer=number, config=config.csa2),
        attention_site=MhcSite.from_state_dict(state, prefix=prefix + "hc_attn_", config=model.mhc),
        ffn_site=MhcSite.from_state_dict(state, prefix=prefix + "hc_ffn_", config=model.mhc),
        ffn_norm_m=_take(state, prefix, "ffn_norm.weight", model.hidden),
        gate_em=ffn.gate_em,
        bias_e=ffn.bias_e,
        experts=ffn.experts,
        shared=ffn.shared,
    )
