"""Fast hyper-connections on four streams; the contract is `reference/mhc.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_positive, expect_shape
from deeptwin.reference.config import MhcConfig

from .providers import deep_gemm

if TYPE_CHECKING:
    from deeptwin.kernels.triton_ops.mhc import Gates
    from deeptwin.reference.weights import MhcSite

STORAGE = (torch.bfloat16, torch.float16, torch.float32)
TF32_SPLITS = 16
COEFFICIENTS = (("pre_tn", "tn"), ("post_tn", "tn"), ("comb_tnn", "tnn"))


def mhc_expand_triton(
    x_tm: Tensor, *, config: MhcConfig, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """`reference.mhc.mhc_expand`, for any number of streams.

    Raises:
        TypeError: x_tm is not bf16, fp16 or fp32; an `out` buffer has another dtype.
        ValueError: x_tm has not two axes; an `out` buffer does not fit.
    """
    expect_shape("x_tm", x_tm, "tm", {})
    expect_dtype("x_tm", x_tm, *STORAGE)
    from deeptwin.kernels.triton_ops import mhc as kernels

    return kernels.mhc_expand(x_tm, streams=config.streams, out=out)


def mhc_apply_triton(pre_tn: Tensor, stream_tnm: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`reference.mhc.mhc_apply` to bf16.

    Raises:
        TypeError: the stream is not bf16, pre_tn not float32; `out` has another dtype.
        ValueError: shapes disagree; `out` does not fit.
        NotImplementedError: there are not four streams.
    """
    dims = _stream_dims(stream_tnm)
    _check_coefficients(dims, pre_tn=pre_tn)
    from deeptwin.kernels.triton_ops import mhc as kernels

    return kernels.mhc_read(pre_tn, stream_tnm, out=out)


def mhc_tap_triton(stream_tnm: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`reference.mhc.mhc_tap` to bf16.

    Raises:
        TypeError: the stream is not bf16; `out` has another dtype.
        ValueError: stream_tnm has not three axes; `out` does not fit.
        NotImplementedError: there are not four streams.
    """
    _stream_dims(stream_tnm)
    from deeptwin.kernels.triton_ops import mhc as kernels

    return kernels.mhc_read(None, stream_tnm, out=out)


def mhc_sinkhorn_triton(logits_tnn: Tensor, *, iters: int, eps: float, out: Tensor | None = None) -> Tensor:
    """`reference.mhc.mhc_sinkhorn`.

    Raises:
        TypeError: the logits are not float32; `out` has another dtype.
        ValueError: the matrices are not square; iters is below 1; eps is not positive; `out` does not fit.
        NotImplementedError: the matrices are not 4 x 4.
    """
    dims: dict[str, int] = {}
    expect_shape("logits_tnn", logits_tnn, "tnn", dims)
    expect_dtype("logits_tnn", logits_tnn, torch.float32)
    expect_positive("iters", iters)
    expect_positive("eps", eps)
    _expect_four("logits_tnn", dims["n"])
    from deeptwin.kernels.triton_ops import mhc as kernels

    return kernels.mhc_sinkhorn(logits_tnn, iters=iters, eps=eps, out=out)


def mhc_mixes_triton(
    stream_tnm: Tensor, site: MhcSite, *, config: MhcConfig, out: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.mhc.mhc_mixes`.

    Raises:
        TypeError: the stream is not bf16, a weight not float32; an `out` buffer has another dtype.
        ValueError: shapes disagree with each other or with `config`; an `out` buffer does not fit.
        NotImplementedError: there are not four streams.
    """
    _check_site(site, _stream_dims(stream_tnm, config), config.coefficients, 3)
    from deeptwin.kernels.triton_ops import mhc as kernels

    return kernels.mhc_mixes(stream_tnm, site.fn_wx, site.scale_z, site.base_w, _gates(config), out=out)


def mhc_mixes_deep_gemm(stream_tnm: Tensor, site: MhcSite, *, config: MhcConfig) -> tuple[Tensor, Tensor, Tensor]:
    """`mhc_mixes` by DeepGEMM 2.5.0's product in TF32 (SM90), to whose nearest number `fn` is rounded, always in 16
    splits, which are added in order; gates and Sinkhorn are those of `mhc_mixes_triton`.

    Raises:
        TypeError: as `mhc_mixes_triton`.
        ValueError: as `mhc_mixes_triton`.
        NotImplementedError: no DeepGEMM, no token, there are not four streams, or channels of all streams that are not
            64·n, n from 16 up.
    """
    dims = _stream_dims(stream_tnm, config)
    _check_site(site, dims, config.coefficients, 3)
    if not dims["t"] or dims["x"] % 64 or dims["x"] < 64 * TF32_SPLITS:
        raise NotImplementedError(f"stream_tnm: expected tokens of 64·n channels, n from 16 up, got {dims}")
    library = deep_gemm()
    stream_tx, fn_wx = stream_tnm.flatten(1).contiguous(), site.fn_wx.contiguous()
    product_ptw, squares_pt = (
        fn_wx.new_empty(TF32_SPLITS, dims["t"], dims["w"]),
        fn_wx.new_empty(TF32_SPLITS, dims["t"]),
    )
    library.tf32_hc_prenorm_gemm(stream_tx, fn_wx, product_ptw, squares_pt, num_splits=TF32_SPLITS)
    from deeptwin.kernels.triton_ops import mhc as kernels

    partial_pwt = torch.cat([product_ptw.transpose(1, 2), squares_pt[:, None]], 1)
    return kernels.mhc_gates(partial_pwt, site.scale_z, site.base_w, dims["m"], _gates(config))


def mhc_post_triton(
    stream_tnm: Tensor, y_tm: Tensor, post_tn: Tensor, comb_tnn: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """`reference.mhc.mhc_post` to bf16.

    Raises:
        TypeError: the stream or y_tm is not bf16, a coefficient not float32; `out` has another dtype.
        ValueError: shapes disagree; `out` does not fit.
        NotImplementedError: there are not four streams.
    """
    dims = _stream_dims(stream_tnm)
    expect_shape("y_tm", y_tm, "tm", dims)
    expect_dtype("y_tm", y_tm, torch.bfloat16)
    _check_coefficients(dims, post_tn=post_tn, comb_tnn=comb_tnn)
    from deeptwin.kernels.triton_ops import mhc as kernels

    return kernels.mhc_post(stream_tnm, y_tm, post_tn, comb_tnn, out=out)


def mhc_boundary_triton(
    stream_tnm: Tensor,
    y_tm: Tensor,
    pre_tn: Tensor,
    post_tn: Tensor,
    comb_tnn: Tensor,
    site: MhcSite,
    *,
    config: MhcConfig,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """`reference.mhc.mhc_boundary`, with the bits of the single steps.

    Raises:
        TypeError: the stream or y_tm is not bf16, a coefficient or weight not float32; an `out` buffer has another
            dtype.
        ValueError: shapes disagree with each other or with `config`; an `out` buffer does not fit.
        NotImplementedError: there are not four streams.
    """
    dims = _stream_dims(stream_tnm, config)
    expect_shape("y_tm", y_tm, "tm", dims)
    expect_dtype("y_tm", y_tm, torch.bfloat16)
    _check_coefficients(dims, pre_tn=pre_tn, post_tn=post_tn, comb_tnn=comb_tnn)
    _check_site(site, dims, config.coefficients, 3)
    from deeptwin.kernels.triton_ops import mhc as kernels

    read_tn = pre_tn if config.shifted else None
    weights = (site.fn_wx, site.scale_z, site.base_w)
    return kernels.mhc_boundary(stream_tnm, y_tm, read_tn, post_tn, comb_tnn, *weights, _gates(config), out=out)


def mhc_head_triton(stream_tnm: Tensor, site: MhcSite, *, config: MhcConfig, out: Tensor | None = None) -> Tensor:
    """`reference.mhc.mhc_head` to bf16.

    Raises:
        TypeError: the stream is not bf16, a weight not float32; `out` has another dtype.
        ValueError: shapes disagree; `config` is shifted; `out` does not fit.
        NotImplementedError: there are not four streams.
    """
    if config.shifted:
        raise ValueError("config: expected shifted=False for a head, got True")
    _check_site(site, _stream_dims(stream_tnm, config), config.streams, 1)
    from deeptwin.kernels.triton_ops import mhc as kernels

    weights = (site.fn_wx, site.scale_z, site.base_w)
    return kernels.mhc_read(kernels.mhc_head_weights(stream_tnm, *weights, _gates(config)), stream_tnm, out=out)


def _stream_dims(stream_tnm: Tensor, config: MhcConfig | None = None) -> dict[str, int]:
    dims: dict[str, int] = {} if config is None else {"n": config.streams}
    expect_shape("stream_tnm", stream_tnm, "tnm", dims)
    expect_dtype("stream_tnm", stream_tnm, torch.bfloat16)
    _expect_four("stream_tnm", dims["n"])
    return dims


def _expect_four(name: str, streams: int) -> None:
    if streams != 4:
        raise NotImplementedError(f"{name}: expected 4 streams, got {streams}")


def _check_coefficients(dims: dict[str, int], **given: Tensor) -> None:
    for name, letters in COEFFICIENTS:
        if name in given:
            expect_shape(name, given[name], letters, dims)
            expect_dtype(name, given[name], torch.float32)


def _check_site(site: MhcSite, dims: dict[str, int], outputs: int, kinds: int) -> None:
    dims |= {"w": outputs, "z": kinds, "x": dims["n"] * dims["m"]}
    for name, letters in (("fn_wx", "wx"), ("scale_z", "z"), ("base_w", "w")):
        expect_shape(f"site.{name}", getattr(site, name), letters, dims)
        expect_dtype(f"site.{name}", getattr(site, name), torch.float32)


def _gates(config: MhcConfig) -> Gates:
    from deeptwin.kernels.triton_ops.mhc import Gates

    return Gates(iters=config.sinkhorn_iters, eps=config.eps, norm_eps=config.norm_eps, post_scale=config.post_scale)
