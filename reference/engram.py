"""The n-gram memory of V4.1: hashes of the last tokens pick rows of a table, which are gated into the streams.

Before the attention of some layers every token looks up the 2-, 3- and 4-gram that ends with it:

    token ids -> classes of alike tokens -> window of the last w classes -> z rows of the table of the layer
      -> z rows side by side -> projected to one key per residual stream and one value -> gate -> streams

The rows are integer arithmetic of the last w token ids alone, so prefill in any chunks, a prefix hit, decode and
verification name the same ones. An image token breaks the window: it and all that lies behind it count as padding. It
looks nothing up itself, and its streams are left as they are.

Letters beside those of the project: `w` places of a window, own token first, then backwards; `i` = w - 1 classes kept
of a request, oldest first; `l` layers with a table; `z` hash columns, 2-grams first; `r` table rows; `j` the keys of
the n streams, then the value. Source of everything: v41-blocks.md section 3; of the gate at d = 0: section 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_multiple, expect_positive, expect_shape
from .config import FP8_32X32, Q8, EngramLayout, OutsideVocabulary
from .engram_table import GROUP, expect_table
from .numerics import CONTRACT, Numerics
from .quant import decode_e4m3, decode_ue8m0, dequantize
from .weights import EngramWeights

IMAGE = -1  # the class of an image token
CLAMP = 1e-6  # least magnitude under the root of the gate: a constant of the released code
FLOATING = (torch.bfloat16, torch.float32, torch.float64)


def engram_window(
    ids_t: Tensor,
    image_t: Tensor,
    bounds_j: Tensor,
    kept_b: Tensor,
    history_bi: Tensor,
    class_v: Tensor,
    *,
    pad_class: int,
    outside: OutsideVocabulary,
) -> tuple[Tensor, Tensor, Tensor]:
    """The windows of the tokens of b requests, and what to keep of each request for its next tokens.

    Math:
        window[t, s] = class of the token s places back, or pad_class if any of the tokens 0 … s places back is an
        image token; what lies before a request's tokens is its history

    Shapes:
        ids_t: int32 [t], the tokens of request b at bounds_j[b] … bounds_j[b + 1] - 1; image_t: bool [t];
        bounds_j: int32 [b + 1]; kept_b: int32 [b], how many tokens of a request stay: all of them, or those that a
        verification accepts; history_bi: int32 [b, i], classes, -1 for an image token, pad_class before the
        sequence; class_v: int32 [v]. Returns window_tw: int32 [t, i + 1], image_t: bool [t], history_bi: int32 [b, i].

    Edges:
        an id that the vocabulary does not have is an image token or an error, as `outside` says. The ids of image
        tokens are not looked at. Special tokens and document boundaries do not break a window.

    Raises:
        TypeError: image_t is not bool, or another tensor is not int32.
        ValueError: shapes disagree; bounds do not ascend from 0 to t; kept_b is not in 0 … the number of tokens of
            the request; pad_class is no class; REFUSE, and an id that is no image token is not in the vocabulary.
    """
    dims = _check_tokens(ids_t, image_t, bounds_j, kept_b, history_bi)
    expect_shape("class_v", class_v, "v", dims)
    expect_dtype("class_v", class_v, torch.int32)
    expect_in_range("pad_class", torch.tensor(pad_class), 0, max(dims["v"], 1))
    if outside is OutsideVocabulary.REFUSE:
        expect_in_range("ids_t", torch.where(image_t, 0, ids_t), 0, dims["v"])
    image_t = image_t | (ids_t < 0) | (ids_t >= dims["v"])
    class_t = torch.full_like(ids_t, IMAGE)
    class_t[~image_t] = class_v[ids_t[~image_t].long()]

    places, windows, histories = history_bi.shape[1] + 1, [], []
    for b, (start, end) in enumerate(zip(bounds_j[:-1].tolist(), bounds_j[1:].tolist(), strict=True)):
        stream = torch.cat([history_bi[b], class_t[start:end]])
        back_wt = torch.stack([stream[places - 1 - s : places - 1 - s + end - start] for s in range(places)])
        broken_wt = torch.cumsum(back_wt == IMAGE, dim=0) > 0  # latching: behind an image token all is padding
        windows.append(torch.where(broken_wt, pad_class, back_wt).T)
        histories.append(stream[int(kept_b[b]) : int(kept_b[b]) + places - 1])
    window_tw = torch.cat([ids_t.new_empty(0, places), *windows])
    return window_tw, image_t, torch.cat([history_bi[:0], *(kept[None] for kept in histories)])


def engram_hash(window_tw: Tensor, image_t: Tensor, *, layout: EngramLayout) -> Tensor:
    """The table rows that each token looks up in each layer.

    Math:
        h = window[0] * m[0] xor … xor window[n-1] * m[n-1]  for n = 2 … w, in 64-bit integers without overflow
        row[z] = h mod prime[z] + offset[z], z a column of n; the offsets are the prefix sums of the primes

    Shapes:
        window_tw: int32 [t, w]; image_t: bool [t]; returns int32 [l, t, z]; -1 for an image token.

    Raises:
        TypeError: window_tw is not int32, or image_t is not bool.
        ValueError: shapes disagree, w is not the one of `layout`, or a class is not in 0 … num_classes - 1.
    """
    dims = {"w": layout.window}
    expect_shape("window_tw", window_tw, "tw", dims)
    expect_shape("image_t", image_t, "t", dims)
    expect_dtype("window_tw", window_tw, torch.int32)
    expect_dtype("image_t", image_t, torch.bool)
    expect_in_range("window_tw", window_tw, 0, layout.num_classes)
    layers = []
    for multipliers, primes, offsets in zip(layout.multipliers, layout.primes, layout.offsets, strict=True):
        product_tw = window_tw.long() * torch.tensor(multipliers, device=window_tw.device)
        hash_t, columns = product_tw[:, 0], []
        for n in range(2, layout.window + 1):
            hash_t = hash_t ^ product_tw[:, n - 1]
            columns += [hash_t] * layout.num_heads
        row_tz = torch.stack(columns, dim=1) % torch.tensor(primes, device=window_tw.device)
        layers.append(row_tz + torch.tensor(offsets, device=window_tw.device))
    return torch.stack(layers).to(torch.int32).masked_fill(image_t[None, :, None], -1)


def engram_lookup(table_rd: Tensor, table_sf_rg: Tensor, row_tz: Tensor) -> tuple[Tensor, Tensor]:
    """The named rows side by side, as the bytes that the table stores; a projection takes them as they are.

    Shapes:
        table_rd: float8_e4m3fn; table_sf_rg: uint8 [r, d / 32]; row_tz: int32; returns [t, z d], [t, z d / 32].

    Edges:
        row -1 is a hole: nothing is read, its codes are 0 and its scales 1 (byte 127).

    Raises:
        TypeError: the table is not float8_e4m3fn and uint8, or row_tz is not int32.
        ValueError: shapes disagree, or a row is not in -1 … r - 1.
    """
    expect_table(table_rd, table_sf_rg, row_tz)
    hole_tz = row_tz < 0
    row_tz = torch.where(hole_tz, 0, row_tz).long()
    codes_tzd = table_rd.view(torch.uint8)[row_tz].masked_fill(hole_tz[..., None], 0)
    sf_tzg = table_sf_rg[row_tz].masked_fill(hole_tz[..., None], 127)
    return codes_tzd.flatten(1).view(torch.float8_e4m3fn), sf_tzg.flatten(1)


def engram_embed(
    table_rd: Tensor,
    table_sf_rg: Tensor,
    row_tz: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The values of the named rows side by side: code × 2^(scale byte - 127).

    Shapes:
        as `engram_lookup`; returns [t, z d].

    Rounding:
        one, to `dtype`; exact for products that are normal numbers of it.

    Edges:
        a hole is 0. A NaN code gives NaN, scale byte 255 makes its group NaN, byte 0 is 2^-127.

    Raises:
        TypeError: as `engram_lookup`; dtype is no storage dtype.
        ValueError: as `engram_lookup`.
    """
    codes_tm, sf_tg = engram_lookup(table_rd, table_sf_rg, row_tz)
    scale_tm = decode_ue8m0(sf_tg, num=num).repeat_interleave(GROUP, dim=1)
    return num.store(decode_e4m3(codes_tm, num=num) * scale_tm, dtype)


def engram_project(
    codes_tm: Tensor, sf_tg: Tensor, w_um: Tensor, w_sf_ig: Tensor, *, num: Numerics = CONTRACT
) -> Tensor:
    """Keys and value: the product of looked-up bytes with the fp8 weight, both as they are stored.

    Math:
        kv[t, u] = sum_m code[t, m] 2^(sf[t, m / 32] - 127) w[u, m] 2^(w_sf[u / 32, m / 32] - 127)

    Shapes:
        codes_tm, w_um: float8_e4m3fn; sf_tg: uint8 [t, m / 32]; w_sf_ig: uint8 [u / 32, m / 32]; returns [t, u].

    Rounding:
        one, to bf16; the looked-up values are not quantised again.

    Raises:
        TypeError: codes or weights are not float8_e4m3fn, or scales are not uint8.
        ValueError: shapes disagree, or m is no multiple of 32.
    """
    expect_shape("w_um", w_um, "um", {"m": codes_tm.shape[-1]})
    e_tm = dequantize(codes_tm, sf_tg, fmt=Q8, dtype=torch.float32, num=num)
    w_wide_um = dequantize(w_um, w_sf_ig, fmt=FP8_32X32, dtype=torch.float32, num=num)
    return num.bf16(num.einsum("tm,um->tu", e_tm, w_wide_um))


def engram_gate(
    r_tnm: Tensor,
    kv_tjm: Tensor,
    q_weight_nm: Tensor,
    k_weight_nm: Tensor,
    image_t: Tensor,
    *,
    eps: float,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Add the value to every stream, as far as the stream agrees with its key.

    Math:
        rx = 1 / sqrt(mean_m(r^2) + eps), rk alike for the key k = kv[t, n]
        d = (sum_m r q_weight k_weight k) rx rk m^-0.5
        r'[t, n] = r + sigmoid(copysign(sqrt(max(|d|, 1e-6)), d)) kv[t, j - 1]

    Shapes:
        r_tnm: [t, n, m]; kv_tjm: [t, n + 1, m]; q_weight_nm, k_weight_nm: [n, m]; image_t: bool [t];
        returns [t, n, m]. All floats are bf16 values.

    Rounding:
        one, to bf16, at return. The three sums are fp32 numbers.

    Edges:
        the streams of an image token come back bit for bit, its keys and value may be NaN. d = 0 gives the gate
        0.50025, -0 gives 0.49975. Where squares overflow fp32 d is 0, or NaN if its own sum does (not in SEMANTIC).

    Raises:
        TypeError: image_t is not bool, or another tensor is not floating.
        ValueError: shapes disagree, or eps is not positive.
    """
    dims: dict[str, int] = {}
    expect_shape("r_tnm", r_tnm, "tnm", dims)
    expect_shape("kv_tjm", kv_tjm, "tjm", dims | {"j": dims["n"] + 1})
    expect_shape("q_weight_nm", q_weight_nm, "nm", dims)
    expect_shape("k_weight_nm", k_weight_nm, "nm", dims)
    expect_shape("image_t", image_t, "t", dims)
    floats = {"r_tnm": r_tnm, "kv_tjm": kv_tjm, "q_weight_nm": q_weight_nm, "k_weight_nm": k_weight_nm}
    for name, x in floats.items():
        expect_dtype(name, x, *FLOATING)
    expect_dtype("image_t", image_t, torch.bool)
    expect_positive("eps", eps)
    wide_tnm, key_tnm, value_tm = num.wide(r_tnm), num.wide(kv_tjm[:, :-1]), num.wide(kv_tjm[:, -1])
    rx_tn = torch.rsqrt(num.sum(wide_tnm * wide_tnm, dim=-1) / dims["m"] + eps)
    rk_tn = torch.rsqrt(num.sum(key_tnm * key_tnm, dim=-1) / dims["m"] + eps)
    weight_nm = num.wide(q_weight_nm) * num.wide(k_weight_nm)
    d_tn = num.sum(wide_tnm * weight_nm * key_tnm, dim=-1) * rx_tn * rk_tn * dims["m"] ** -0.5
    gated_tnm = num.bf16(wide_tnm + gate_of(d_tn)[..., None] * value_tm[:, None])
    return torch.where(image_t[:, None, None], wide_tnm, gated_tnm)


def gate_of(d_tn: Tensor) -> Tensor:
    """sigmoid(copysign(sqrt(max(|d|, 1e-6)), d)): never exactly one half."""
    return torch.sigmoid(torch.copysign(d_tn.abs().clamp(min=CLAMP).sqrt(), d_tn))


def engram(
    r_tnm: Tensor,
    row_tz: Tensor,
    table_rd: Tensor,
    table_sf_rg: Tensor,
    weights: EngramWeights,
    *,
    eps: float,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The memory of one layer: `engram_lookup`, `engram_project`, `engram_gate`.

    Shapes:
        r_tnm: bf16 [t, n, m]; row_tz: the rows of this layer, int32 [t, z], all -1 for an image token; the table as
        in `engram_lookup`; returns [t, n, m].

    Rounding:
        keys and value to bf16, the streams to bf16.

    Raises:
        TypeError: as the three.
        ValueError: as the three; some rows of a token are -1 and others are not.
    """
    codes_tm, sf_tg = engram_lookup(table_rd, table_sf_rg, row_tz)
    image_t = (row_tz < 0).all(-1)
    if not torch.equal(image_t, (row_tz < 0).any(-1)):
        raise ValueError("row_tz: expected all rows of a token to be -1 or none")
    expect_multiple("weights.wkv_um (first axis)", weights.wkv_um.shape[0], r_tnm.shape[-1])
    kv_tu = engram_project(codes_tm, sf_tg, weights.wkv_um, weights.wkv_sf_ig, num=num)
    kv_tjm = kv_tu.unflatten(1, (-1, r_tnm.shape[-1]))
    return engram_gate(r_tnm, kv_tjm, weights.q_weight_nm, weights.k_weight_nm, image_t, eps=eps, num=num)


def _check_tokens(
    ids_t: Tensor, image_t: Tensor, bounds_j: Tensor, kept_b: Tensor, history_bi: Tensor
) -> dict[str, int]:
    dims: dict[str, int] = {}
    expect_shape("ids_t", ids_t, "t", dims)
    expect_shape("image_t", image_t, "t", dims)
    expect_shape("history_bi", history_bi, "bi", dims)
    expect_shape("kept_b", kept_b, "b", dims)
    expect_shape("bounds_j", bounds_j, "j", {"j": dims["b"] + 1})
    expect_dtype("image_t", image_t, torch.bool)
    for name, x in (("ids_t", ids_t), ("bounds_j", bounds_j), ("kept_b", kept_b), ("history_bi", history_bi)):
        expect_dtype(name, x, torch.int32)
    expect_in_range("history_bi", history_bi, IMAGE, 2**31 - 1)
    lengths_b = bounds_j.diff()
    if bounds_j[0] != 0 or bounds_j[-1] != dims["t"] or (lengths_b < 0).any():
        raise ValueError(f"bounds_j: expected to ascend from 0 to t={dims['t']}, got {bounds_j.tolist()}")
    if ((kept_b < 0) | (kept_b > lengths_b)).any():
        raise ValueError(f"kept_b: expected at most {lengths_b.tolist()} tokens, got {kept_b.tolist()}")
    return dims
