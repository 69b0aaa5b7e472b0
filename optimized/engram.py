"""Fast n-gram memory; the contract is `reference/engram.py`.

Values that a wrong number would come from are checked before a launch, which waits for the device. Where that is not
wanted (a captured graph, a decode step), `trusted=True` leaves the checks of values out: the kernels then read nothing
for a token id, class or row that does not exist, and treat it as an image token or a hole.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from deeptwin.reference.checks import (
    expect_dtype,
    expect_in_range,
    expect_multiple,
    expect_positive,
    expect_shape,
)
from deeptwin.reference.config import EngramLayout, OutsideVocabulary
from deeptwin.reference.weights import EngramWeights

from .providers import packed, tile_kernels

STORAGE = (torch.bfloat16, torch.float16, torch.float32)
CLAMP = 1e-6  # least magnitude under the root of the gate


def engram_window_triton(
    ids_t: Tensor,
    image_t: Tensor,
    bounds_j: Tensor,
    kept_b: Tensor,
    history_bi: Tensor,
    class_v: Tensor,
    *,
    pad_class: int,
    outside: OutsideVocabulary,
    trusted: bool = False,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.engram.engram_window`.

    Raises:
        TypeError: image_t is not bool, or another tensor is not int32; an `out` buffer has another dtype.
        ValueError: shapes disagree; not trusted, and bounds do not ascend from 0 to t, kept_b is not in 0 … the number
            of tokens of the request, pad_class is no class, a class of the history is below -1, or REFUSE and an id
            that is no image token is not in the vocabulary; an `out` buffer does not fit.
        NotImplementedError: the history keeps no class.
    """
    dims: dict[str, int] = {}
    expect_shape("ids_t", ids_t, "t", dims)
    expect_shape("image_t", image_t, "t", dims)
    expect_shape("history_bi", history_bi, "bi", dims)
    expect_shape("kept_b", kept_b, "b", dims)
    expect_shape("bounds_j", bounds_j, "j", {"j": dims["b"] + 1})
    expect_shape("class_v", class_v, "v", dims)
    expect_dtype("image_t", image_t, torch.bool)
    integers = {"ids_t": ids_t, "bounds_j": bounds_j, "kept_b": kept_b, "history_bi": history_bi, "class_v": class_v}
    for name, x in integers.items():
        expect_dtype(name, x, torch.int32)
    if not dims["i"]:
        raise NotImplementedError(
            f"history_bi: expected at least one class to keep, got shape {tuple(history_bi.shape)}"
        )
    if not trusted:
        _check_values(ids_t, image_t, bounds_j, kept_b, history_bi, class_v.numel(), pad_class, outside)
    from deeptwin.kernels.triton_ops import engram

    return engram.engram_window(ids_t, image_t, bounds_j, kept_b, history_bi, class_v, pad_class=pad_class, out=out)


def engram_hash_triton(
    window_tw: Tensor, image_t: Tensor, *, layout: EngramLayout, trusted: bool = False, out: Tensor | None = None
) -> Tensor:
    """`reference.engram.engram_hash`.

    Raises:
        TypeError: window_tw is not int32, or image_t is not bool; `out` has another dtype.
        ValueError: shapes disagree, w is not the one of `layout`; not trusted, and a class is not in
            0 … num_classes - 1; `out` does not fit.
    """
    _check_windows(window_tw, image_t, layout, trusted)
    from deeptwin.kernels.triton_ops import engram

    return engram.engram_hash(
        window_tw,
        image_t,
        constants=_hash_constants(layout, window_tw.device),
        num_heads=layout.num_heads,
        num_classes=layout.num_classes,
        out=out,
    )


def engram_lookup_triton(
    table_rd: Tensor,
    table_sf_rg: Tensor,
    row_tz: Tensor,
    *,
    trusted: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.engram.engram_lookup`.

    Raises:
        TypeError: the table is not float8_e4m3fn and uint8, or row_tz is not int32; an `out` buffer has another dtype.
        ValueError: shapes disagree; not trusted, and a row is not in -1 … r - 1; an `out` buffer does not fit.
        NotImplementedError: the bytes of a row are not adjacent.
    """
    _check_table(table_rd, table_sf_rg, row_tz, trusted)
    from deeptwin.kernels.triton_ops import engram

    return engram.engram_lookup(table_rd, table_sf_rg, row_tz, out=out)


def engram_embed_triton(
    table_rd: Tensor,
    table_sf_rg: Tensor,
    row_tz: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    trusted: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.engram.engram_embed`.

    Raises:
        TypeError: as `engram_lookup_triton`; dtype is not bf16, fp16 or fp32.
        ValueError: as `engram_lookup_triton`.
        NotImplementedError: the bytes of a row are not adjacent.
    """
    _check_table(table_rd, table_sf_rg, row_tz, trusted)
    if dtype not in STORAGE:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    from deeptwin.kernels.triton_ops import engram

    return engram.engram_embed(table_rd, table_sf_rg, row_tz, dtype=dtype, out=out)


def engram_project_triton(
    codes_tm: Tensor, sf_tg: Tensor, w_um: Tensor, w_sf_ig: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """`reference.engram.engram_project`.

    Raises:
        TypeError: codes or weights are not float8_e4m3fn, or scales are not uint8; `out` has another dtype.
        ValueError: shapes disagree, or m is no multiple of 32; `out` does not fit.
    """
    dims: dict[str, int] = {}
    expect_shape("codes_tm", codes_tm, "tm", dims)
    expect_multiple("codes_tm (last axis)", dims["m"], 32)
    expect_shape("w_um", w_um, "um", dims)
    dims |= {"g": dims["m"] // 32, "i": -(-dims["u"] // 32)}
    expect_shape("sf_tg", sf_tg, "tg", dims)
    expect_shape("w_sf_ig", w_sf_ig, "ig", dims)
    for name, codes in (("codes_tm", codes_tm), ("w_um", w_um)):
        expect_dtype(name, codes, torch.float8_e4m3fn)
    for name, scales in (("sf_tg", sf_tg), ("w_sf_ig", w_sf_ig)):
        expect_dtype(name, scales, torch.uint8)
    from deeptwin.kernels.triton_ops import engram_mix

    return engram_mix.engram_project(codes_tm, sf_tg, w_um, w_sf_ig, out=out)


def engram_gate_triton(
    r_tnm: Tensor,
    kv_tjm: Tensor,
    q_weight_nm: Tensor,
    k_weight_nm: Tensor,
    image_t: Tensor,
    *,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.engram.engram_gate`.

    Raises:
        TypeError: image_t is not bool, or another tensor is not bf16; `out` has another dtype.
        ValueError: shapes disagree, or eps is not positive; `out` does not fit.
    """
    _check_gate(r_tnm, kv_tjm, q_weight_nm, k_weight_nm, image_t, eps)
    from deeptwin.kernels.triton_ops import engram_mix

    return engram_mix.engram_gate(r_tnm, kv_tjm, q_weight_nm, k_weight_nm, image_t, eps=eps, out=out)


def engram_triton(
    r_tnm: Tensor,
    row_tz: Tensor,
    table_rd: Tensor,
    table_sf_rg: Tensor,
    weights: EngramWeights,
    *,
    eps: float,
    trusted: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.engram.engram`: look up, project, gate.

    Raises:
        TypeError: as the three.
        ValueError: as the three; not trusted, and some rows of a token are -1 and others are not.
        NotImplementedError: the bytes of a row are not adjacent.
    """
    expect_multiple("weights.wkv_um (first axis)", weights.wkv_um.shape[0], r_tnm.shape[-1])
    codes_tm, sf_tg = engram_lookup_triton(table_rd, table_sf_rg, row_tz, trusted=trusted)
    image_t = (row_tz < 0).all(-1)
    if not trusted and not torch.equal(image_t, (row_tz < 0).any(-1)):
        raise ValueError("row_tz: expected all rows of a token to be -1 or none")
    kv_tu = engram_project_triton(codes_tm, sf_tg, weights.wkv_um, weights.wkv_sf_ig)
    kv_tjm = kv_tu.unflatten(1, (-1, r_tnm.shape[-1]))
    return engram_gate_triton(r_tnm, kv_tjm, weights.q_weight_nm, weights.k_weight_nm, image_t, eps=eps, out=out)


def engram_hash_tile_kernels(
    window_tw: Tensor, image_t: Tensor, *, layout: EngramLayout, trusted: bool = False
) -> Tensor:
    """`engram_hash` by `engram_hash` of TileKernels 2.1.0 (SM90, SM100), bit for bit.

    Layout: windows are packed if they are not; sizes and offsets are int32, sizes by n and head. Launches repeat, and
    no token depends on its batch.

    Raises:
        TypeError: window_tw is not int32, or image_t is not bool.
        ValueError: as `engram_hash_triton`.
        NotImplementedError: no TileKernels 2.x.
    """
    _check_windows(window_tw, image_t, layout, trusted)
    library = tile_kernels()
    constants = _library_constants(layout, window_tw.device)
    row_ltz: Tensor = library.engram.engram_hash(packed(window_tw), *constants, packed(image_t))
    return row_ltz


def engram_gate_tile_kernels(
    r_tnm: Tensor, kv_tjm: Tensor, q_weight_nm: Tensor, k_weight_nm: Tensor, image_t: Tensor, *, eps: float
) -> Tensor:
    """`engram_gate` by `fused_weight` and `engram_gate_fwd` of TileKernels 2.1.0 (SM90, SM100).

    Layout: tensors are packed if they are not; the product of the two weights is made here, once a call. The sign of d
    is copied, as ours. Launches repeat, and no token depends on its batch.

    Raises:
        TypeError: image_t is not bool, or another tensor is not bf16.
        ValueError: shapes disagree, or eps is not positive.
        NotImplementedError: no TileKernels 2.x, or streams that are no multiple of 256 from 512 up.
    """
    _check_gate(r_tnm, kv_tjm, q_weight_nm, k_weight_nm, image_t, eps)
    width = r_tnm.shape[2]
    if width < 512 or width % 256:
        raise NotImplementedError(f"r_tnm: expected streams of 256·n channels from 512 up, got {width}")
    library = tile_kernels()
    weight_nm = library.engram.fused_weight(packed(q_weight_nm), packed(k_weight_nm))
    gated_tnm: Tensor = library.engram.engram_gate_fwd(
        packed(r_tnm), packed(kv_tjm), weight_nm, eps, CLAMP, save_for_backward=False, image_token_mask=packed(image_t)
    )[0]
    return gated_tnm


@lru_cache(maxsize=16)
def _hash_constants(layout: EngramLayout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Multipliers, primes and offsets of `layout` on `device`, int64, one line a layer."""
    multipliers, primes, offsets = (
        torch.tensor(table, dtype=torch.int64, device=device)
        for table in (layout.multipliers, layout.primes, layout.offsets)
    )
    return multipliers, primes, offsets


@lru_cache(maxsize=16)
def _library_constants(layout: EngramLayout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The same as TileKernels takes them: sizes by n and head, sizes and offsets as int32."""
    multipliers, sizes, offsets = _hash_constants(layout, device)
    return multipliers, sizes.to(torch.int32).unflatten(1, (-1, layout.num_heads)), offsets.to(torch.int32)


def _check_values(
    ids_t: Tensor,
    image_t: Tensor,
    bounds_j: Tensor,
    kept_b: Tensor,
    history_bi: Tensor,
    num_ids: int,
    pad_class: int,
    outside: OutsideVocabulary,
) -> None:
    if not 0 <= pad_class < num_ids:
        raise ValueError(f"pad_class: expected a class in 0 … {num_ids - 1}, got {pad_class}")
    lengths_b = bounds_j.diff()
    if bounds_j[0] != 0 or bounds_j[-1] != ids_t.numel() or (lengths_b < 0).any():
        raise ValueError(f"bounds_j: expected to ascend from 0 to t={ids_t.numel()}, got {bounds_j.tolist()}")
    if ((kept_b < 0) | (kept_b > lengths_b)).any():
        raise ValueError(f"kept_b: expected at most {lengths_b.tolist()} tokens, got {kept_b.tolist()}")
    expect_in_range("history_bi", history_bi, -1, 2**31 - 1)
    if outside is OutsideVocabulary.REFUSE:
        expect_in_range("ids_t", torch.where(image_t, 0, ids_t), 0, num_ids)


def _check_windows(window_tw: Tensor, image_t: Tensor, layout: EngramLayout, trusted: bool) -> None:
    dims = {"w": layout.window}
    expect_shape("window_tw", window_tw, "tw", dims)
    expect_shape("image_t", image_t, "t", dims)
    expect_dtype("window_tw", window_tw, torch.int32)
    expect_dtype("image_t", image_t, torch.bool)
    if not trusted:
        expect_in_range("window_tw", window_tw, 0, layout.num_classes)


def _check_gate(
    r_tnm: Tensor, kv_tjm: Tensor, q_weight_nm: Tensor, k_weight_nm: Tensor, image_t: Tensor, eps: float
) -> None:
    dims: dict[str, int] = {}
    expect_shape("r_tnm", r_tnm, "tnm", dims)
    expect_shape("kv_tjm", kv_tjm, "tjm", dims | {"j": dims["n"] + 1})
    expect_shape("q_weight_nm", q_weight_nm, "nm", dims)
    expect_shape("k_weight_nm", k_weight_nm, "nm", dims)
    expect_shape("image_t", image_t, "t", dims)
    floats = {"r_tnm": r_tnm, "kv_tjm": kv_tjm, "q_weight_nm": q_weight_nm, "k_weight_nm": k_weight_nm}
    for name, x in floats.items():
        expect_dtype(name, x, torch.bfloat16)
    expect_dtype("image_t", image_t, torch.bool)
    expect_positive("eps", eps)


def _check_table(table_rd: Tensor, table_sf_rg: Tensor, row_tz: Tensor, trusted: bool) -> None:
    dims: dict[str, int] = {}
    expect_shape("table_rd", table_rd, "rd", dims)
    expect_multiple("table_rd (last axis)", dims["d"], 32)
    expect_shape("table_sf_rg", table_sf_rg, "rg", dims | {"g": dims["d"] // 32})
    expect_shape("row_tz", row_tz, "tz", {})
    expect_dtype("table_rd", table_rd, torch.float8_e4m3fn)
    expect_dtype("table_sf_rg", table_sf_rg, torch.uint8)
    expect_dtype("row_tz", row_tz, torch.int32)
    if not trusted:
        expect_in_range("row_tz", row_tz, -1, dims["r"])
