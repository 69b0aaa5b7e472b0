"""A module in the place of `tile_kernels`: its CUDA functions made of the torch references of the same distribution."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def stand_in() -> ModuleType:
    """The functions that the adapters call, which assert what the library asks for."""
    module = ModuleType("tile_kernels")
    for name, functions in (
        ("config", (get_amax_clamp_for_quant,)),
        ("quant", (per_token_cast, cast_back, norm_forward, norm_forward_and_per_token_cast)),
        ("transform", (apply_rotary,)),
        ("moe", (moe_topk_gate_forward,)),
        ("engram", (engram_hash, fused_weight, engram_gate_fwd)),
    ):
        setattr(module, name, SimpleNamespace(**{function.__name__: function for function in functions}))
    module.quant.swiglu_forward = swiglu_forward
    module.quant.swiglu_forward_and_per_token_cast = swiglu_forward_and_per_token_cast
    mhc = (
        expand_to_mhc_fwd,
        mhc_post_fwd,
        mhc_sinkhorn_fwd,
        mhc_pre_apply_mix_fwd,
        mhc_reduce_partials_and_rmsnorm_fwd,
    )
    mhc += (mhc_pre_split_mixes_fwd, mhc_head_compute_mix_fwd, mhc_pre_big_fuse_fwd)
    module.mhc = SimpleNamespace(**{function.__name__: function for function in mhc})
    return module


def _torch(name: str) -> Any:
    return importlib.import_module(f"tile_kernels.torch.{name}")


def get_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool) -> float:
    return {("e4m3", False): 1e-4, ("e2m1", False): 6 * 2.0**-126, ("e2m1", True): 6 * 2.0**-9}[fmt, use_e4m3_sf]


def _packed_rows(sf: Tensor) -> Tensor:
    """fp32 powers of two as int32 of four exponents, the last filled with rubbish."""
    exponent = (sf.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    whole = torch.full((len(sf), -(-sf.shape[1] // 4) * 4), 0xEE, dtype=torch.uint8)
    whole[:, : sf.shape[1]] = exponent
    return whole.view(torch.int32)


def per_token_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
) -> tuple[Tensor, Tensor]:
    assert x.shape[1] % 64 == 0
    return _cast(x, fmt, num_per_channels, round_sf, use_packed_ue8m0, use_e4m3_sf)


def _cast(
    x: Tensor, fmt: str, group: int, round_sf: bool, use_packed_ue8m0: bool, use_e4m3_sf: bool = False
) -> tuple[Tensor, Tensor]:
    assert x.is_contiguous()
    codes, sf = _torch("cast").cast(x, fmt, (1, group), round_sf=round_sf, use_e4m3_sf=use_e4m3_sf)
    if use_e4m3_sf and not x.numel():
        sf = sf.to(torch.float8_e4m3fn)
    return codes, _packed_rows(sf) if use_packed_ue8m0 else sf.contiguous()


def cast_back(x: tuple[Tensor, Tensor], fmt: str, x_block_size: tuple[int, int]) -> Tensor:
    codes, sf = x
    assert codes.is_contiguous()
    assert sf.stride(1) == 1
    return _torch("cast").cast_back((codes, sf), fmt, x_block_size)


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, None, Tensor]:
    assert x.dtype is weight.dtype
    assert x.stride(0) % 16 == 0
    return _torch("norm").norm_forward_ref(x, weight, eps)[0], None, x


def norm_forward_and_per_token_cast(
    x: Tensor,
    weight: Tensor,
    eps: float,
    fmt: str,
    num_per_channels: int,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
) -> tuple[tuple[Tensor, Tensor], Tensor, None, Tensor]:
    y = norm_forward(x, weight, eps)[0]
    return _cast(y, fmt, num_per_channels, round_sf, use_packed_ue8m0), y, None, x


def apply_rotary(
    query: Tensor, cos_sin_cache: Tensor, positions: Tensor, interleaved: bool = False, conjugate: bool = False
) -> None:
    cos, sin = cos_sin_cache.chunk(2, -1)
    assert query.shape[-1] == cos_sin_cache.shape[1]
    rotated = _torch("rope").rotary_embedding_ref(
        query.float(), cos, sin, positions, interleaved=interleaved, conjugate=conjugate
    )
    query.copy_(rotated)


def swiglu_forward(x: Tensor, fmt: str, topk_weights: Tensor | None = None, clamp_value: float | None = None) -> Tensor:
    assert x.is_contiguous()
    y = _torch("swiglu").swiglu_forward(x, topk_weights=topk_weights, clamp_value=clamp_value)
    return y.to({"fp32": torch.float32, "bf16": torch.bfloat16}[fmt])


def swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    topk_weights: Tensor | None = None,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
) -> tuple[Tensor, Tensor]:
    y = swiglu_forward(x, "fp32", topk_weights, clamp_value)
    return _cast(y, fmt, num_per_channels, round_sf, use_packed_ue8m0)


def moe_topk_gate_forward(
    logits: Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert logits.is_contiguous()
    return _torch("topk").moe_topk_gate_forward(
        *(logits, num_topk, use_shared_as_routed, num_shared_experts, routed_scaling_factor, ep_rank, "sqrtsoftplus"),
        mask=mask,
        bias=bias,
        image_bias=image_bias,
        image_token_mask=image_token_mask,
    )


def engram_hash(ids: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor, image_token_mask: Tensor) -> Tensor:
    assert (sizes.dtype, offsets.dtype) == (torch.int32, torch.int32)
    return _torch("engram").engram_hash_ref(ids, multipliers, sizes, offsets, image_token_mask)


def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    return weight_hidden.float() * weight_embed.float()


def engram_gate_fwd(
    hidden_states: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool,
    image_token_mask: Tensor,
) -> tuple[Tensor]:
    """As the CUDA kernel has it: the torch reference takes sign(d), the kernel copies the sign."""
    x, key, value = hidden_states.float(), kv[:, :-1].float(), kv[:, -1:].float()
    rstd = [torch.rsqrt(y.square().mean(-1) + eps) for y in (x, key)]
    dot = (x * weight_fused * key).sum(-1) * rstd[0] * rstd[1] * x.shape[-1] ** -0.5
    gate = torch.copysign(dot.abs().clamp_min(clamp_value).sqrt(), dot).sigmoid()
    gated = (x + gate[..., None] * value).bfloat16()
    return (torch.where(image_token_mask[:, None, None], hidden_states, gated),)


def expand_to_mhc_fwd(x: Tensor, out: Tensor) -> None:
    assert x.is_contiguous()
    out.copy_(_torch("mhc").expand_to_mhc_ref(x, out.shape[1]))


def mhc_post_fwd(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    assert x.is_contiguous()
    assert comb_res_mix.is_contiguous()
    return _torch("mhc").mhc_post_ref(x, residual, post_layer_mix, comb_res_mix)


def mhc_sinkhorn_fwd(comb: Tensor, out: Tensor, repeat: int, eps: float) -> None:
    assert comb.is_contiguous()
    out.copy_(_torch("mhc").sinkhorn_normalize_ref(comb, repeat, eps))


def mhc_pre_apply_mix_fwd(x: Tensor, mix: Tensor, out: Tensor) -> None:
    out.copy_(_torch("mhc").mhc_pre_apply_mix_ref(x, mix[..., None]))


def mhc_reduce_partials_and_rmsnorm_fwd(
    products: Tensor,
    squares: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    out: Tensor,
    rms_group_size: int,
    rms_eps: float,
    n_splits: int,
) -> None:
    assert products.shape == (n_splits, *out_mul.shape)
    assert squares.shape == (n_splits, *sqrsum.shape)
    rms = (squares.sum(0) / rms_group_size + rms_eps).rsqrt()
    out.copy_(products.sum(0)[:, 0] * rms)


def mhc_pre_split_mixes_fwd(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    pre: Tensor,
    post: Tensor,
    comb: Tensor,
    post_mult: float,
    eps: float,
) -> None:
    parts = _torch("mhc").mhc_pre_split_mixes_ref(mixes[None], scale, base, pre.shape[1], post_mult, eps)
    for out, part in zip((pre, post, comb), parts, strict=True):
        out.copy_(part.reshape(out.shape))


def mhc_head_compute_mix_fwd(mixes: Tensor, scale: Tensor, base: Tensor, out: Tensor, eps: float) -> None:
    out.copy_(_torch("mhc").mhc_head_compute_mix_ref(mixes, scale, base, eps))


def mhc_pre_big_fuse_fwd(
    products: Tensor,
    squares: Tensor,
    scale: Tensor,
    base: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    out: Tensor,
    *numbers: float,
    n_splits: int,
) -> None:
    rms_eps, pre_eps, sinkhorn_eps, post_mult, repeat = numbers
    t, n, m = residual.shape
    mixes, pre, logits = products.new_empty(t, products.shape[2]), post.clone(), comb.clone()
    scratch = products.new_empty(t, 1, products.shape[2]), products.new_empty(t, 1)
    mhc_reduce_partials_and_rmsnorm_fwd(
        products[:, :, None], squares[:, :, None], *scratch, mixes, n * m, rms_eps, n_splits
    )
    mhc_pre_split_mixes_fwd(mixes, scale, base, pre, post, logits, post_mult, pre_eps)
    comb.copy_(_torch("mhc").sinkhorn_normalize_ref(logits.view(t, n, n), int(repeat), sinkhorn_eps).flatten(1))
    mhc_pre_apply_mix_fwd(residual, pre, out)


def partials(stream: Tensor, fn: Tensor) -> Tensor:
    """In the place of our projection, which needs a device: two splits of the flat stream, square sums last."""
    flat, (t, half) = stream.flatten(1).double(), (len(stream), fn.shape[1] // 2)
    parts = []
    for split in (slice(None, half), slice(half, None)):
        rows = flat[:, split]
        parts.append(torch.cat([rows @ fn[:, split].double().T, rows.square().sum(1, keepdim=True)], 1).T)
    return torch.stack(parts).float().view(2, -1, t)
