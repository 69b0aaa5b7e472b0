"""Manifold-constrained hyper-connections: n residual streams instead of one, mixed by coefficients of each token.

A sub-layer reads the streams through n weights `pre`, writes its output back through n weights `post`, and the streams
themselves are mixed by a nearly doubly stochastic matrix `comb` [input stream, output stream]:

    x        = sum_j pre[j] * stream[j]
    stream'  = post[o] * sublayer(norm(x)) + sum_i comb[i, o] * stream[i]

All three come from the stream by one projection. V4 reads with the `pre` that is computed from the very stream
(`shifted=False`); V4.1 with the one that the sub-layer before it computed, so that one pass over the stream suffices.

Where numbers are rounded: projection, square sum and Sinkhorn are fp32, `pre`, `post` and `comb` are stored in fp32, x
once in `dtype`. The rounding of stream' to `dtype` is the boundary: everything after it reads the rounded value.

Letters beside the project's own: w mixing coefficients, x = n * m values of a token's streams one after the other,
z kinds of coefficients. Source: v41-blocks.md section 2, v3-v32-v4.md section 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_positive, expect_shape
from .config import MhcConfig
from .numerics import CONTRACT, Numerics
from .weights import MhcCarry, MhcSite

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def mhc_expand(x_tm: Tensor, *, config: MhcConfig) -> tuple[Tensor, Tensor]:
    """The streams of a model's first layer, n copies of the embedding row, and the `pre` that reads the first of them.

    Shapes:
        x_tm: [t, m]; returns stream_tnm [t, n, m] and pre_tn fp32 [t, n].

    Rounding:
        none: copies, and a one without eps, so the first sub-layer reads the embedding row itself.

    Raises:
        TypeError: x_tm is not floating.
        ValueError: x_tm has not two axes.
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_dtype("x_tm", x_tm, *FLOATING)
    pre_tn = torch.zeros(dims["t"], config.streams, device=x_tm.device, dtype=torch.float32)
    pre_tn[:, 0] = 1
    return x_tm[:, None, :].repeat(1, config.streams, 1), pre_tn


def mhc_apply(
    pre_tn: Tensor, stream_tnm: Tensor, *, dtype: torch.dtype = torch.bfloat16, num: Numerics = CONTRACT
) -> Tensor:
    """Read the streams: what a sub-layer, or the final norm, gets.

    Math:
        x[t, m] = sum_j pre[t, j] * stream[t, j, m]

    Shapes:
        pre_tn: [t, n]; stream_tnm: [t, n, m]; returns [t, m].

    Rounding:
        one, to `dtype`. A kernel adds in fp32 in the order j = 0, 1, 2, 3.

    Raises:
        TypeError: stream_tnm is not floating; dtype is no storage dtype.
        ValueError: shapes disagree.
    """
    dims: dict[str, int] = {}
    expect_shape("stream_tnm", stream_tnm, "tnm", dims)
    expect_shape("pre_tn", pre_tn, "tn", dims)
    expect_dtype("stream_tnm", stream_tnm, *FLOATING)
    return num.store(num.einsum("tn,tnm->tm", num.wide(pre_tn), num.wide(stream_tnm)), dtype)


def mhc_tap(stream_tnm: Tensor, *, dtype: torch.dtype = torch.bfloat16, num: Numerics = CONTRACT) -> Tensor:
    """The mean stream, which the draft model reads at its target layers (after the update and after any Engram).

    Shapes:
        stream_tnm: [t, n, m]; returns [t, m].

    Rounding:
        one, to `dtype`.

    Raises:
        TypeError: stream_tnm is not floating; dtype is no storage dtype.
        ValueError: stream_tnm has not three axes.
    """
    dims: dict[str, int] = {}
    expect_shape("stream_tnm", stream_tnm, "tnm", dims)
    expect_dtype("stream_tnm", stream_tnm, *FLOATING)
    return num.store(num.sum(num.wide(stream_tnm), dim=1) / dims["n"], dtype)


def mhc_sinkhorn(logits_tnn: Tensor, *, iters: int, eps: float, num: Numerics = CONTRACT) -> Tensor:
    """Make a positive matrix nearly doubly stochastic by normalising columns and rows in turn.

    Math:
        C = softmax over the output stream + eps;  C /= column sum + eps;
        iters - 1 times: C /= row sum + eps;  C /= column sum + eps.

    Shapes:
        logits_tnn: [t, input, output]; returns [t, input, output].

    Rounding:
        one, to fp32, at return.

    Edges:
        columns end at S / (S + eps), rows only near one: on peaked logits they are still up to 8 % off after 20 steps.

    Raises:
        ValueError: the matrices are not square; iters is below 1; eps is not positive.
    """
    dims: dict[str, int] = {}
    expect_shape("logits_tnn", logits_tnn, "tnn", dims)
    expect_positive("iters", iters)
    expect_positive("eps", eps)
    logits_tnn = num.wide(logits_tnn)
    comb_tnn = torch.exp(logits_tnn - logits_tnn.amax(-1, keepdim=True))
    comb_tnn = comb_tnn / num.sum(comb_tnn, dim=-1, keepdim=True) + eps
    comb_tnn = comb_tnn / (num.sum(comb_tnn, dim=-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb_tnn = comb_tnn / (num.sum(comb_tnn, dim=-1, keepdim=True) + eps)
        comb_tnn = comb_tnn / (num.sum(comb_tnn, dim=-2, keepdim=True) + eps)
    return num.f32(comb_tnn)


def mhc_mixes(
    stream_tnm: Tensor, site: MhcSite, *, config: MhcConfig, num: Numerics = CONTRACT
) -> tuple[Tensor, Tensor, Tensor]:
    """The coefficients of one site: how to read the stream, how to write to it, how to mix it.

    Math:
        w[c] = (sum_x stream[x] fn[c, x]) * rsqrt(mean_x stream[x]^2 + norm_eps) * scale[kind of c] + base[c]
        pre = sigmoid(w[:n]) + eps;  post = post_scale * sigmoid(w[n:2n])
        comb = sinkhorn(w[2n:] as [input stream, output stream])

    Rounding:
        projection and square sum are fp32 numbers; pre_tn, post_tn and comb_tnn once to fp32.

    Edges:
        a zero stream leaves the coefficients of base alone, and so does one whose square sum overflows fp32 (|x| above
        about 1e18; under CONTRACT and RIVAL). A NaN spoils its own token. t = 0 gives empty tensors.

    Raises:
        TypeError: the stream is not floating; a weight is not float32.
        ValueError: shapes disagree with each other or with `config`.
    """
    n = config.streams
    w_tw = _projected(stream_tnm, site, n, config.coefficients, 3, config.norm_eps, num)
    kinds = torch.tensor([n, n, n * n], device=stream_tnm.device)
    w_tw = w_tw * num.wide(site.scale_z).repeat_interleave(kinds) + num.wide(site.base_w)
    pre_tn = num.f32(torch.sigmoid(w_tw[:, :n]) + config.eps)
    post_tn = num.f32(config.post_scale * torch.sigmoid(w_tw[:, n : 2 * n]))
    logits_tnn = w_tw[:, 2 * n :].unflatten(1, (n, n))
    return pre_tn, post_tn, mhc_sinkhorn(logits_tnn, iters=config.sinkhorn_iters, eps=config.eps, num=num)


def mhc_post(
    stream_tnm: Tensor,
    y_tm: Tensor,
    post_tn: Tensor,
    comb_tnn: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Write the output of a sub-layer to the streams and mix them.

    Math:
        stream'[t, o, m] = post[t, o] * y[t, m] + sum_i comb[t, i, o] * stream[t, i, m]

    Shapes:
        stream_tnm: [t, n, m]; y_tm: [t, m]; post_tn: [t, n]; comb_tnn: [t, input, output]; returns [t, n, m].

    Rounding:
        one, to `dtype`. A kernel takes the product with y first, then i = 0, 1, 2, 3, in fp32.

    Raises:
        TypeError: stream_tnm or y_tm is not floating; dtype is no storage dtype.
        ValueError: shapes disagree.
    """
    dims: dict[str, int] = {}
    for name, x, letters in (("stream_tnm", stream_tnm, "tnm"), ("y_tm", y_tm, "tm")):
        expect_shape(name, x, letters, dims)
        expect_dtype(name, x, *FLOATING)
    expect_shape("post_tn", post_tn, "tn", dims)
    expect_shape("comb_tnn", comb_tnn, "tnn", dims)
    mixed_tnm = num.einsum("tij,tim->tjm", num.wide(comb_tnn), num.wide(stream_tnm))
    return num.store(num.wide(post_tn)[:, :, None] * num.wide(y_tm)[:, None, :] + mixed_tnm, dtype)


def mhc_boundary(
    stream_tnm: Tensor,
    y_tm: Tensor,
    pre_tn: Tensor,
    post_tn: Tensor,
    comb_tnn: Tensor,
    site: MhcSite,
    *,
    config: MhcConfig,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From one sub-layer to the next: `mhc_post`, then `mhc_mixes` and `mhc_apply` of the rounded stream.

    Shapes:
        as those functions; pre_tn is the one computed by the sub-layer that y_tm comes from (not read unless
        `config.shifted`); returns stream_tnm, x_tm and the pre_tn, post_tn and comb_tnn of the next sub-layer.

    Rounding:
        the new stream and x once to bf16 each, the coefficients to fp32.

    Raises:
        TypeError: the stream or y_tm is not floating; a weight is not float32.
        ValueError: shapes disagree with each other or with `config`.
    """
    stream_tnm = mhc_post(stream_tnm, y_tm, post_tn, comb_tnn, num=num)
    next_pre_tn, next_post_tn, next_comb_tnn = mhc_mixes(stream_tnm, site, config=config, num=num)
    x_tm = mhc_apply(pre_tn if config.shifted else next_pre_tn, stream_tnm, num=num)
    return stream_tnm, x_tm, next_pre_tn, next_post_tn, next_comb_tnn


def mhc_head(
    stream_tnm: Tensor,
    site: MhcSite,
    *,
    config: MhcConfig,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Read the last stream of a non-shifted model through coefficients of its own: what the final norm gets.

    Math:
        x = mhc_apply(sigmoid((fn stream) * rsqrt(mean stream^2 + norm_eps) * scale + base) + eps, stream)

    Shapes:
        stream_tnm: [t, n, m]; site.fn_wx: [n, n * m], scale_z: [1], base_w: [n]; returns [t, m].

    Rounding:
        projection and square sum are fp32 numbers, the coefficients are rounded to fp32, x to `dtype`.

    Raises:
        TypeError: the stream is not floating; a weight is not float32; dtype is no storage dtype.
        ValueError: shapes disagree; `config` is shifted, where the last `pre` reads the stream instead.
    """
    if config.shifted:
        raise ValueError("config: expected shifted=False for a head, got True")
    w_tn = _projected(stream_tnm, site, config.streams, config.streams, 1, config.norm_eps, num)
    pre_tn = num.f32(torch.sigmoid(w_tn * num.wide(site.scale_z) + num.wide(site.base_w)) + config.eps)
    return mhc_apply(pre_tn, stream_tnm, dtype=dtype, num=num)


def mhc_enter(
    carry: MhcCarry, site: MhcSite, *, config: MhcConfig, num: Numerics = CONTRACT
) -> tuple[Tensor, MhcCarry]:
    """Begin a sub-layer: x_tm to normalise, and the carry that waits for its output (`carry.left(y_tm)`).

    Raises:
        ValueError: the sub-layer before it was entered and has no output; `pre_tn` is missing in a shifted schedule.
        TypeError: the stream is not floating; a weight is not float32.
    """
    carry = mhc_settle(carry, num=num)
    pre_tn, post_tn, comb_tnn = mhc_mixes(carry.stream_tnm, site, config=config, num=num)
    read_tn = carry.pre_tn if config.shifted else pre_tn
    if read_tn is None:
        raise ValueError("carry: expected pre_tn of the sub-layer before, got None")
    x_tm = mhc_apply(read_tn, carry.stream_tnm, num=num)
    return x_tm, MhcCarry(stream_tnm=carry.stream_tnm, pre_tn=pre_tn, post_tn=post_tn, comb_tnn=comb_tnn)


def mhc_settle(carry: MhcCarry, *, num: Numerics = CONTRACT) -> MhcCarry:
    """Do the update that waits, if there is one: now (eager) or when the next sub-layer begins (lazy) is the same.

    Raises:
        ValueError: a sub-layer was entered and has no output.
    """
    if carry.post_tn is None or carry.comb_tnn is None:
        return carry
    if carry.y_tm is None:
        raise ValueError("carry: expected the output of the sub-layer that was entered, got none")
    stream_tnm = mhc_post(carry.stream_tnm, carry.y_tm, carry.post_tn, carry.comb_tnn, num=num)
    return MhcCarry(stream_tnm=stream_tnm, pre_tn=carry.pre_tn)


def _projected(
    stream_tnm: Tensor, site: MhcSite, streams: int, outputs: int, kinds: int, eps: float, num: Numerics
) -> Tensor:
    """The normalised projection of the flat stream, before scale and base."""
    dims: dict[str, int] = {"n": streams, "w": outputs, "z": kinds}
    expect_shape("stream_tnm", stream_tnm, "tnm", dims)
    expect_dtype("stream_tnm", stream_tnm, *FLOATING)
    dims["x"] = dims["n"] * dims["m"]
    for name, letters in (("fn_wx", "wx"), ("scale_z", "z"), ("base_w", "w")):
        expect_shape(f"site.{name}", getattr(site, name), letters, dims)
        expect_dtype(f"site.{name}", getattr(site, name), torch.float32)
    flat_tx = num.wide(stream_tnm).flatten(1)
    mean_t1 = num.sum(flat_tx * flat_tx, dim=-1, keepdim=True) / dims["x"]
    return num.einsum("tx,wx->tw", flat_tx, num.wide(site.fn_wx)) * torch.rsqrt(mean_t1 + eps)
