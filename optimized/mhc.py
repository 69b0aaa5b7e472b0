"""Fast hyper-connections on four streams; the contract is `reference/mhc.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_positive, expect_shape
from deeptwin.reference.config import MhcConfig

from .providers import deep_gemm, packed, tile_kernels

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


def mhc_expand_tile_kernels(x_tm: Tensor, *, config: MhcConfig) -> tuple[Tensor, Tensor]:
    """`mhc_expand` by `expand_to_mhc_fwd` of TileKernels 2.1.0 (SM90, SM100); the one-hot coefficients are made here.

    Layout: rows are packed if they are not. Copies: launches repeat, and no token depends on its batch.

    Raises:
        TypeError: x_tm is not bf16, fp16 or fp32.
        ValueError: x_tm has not two axes.
        NotImplementedError: no TileKernels 2.x, another dtype than bf16, or no token.
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_dtype("x_tm", x_tm, *STORAGE)
    if x_tm.dtype is not torch.bfloat16 or not dims["t"]:
        raise NotImplementedError(f"x_tm: expected tokens in bfloat16, got {dims['t']} in {x_tm.dtype}")
    library = tile_kernels()
    stream_tnm = x_tm.new_empty(dims["t"], config.streams, dims["m"])
    library.mhc.expand_to_mhc_fwd(packed(x_tm), stream_tnm)
    pre_tn = torch.zeros(stream_tnm.shape[:2], dtype=torch.float32, device=x_tm.device)
    pre_tn[:, 0] = 1
    return stream_tnm, pre_tn


def mhc_apply_tile_kernels(pre_tn: Tensor, stream_tnm: Tensor) -> Tensor:
    """`mhc_apply` by `mhc_pre_apply_mix_fwd` of TileKernels 2.1.0 (SM90, SM100).

    Layout: tensors are packed if they are not. Launches repeat, and no token depends on its batch.

    Raises:
        TypeError: the stream is not bf16, pre_tn not float32.
        ValueError: shapes disagree.
        NotImplementedError: no TileKernels 2.x, not four streams of 128·n channels, or no token.
    """
    dims = _stream_dims(stream_tnm)
    _check_coefficients(dims, pre_tn=pre_tn)
    _expect_wide(dims)
    return _read(tile_kernels(), pre_tn, stream_tnm)


def mhc_sinkhorn_tile_kernels(logits_tnn: Tensor, *, iters: int, eps: float) -> Tensor:
    """`mhc_sinkhorn` by `mhc_sinkhorn_fwd` of TileKernels 2.1.0 (SM90, SM100), which has our order of steps.

    Layout: as `mhc_apply_tile_kernels`. Launches repeat, and no matrix depends on its batch.

    Raises:
        TypeError: the logits are not float32.
        ValueError: the matrices are not square; iters is below 1; eps is not positive.
        NotImplementedError: no TileKernels 2.x, the matrices are not 4 x 4, or there is none.
    """
    dims: dict[str, int] = {}
    expect_shape("logits_tnn", logits_tnn, "tnn", dims)
    expect_dtype("logits_tnn", logits_tnn, torch.float32)
    expect_positive("iters", iters)
    expect_positive("eps", eps)
    _expect_four("logits_tnn", dims["n"])
    if not dims["t"]:
        raise NotImplementedError(f"logits_tnn: expected a matrix, got shape {tuple(logits_tnn.shape)}")
    library = tile_kernels()
    comb_tnn = torch.empty(logits_tnn.shape, dtype=torch.float32, device=logits_tnn.device)
    library.mhc.mhc_sinkhorn_fwd(packed(logits_tnn), comb_tnn, iters, eps)
    return comb_tnn


def mhc_mixes_tile_kernels(stream_tnm: Tensor, site: MhcSite, *, config: MhcConfig) -> tuple[Tensor, Tensor, Tensor]:
    """`mhc_mixes` by three functions of TileKernels 2.1.0 (SM90, SM100) behind our own projection, which it has not:
    `mhc_reduce_partials_and_rmsnorm_fwd`, `mhc_pre_split_mixes_fwd` and `mhc_sinkhorn_fwd`.

    Layout: partial sums are turned to [split, token, weight] and added in the order of the splits. Launches repeat, and
    no token depends on its batch.

    Raises:
        TypeError: the stream is not bf16, a weight not float32.
        ValueError: shapes disagree with each other or with `config`.
        NotImplementedError: no TileKernels 2.x, not four streams, or no token.
    """
    dims = _stream_dims(stream_tnm, config)
    _check_site(site, dims, config.coefficients, 3)
    _expect_tokens(dims)
    library = tile_kernels()
    return _gated(library, *_partial_sums(stream_tnm, site), site, config, dims)


def mhc_post_tile_kernels(stream_tnm: Tensor, y_tm: Tensor, post_tn: Tensor, comb_tnn: Tensor) -> Tensor:
    """`mhc_post` by `mhc_post_fwd` of TileKernels 2.1.0 (SM90, SM100), which adds in our order.

    Layout: as `mhc_apply_tile_kernels`, as one sequence. Launches repeat, and no token depends on its batch.

    Raises:
        TypeError: the stream or y_tm is not bf16, a coefficient not float32.
        ValueError: shapes disagree.
        NotImplementedError: no TileKernels 2.x, not four streams of 128·n channels, or no token.
    """
    dims = _stream_dims(stream_tnm)
    expect_shape("y_tm", y_tm, "tm", dims)
    expect_dtype("y_tm", y_tm, torch.bfloat16)
    _check_coefficients(dims, post_tn=post_tn, comb_tnn=comb_tnn)
    _expect_wide(dims)
    return _written(tile_kernels(), stream_tnm, y_tm, post_tn, comb_tnn)


def mhc_boundary_tile_kernels(
    stream_tnm: Tensor,
    y_tm: Tensor,
    pre_tn: Tensor,
    post_tn: Tensor,
    comb_tnn: Tensor,
    site: MhcSite,
    *,
    config: MhcConfig,
) -> tuple[Tensor, ...]:
    """`mhc_boundary` of the schedule of V4 by TileKernels 2.1.0 (SM90, SM100): `mhc_post_fwd`, our projection, then
    `mhc_pre_big_fuse_fwd`, which keeps the coefficients that it reads with to itself; they come as in
    `mhc_mixes_tile_kernels`.

    Layout: as `mhc_apply_tile_kernels`. Launches repeat, and no token depends on its batch.

    Raises:
        TypeError: the stream or y_tm is not bf16, a coefficient or weight not float32.
        ValueError: shapes disagree with each other or with `config`.
        NotImplementedError: no TileKernels 2.x, a shifted schedule, not four streams of 128·n channels, or no token.
    """
    dims = _stream_dims(stream_tnm, config)
    expect_shape("y_tm", y_tm, "tm", dims)
    expect_dtype("y_tm", y_tm, torch.bfloat16)
    _check_coefficients(dims, pre_tn=pre_tn, post_tn=post_tn, comb_tnn=comb_tnn)
    _check_site(site, dims, config.coefficients, 3)
    _expect_wide(dims)
    if config.shifted:
        raise NotImplementedError("config: expected shifted=False, the fused kernel reads with its own coefficients")
    library, (t, n, m) = tile_kernels(), stream_tnm.shape
    new_tnm = _written(library, stream_tnm, y_tm, post_tn, comb_tnn)
    products, squares = _partial_sums(new_tnm, site)
    next_post_tn, next_comb_tx = products.new_empty(t, n), products.new_empty(t, n * n)
    x_tm = new_tnm.new_empty(t, m)
    library.mhc.mhc_pre_big_fuse_fwd(
        products,
        squares,
        packed(site.scale_z),
        packed(site.base_w),
        new_tnm,
        next_post_tn,
        next_comb_tx,
        x_tm,
        config.norm_eps,
        config.eps,
        config.eps,
        config.post_scale,
        config.sinkhorn_iters,
        n_splits=len(products),
    )
    next_pre_tn = _gated(library, products, squares, site, config, dims)[0]
    return new_tnm, x_tm, next_pre_tn, next_post_tn, next_comb_tx.view(t, n, n)


def mhc_head_tile_kernels(stream_tnm: Tensor, site: MhcSite, *, config: MhcConfig) -> Tensor:
    """`mhc_head` by TileKernels 2.1.0 (SM90, SM100) behind our own projection: `mhc_reduce_partials_and_rmsnorm_fwd`,
    `mhc_head_compute_mix_fwd` and `mhc_pre_apply_mix_fwd`.

    Layout: as `mhc_mixes_tile_kernels`. Launches repeat, and no token depends on its batch.

    Raises:
        TypeError: the stream is not bf16, a weight not float32.
        ValueError: shapes disagree; `config` is shifted.
        NotImplementedError: no TileKernels 2.x, not four streams of 128·n channels, or no token.
    """
    if config.shifted:
        raise ValueError("config: expected shifted=False for a head, got True")
    dims = _stream_dims(stream_tnm, config)
    _check_site(site, dims, config.streams, 1)
    _expect_wide(dims)
    library = tile_kernels()
    mixed_tn = _normalised(library, *_partial_sums(stream_tnm, site), config, dims)
    pre_tn = torch.empty_like(mixed_tn)
    library.mhc.mhc_head_compute_mix_fwd(mixed_tn, packed(site.scale_z), packed(site.base_w), pre_tn, config.eps)
    return _read(library, pre_tn, stream_tnm)


def _expect_tokens(dims: dict[str, int]) -> None:
    if not dims["t"]:
        raise NotImplementedError("stream_tnm: expected a token, got none")


def _expect_wide(dims: dict[str, int]) -> None:
    _expect_tokens(dims)
    if dims["m"] % 128:
        raise NotImplementedError(f"stream_tnm: expected 128·n channels, got {dims['m']}")


def _read(library: Any, pre_tn: Tensor, stream_tnm: Tensor) -> Tensor:
    x_tm = torch.empty(stream_tnm.shape[::2], dtype=torch.bfloat16, device=stream_tnm.device)
    library.mhc.mhc_pre_apply_mix_fwd(packed(stream_tnm), packed(pre_tn), x_tm)
    return x_tm


def _written(library: Any, stream_tnm: Tensor, y_tm: Tensor, post_tn: Tensor, comb_tnn: Tensor) -> Tensor:
    rows = (packed(y_tm)[None], packed(stream_tnm)[None], packed(post_tn)[None, :, :, None], packed(comb_tnn)[None])
    new_tnm: Tensor = library.mhc.mhc_post_fwd(*rows)[0]
    return new_tnm


def _partial_sums(stream_tnm: Tensor, site: MhcSite) -> tuple[Tensor, Tensor]:
    """Our products [split, t, w] and square sums [split, t]."""
    from deeptwin.kernels.triton_ops import mhc as kernels

    partial = kernels.mhc_partials(stream_tnm, site.fn_wx)
    return partial[:, :-1].transpose(1, 2).contiguous(), partial[:, -1].contiguous()


def _normalised(library: Any, products: Tensor, squares: Tensor, config: MhcConfig, dims: dict[str, int]) -> Tensor:
    splits, t, w = products.shape
    mixed_tw, sums, square = products.new_empty(t, w), products.new_empty(t, 1, w), products.new_empty(t, 1)
    library.mhc.mhc_reduce_partials_and_rmsnorm_fwd(
        products[:, :, None], squares[:, :, None], sums, square, mixed_tw, dims["x"], config.norm_eps, splits
    )
    return mixed_tw


def _gated(
    library: Any, products: Tensor, squares: Tensor, site: MhcSite, config: MhcConfig, dims: dict[str, int]
) -> tuple[Tensor, Tensor, Tensor]:
    t, n = dims["t"], dims["n"]
    mixed_tw = _normalised(library, products, squares, config, dims)
    pre_tn, post_tn, logits_tx = (mixed_tw.new_empty(t, width) for width in (n, n, n * n))
    weights = packed(site.scale_z), packed(site.base_w)
    library.mhc.mhc_pre_split_mixes_fwd(mixed_tw, *weights, pre_tn, post_tn, logits_tx, config.post_scale, config.eps)
    comb_tnn = mixed_tw.new_empty(t, n, n)
    library.mhc.mhc_sinkhorn_fwd(logits_tx.view(t, n, n), comb_tnn, config.sinkhorn_iters, config.eps)
    return pre_tn, post_tn, comb_tnn


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
