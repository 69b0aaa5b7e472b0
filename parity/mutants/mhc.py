"""Hyper-connections as kernels compute them, in fp32 on the CPU, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import MhcConfig
from deeptwin.reference.weights import MhcSite


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong; the default is right. `lanes` is an honest choice of order."""

    # projection
    lanes: int = 1  # partial sums, added up in ascending order
    lanes_by_batch: bool = False
    fn: str = "fp32"  # fp32, tf32, bf16
    unit: str = "wide"  # wide, tf32: eight products a step, the sum so far cut to 24 bits
    flat: str = "stream-major"  # stream-major, interleaved
    norm: str = "token"  # token, stream, missing, batch, sum
    norm_eps: float | None = None
    rstd: str = "nearest"  # nearest, bf16, 12_bits
    scale: str = "own"  # own, first, after_base
    order: str = "pre_post"  # pre_post, post_pre
    # gates
    pre_eps: str = "added"  # added, missing, 1e-5
    post: str = "two_sigma"  # two_sigma, sigma, sigma_eps, two_sigma_eps
    # sinkhorn
    start: str = "softmax"  # softmax, sigmoid, exp, columns
    iters: int = 0  # more or fewer than asked
    eps_entry: str = "added"  # added, missing, in_softmax
    eps_sum: str = "added"  # added, missing
    sinkhorn_eps: float | None = None
    last: str = "columns"  # columns, rows
    comb: str = "own"  # own, transposed
    # read
    read: str = "fp32"  # fp32, bf16_sum, bf16_pre, three_streams, normalised, squared
    # update
    mixed: str = "own"  # own, transposed, bf16_comb, bf16_post, bf16_sum, bf16_product, no_y, in_place, first_token
    # boundary
    reads: str = "rounded"  # rounded, unrounded, old
    mixes_of: str = "rounded"  # rounded, unrounded, old
    schedule: str = "asked"  # asked, other
    # everywhere
    store: str = "nearest"  # nearest, truncated
    unwritten: bool = False
    counter: bool = False


_calls = 0
RIGHT = Faults()


def _rounded(faults: Faults, x: Tensor) -> Tensor:
    if faults.store == "truncated":
        x = (x.view(torch.int32) & -65536).view(torch.float32)
    return _tampered(faults, x.bfloat16())


def _tampered(faults: Faults, x: Tensor) -> Tensor:
    global _calls
    if faults.unwritten:
        x[-1:] = torch.nan
    if faults.counter and x.numel():
        _calls += 1
        x.view(-1)[0] += _calls * 2.0**-6
    return x


def _fn(faults: Faults, fn_wx: Tensor) -> Tensor:
    if faults.fn == "bf16":
        return fn_wx.bfloat16().float()
    if faults.fn == "tf32":
        bits = fn_wx.contiguous().view(torch.int32)
        return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    return fn_wx.float()


def tf32_unit_product(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Rows times rows by the TF32 unit of SM90, and square sums beside it: step after step of eight, in fp32."""
    total, squares = torch.zeros(len(x), len(w), dtype=torch.float64), torch.zeros(len(x), 1)
    for a, b in zip(x.double().split(8, 1), w.double().split(8, 1), strict=True):
        exact = total + a @ b.T
        near = exact.float()
        beyond = near.double().abs() > exact.abs()
        total = torch.where(beyond, torch.nextafter(near, torch.zeros_like(near)), near).double()
        squares = squares + a.square().sum(1, keepdim=True).float()
    return total.float(), squares


def _project(faults: Faults, stream_tnm: Tensor, site: MhcSite, norm_eps: float) -> Tensor:
    flat = (stream_tnm.transpose(1, 2) if faults.flat == "interleaved" else stream_tnm).float().flatten(1)
    fn = _fn(faults, site.fn_wx)
    t, width = flat.shape
    lanes = max(t, 1) if faults.lanes_by_batch else faults.lanes
    z, squares = torch.zeros(t, len(fn)), torch.zeros(t, 1)
    for part, weight in zip(flat.tensor_split(lanes, -1), fn.tensor_split(lanes, -1), strict=True):
        if faults.unit == "tf32":
            sums = tf32_unit_product(part, weight)
        else:  # every part exactly, so that a row has the same bits in every batch
            sums = (part.double() @ weight.double().T).float(), part.double().square().sum(-1, keepdim=True).float()
        z, squares = z + sums[0], squares + sums[1]
    if faults.norm == "stream":
        squares = stream_tnm[:, 0].double().square().sum(-1, keepdim=True).float() * stream_tnm.shape[1]
    elif faults.norm == "batch" and t:
        squares = squares.mean(0, keepdim=True).expand_as(squares)
    count = {"sum": 1, "width": width // stream_tnm.shape[1]}.get(faults.norm, width)
    inside = (squares / count + (norm_eps if faults.norm_eps is None else faults.norm_eps)).double()
    rstd = (1 / inside.sqrt()).float()
    if faults.rstd == "bf16":
        rstd = rstd.bfloat16().float()
    elif faults.rstd == "12_bits":
        rstd = (rstd.view(torch.int32) & -2048).view(torch.float32)
    return z if faults.norm == "missing" else z * rstd


def _sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x.double()).float()


def _sinkhorn(faults: Faults, logits: Tensor, iters: int, eps: float) -> Tensor:
    eps = eps if faults.sinkhorn_eps is None else faults.sinkhorn_eps
    after = {"added": eps, "missing": 0.0, "in_softmax": 0.0}[faults.eps_entry]
    inside = eps if faults.eps_entry == "in_softmax" else 0.0
    below = eps if faults.eps_sum == "added" else 0.0
    if faults.start == "sigmoid":
        comb = _sigmoid(logits) + after
    elif faults.start == "columns":
        comb = logits.double().softmax(-2).float() + after
    else:
        top = 0 if faults.start == "exp" else logits.amax(-1, keepdim=True)
        comb = (logits - top).double().exp().float()
        comb = comb / (_sum(comb, -1) + inside) + after
    comb = comb / (_sum(comb, -2) + below)
    for _ in range(iters + faults.iters - 1):
        comb = comb / (_sum(comb, -1) + below)
        comb = comb / (_sum(comb, -2) + below)
    if faults.last == "rows":
        comb = comb / (_sum(comb, -1) + below)
    return comb.transpose(-1, -2).contiguous() if faults.comb == "transposed" else comb


def _sum(x: Tensor, axis: int) -> Tensor:
    a, b, c, d = x.unbind(axis)
    return ((a + b) + (c + d)).unsqueeze(axis)


def _pre(faults: Faults, w: Tensor, eps: float) -> Tensor:
    return _sigmoid(w) + {"added": eps, "missing": 0.0, "1e-5": 1e-5}[faults.pre_eps]


def _mixes(faults: Faults, stream_tnm: Tensor, site: MhcSite, config: MhcConfig) -> tuple[Tensor, Tensor, Tensor]:
    n = config.streams
    z = _project(faults, stream_tnm, site, config.norm_eps)
    scale = site.scale_z[:1].expand(3) if faults.scale == "first" else site.scale_z
    spread = torch.cat([scale[:1].expand(n), scale[1:2].expand(n), scale[2:].expand(n * n)])
    w = (z + site.base_w) * spread if faults.scale == "after_base" else z * spread + site.base_w
    first, second = (w[:, n : 2 * n], w[:, :n]) if faults.order == "post_pre" else (w[:, :n], w[:, n : 2 * n])
    gate = _sigmoid(second)
    post = {
        "two_sigma": config.post_scale * gate,
        "sigma": gate,
        "sigma_eps": gate + config.eps,
        "two_sigma_eps": config.post_scale * gate + config.eps,
    }[faults.post]
    comb = _sinkhorn(faults, w[:, 2 * n :].unflatten(1, (n, n)), config.sinkhorn_iters, config.eps)
    return _pre(faults, first, config.eps), post, comb


def _read(faults: Faults, pre_tn: Tensor, rows: Tensor) -> Tensor:
    pre = pre_tn.bfloat16().float() if faults.read == "bf16_pre" else pre_tn
    if faults.read == "normalised":
        pre = pre / pre.sum(-1, keepdim=True)
    elif faults.read == "squared":
        pre = pre * pre
    total = torch.zeros_like(rows[:, 0])
    for j in range(3 if faults.read == "three_streams" else rows.shape[1]):
        total = total + pre[:, j, None] * rows[:, j]
        total = total.bfloat16().float() if faults.read == "bf16_sum" else total
    return total


def _update(faults: Faults, stream_tnm: Tensor, y_tm: Tensor, post_tn: Tensor, comb_tnn: Tensor) -> Tensor:
    post, comb, y = post_tn, comb_tnn, y_tm.float()
    comb = comb.transpose(-1, -2) if faults.mixed == "transposed" else comb
    comb = comb.bfloat16().float() if faults.mixed == "bf16_comb" else comb
    post = post.bfloat16().float() if faults.mixed == "bf16_post" else post
    if faults.mixed == "first_token":
        comb = comb[:1].expand_as(comb)
    rows = list(stream_tnm.float().unbind(1))
    new = []
    for o in range(len(rows)):
        total = post[:, o, None] * y * (0 if faults.mixed == "no_y" else 1)
        total = total.bfloat16().float() if faults.mixed == "bf16_product" else total
        for i, row in enumerate(rows):
            total = total + comb[:, i, o, None] * row
            total = total.bfloat16().float() if faults.mixed == "bf16_sum" else total
        new.append(total)
        if faults.mixed == "in_place":
            rows[o] = total
    return torch.stack(new, 1)


def expand_with(
    *, pre: str = "first", copies: str = "all", factor: float = 1.0
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The copy with the signature of `mhc_expand`."""

    def mhc_expand(x_tm: Tensor, *, config: MhcConfig) -> tuple[Tensor, Tensor]:
        stream = (x_tm[:, None] * factor).repeat(1, config.streams, 1)
        if copies == "first":
            stream[:, 1:] = 0
        weights = torch.zeros(len(x_tm), config.streams)
        weights[:, 0] = 1.0
        if pre == "mean":
            weights[:] = 1 / config.streams
        elif pre == "eps":
            weights += config.eps
        elif pre == "last":
            weights = weights.flip(1)
        return stream, weights

    return mhc_expand


def apply_with(faults: Faults) -> Callable[..., Tensor]:
    """The read with the signature of `mhc_apply`."""

    def mhc_apply(pre_tn: Tensor, stream_tnm: Tensor) -> Tensor:
        return _rounded(faults, _read(faults, pre_tn, stream_tnm.float()))

    return mhc_apply


def tap_with(faults: Faults, *, share: float = 0.25) -> Callable[..., Tensor]:
    """The mean with the signature of `mhc_tap`."""

    def mhc_tap(stream_tnm: Tensor) -> Tensor:
        pre = torch.full(stream_tnm.shape[:2], share)
        return _rounded(faults, _read(faults, pre, stream_tnm.float()))

    return mhc_tap


def sinkhorn_with(faults: Faults) -> Callable[..., Tensor]:
    """The iteration with the signature of `mhc_sinkhorn`."""

    def mhc_sinkhorn(logits_tnn: Tensor, *, iters: int, eps: float) -> Tensor:
        return _tampered(faults, _sinkhorn(faults, logits_tnn, iters, eps))

    return mhc_sinkhorn


def mixes_with(faults: Faults) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The coefficients with the signature of `mhc_mixes`."""

    def mhc_mixes(stream_tnm: Tensor, site: MhcSite, *, config: MhcConfig) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, comb = _mixes(faults, stream_tnm, site, config)
        return _tampered(faults, pre), post, comb

    return mhc_mixes


def post_with(faults: Faults) -> Callable[..., Tensor]:
    """The update with the signature of `mhc_post`."""

    def mhc_post(stream_tnm: Tensor, y_tm: Tensor, post_tn: Tensor, comb_tnn: Tensor) -> Tensor:
        return _rounded(faults, _update(faults, stream_tnm, y_tm, post_tn, comb_tnn))

    return mhc_post


def boundary_with(faults: Faults) -> Callable[..., tuple[Tensor, ...]]:
    """Everything in one call, with the signature of `mhc_boundary`."""

    def mhc_boundary(
        stream_tnm: Tensor,
        y_tm: Tensor,
        pre_tn: Tensor,
        post_tn: Tensor,
        comb_tnn: Tensor,
        site: MhcSite,
        *,
        config: MhcConfig,
    ) -> tuple[Tensor, ...]:
        wide = _update(faults, stream_tnm, y_tm, post_tn, comb_tnn)
        new = _rounded(faults, wide)
        views = {"rounded": new.float(), "unrounded": wide, "old": stream_tnm.float()}
        pre, post, comb = _mixes(faults, views[faults.mixes_of], site, config)
        shifted = config.shifted if faults.schedule == "asked" else not config.shifted
        x = _read(faults, pre_tn if shifted else pre, views[faults.reads]).bfloat16()
        return new, x, pre, post, comb

    return mhc_boundary


def head_with(faults: Faults, *, gate: str = "sigmoid") -> Callable[..., Tensor]:
    """The head with the signature of `mhc_head`."""

    def mhc_head(stream_tnm: Tensor, site: MhcSite, *, config: MhcConfig) -> Tensor:
        z = _project(faults, stream_tnm, site, config.norm_eps)
        w = (z + site.base_w) * site.scale_z if faults.scale == "after_base" else z * site.scale_z + site.base_w
        pre = w.softmax(-1) if gate == "softmax" else _pre(faults, w, config.eps) * (2.0 if gate == "two" else 1.0)
        return _rounded(faults, _read(faults, pre, stream_tnm.float()))

    return mhc_head


LANES = replace(RIGHT, lanes=16)
right_expand = expand_with()
right_apply, right_tap = apply_with(RIGHT), tap_with(RIGHT)
right_sinkhorn = sinkhorn_with(RIGHT)
right_mixes, right_mixes_16_lanes = mixes_with(RIGHT), mixes_with(LANES)
mixes_of_tf32_unit = mixes_with(replace(LANES, fn="tf32", unit="tf32"))
right_post = post_with(RIGHT)
right_boundary, right_boundary_16_lanes = boundary_with(RIGHT), boundary_with(LANES)
right_head, right_head_16_lanes = head_with(RIGHT), head_with(LANES)

expand_scaled = expand_with(factor=0.5)
expand_first_only = expand_with(copies="first")
expand_pre_mean = expand_with(pre="mean")
expand_pre_eps = expand_with(pre="eps")
expand_pre_last = expand_with(pre="last")

apply_truncated = apply_with(replace(RIGHT, store="truncated"))
apply_bf16_sum = apply_with(replace(RIGHT, read="bf16_sum"))
apply_bf16_pre = apply_with(replace(RIGHT, read="bf16_pre"))
apply_three_streams = apply_with(replace(RIGHT, read="three_streams"))
apply_normalised = apply_with(replace(RIGHT, read="normalised"))
apply_squared = apply_with(replace(RIGHT, read="squared"))
apply_last_row_stale = apply_with(replace(RIGHT, unwritten=True))
apply_not_deterministic = apply_with(replace(RIGHT, counter=True))

tap_sum = tap_with(RIGHT, share=1.0)
tap_bf16_sum = tap_with(replace(RIGHT, read="bf16_sum"))
tap_three_streams = tap_with(replace(RIGHT, read="three_streams"))

sinkhorn_19 = sinkhorn_with(replace(RIGHT, iters=-1))
sinkhorn_10 = sinkhorn_with(replace(RIGHT, iters=-10))
sinkhorn_21 = sinkhorn_with(replace(RIGHT, iters=1))
sinkhorn_sigmoid = sinkhorn_with(replace(RIGHT, start="sigmoid"))
sinkhorn_no_max = sinkhorn_with(replace(RIGHT, start="exp"))
sinkhorn_softmax_over_input = sinkhorn_with(replace(RIGHT, start="columns"))
sinkhorn_rows_last = sinkhorn_with(replace(RIGHT, last="rows"))
sinkhorn_eps_1e_5 = sinkhorn_with(replace(RIGHT, sinkhorn_eps=1e-5))
sinkhorn_eps_not_on_entries = sinkhorn_with(replace(RIGHT, eps_entry="missing"))
sinkhorn_eps_in_softmax = sinkhorn_with(replace(RIGHT, eps_entry="in_softmax"))
sinkhorn_eps_not_on_sums = sinkhorn_with(replace(RIGHT, eps_sum="missing"))
sinkhorn_transposed = sinkhorn_with(replace(RIGHT, comb="transposed"))
sinkhorn_last_row_stale = sinkhorn_with(replace(RIGHT, unwritten=True))

mixes_post_sigma_eps = mixes_with(replace(RIGHT, post="sigma_eps"))
mixes_post_sigma = mixes_with(replace(RIGHT, post="sigma"))
mixes_post_plus_eps = mixes_with(replace(RIGHT, post="two_sigma_eps"))
mixes_pre_without_eps = mixes_with(replace(RIGHT, pre_eps="missing"))
mixes_pre_eps_1e_5 = mixes_with(replace(RIGHT, pre_eps="1e-5"))
mixes_19_iterations = mixes_with(replace(RIGHT, iters=-1))
mixes_sigmoid_start = mixes_with(replace(RIGHT, start="sigmoid"))
mixes_comb_transposed = mixes_with(replace(RIGHT, comb="transposed"))
mixes_fn_tf32 = mixes_with(replace(RIGHT, fn="tf32"))
mixes_fn_bf16 = mixes_with(replace(RIGHT, fn="bf16"))
mixes_interleaved_streams = mixes_with(replace(RIGHT, flat="interleaved"))
mixes_norm_missing = mixes_with(replace(RIGHT, norm="missing"))
mixes_norm_of_first_stream = mixes_with(replace(RIGHT, norm="stream"))
mixes_norm_over_width = mixes_with(replace(RIGHT, norm="width"))
mixes_norm_over_batch = mixes_with(replace(RIGHT, norm="batch"))
mixes_norm_eps_1e_6 = mixes_with(replace(RIGHT, norm_eps=1e-6))
mixes_rstd_bf16 = mixes_with(replace(RIGHT, rstd="bf16"))
mixes_rstd_12_bits = mixes_with(replace(RIGHT, rstd="12_bits"))
mixes_one_scale = mixes_with(replace(RIGHT, scale="first"))
mixes_scale_after_base = mixes_with(replace(RIGHT, scale="after_base"))
mixes_pre_and_post_swapped = mixes_with(replace(RIGHT, order="post_pre"))
mixes_split_depends_on_batch = mixes_with(replace(RIGHT, lanes_by_batch=True))
mixes_not_deterministic = mixes_with(replace(RIGHT, counter=True))
mixes_last_row_stale = mixes_with(replace(RIGHT, unwritten=True))

post_transposed = post_with(replace(RIGHT, mixed="transposed"))
post_bf16_comb = post_with(replace(RIGHT, mixed="bf16_comb"))
post_bf16_post = post_with(replace(RIGHT, mixed="bf16_post"))
post_bf16_sum = post_with(replace(RIGHT, mixed="bf16_sum"))
post_bf16_product = post_with(replace(RIGHT, mixed="bf16_product"))
post_without_y = post_with(replace(RIGHT, mixed="no_y"))
post_in_place = post_with(replace(RIGHT, mixed="in_place"))
post_comb_of_first_token = post_with(replace(RIGHT, mixed="first_token"))
post_truncated = post_with(replace(RIGHT, store="truncated"))
post_last_row_stale = post_with(replace(RIGHT, unwritten=True))

boundary_reads_unrounded = boundary_with(replace(RIGHT, reads="unrounded"))
boundary_reads_old_stream = boundary_with(replace(RIGHT, reads="old"))
boundary_mixes_of_unrounded = boundary_with(replace(RIGHT, mixes_of="unrounded"))
boundary_mixes_of_old_stream = boundary_with(replace(RIGHT, mixes_of="old"))
boundary_other_schedule = boundary_with(replace(RIGHT, schedule="other"))
boundary_truncated = boundary_with(replace(RIGHT, store="truncated"))
boundary_transposed = boundary_with(replace(RIGHT, mixed="transposed"))
boundary_split_depends_on_batch = boundary_with(replace(RIGHT, lanes_by_batch=True))

head_without_eps = head_with(replace(RIGHT, pre_eps="missing"))
head_softmax = head_with(RIGHT, gate="softmax")
head_two_sigma = head_with(RIGHT, gate="two")
head_norm_eps_1e_20 = head_with(replace(RIGHT, norm_eps=1e-20))
head_scale_after_base = head_with(replace(RIGHT, scale="after_base"))
head_norm_missing = head_with(replace(RIGHT, norm="missing"))
