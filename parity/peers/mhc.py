"""TileKernels' torch functions and transformers' V4 modules as peers of `reference/mhc.py`."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from deeptwin.reference.config import MhcConfig
from deeptwin.reference.weights import MhcSite


def tile_kernels_apply(pre_tn: Tensor, stream_tnm: Tensor) -> Tensor:
    """`mhc_pre_apply_mix_ref`: fp32 products, summed, rounded."""
    from tile_kernels.torch.mhc import mhc_pre_apply_mix_ref

    return mhc_pre_apply_mix_ref(stream_tnm, pre_tn[..., None])


def tile_kernels_sinkhorn(logits_tnn: Tensor, *, iters: int, eps: float) -> Tensor:
    """`sinkhorn_normalize_ref` in the dtype of its input."""
    from tile_kernels.torch.mhc import sinkhorn_normalize_ref

    return sinkhorn_normalize_ref(logits_tnn, iters, eps)


def tile_kernels_mixes(stream_tnm: Tensor, site: MhcSite, *, config: MhcConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The projection with its norm, the split into three kinds, and Sinkhorn, each by its own function."""
    from tile_kernels.torch import mhc

    n = config.streams
    projected = mhc.mhc_pre_norm_fn_ref(stream_tnm[None], site.fn_wx, None, config.norm_eps)
    pre, post, logits = mhc.mhc_pre_split_mixes_ref(
        projected, site.scale_z, site.base_w, n, config.post_scale, config.eps
    )
    comb = mhc.sinkhorn_normalize_ref(logits[0], config.sinkhorn_iters, config.eps)
    return pre[0, ..., 0], post[0, ..., 0], comb


def tile_kernels_post(stream_tnm: Tensor, y_tm: Tensor, post_tn: Tensor, comb_tnn: Tensor) -> Tensor:
    """`mhc_post_ref`: fp32, rounded once."""
    from tile_kernels.torch.mhc import mhc_post_ref

    return mhc_post_ref(y_tm[None], stream_tnm[None], post_tn[None, ..., None], comb_tnn[None])[0]


def tile_kernels_expand(x_tm: Tensor, *, config: MhcConfig) -> tuple[Tensor, Tensor]:
    """`expand_to_mhc_ref`, and the one-hot coefficients, which have no function of their own."""
    from tile_kernels.torch.mhc import expand_to_mhc_ref

    first = torch.eye(config.streams)[:1]
    return expand_to_mhc_ref(x_tm, config.streams), first.repeat(x_tm.shape[0], 1)


def transformers_mixes(stream_tnm: Tensor, site: MhcSite, *, config: MhcConfig) -> tuple[Tensor, Tensor, Tensor]:
    """`DeepseekV4HyperConnection` in fp32, which returns sum_j pre_j R_j and not pre: solved for here."""
    post, comb, collapsed = _connection(site, config)(stream_tnm[None].float())
    streams = stream_tnm.double().transpose(1, 2)
    pre = torch.linalg.lstsq(streams, collapsed[0].double()[..., None]).solution[..., 0]
    return pre.float(), post[0].detach(), comb[0].detach()


def transformers_post(stream_tnm: Tensor, y_tm: Tensor, post_tn: Tensor, comb_tnn: Tensor) -> Tensor:
    """The attention half of `DeepseekV4DecoderLayer.forward` in fp32, rounded once; its MLP half is switched off."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4DecoderLayer

    rows = stream_tnm[None].float()
    still = torch.eye(rows.shape[2]).expand(1, rows.shape[1], -1, -1)
    layer = DeepseekV4DecoderLayer.__new__(DeepseekV4DecoderLayer)
    torch.nn.Module.__init__(layer)
    layer.attn_hc = lambda streams: (post_tn[None], comb_tnn[None], y_tm[None].float())
    layer.self_attn = lambda x, **_: (x, None)
    layer.ffn_hc = lambda streams: (torch.zeros_like(post_tn[None]), still, y_tm[None].float())
    layer.input_layernorm = layer.post_attention_layernorm = lambda x: x
    layer.mlp = lambda x, **_: x
    return layer(rows)[0].bfloat16()


def transformers_head(stream_tnm: Tensor, site: MhcSite, *, config: MhcConfig) -> Tensor:
    """`DeepseekV4HyperHead`."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperHead

    head = DeepseekV4HyperHead(_v4_config(site, config))
    _fill(head, hc_fn=site.fn_wx, hc_base=site.base_w, hc_scale=site.scale_z)
    return head(stream_tnm[None])[0].detach()


def _connection(site: MhcSite, config: MhcConfig) -> torch.nn.Module:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    if config.post_scale != 2.0:
        raise NotImplementedError(f"config: expected post_scale 2, got {config.post_scale}")
    module = DeepseekV4HyperConnection(_v4_config(site, config))
    return _fill(module, fn=site.fn_wx, base=site.base_w, scale=site.scale_z)


def _v4_config(site: MhcSite, config: MhcConfig) -> SimpleNamespace:
    return SimpleNamespace(
        hc_mult=config.streams,
        hc_sinkhorn_iters=config.sinkhorn_iters,
        hc_eps=config.eps,
        rms_norm_eps=config.norm_eps,
        hidden_size=site.fn_wx.shape[1] // config.streams,
    )


def _fill(module: torch.nn.Module, **weights: Tensor) -> torch.nn.Module:
    for name, weight in weights.items():
        setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))
    return module
