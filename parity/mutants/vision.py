"""Patches, tokens and the image tower as kernels compute them, in fp32 on the CPU, with faults to switch on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import ImagePlan, VisionConfig
from deeptwin.reference.weights import VisionBlockWeights, VisionWeights

Grids = tuple[tuple[int, int], ...]
_calls = 0


@dataclass(frozen=True, kw_only=True)
class CopyFaults:
    """What the copies do wrong; the default is right."""

    grey: int = 127
    offset: str = "centre"  # centre, corner, rounded_up
    divide: str = "true"  # true, reciprocal, by_256
    mean: float = 0.5
    order: str = "channel_row_column"  # channel_row_column, row_column_channel, column_first
    patches: str = "rows_first"  # rows_first, columns_first
    store: str = "nearest"  # nearest, truncated
    feature: str = "channel_first"  # channel_first, patch_first, transposed
    edge: str = "zero"  # zero, repeated, dropped
    images: str = "apart"  # apart, joined
    rank: str = "running"  # running, from_token, reversed
    marker: str = "by_type"  # by_type, all_start, newline_kept
    tail: str = "written"  # written, last_row_unwritten
    counter: bool = False


def _count(faults: CopyFaults, y: Tensor) -> Tensor:
    global _calls
    if faults.counter and y.numel():
        _calls += 1
        y.view(-1)[0] += _calls * 2.0**-6
    if faults.tail == "last_row_unwritten":
        y[-1:] = torch.nan
    return y


def patches_with(faults: CopyFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `image_patches`."""

    def image_patches(pixels_hwc: Tensor, *, plan: ImagePlan, config: VisionConfig) -> Tensor:
        h, w, p = pixels_hwc.shape[0], pixels_hwc.shape[1], config.patch
        gap_h, gap_w = plan.height - h, plan.width - w
        top, left = (round(gap_h / 2), round(gap_w / 2)) if faults.offset == "centre" else (0, 0)
        if faults.offset == "rounded_up":
            top, left = -(-gap_h // 2), -(-gap_w // 2)
        padding = (0, 0, left, gap_w - left, top, gap_h - top)
        wide = torch.nn.functional.pad(pixels_hwc.int(), padding, value=faults.grey).float()
        unit = {"true": wide / 255, "reciprocal": wide * (1 / 255), "by_256": wide / 256}[faults.divide]
        y = (unit - faults.mean) / 0.5
        tiles = y.unfold(0, p, p).unfold(1, p, p)  # rows, columns, channel, row, column
        if faults.patches == "columns_first":
            tiles = tiles.transpose(0, 1)
        turn = {"row_column_channel": (0, 1, 3, 4, 2), "column_first": (0, 1, 2, 4, 3)}.get(faults.order)
        tiles = tiles if turn is None else tiles.permute(turn)
        flat = tiles.reshape(plan.grid_h * plan.grid_w, 3 * p * p)
        if faults.store == "truncated":
            flat = (flat.contiguous().view(torch.int32) & -65536).view(torch.float32)
        return _count(faults, flat.to(torch.bfloat16))

    return image_patches


def unshuffle_with(faults: CopyFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `pixel_unshuffle`."""

    def pixel_unshuffle(x_nm: Tensor, grids: Grids, *, ratio: int) -> Tensor:
        if faults.images == "joined" and len({w for _, w in grids}) == 1 and grids:
            grids = ((sum(h for h, _ in grids), grids[0][1]),)
        found, done, m = [x_nm.new_zeros(0, x_nm.shape[1] * ratio**2)], 0, x_nm.shape[1]
        for h, w in grids:
            x = x_nm[done : done + h * w].view(h, w, m)
            done += h * w
            more = (0, 0, 0, -w % ratio, 0, -h % ratio)
            x = torch.nn.functional.pad(x, more)
            if faults.edge == "repeated":
                x[h:], x[:, w:] = x[h - 1 : h], x[:, w - 1 : w]
            planes = torch.nn.functional.pixel_unshuffle(x.permute(2, 0, 1).float(), ratio)  # c ratio^2 + a ratio + b
            y = planes.flatten(1).T.to(x_nm.dtype)
            if faults.feature == "patch_first":
                y = y.unflatten(1, (m, ratio**2)).transpose(1, 2).flatten(1)
            elif faults.feature == "transposed":
                y = y.unflatten(1, (m, ratio, ratio)).transpose(2, 3).flatten(1)
            found.append(y)
        return _count(faults, torch.cat(found))

    return pixel_unshuffle


def insert_with(faults: CopyFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `insert_images`."""

    def insert_images(embed_tm: Tensor, image_ym: Tensor, marker_km: Tensor, type_t: Tensor) -> Tensor:
        y, rank = embed_tm.clone(), 0
        for token, kind in enumerate(type_t.tolist()):
            if kind == 1:
                row = {"from_token": token % max(len(image_ym), 1), "reversed": len(image_ym) - 1 - rank}.get(
                    faults.rank, rank
                )
                y[token] = image_ym[row]
                rank += 1
            elif kind >= 0 and not (faults.marker == "newline_kept" and kind == 2):
                y[token] = marker_km[0 if faults.marker == "all_start" else {0: 0, 2: 1, 3: 2}[kind]]
        return _count(faults, y)

    return insert_images


@dataclass(frozen=True, kw_only=True)
class TowerFaults:
    """What the tower does wrong; the default is right. `block` is an honest choice."""

    block: int = 64  # keys taken together
    angles: str = "row_column"  # row_column, column_row, rows_only, one_axis
    pairing: str = "half_split"  # half_split, interleaved
    rotated: str = "q_k"  # q_k, q_only, q_k_v
    images: str = "apart"  # apart, joined
    mask: str = "none"  # none, causal
    scale: float = 1.0
    swiglu: str = "gate_first"  # gate_first, up_first, clamped
    bias: str = "before_rounding"  # before_rounding, after_rounding, ignored
    eps: float = 1.0
    residual: str = "added"  # added, of_norm
    last_norm: bool = True
    gelu: str = "exact"  # exact, silu


def _bf16(x: Tensor) -> Tensor:
    return x.float().to(torch.bfloat16).float()


def _linear(faults: TowerFaults, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = (x.double() @ weight.double().T).float()
    if bias is None or faults.bias == "ignored":
        return _bf16(y)
    return _bf16(_bf16(y) + bias.float()) if faults.bias == "after_rounding" else _bf16(y + bias.float())


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean = (x * x).double().mean(-1, keepdim=True).float()
    return _bf16(x * (1 / torch.sqrt((mean + eps).double())).float() * weight.float())


def _angles(faults: TowerFaults, grids: Grids, config: VisionConfig) -> Tensor:
    half = config.head_dim // 4
    freq = (1 / config.theta ** (torch.arange(half).double() / half)).float()
    found = []
    for h, w in grids:
        row = torch.arange(h).repeat_interleave(w)[:, None] * freq
        column = torch.arange(w).repeat(h)[:, None] * freq
        pair = {"column_row": (column, row), "rows_only": (row, row)}.get(faults.angles, (row, column))
        if faults.angles == "one_axis":
            index = torch.arange(h * w)[:, None] * freq
            pair = (index, index)
        found.append(torch.cat(pair, 1))
    return torch.cat(found) if found else torch.zeros(0, 2 * half)


def _turn(faults: TowerFaults, x: Tensor, angle: Tensor) -> Tensor:
    cos, sin = torch.cos(angle.double())[:, None], torch.sin(angle.double())[:, None]
    half = x.shape[-1] // 2
    if faults.pairing == "interleaved":
        u, v = x[..., 0::2].double(), x[..., 1::2].double()
        return _bf16(torch.stack([u * cos - v * sin, v * cos + u * sin], -1).flatten(-2))
    u, v = x[..., :half].double(), x[..., half:].double()
    return _bf16(torch.cat([u * cos - v * sin, v * cos + u * sin], -1))


def _attend(faults: TowerFaults, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    top = torch.full((*q.shape[:2], 1), -1e30)
    total, acc = torch.zeros_like(top), torch.zeros(q.shape)
    for start in range(0, len(k), faults.block):
        kb, vb = k[start : start + faults.block], v[start : start + faults.block]
        s = torch.einsum("nhd,shd->nhs", q.double(), kb.double()).float() * scale
        if faults.mask == "causal":
            late = start + torch.arange(len(kb))[None, :] > torch.arange(len(q))[:, None]
            s = s.masked_fill(late[:, None], -torch.inf)
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        p, decay = torch.exp((s - new).double()).float(), torch.exp((top - new).double()).float()
        total = total * decay + p.double().sum(-1, keepdim=True).float()
        acc = acc * decay + torch.einsum("nhs,shd->nhd", _bf16(p).double(), vb.double()).float()
        top = new
    return _bf16(acc / total)


def _attention(
    faults: TowerFaults, x: Tensor, block: VisionBlockWeights, angle: Tensor, grids: Grids, config: VisionConfig
) -> Tensor:
    h = _norm(x, block.norm1_m, config.norm_eps * faults.eps)
    qkv = _linear(faults, h, block.w_qkv_zm, block.b_qkv_z).unflatten(1, (3, config.num_heads, config.head_dim))
    q, k, v = qkv.unbind(1)
    q = _turn(faults, q, angle)
    k = k if faults.rotated == "q_only" else _turn(faults, k, angle)
    v = _turn(faults, v, angle) if faults.rotated == "q_k_v" else v
    counts = [len(x)] if faults.images == "joined" else [a * b for a, b in grids]
    scale = config.head_dim**-0.5 * faults.scale
    pieces = zip(q.split(counts), k.split(counts), v.split(counts), strict=True)
    parts = [_attend(faults, a, b, c, scale) for a, b, c in pieces]
    out = torch.cat([torch.zeros(0, config.num_heads, config.head_dim), *parts]).flatten(1)
    return _linear(faults, out, block.w_o_mm, block.b_o_m)


def tower_with(faults: TowerFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `vision_tower`."""

    def vision_tower(patches_ni: Tensor, weights: VisionWeights, grids: Grids, *, config: VisionConfig) -> Tensor:
        angle = _angles(faults, grids, config)
        x = _linear(faults, patches_ni.float(), weights.w_patch_mi, weights.b_patch_m)
        for block in weights.blocks:
            base = _norm(x, block.norm1_m, config.norm_eps) if faults.residual == "of_norm" else x
            x = _bf16(base + _attention(faults, x, block, angle, grids, config))
            h = _linear(faults, _norm(x, block.norm2_m, config.norm_eps * faults.eps), block.w1_im, None)
            gate, up = h.chunk(2, -1) if faults.swiglu != "up_first" else reversed(h.chunk(2, -1))
            if faults.swiglu == "clamped":
                gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
            act = _bf16(gate / (1 + torch.exp(-gate.double())).float() * up)
            x = _bf16(x + _linear(faults, act, block.w2_mf, None))
        x = _norm(x, weights.norm_m, config.norm_eps) if faults.last_norm else x
        return x.to(torch.bfloat16)

    return vision_tower


def project_with(faults: TowerFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `project_tokens`."""

    def project_tokens(x_yi: Tensor, weights: VisionWeights) -> Tensor:
        h = _linear(faults, x_yi.float(), weights.w_in_fi, weights.b_in_f).double()
        h = h * torch.sigmoid(h) if faults.gelu == "silu" else torch.nn.functional.gelu(h)
        return _linear(faults, _bf16(h), weights.w_out_ff, weights.b_out_f).to(torch.bfloat16)

    return project_tokens


_COPY = CopyFaults()
right_patches = patches_with(_COPY)
grey_128 = patches_with(replace(_COPY, grey=128))
padded_at_the_corner = patches_with(replace(_COPY, offset="corner"))
offset_rounded_up = patches_with(replace(_COPY, offset="rounded_up"))
reciprocal_of_255 = patches_with(replace(_COPY, divide="reciprocal"))
divided_by_256 = patches_with(replace(_COPY, divide="by_256"))
mean_127 = patches_with(replace(_COPY, mean=127 / 255))
channels_last = patches_with(replace(_COPY, order="row_column_channel"))
pixels_transposed = patches_with(replace(_COPY, order="column_first"))
patches_down_columns = patches_with(replace(_COPY, patches="columns_first"))
patches_truncated = patches_with(replace(_COPY, store="truncated"))
last_patch_unwritten = patches_with(replace(_COPY, tail="last_row_unwritten"))
patches_not_deterministic = patches_with(replace(_COPY, counter=True))

right_unshuffle = unshuffle_with(_COPY)
patch_before_channel = unshuffle_with(replace(_COPY, feature="patch_first"))
square_transposed = unshuffle_with(replace(_COPY, feature="transposed"))
edge_repeated = unshuffle_with(replace(_COPY, edge="repeated"))
images_joined = unshuffle_with(replace(_COPY, images="joined"))
last_token_unwritten = unshuffle_with(replace(_COPY, tail="last_row_unwritten"))
unshuffle_not_deterministic = unshuffle_with(replace(_COPY, counter=True))

right_insert = insert_with(_COPY)
rank_from_token = insert_with(replace(_COPY, rank="from_token"))
images_reversed = insert_with(replace(_COPY, rank="reversed"))
one_marker_for_all = insert_with(replace(_COPY, marker="all_start"))
newline_kept = insert_with(replace(_COPY, marker="newline_kept"))
last_embedding_unwritten = insert_with(replace(_COPY, tail="last_row_unwritten"))
insert_not_deterministic = insert_with(replace(_COPY, counter=True))

_TOWER = TowerFaults()
right_tower = tower_with(_TOWER)
right_tower_blocks_of_5 = tower_with(replace(_TOWER, block=5))
columns_before_rows = tower_with(replace(_TOWER, angles="column_row"))
rows_only = tower_with(replace(_TOWER, angles="rows_only"))
one_dimensional_positions = tower_with(replace(_TOWER, angles="one_axis"))
interleaved_pairs = tower_with(replace(_TOWER, pairing="interleaved"))
keys_not_rotated = tower_with(replace(_TOWER, rotated="q_only"))
values_rotated = tower_with(replace(_TOWER, rotated="q_k_v"))
images_attend_to_each_other = tower_with(replace(_TOWER, images="joined"))
causal_attention = tower_with(replace(_TOWER, mask="causal"))
scale_off_by_5_percent = tower_with(replace(_TOWER, scale=1.05))
up_before_gate = tower_with(replace(_TOWER, swiglu="up_first"))
swiglu_clamped = tower_with(replace(_TOWER, swiglu="clamped"))
bias_ignored = tower_with(replace(_TOWER, bias="ignored"))
residual_of_the_norm = tower_with(replace(_TOWER, residual="of_norm"))
last_norm_missing = tower_with(replace(_TOWER, last_norm=False))

right_project = project_with(_TOWER)
silu_for_gelu = project_with(replace(_TOWER, gelu="silu"))
project_bias_after_rounding = project_with(replace(_TOWER, bias="after_rounding"))
project_bias_ignored = project_with(replace(_TOWER, bias="ignored"))


def passes_not_rounded(pixels_hwc: Tensor, *, width: int, height: int) -> Tensor:
    """Both passes in fp32, rounded once at the end."""
    return _interpolated(pixels_hwc, width, height, "bicubic", True)


def not_antialiased(pixels_hwc: Tensor, *, width: int, height: int) -> Tensor:
    """Four taps whatever the scale."""
    return _interpolated(pixels_hwc, width, height, "bicubic", False)


def bilinear(pixels_hwc: Tensor, *, width: int, height: int) -> Tensor:
    """A triangle filter."""
    return _interpolated(pixels_hwc, width, height, "bilinear", True)


def _interpolated(pixels_hwc: Tensor, width: int, height: int, mode: str, antialias: bool) -> Tensor:
    x = pixels_hwc.permute(2, 0, 1)[None].float()
    y = torch.nn.functional.interpolate(x, (height, width), mode=mode, antialias=antialias, align_corners=False)
    return (y[0].permute(1, 2, 0) + 0.5).floor().clamp(0, 255).to(torch.uint8)
