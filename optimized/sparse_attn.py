"""Fast sparse attention; the contract is `reference/sparse_attn.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_positive, expect_shape
from deeptwin.reference.config import PageLayout, RecordFormat, ScaleKind, TwoCaches

from .providers import expect_sm90, flash_mla_legacy, flash_mla_lists, flash_mla_schedule, flash_mla_steps

if TYPE_CHECKING:
    from deeptwin.kernels.triton_ops.split_softmax import SplitLaunch
    from deeptwin.kernels.triton_ops.two_cache import TwoCacheLaunch


def sparse_attn_triton(
    q_thd: Tensor,
    kv_sd: Tensor,
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    launch: SplitLaunch | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to listed rows of a sequence; queries, keys and output are of `dtype`.

    Raises:
        ValueError: shapes disagree, `value_dim` is not in 1..d, `scale` is not positive, or an `out` buffer has
            another shape.
        TypeError: `dtype` is not bfloat16 or float32, queries, keys or an `out` buffer have another dtype, indices or
            lengths are not int32, or the sink is not float32.
        NotImplementedError: `value_dim` is no power of two from 16 up, or rows are not contiguous.
    """
    _check_lists(q_thd, idx_tk, sink_h, topk_length_t, scale, value_dim, dtype, kv_sd=kv_sd)
    from deeptwin.kernels.triton_ops import sparse_attn as kernels

    return kernels.sparse_attn(
        q_thd, kv_sd, idx_tk, sink_h, topk_length_t, scale=scale, value_dim=value_dim, launch=launch, out=out
    )


def sparse_attn_tilelang(
    q_thd: Tensor,
    kv_sd: Tensor,
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """`sparse_attn` on SM90 with specialised warps; queries that are not contiguous are copied first.

    Raises:
        ValueError: shapes disagree, `value_dim` is not in 1..d, or `scale` is not positive.
        TypeError: queries or keys are not of `dtype`, indices or lengths are not int32, or the sink is not float32.
        NotImplementedError: another dtype than bf16, heads that are no multiple of 64, other widths than 512 or 576
            with 512 values, rows that do not follow one another, or no SM90.
    """
    _check_lists(q_thd, idx_tk, sink_h, topk_length_t, scale, value_dim, dtype, kv_sd=kv_sd)
    _expect_specialised(q_thd, kv_sd.unsqueeze(0), "kv_sd", value_dim)
    from deeptwin.kernels.tilelang_ops import sparse_attn_sm90 as kernels

    return kernels.sparse_attn(
        q_thd.contiguous(),
        kv_sd.unsqueeze(0),
        idx_tk.contiguous(),
        sink_h,
        topk_length_t,
        scale=scale,
        value_dim=value_dim,
    )


def sparse_attn_decode_tilelang(
    q_thd: Tensor,
    kv_pod: Tensor,
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """`sparse_attn_tilelang` over a paged cache, with the same bits for the same list.

    Raises:
        ValueError: as `sparse_attn_tilelang`.
        TypeError: as `sparse_attn_tilelang`.
        NotImplementedError: as `sparse_attn_tilelang`.
    """
    _check_lists(q_thd, idx_tk, sink_h, topk_length_t, scale, value_dim, dtype, kv_pod=kv_pod)
    _expect_specialised(q_thd, kv_pod, "kv_pod", value_dim)
    from deeptwin.kernels.tilelang_ops import sparse_attn_sm90 as kernels

    return kernels.sparse_attn(
        q_thd.contiguous(), kv_pod, idx_tk.contiguous(), sink_h, topk_length_t, scale=scale, value_dim=value_dim
    )


def sparse_attn_flash_mla(
    q_thd: Tensor,
    kv_sd: Tensor,
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """`sparse_attn` by FlashMLA's legacy sparse prefill (sgl-flash-mla 1.0.0, SM90).

    Layout: bf16 rows [s, d], each at a multiple of 16 bytes. Its LSE is natural; +inf of an empty row becomes −inf.
    Runs repeat their bits, and a row has the same bits in every batch.

    Raises:
        ValueError: shapes disagree, `value_dim` is not in 1..d, or `scale` is not positive.
        TypeError: queries or keys are not of `dtype`, indices or lengths are not int32, or the sink is not float32.
        NotImplementedError: no FlashMLA with the legacy line, another dtype than bf16, other heads than 64 or 128,
            other widths than 512 or 576 with 512 values, no token or key, or rows that lie otherwise.
    """
    dims = _check_lists(q_thd, idx_tk, sink_h, topk_length_t, scale, value_dim, dtype, kv_sd=kv_sd)
    if dtype is not torch.bfloat16:
        raise NotImplementedError(f"dtype: expected bfloat16, got {dtype}")
    if dims["h"] not in (64, 128) or dims["d"] not in (512, 576) or value_dim != 512:
        raise NotImplementedError(f"q_thd: expected 64 or 128 heads of 512 or 576 with 512 values, got {dims}")
    if not dims["t"] or not dims["s"]:
        raise NotImplementedError(f"q_thd, kv_sd: expected tokens and keys, got {dims}")
    if kv_sd.stride(1) != 1 or kv_sd.stride(0) % 8 or kv_sd.data_ptr() % 16:
        raise NotImplementedError(f"kv_sd: expected rows at multiples of 16 bytes, got strides {kv_sd.stride()}")
    # lists grow by holes to the kernel's step, which changes no bit; indices outside are holes to it
    lists = flash_mla_steps(idx_tk, 128)
    out_thu, _, lse_th = flash_mla_legacy().flash_mla_sparse_fwd(
        q_thd.contiguous(), kv_sd[:, None], lists[:, None], scale, 512, sink_h, topk_length_t, use_legacy=True
    )
    return out_thu, lse_th.masked_fill(lse_th == torch.inf, -torch.inf)


def sparse_attn_decode_triton(
    q_thd: Tensor,
    kv_pod: Tensor,
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    launch: SplitLaunch | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to listed slots of a paged cache; as `sparse_attn_triton`, and with the same bits for the same list.

    Raises:
        ValueError: shapes disagree, `value_dim` is not in 1..d, `scale` is not positive, or an `out` buffer has
            another shape.
        TypeError: `dtype` is not bfloat16 or float32, queries, keys or an `out` buffer have another dtype, indices or
            lengths are not int32, or the sink is not float32.
        NotImplementedError: `value_dim` is no power of two from 16 up, or rows are not contiguous.
    """
    _check_lists(q_thd, idx_tk, sink_h, topk_length_t, scale, value_dim, dtype, kv_pod=kv_pod)
    from deeptwin.kernels.triton_ops import sparse_attn as kernels

    return kernels.sparse_attn_decode(
        q_thd, kv_pod, idx_tk, sink_h, topk_length_t, scale=scale, value_dim=value_dim, launch=launch, out=out
    )


def two_cache_attn_triton(
    q_thd: Tensor,
    window_sd: Tensor,
    window_idx_tk: Tensor,
    main_pow: Tensor,
    main_idx_tk: Tensor,
    sink_h: Tensor | None,
    *,
    caches: TwoCaches,
    dtype: torch.dtype = torch.bfloat16,
    launch: TwoCacheLaunch | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to bf16 window rows and compressed records; queries are bf16, the output is of `dtype`.

    Raises:
        ValueError: shapes disagree, w is not the bytes of a record of `caches`, or an `out` buffer has another shape.
        TypeError: queries or rows are not bfloat16, pages are not uint8, indices are not int32, the sink is not
            float32, `dtype` is not bfloat16 or float32, or an `out` buffer has another dtype.
        NotImplementedError: d is no power of two from 32 up, or rows or pages are not contiguous.
    """
    dims = {"d": caches.main.width}
    expect_shape("window_sd", window_sd, "sd", dims)
    expect_dtype("window_sd", window_sd, torch.bfloat16)
    _check_pair(q_thd, window_idx_tk, main_pow, main_idx_tk, sink_h, caches, dtype)
    return _launch_pair(
        q_thd, window_sd, window_idx_tk, main_pow, main_idx_tk, sink_h, "rows", caches, dtype, launch, out
    )


def two_cache_attn_decode_triton(
    q_thd: Tensor,
    window_pow: Tensor,
    window_idx_tk: Tensor,
    main_pow: Tensor,
    main_idx_tk: Tensor,
    sink_h: Tensor | None,
    *,
    caches: TwoCaches,
    dtype: torch.dtype = torch.bfloat16,
    launch: TwoCacheLaunch | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to window records and compressed records; as `two_cache_attn_triton`, with the same bits for equal keys.

    Raises:
        ValueError: shapes disagree, w is not the bytes of a record of `caches`, or an `out` buffer has another shape.
        TypeError: queries are not bfloat16, pages are not uint8, indices are not int32, the sink is not float32,
            `dtype` is not bfloat16 or float32, or an `out` buffer has another dtype.
        NotImplementedError: d is no power of two from 32 up, or rows or pages are not contiguous.
    """
    expect_shape("window_pow", window_pow, "pow", {"w": caches.window.record_bytes})
    expect_dtype("window_pow", window_pow, torch.uint8)
    _check_pair(q_thd, window_idx_tk, main_pow, main_idx_tk, sink_h, caches, dtype)
    kind = _kind(caches.window)
    return _launch_pair(
        q_thd, window_pow, window_idx_tk, main_pow, main_idx_tk, sink_h, kind, caches, dtype, launch, out
    )


def two_cache_attn_tilelang(
    q_thd: Tensor,
    window_sd: Tensor,
    window_idx_tk: Tensor,
    main_pow: Tensor,
    main_idx_tk: Tensor,
    sink_h: Tensor | None,
    *,
    caches: TwoCaches,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """`two_cache_attn` on SM90 with specialised warps; queries and lists that are not contiguous are copied first.

    Raises:
        ValueError: shapes disagree, or w is not the bytes of a record of `caches`.
        TypeError: queries or rows are not bfloat16, pages are not uint8, indices are not int32, the sink is not
            float32, or `dtype` is not bfloat16 or float32.
        NotImplementedError: an output that is not bf16, heads that are no multiple of 64, other records than those of
            512 channels, pages whose records do not follow one another or begin at odd places, or no SM90.
    """
    expect_shape("window_sd", window_sd, "sd", {"d": caches.main.width})
    expect_dtype("window_sd", window_sd, torch.bfloat16)
    _check_pair(q_thd, window_idx_tk, main_pow, main_idx_tk, sink_h, caches, dtype)
    if window_sd.stride() != (caches.main.width, 1):
        raise NotImplementedError(f"window_sd: expected contiguous rows, got strides {window_sd.stride()}")
    return _launch_specialised(q_thd, window_sd, window_idx_tk, main_pow, main_idx_tk, sink_h, "rows", caches, dtype)


def two_cache_attn_decode_tilelang(
    q_thd: Tensor,
    window_pow: Tensor,
    window_idx_tk: Tensor,
    main_pow: Tensor,
    main_idx_tk: Tensor,
    sink_h: Tensor | None,
    *,
    caches: TwoCaches,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """`two_cache_attn_tilelang` over window records, with the same bits for equal keys.

    Raises:
        ValueError: as `two_cache_attn_tilelang`.
        TypeError: queries are not bfloat16, pages are not uint8, indices are not int32, the sink is not float32, or
            `dtype` is not bfloat16 or float32.
        NotImplementedError: as `two_cache_attn_tilelang`.
    """
    expect_shape("window_pow", window_pow, "pow", {"w": caches.window.record_bytes})
    expect_dtype("window_pow", window_pow, torch.uint8)
    _check_pair(q_thd, window_idx_tk, main_pow, main_idx_tk, sink_h, caches, dtype)
    kind = _kind(caches.window)
    return _launch_specialised(q_thd, window_pow, window_idx_tk, main_pow, main_idx_tk, sink_h, kind, caches, dtype)


def two_cache_attn_decode_flash_mla(
    q_thd: Tensor,
    window_pow: Tensor,
    window_idx_tk: Tensor,
    main_pow: Tensor,
    main_idx_tk: Tensor,
    sink_h: Tensor | None,
    *,
    caches: TwoCaches,
    dtype: torch.dtype = torch.bfloat16,
    clean_lists: bool = False,
) -> tuple[Tensor, Tensor]:
    """`two_cache_attn_decode` by FlashMLA's legacy sparse decode (sgl-flash-mla 1.0.0, SM90), a request for each token.

    Layout: kv_v4, 584 bytes in sectioned pages, in both pools. The length of each list ends at its last entry. Its
    LSE is natural; +inf of an empty row becomes −inf. Runs repeat their bits; lists are split by the batch, so a row
    depends on its neighbours. With `clean_lists` the caller vouches for lists of whole steps of 64 entries whose holes
    are −1, which are walked to their ends.

    Raises:
        ValueError: shapes disagree, or w is not the bytes of a record of `caches`.
        TypeError: queries are not bfloat16, pages are not uint8, indices are not int32, the sink is not float32, or
            `dtype` is not bfloat16 or float32.
        NotImplementedError: no FlashMLA with the legacy line, an output that is not bf16, other heads than 64 or 128,
            other records than those of 584 bytes in sectioned pages, pages whose records do not follow one another or
            begin at odd places, or no token.
    """
    return _two_cache_flash_mla(
        q_thd, window_pow, window_idx_tk, main_pow, main_idx_tk, sink_h, caches, dtype, clean_lists, whole=False
    )


def two_cache_attn_decode_flash_mla_unsplit(
    q_thd: Tensor,
    window_pow: Tensor,
    window_idx_tk: Tensor,
    main_pow: Tensor,
    main_idx_tk: Tensor,
    sink_h: Tensor | None,
    *,
    caches: TwoCaches,
    dtype: torch.dtype = torch.bfloat16,
    clean_lists: bool = False,
) -> tuple[Tensor, Tensor]:
    """`two_cache_attn_decode_flash_mla` by a schedule of whole requests: a row has the same bits in every batch.

    Raises:
        ValueError: as `two_cache_attn_decode_flash_mla`.
        TypeError: as `two_cache_attn_decode_flash_mla`.
        NotImplementedError: as `two_cache_attn_decode_flash_mla`.
    """
    return _two_cache_flash_mla(
        q_thd, window_pow, window_idx_tk, main_pow, main_idx_tk, sink_h, caches, dtype, clean_lists, whole=True
    )


def _two_cache_flash_mla(
    q_thd: Tensor,
    window_pow: Tensor,
    window_idx_tk: Tensor,
    main_pow: Tensor,
    main_idx_tk: Tensor,
    sink_h: Tensor | None,
    caches: TwoCaches,
    dtype: torch.dtype,
    clean_lists: bool,
    *,
    whole: bool,
) -> tuple[Tensor, Tensor]:
    expect_shape("window_pow", window_pow, "pow", {"w": caches.window.record_bytes})
    expect_dtype("window_pow", window_pow, torch.uint8)
    _check_pair(q_thd, window_idx_tk, main_pow, main_idx_tk, sink_h, caches, dtype)
    if dtype is not torch.bfloat16:
        raise NotImplementedError(f"dtype: expected bfloat16, got {dtype}")
    if q_thd.shape[1] not in (64, 128) or not len(q_thd):
        raise NotImplementedError(f"q_thd: expected tokens of 64 or 128 heads, got {tuple(q_thd.shape)}")
    found = (caches.window.record_bytes, caches.main.record_bytes, caches.layout)
    if found != (584, 584, PageLayout.SECTIONED):
        raise NotImplementedError(f"caches: expected records of 584 bytes in sectioned pages, got {found}")
    _expect_pages("window_pow", window_pow)
    _expect_pages("main_pow", main_pow)
    library = flash_mla_legacy()
    q_t1hd = q_thd[:, None].contiguous()
    window, main, window_t, main_t = window_idx_tk, main_idx_tk, None, None
    if not clean_lists:
        window = flash_mla_lists(window, window_pow.shape[0] * window_pow.shape[1], 64)
        main = flash_mla_lists(main, main_pow.shape[0] * main_pow.shape[1], 64)
        window_t, main_t = _used(window), _used(main)
    blocks_t = _blocks(window, window_t).clamp_min(1) + _blocks(main, main_t) if whole else None
    out_t1hu, lse_th1 = library.flash_mla_with_kvcache(
        q_t1hd,
        window_pow[:, :, None],
        None,
        None,
        512,
        flash_mla_schedule(library, q_t1hd, blocks_t),
        softmax_scale=caches.scale,
        is_fp8_kvcache=True,
        indices=window[:, None],
        attn_sink=sink_h,
        extra_k_cache=main_pow[:, :, None],
        extra_indices_in_kvcache=main[:, None],
        topk_length=window_t,
        extra_topk_length=main_t,
        use_legacy=True,
    )
    return out_t1hu[:, 0], lse_th1[:, :, 0].masked_fill(lse_th1[:, :, 0] == torch.inf, -torch.inf)


def _used(lists: Tensor) -> Tensor:
    """How many entries of every list there are up to the last that is no hole."""
    place_k = torch.arange(1, lists.shape[1] + 1, dtype=torch.int32, device=lists.device)
    return torch.where(lists >= 0, place_k, 0).amax(1)


def _blocks(lists: Tensor, length_t: Tensor | None) -> Tensor:
    """How many blocks of 64 entries of every list are walked."""
    return torch.full_like(lists[:, 0], lists.shape[1] // 64) if length_t is None else (length_t + 63) // 64


def _launch_specialised(
    q_thd: Tensor,
    window: Tensor,
    window_idx_tk: Tensor,
    main_pow: Tensor,
    main_idx_tk: Tensor,
    sink_h: Tensor | None,
    kind: str,
    caches: TwoCaches,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    heads, width = q_thd.shape[1:]
    kinds = (kind, _kind(caches.main))
    if dtype is not torch.bfloat16:
        raise NotImplementedError(f"dtype: expected bfloat16, got {dtype}")
    if heads % 64 or width != 512:
        raise NotImplementedError(f"q_thd: expected 64·n heads of 512, got {heads} of {width}")
    groups = {"e4m3": 32, "e2m1": 16, "v4": 64}
    for name, fmt, code in (("window", caches.window, kind), ("main", caches.main, kinds[1])):
        if code != "rows" and fmt.quant.group != groups.get(code):
            raise NotImplementedError(f"caches: expected {name} records of 528, 288 or 584 bytes, got {fmt.name}")
    if kind != "rows":
        _expect_pages("window_pow", window)
    _expect_pages("main_pow", main_pow)
    expect_sm90("q_thd", q_thd)
    from deeptwin.kernels.tilelang_ops import two_cache_sm90 as kernels

    return kernels.two_cache_attn(
        q_thd.contiguous(),
        window,
        window_idx_tk.contiguous(),
        main_pow,
        main_idx_tk.contiguous(),
        sink_h,
        kinds=kinds,
        sectioned=caches.layout is PageLayout.SECTIONED,
        scale=caches.scale,
    )


def _expect_pages(name: str, pages: Tensor) -> None:
    """Pages that are read sixteen bytes at a time, by their bytes in order."""
    if pages.stride()[1:] != (pages.shape[2], 1) or pages.stride(0) % 16 or pages.data_ptr() % 16:
        raise NotImplementedError(f"{name}: expected pages of records in order, got strides {pages.stride()}")


def _check_pair(
    q_thd: Tensor,
    window_idx_tk: Tensor,
    main_pow: Tensor,
    main_idx_tk: Tensor,
    sink_h: Tensor | None,
    caches: TwoCaches,
    dtype: torch.dtype,
) -> None:
    dims = {"d": caches.main.width}
    expect_shape("q_thd", q_thd, "thd", dims)
    expect_dtype("q_thd", q_thd, torch.bfloat16)
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"dtype: expected bfloat16 or float32, got {dtype}")
    for name, idx_tk in (("window_idx_tk", window_idx_tk), ("main_idx_tk", main_idx_tk)):
        expect_shape(name, idx_tk, "tk", {"t": dims["t"]})
        expect_dtype(name, idx_tk, torch.int32)
    expect_shape("main_pow", main_pow, "pow", {"w": caches.main.record_bytes})
    expect_dtype("main_pow", main_pow, torch.uint8)
    if sink_h is not None:
        expect_shape("sink_h", sink_h, "h", dims)
        expect_dtype("sink_h", sink_h, torch.float32)


def _launch_pair(
    q_thd: Tensor,
    window: Tensor,
    window_idx_tk: Tensor,
    main_pow: Tensor,
    main_idx_tk: Tensor,
    sink_h: Tensor | None,
    kind: str,
    caches: TwoCaches,
    dtype: torch.dtype,
    launch: TwoCacheLaunch | None,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    from deeptwin.kernels.triton_ops import two_cache as kernels

    return kernels.two_cache_attn(
        q_thd,
        window,
        window_idx_tk,
        main_pow,
        main_idx_tk,
        sink_h,
        kinds=(kind, _kind(caches.main)),
        groups=(caches.window.quant.group, caches.main.quant.group),
        sectioned=caches.layout is PageLayout.SECTIONED,
        scale=caches.scale,
        dtype=dtype,
        launch=launch,
        out=out,
    )


def _expect_specialised(q_thd: Tensor, kv_pod: Tensor, name: str, value_dim: int) -> None:
    """What the kernel with specialised warps is written for."""
    heads, width = q_thd.shape[1:]
    if q_thd.dtype is not torch.bfloat16:
        raise NotImplementedError(f"dtype: expected bfloat16, got {q_thd.dtype}")
    if heads % 64 or width not in (512, 576) or value_dim != 512:
        raise NotImplementedError(
            f"q_thd: expected 64·n heads of 512 or 576 with 512 values, got {heads} of {width} with {value_dim}"
        )
    if kv_pod.stride()[1:] != (width, 1):
        raise NotImplementedError(f"{name}: expected rows one behind the other, got strides {kv_pod.stride()}")
    expect_sm90("q_thd", q_thd)


def _kind(fmt: RecordFormat) -> str:
    """What the kernel calls a format."""
    if fmt.tail and (fmt.tail, fmt.pad, fmt.quant.scale) != (fmt.quant.group, 1, ScaleKind.UE8M0):
        raise NotImplementedError(f"caches: expected a tail of one group behind UE8M0 scales, got {fmt.name}")
    return "v4" if fmt.tail else fmt.quant.code.value


def _check_lists(
    q_thd: Tensor,
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    scale: float,
    value_dim: int,
    dtype: torch.dtype,
    **keys: Tensor,
) -> dict[str, int]:
    """Check what every form takes; `keys` is one tensor, whose name ends in its axes. Returns the sizes by letter."""
    dims: dict[str, int] = {}
    expect_shape("q_thd", q_thd, "thd", dims)
    for name, kv in keys.items():
        expect_shape(name, kv, name.removeprefix("kv_"), dims)
        expect_dtype(name, kv, dtype)
    expect_dtype("q_thd", q_thd, dtype)
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"dtype: expected bfloat16 or float32, got {dtype}")
    expect_shape("idx_tk", idx_tk, "tk", dims)
    expect_dtype("idx_tk", idx_tk, torch.int32)
    if sink_h is not None:
        expect_shape("sink_h", sink_h, "h", dims)
        expect_dtype("sink_h", sink_h, torch.float32)
    if topk_length_t is not None:
        expect_shape("topk_length_t", topk_length_t, "t", dims)
        expect_dtype("topk_length_t", topk_length_t, torch.int32)
    expect_positive("scale", scale)
    if not 1 <= value_dim <= dims["d"]:
        raise ValueError(f"value_dim: expected a number in 1..{dims['d']}, got {value_dim}")
    return dims
