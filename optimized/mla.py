"""Fast kernels of multi-head latent attention; the contract is `reference/mla.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_positive, expect_shape

from .providers import expect_sm90, flash_mla_legacy, flash_mla_schedule

if TYPE_CHECKING:
    from deeptwin.kernels.triton_ops.mla_prefill import PrefillLaunch
    from deeptwin.kernels.triton_ops.split_softmax import SplitLaunch


def mla_prefill_triton(
    q_thd: Tensor,
    k_shd: Tensor,
    v_shu: Tensor,
    *,
    scale: float,
    dtype: torch.dtype = torch.bfloat16,
    launch: PrefillLaunch | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the naive form; queries, keys, values and output are of `dtype`.

    Edges:
        keys after a query get weight 0 but share its tile: their values have to be finite.

    Raises:
        ValueError: shapes disagree, there are fewer keys than queries, `scale` is not positive, or an `out` buffer has
            another shape.
        TypeError: `dtype` is not bfloat16 or float32, or queries, keys, values or an `out` buffer have another dtype.
        NotImplementedError: the value width is no power of two from 16 up, heads are narrower than 16, or rows are not
            contiguous.
    """
    dims: dict[str, int] = {}
    expect_shape("q_thd", q_thd, "thd", dims)
    expect_shape("k_shd", k_shd, "shd", dims)
    expect_shape("v_shu", v_shu, "shu", dims)
    for name, x in (("q_thd", q_thd), ("k_shd", k_shd), ("v_shu", v_shu)):
        expect_dtype(name, x, dtype)
    _expect_kernel_dtype(dtype)
    expect_positive("scale", scale)
    if dims["s"] < dims["t"]:
        raise ValueError(f"k_shd: expected at least t={dims['t']} keys, got s={dims['s']}")
    from deeptwin.kernels.triton_ops import mla_prefill as kernels

    return kernels.mla_prefill(q_thd, k_shd, v_shu, scale=scale, launch=launch, out=out)


def mla_decode_triton(
    q_bthd: Tensor,
    cache_pod: Tensor,
    block_table_bp: Tensor,
    lengths_b: Tensor,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    launch: SplitLaunch | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed attention over a paged cache; queries, cache and output are of `dtype`.

    Lengths and table entries are on the device and are not checked here: a used entry that is no page counts as a
    missing key, and a length beyond the table is the caller's error (the reference refuses both).

    Raises:
        ValueError: shapes disagree, `value_dim` is not in 1..d, `scale` is not positive, or an `out` buffer has
            another shape.
        TypeError: `dtype` is not bfloat16 or float32, queries, cache or an `out` buffer have another dtype, or table or
            lengths are not int32.
        NotImplementedError: `value_dim` is no power of two from 16 up, or rows are not contiguous.
    """
    _check_decode(q_bthd, cache_pod, block_table_bp, lengths_b, scale, value_dim, dtype)
    from deeptwin.kernels.triton_ops import mla as kernels

    return kernels.mla_decode(
        q_bthd, cache_pod, block_table_bp, lengths_b, scale=scale, value_dim=value_dim, launch=launch, out=out
    )


def mla_decode_tilelang(
    q_bthd: Tensor,
    cache_pod: Tensor,
    block_table_bp: Tensor,
    lengths_b: Tensor,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """`mla_decode` on SM90 with specialised warps, in splits of 4096 keys; queries that lie apart are copied first.

    Few and many tokens go through different kernels, which give a row the same bits: batch-invariant, runs repeat.

    Raises:
        ValueError: shapes disagree, `value_dim` is not in 1..d, or `scale` is not positive.
        TypeError: queries or cache are not of `dtype`, or table or lengths are not int32.
        NotImplementedError: another dtype than bf16, heads that are no multiple of 64, pages of other than 64 slots,
            other widths than 512 or 576 with 512 values, rows or pages that do not follow one another, or no SM90.
    """
    dims = _check_decode(q_bthd, cache_pod, block_table_bp, lengths_b, scale, value_dim, dtype)
    if dtype is not torch.bfloat16:
        raise NotImplementedError(f"dtype: expected bfloat16, got {dtype}")
    if dims["h"] % 64 or dims["d"] not in (512, 576) or value_dim != 512:
        raise NotImplementedError(f"q_bthd: expected 64·n heads of 512 or 576 with 512 values, got {dims}")
    if dims["o"] != 64 or cache_pod.stride()[1:] != (dims["d"], 1) or cache_pod.stride(0) % 8:
        raise NotImplementedError(
            f"cache_pod: expected pages of 64 rows side by side, got strides {cache_pod.stride()}"
        )
    expect_sm90("q_bthd", q_bthd)
    from deeptwin.kernels.tilelang_ops import mla_sm90 as kernels

    return kernels.mla_decode(
        q_bthd.contiguous(), cache_pod, block_table_bp.contiguous(), lengths_b.contiguous(), scale=scale
    )


def mla_decode_flash_mla(
    q_bthd: Tensor,
    cache_pod: Tensor,
    block_table_bp: Tensor,
    lengths_b: Tensor,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """`mla_decode` by FlashMLA's legacy dense decode (sgl-flash-mla 1.0.0, SM90).

    Layout: bf16 pages [p, 64, 576]. Its LSE is natural; +inf of an empty row becomes −inf. Runs repeat their bits;
    keys are split by the batch, so a row depends on its neighbours.

    Raises:
        ValueError: shapes disagree, `value_dim` is not in 1..d, or `scale` is not positive.
        TypeError: queries or cache are not of `dtype`, or table or lengths are not int32.
        NotImplementedError: no FlashMLA with the legacy line, another dtype than bf16, pages of other than 64 slots,
            other widths than 576 with 512 values, rows that do not follow one another, or no request or page.
    """
    return _flash_mla(q_bthd, cache_pod, block_table_bp, lengths_b, scale, value_dim, dtype, whole=False)


def mla_decode_flash_mla_unsplit(
    q_bthd: Tensor,
    cache_pod: Tensor,
    block_table_bp: Tensor,
    lengths_b: Tensor,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """`mla_decode_flash_mla` by a schedule of whole requests: a row has the same bits in every batch.

    Raises:
        ValueError: as `mla_decode_flash_mla`.
        TypeError: as `mla_decode_flash_mla`.
        NotImplementedError: as `mla_decode_flash_mla`.
    """
    return _flash_mla(q_bthd, cache_pod, block_table_bp, lengths_b, scale, value_dim, dtype, whole=True)


def _flash_mla(
    q_bthd: Tensor,
    cache_pod: Tensor,
    block_table_bp: Tensor,
    lengths_b: Tensor,
    scale: float,
    value_dim: int,
    dtype: torch.dtype,
    *,
    whole: bool,
) -> tuple[Tensor, Tensor]:
    dims = _check_decode(q_bthd, cache_pod, block_table_bp, lengths_b, scale, value_dim, dtype)
    if dtype is not torch.bfloat16:
        raise NotImplementedError(f"dtype: expected bfloat16, got {dtype}")
    if dims["o"] != 64 or dims["d"] != 576 or value_dim != 512 or not dims["b"] or not len(cache_pod):
        raise NotImplementedError(f"cache_pod: expected pages of 64 slots of 576 with 512 values, got {dims}")
    if cache_pod.stride()[1:] != (576, 1):
        raise NotImplementedError(f"cache_pod: expected rows one behind the other, got strides {cache_pod.stride()}")
    library = flash_mla_legacy()
    q_bthd = q_bthd.contiguous()
    blocks_b = (lengths_b + 63) // 64 if whole else None
    if not block_table_bp.shape[1]:  # a request of no key has its first page looked up all the same
        block_table_bp = torch.zeros_like(lengths_b)[:, None]
    out_bthu, lse_bht = library.flash_mla_with_kvcache(
        q_bthd,
        cache_pod[:, :, None],
        block_table_bp.contiguous(),
        lengths_b.contiguous(),
        512,
        flash_mla_schedule(library, q_bthd, blocks_b),
        softmax_scale=scale,
        causal=dims["t"] > 1,
        use_legacy=True,
    )
    return out_bthu, lse_bht.transpose(1, 2).masked_fill(lse_bht.transpose(1, 2) == torch.inf, -torch.inf)


def store_latent_triton(cache_pod_: Tensor, latent_td: Tensor, slots_t: Tensor) -> Tensor:
    """Write latent rows into a paged cache, in place; returns `cache_pod_`.

    Slots are on the device and are not checked here: one outside the cache writes nothing, and of two rows that share
    a slot either may win (the reference refuses both).

    Raises:
        ValueError: shapes disagree.
        TypeError: slots are no integers, or the rows have another dtype than the cache.
        NotImplementedError: rows are not contiguous.
    """
    dims: dict[str, int] = {}
    expect_shape("cache_pod_", cache_pod_, "pod", dims)
    expect_shape("latent_td", latent_td, "td", dims)
    expect_shape("slots_t", slots_t, "t", dims)
    expect_dtype("slots_t", slots_t, torch.int32, torch.int64)
    expect_dtype("latent_td", latent_td, cache_pod_.dtype)
    from deeptwin.kernels.triton_ops import mla as kernels

    return kernels.store_latent(cache_pod_, latent_td, slots_t)


def _check_decode(
    q_bthd: Tensor,
    cache_pod: Tensor,
    block_table_bp: Tensor,
    lengths_b: Tensor,
    scale: float,
    value_dim: int,
    dtype: torch.dtype,
) -> dict[str, int]:
    dims: dict[str, int] = {}
    expect_shape("q_bthd", q_bthd, "bthd", dims)
    expect_shape("cache_pod", cache_pod, "pod", dims)
    expect_shape("block_table_bp", block_table_bp, "bp", {"b": dims["b"]})
    expect_shape("lengths_b", lengths_b, "b", dims)
    expect_dtype("q_bthd", q_bthd, dtype)
    expect_dtype("cache_pod", cache_pod, dtype)
    _expect_kernel_dtype(dtype)
    expect_dtype("block_table_bp", block_table_bp, torch.int32)
    expect_dtype("lengths_b", lengths_b, torch.int32)
    expect_positive("scale", scale)
    if not 1 <= value_dim <= dims["d"]:
        raise ValueError(f"value_dim: expected a number in 1..{dims['d']}, got {value_dim}")
    return dims


def _expect_kernel_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"dtype: expected bfloat16 or float32, got {dtype}")
