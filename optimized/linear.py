"""Linear layers, fast: bf16 products and products of block-scaled bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_multiple, expect_shape
from deeptwin.reference.config import CodeKind, QuantFormat, ScaleKind

from .providers import deep_gemm, expect_sm90, packed

STORAGE = (torch.bfloat16, torch.float16, torch.float32)
SCALE_DTYPES = {ScaleKind.UE8M0: torch.uint8, ScaleKind.E4M3: torch.float8_e4m3fn, ScaleKind.F32: torch.float32}
WIDEST_SPREAD = 14
TILE_ROWS = 128  # of DeepGEMM's grouped products: a tile has one expert


def linear_triton(
    x_tm: Tensor,
    w_fm: Tensor,
    bias_f: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.linear.linear` of operands of one dtype.

    Raises:
        TypeError: an operand or dtype is not bf16, fp16 or fp32; `out` has another dtype.
        ValueError: shapes disagree; `out` does not fit.
        NotImplementedError: x_tm and w_fm differ in dtype, or rows are not contiguous.
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("w_fm", w_fm, "fm", dims)
    expect_dtype("x_tm", x_tm, *STORAGE)
    expect_dtype("w_fm", w_fm, *STORAGE)
    if bias_f is not None:
        expect_shape("bias_f", bias_f, "f", dims)
        expect_dtype("bias_f", bias_f, *STORAGE)
    _check_dtype(dtype)
    if x_tm.dtype != w_fm.dtype:
        raise NotImplementedError(f"w_fm: expected {x_tm.dtype} as x_tm, got {w_fm.dtype}")
    from deeptwin.kernels.triton_ops import linear

    return linear.linear(x_tm, w_fm, bias_f, dtype=dtype, out=out)


def linear_deep_gemm(
    x_tm: Tensor, w_fm: Tensor, bias_f: Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """`linear` of bf16 rows by the bf16 product of DeepGEMM 2.5.0 on SM90, which never hands over to another library
    there: run to run and whatever the batch a row has the same bits.

    Raises:
        TypeError: as `linear_triton`.
        ValueError: as `linear_triton`.
        NotImplementedError: no DeepGEMM, operands other than bf16, a bias, another dtype than bf16 or fp32, no row or
            width, features or a width that are none of 8, or rows that do not begin at multiples of 16 bytes.
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("w_fm", w_fm, "fm", dims)
    expect_dtype("x_tm", x_tm, *STORAGE)
    expect_dtype("w_fm", w_fm, *STORAGE)
    _check_dtype(dtype)
    if {x_tm.dtype, w_fm.dtype} != {torch.bfloat16} or bias_f is not None or dtype is torch.float16:
        raise NotImplementedError(f"x_tm, w_fm, bias_f, dtype: expected bf16, no bias, bf16 or fp32, got {dtype}")
    if not dims["t"] or not dims["m"] or dims["f"] % 8 or dims["m"] % 8:
        raise NotImplementedError(f"x_tm, w_fm: expected rows, 8·n features and 8·n columns, got {dims}")
    for name, x in (("x_tm", x_tm), ("w_fm", w_fm)):
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            raise NotImplementedError(f"{name}: expected rows at multiples of 16 bytes, got strides {x.stride()}")
    library = deep_gemm()
    y_tf = torch.empty(dims["t"], dims["f"], dtype=dtype, device=x_tm.device)
    library.bf16_gemm_nt(x_tm, w_fm, y_tf)
    return y_tf


def linear_codes_triton(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    add_tf: Tensor | None = None,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.linear.linear_codes` for e4m3 rows with UE8M0 or fp32 scales. UE8M0 bytes outside 10 … 245 are
    beyond what the kernel multiplies exactly.

    Raises:
        TypeError: codes or scales have another dtype than their format says; add_tf or dtype is not bf16, fp16 or
            fp32; `out` has another dtype.
        ValueError: x_fmt has blocks of several rows; codes and scales do not fit their format or each other; `out`
            does not fit.
        NotImplementedError: x_fmt has e2m1 codes, a format has e4m3 scales, both have fp32 scales of different groups,
            a group is no power of two from 16 up, or rows are not contiguous.
    """
    _check_rows(x_q, x_sf, x_fmt)
    _check_weight(w_q, w_sf, w_fmt, x_q.shape[1])
    _check_dtype(dtype)
    if add_tf is not None:
        expect_shape("add_tf", add_tf, "tf", {"t": x_q.shape[0], "f": w_q.shape[0]})
        expect_dtype("add_tf", add_tf, *STORAGE)
    from deeptwin.kernels.triton_ops import linear

    return linear.linear_codes(
        x_q, x_sf, w_q, w_sf, add_tf, x_group=x_fmt.group, w_block=(w_fmt.rows, w_fmt.group), dtype=dtype, out=out
    )


def linear_codes_triton_native(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    add_tf: Tensor | None = None,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`linear_codes_triton` by the block-scaled matrix instruction of SM100.

    Raises:
        TypeError: as `linear_codes_triton`.
        ValueError: as `linear_codes_triton`.
        NotImplementedError: x_fmt has e2m1 codes, a scale is not UE8M0 or its group no multiple of 32, the width no
            multiple of 128, or rows are not contiguous.
    """
    _check_rows(x_q, x_sf, x_fmt)
    _check_weight(w_q, w_sf, w_fmt, x_q.shape[1])
    _check_dtype(dtype)
    if add_tf is not None:
        expect_shape("add_tf", add_tf, "tf", {"t": x_q.shape[0], "f": w_q.shape[0]})
        expect_dtype("add_tf", add_tf, *STORAGE)
    from deeptwin.kernels.triton_ops import linear_native

    return linear_native.linear_codes(
        x_q, x_sf, w_q, w_sf, add_tf, x_group=x_fmt.group, w_block=(w_fmt.rows, w_fmt.group), dtype=dtype, out=out
    )


def linear_codes_tilelang(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    add_tf: Tensor | None = None,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`linear_codes` by the FP8 unit of SM90 with specialised warps; sums leave the unit after every block that shares
    a scale. UE8M0 scales of a row and a feature multiply to a normal fp32 number.

    Raises:
        TypeError: as `linear_codes_triton`.
        ValueError: as `linear_codes_triton`.
        NotImplementedError: another device, e4m3 blocks other than 1 x 128 with 128 x 128 or 1 x 32 with 32 x 32,
            `add_tf`, another dtype than bf16, a width that is no multiple of 128, features that are none of 8, or rows
            that do not begin at multiples of 16 bytes.
    """
    _check_rows(x_q, x_sf, x_fmt)
    _check_weight(w_q, w_sf, w_fmt, x_q.shape[1])
    _check_dtype(dtype)
    if add_tf is not None or dtype is not torch.bfloat16:
        raise NotImplementedError(f"add_tf, dtype: expected None and bfloat16, got {dtype}")
    _expect_specialised(x_q, x_fmt, w_fmt)
    from deeptwin.kernels.tilelang_ops import linear_sm90

    return linear_sm90.linear_codes(x_q, x_sf, w_q, w_sf)


def linear_codes_deep_gemm(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    add_tf: Tensor | None = None,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`linear_codes` by the FP8 products of DeepGEMM 2.5.0 (SM90), whose matrix unit cuts sums within 128 products. To
    fp32 another of its kernels adds to what stands there; it takes the weight's scales row by row. Scales of rows go in
    column by column. Run to run and whatever the batch a row has the same bits.

    Raises:
        TypeError: as `linear_codes_triton`.
        ValueError: as `linear_codes_triton`.
        NotImplementedError: no DeepGEMM, other formats than fp8_1x128 and fp8_128x128, `add_tf` to bf16, another dtype
            than bf16 or fp32, features that are none of 8, or no row, to fp32 fewer than 33.
    """
    _check_rows(x_q, x_sf, x_fmt)
    _check_weight(w_q, w_sf, w_fmt, x_q.shape[1])
    _check_dtype(dtype)
    _expect_deep_gemm(x_q, w_q, x_fmt, w_fmt)
    if dtype is torch.float32:
        return _deep_gemm_fp32((x_q, x_sf), (w_q, w_sf), add_tf)
    if add_tf is not None or dtype is not torch.bfloat16:
        raise NotImplementedError(f"add_tf, dtype: expected None and bfloat16, or float32, got {dtype}")
    library = deep_gemm()
    y_tf = torch.empty(x_q.shape[0], w_q.shape[0], dtype=dtype, device=x_q.device)
    rows = x_q, library.utils.layout.get_mn_major_tma_aligned_tensor(x_sf)
    library.fp8_gemm_nt(rows, (w_q, packed(w_sf)), y_tf)
    return y_tf


def linear_quant_triton(
    x_tm: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.linear.linear_quant`: one launch quantises the rows, one multiplies. Values are not inspected.

    Raises:
        TypeError: x_tm is not bf16, fp16 or fp32; otherwise as `linear_codes_triton`.
        ValueError: x_tm is not 2-D or its width no multiple of the group; otherwise as `linear_codes_triton`.
        NotImplementedError: as `linear_codes_triton`.
    """
    expect_shape("x_tm", x_tm, "tm", {})
    expect_dtype("x_tm", x_tm, *STORAGE)
    _check_x_format(x_fmt)
    expect_multiple("x_tm (last axis)", x_tm.shape[1], x_fmt.group)
    _check_weight(w_q, w_sf, w_fmt, x_tm.shape[1])
    _check_dtype(dtype)
    from deeptwin.kernels.triton_ops import linear, quant

    linear.require_contiguous_rows(w_q=w_q, w_sf=w_sf)
    linear.require_groups(x_sf=x_fmt.group, w_sf=w_fmt.group)
    x_q, x_sf = quant.quantize(
        x_tm,
        rows=1,
        group=x_fmt.group,
        code=x_fmt.code.value,
        scale=x_fmt.scale.value,
        max_value=x_fmt.max_value,
        amax_floor=x_fmt.amax_floor,
    )
    return linear.linear_codes(
        x_q, x_sf, w_q, w_sf, None, x_group=x_fmt.group, w_block=(w_fmt.rows, w_fmt.group), dtype=dtype, out=out
    )


def linear_grouped_triton(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    group_sizes_e: Tensor,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    dtype: torch.dtype = torch.bfloat16,
    trusted: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.linear.linear_grouped`. With `trusted` the sizes are not read back from the device: a caller
    who made them knows that they add up, and rows that no size covers stay unwritten.

    Raises:
        TypeError: group_sizes_e is neither int32 nor int64; otherwise as `linear_codes_triton`.
        ValueError: a size is negative, or the sizes do not add up to y; w_q, w_sf and group_sizes_e differ in e;
            otherwise as `linear_codes_triton`.
        NotImplementedError: as `linear_codes_triton`.
    """
    _check_grouped((x_q, x_sf), (w_q, w_sf), group_sizes_e, x_fmt, w_fmt, trusted)
    _check_dtype(dtype)
    from deeptwin.kernels.triton_ops import linear

    return linear.linear_grouped(
        x_q,
        x_sf,
        w_q,
        w_sf,
        group_sizes_e,
        x_group=x_fmt.group,
        w_block=(w_fmt.rows, w_fmt.group),
        dtype=dtype,
        out=out,
    )


def linear_grouped_tilelang(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    group_sizes_e: Tensor,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    trusted: bool = False,
) -> Tensor:
    """`linear_grouped` to bf16 with the kernel and the bits of `linear_codes_tilelang`; `trusted` as
    `linear_grouped_triton`.

    Raises:
        TypeError: as `linear_grouped_triton`.
        ValueError: as `linear_grouped_triton`.
        NotImplementedError: as `linear_codes_tilelang`; no expert, or weights of experts that do not lie one below the
            other.
    """
    _check_grouped((x_q, x_sf), (w_q, w_sf), group_sizes_e, x_fmt, w_fmt, trusted)
    if not len(w_q):
        raise NotImplementedError("w_q: expected experts, got none")
    _expect_specialised(x_q, x_fmt, w_fmt)
    from deeptwin.kernels.tilelang_ops import linear_sm90

    return linear_sm90.linear_grouped(x_q, x_sf, w_q, w_sf, group_sizes_e)


def linear_grouped_deep_gemm(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    group_sizes_e: Tensor,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """`linear_grouped` to bf16 by DeepGEMM's contiguous grouped product (SM90), with the bits of
    `linear_codes_deep_gemm`. Its tiles have one expert, so experts are moved to multiples of 128 rows where they do not
    begin there. `sizes` are the numbers of `group_sizes_e` for a caller who knows them: then nothing is read back.

    Raises:
        TypeError: as `linear_grouped_triton`.
        ValueError: as `linear_grouped_triton`.
        NotImplementedError: as `linear_codes_deep_gemm`.
    """
    _check_grouped((x_q, x_sf), (w_q, w_sf), group_sizes_e, x_fmt, w_fmt, sizes is not None)
    _expect_deep_gemm(x_q, w_q, x_fmt, w_fmt)
    sizes = group_sizes_e.tolist() if sizes is None else sizes
    experts = torch.arange(len(sizes), dtype=torch.int32, device=x_q.device)
    expert_y = experts.repeat_interleave(group_sizes_e, output_size=len(x_q))
    room = [-(-size // TILE_ROWS) * TILE_ROWS for size in sizes]
    if room == list(sizes):
        y_yf = torch.empty(len(x_q), w_q.shape[1], dtype=torch.bfloat16, device=x_q.device)
        return _contiguous_product((x_q, x_sf), (w_q, w_sf), expert_y, y_yf)
    place_y = _places(sizes, room).to(x_q.device)
    rows = _moved(x_q, place_y, sum(room)), _moved(x_sf, place_y, sum(room))
    y_sf = torch.empty(sum(room), w_q.shape[1], dtype=torch.bfloat16, device=x_q.device)
    expert_s = torch.full((sum(room),), -1, dtype=torch.int32, device=x_q.device).index_copy_(0, place_y, expert_y)
    return _contiguous_product(rows, (w_q, w_sf), expert_s, y_sf)[place_y]


def linear_grouped_deep_gemm_masked(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    group_sizes_e: Tensor,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """`linear_grouped_deep_gemm` by the masked grouped product: every expert is moved to as much room as the largest
    needs, in multiples of 128 rows, as the last tile of an expert would be written into the room of the next.

    Raises:
        TypeError: as `linear_grouped_triton`.
        ValueError: as `linear_grouped_triton`.
        NotImplementedError: as `linear_codes_deep_gemm`.
    """
    _check_grouped((x_q, x_sf), (w_q, w_sf), group_sizes_e, x_fmt, w_fmt, sizes is not None)
    _expect_deep_gemm(x_q, w_q, x_fmt, w_fmt)
    sizes = group_sizes_e.tolist() if sizes is None else sizes
    room = -(-max(sizes) // TILE_ROWS) * TILE_ROWS
    place_y = _places(sizes, [room] * len(sizes)).to(x_q.device)
    rows = _moved(x_q, place_y, room * len(sizes)), _moved(x_sf, place_y, room * len(sizes))
    y_sf = torch.empty(room * len(sizes), w_q.shape[1], dtype=torch.bfloat16, device=x_q.device)
    return _masked_product(rows, (w_q, w_sf), group_sizes_e, -(-len(x_q) // len(sizes)), y_sf)[place_y]


def linear_slots_triton(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    expert_y: Tensor,
    before_yf: Tensor,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.linear_slots.linear_slots`. Names are not inspected: of two experts in one tile the larger is taken.

    Raises:
        TypeError: expert_y is not int32, before_yf not bf16; otherwise as `linear_codes_triton`.
        ValueError: shapes disagree; otherwise as `linear_codes_triton`.
        NotImplementedError: as `linear_codes_triton`.
    """
    _check_slots((x_q, x_sf), (w_q, w_sf), expert_y, before_yf, x_fmt, w_fmt)
    from deeptwin.kernels.triton_ops import linear

    block = (w_fmt.rows, w_fmt.group)
    return linear.linear_slots(x_q, x_sf, w_q, w_sf, expert_y, before_yf, x_group=x_fmt.group, w_block=block, out=out)


def linear_slots_deep_gemm(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    expert_y: Tensor,
    before_yf: Tensor,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
) -> Tensor:
    """`linear_slots` by DeepGEMM's contiguous grouped product (SM90), which takes the expert of a tile from its first
    row and writes whole tiles.

    Raises:
        TypeError: as `linear_slots_triton`.
        ValueError: as `linear_slots_triton`.
        NotImplementedError: as `linear_codes_deep_gemm`; rows that are none of 128.
    """
    _check_slots((x_q, x_sf), (w_q, w_sf), expert_y, before_yf, x_fmt, w_fmt)
    _expect_deep_gemm(x_q, w_q, x_fmt, w_fmt)
    if len(x_q) % TILE_ROWS:
        raise NotImplementedError(f"x_q: expected {TILE_ROWS}·n rows, got {len(x_q)}")
    return _contiguous_product((x_q, x_sf), (w_q, w_sf), expert_y, before_yf.clone())


def linear_slots_deep_gemm_masked(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    expert_y: Tensor,
    before_yf: Tensor,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
) -> Tensor:
    """`linear_slots` by DeepGEMM's masked grouped product (SM90), where experts have equal shares and fill the first
    rows of theirs; it writes whole tiles.

    Raises:
        TypeError: as `linear_slots_triton`.
        ValueError: as `linear_slots_triton`.
        NotImplementedError: as `linear_codes_deep_gemm`; experts have no equal shares of 128·n rows, or a row stands
            behind one that names no expert.
    """
    _check_slots((x_q, x_sf), (w_q, w_sf), expert_y, before_yf, x_fmt, w_fmt)
    _expect_deep_gemm(x_q, w_q, x_fmt, w_fmt)
    experts = len(w_q)
    if len(x_q) % (experts * TILE_ROWS):
        raise NotImplementedError(f"x_q: expected {TILE_ROWS}·n rows for each of {experts} experts, got {len(x_q)}")
    expert_eo = expert_y.unflatten(0, (experts, -1))
    count_e = (expert_eo >= 0).sum(1, dtype=torch.int32)
    place_o, own_e1 = torch.arange(expert_eo.shape[1], device=x_q.device), torch.arange(experts, device=x_q.device)
    if not torch.equal(expert_eo, torch.where(place_o < count_e[:, None], own_e1[:, None], -1).to(torch.int32)):
        raise NotImplementedError("expert_y: expected the first rows of every expert's share, got others")
    expected = max(1, -(-int(count_e.sum()) // experts))
    return _masked_product((x_q, x_sf), (w_q, w_sf), count_e, expected, before_yf.clone())


def widen_fp4_triton(
    w_q: Tensor,
    w_sf: Tensor,
    *,
    fmt: QuantFormat,
    out_fmt: QuantFormat,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.linear.widen_fp4`. The scales are looked at before the launch.

    Raises:
        TypeError: w_q or w_sf is not uint8; an `out` buffer has another dtype.
        ValueError: as `reference.linear.widen_fp4`; an `out` buffer does not fit.
        NotImplementedError: rows are not contiguous, or a block is no power of two from 16 up.
    """
    if fmt.code is not CodeKind.E2M1 or fmt.scale is not ScaleKind.UE8M0 or fmt.rows != 1:
        raise ValueError(f"fmt: expected rows of e2m1 codes with UE8M0 scales, got {fmt.name}")
    if out_fmt.code is not CodeKind.E4M3 or out_fmt.scale is not ScaleKind.UE8M0 or out_fmt.group % fmt.group:
        raise ValueError(f"out_fmt: expected e4m3 blocks of whole {fmt.name} groups with UE8M0 scales, got {out_fmt}")
    expect_shape("w_q", w_q, "fi", {})
    _check_weight(w_q, w_sf, fmt, 2 * w_q.shape[1])
    _check_spread(w_q, w_sf, fmt, out_fmt)
    from deeptwin.kernels.triton_ops import linear

    return linear.widen_fp4(w_q, w_sf, group=fmt.group, out_block=(out_fmt.rows, out_fmt.group), out=out)


def _check_spread(w_q: Tensor, w_sf: Tensor, fmt: QuantFormat, out_fmt: QuantFormat) -> None:
    """Refuse NaN scales, and blocks with something in them that lie too far below the largest of their block."""
    if bool((w_sf == 255).any()):
        raise ValueError("w_sf: expected bytes 0 to 254, got 255 (NaN)")
    if not w_sf.numel():
        return
    wide = w_sf.to(torch.float32)[None, None]
    block = (out_fmt.rows, out_fmt.group // fmt.group)
    largest = torch.nn.functional.max_pool2d(wide, block, ceil_mode=True)[0, 0]
    spread = largest.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    below = spread[: w_sf.shape[0], : w_sf.shape[1]].clamp(min=6) - wide[0, 0]
    has_values = (w_q & 0x77).unflatten(-1, (-1, fmt.group // 2)).amax(-1) > 0
    worst = torch.where(has_values, below, 0).amax().item()
    if worst > WIDEST_SPREAD:
        raise ValueError(
            f"w_sf: expected scales at most 2^{WIDEST_SPREAD} apart inside one {out_fmt.name} block, got 2^{worst:.0f}"
        )


def _check_grouped(
    x: tuple[Tensor, Tensor],
    w: tuple[Tensor, Tensor],
    group_sizes_e: Tensor,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    trusted: bool,
) -> None:
    """Rows, the weights of all experts, and sizes that add up."""
    _check_rows(*x, x_fmt)
    dims: dict[str, int] = {}
    expect_shape("w_q", w[0], "efj", dims)
    expect_shape("w_sf", w[1], "eng", dims)
    expect_shape("group_sizes_e", group_sizes_e, "e", dims)
    expect_dtype("group_sizes_e", group_sizes_e, torch.int32, torch.int64)
    num_rows, width = x[0].shape
    _check_weight(*w, w_fmt, width)
    if not trusted:
        sizes = group_sizes_e.tolist()
        if min(sizes, default=0) < 0 or sum(sizes) != num_rows:
            raise ValueError(f"group_sizes_e: expected sizes from 0 up that add up to y={num_rows}, got {sizes}")


def _check_slots(
    x: tuple[Tensor, Tensor],
    w: tuple[Tensor, Tensor],
    expert_y: Tensor,
    before_yf: Tensor,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
) -> None:
    """Rows that name experts, the weights of all experts, and what stands where the results go."""
    _check_rows(*x, x_fmt)
    dims = {"y": len(x[0])}
    expect_shape("w_q", w[0], "efj", dims)
    expect_shape("expert_y", expert_y, "y", dims)
    expect_dtype("expert_y", expert_y, torch.int32)
    expect_shape("before_yf", before_yf, "yf", dims)
    expect_dtype("before_yf", before_yf, torch.bfloat16)
    _check_weight(*w, w_fmt, x[0].shape[1])


def _expect_specialised(x_q: Tensor, x_fmt: QuantFormat, w_fmt: QuantFormat) -> None:
    """What the products with specialised warps take."""
    blocks = (x_fmt.rows, x_fmt.group, w_fmt.rows, w_fmt.group)
    same = (w_fmt.code, w_fmt.scale) == (CodeKind.E4M3, x_fmt.scale)
    known = blocks == (1, 128, 128, 128) or (blocks == (1, 32, 32, 32) and x_fmt.scale is ScaleKind.UE8M0)
    if not same or not known:
        raise NotImplementedError(f"x_fmt, w_fmt: expected e4m3 blocks of 128 or of 32, got {x_fmt.name}, {w_fmt.name}")
    expect_sm90("x_q", x_q)


def _expect_deep_gemm(x_q: Tensor, w_q: Tensor, x_fmt: QuantFormat, w_fmt: QuantFormat) -> None:
    """What every FP8 product of DeepGEMM on SM90 takes."""
    if (x_fmt.name, w_fmt.name) != ("fp8_1x128", "fp8_128x128"):
        raise NotImplementedError(f"x_fmt, w_fmt: expected fp8_1x128, fp8_128x128, got {x_fmt.name}, {w_fmt.name}")
    if not len(x_q) or w_q.shape[-2] % 8:
        raise NotImplementedError(f"x_q, w_q: expected rows and 8·n features, got {len(x_q)} and {w_q.shape[-2]}")


def _places(sizes: Sequence[int], room: Sequence[int]) -> Tensor:
    """Where every row goes when its expert has more room than rows."""
    size_e, room_e = torch.tensor(sizes), torch.tensor(room)
    ahead_e = (room_e.cumsum(0) - room_e) - (size_e.cumsum(0) - size_e)
    return torch.arange(int(size_e.sum())) + ahead_e.repeat_interleave(size_e)


def _moved(x: Tensor, place_y: Tensor, rows: int) -> Tensor:
    """Rows in their new places; what stands between them is zero. No narrow float can be copied by index."""
    bits = x.contiguous().view(torch.uint8)
    moved = torch.zeros(rows, bits.shape[1], dtype=torch.uint8, device=x.device)
    return moved.index_copy_(0, place_y, bits).view(x.dtype)


def _deep_gemm_fp32(x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], add_tf: Tensor | None) -> Tensor:
    """The product to fp32. The library does not look at the strides of its operands here, and has no tile for few rows
    that its compiler takes."""
    shape = len(x[0]), len(w[0])
    if shape[0] <= 32:
        raise NotImplementedError(f"x_q: expected more than 32 rows to fp32, got {shape[0]}")
    y_tf = torch.zeros(shape, dtype=torch.float32, device=x[0].device)
    if add_tf is not None:
        expect_shape("add_tf", add_tf, "tf", {"t": shape[0], "f": shape[1]})
        expect_dtype("add_tf", add_tf, *STORAGE)
        y_tf.copy_(add_tf)
    library = deep_gemm()
    aligned = library.utils.layout.get_mn_major_tma_aligned_tensor
    w_sf_fg = w[1].repeat_interleave(128, 0)[: shape[1]]
    rows, weight = (packed(x[0]), aligned(x[1])), (packed(w[0]), aligned(w_sf_fg))
    library.fp8_gemm_nt(rows, weight, y_tf, y_tf, recipe=(1, 1, 128))
    return y_tf


def _contiguous_product(x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], expert_s: Tensor, y_sf: Tensor) -> Tensor:
    library = deep_gemm()
    rows = packed(x[0]), library.utils.layout.get_mn_major_tma_aligned_tensor(x[1])
    library.m_grouped_fp8_gemm_nt_contiguous(rows, (packed(w[0]), packed(w[1])), y_sf, expert_s)
    return y_sf


def _masked_product(
    x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], count_e: Tensor, expected: int, y_sf: Tensor
) -> Tensor:
    library = deep_gemm()
    x_q, x_sf = (packed(part).unflatten(0, (len(count_e), -1)) for part in x)
    rows = x_q, library.utils.layout.get_mn_major_tma_aligned_tensor(x_sf)
    weights, counts = (packed(w[0]), packed(w[1])), count_e.to(torch.int32)
    library.m_grouped_fp8_gemm_nt_masked(rows, weights, y_sf.unflatten(0, (len(count_e), -1)), counts, expected)
    return y_sf


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in STORAGE:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")


def _check_x_format(x_fmt: QuantFormat) -> None:
    if x_fmt.rows != 1:
        raise ValueError(f"x_fmt: expected groups of one row, got {x_fmt.name} with {x_fmt.rows} rows")
    if x_fmt.code is not CodeKind.E4M3 or x_fmt.scale is ScaleKind.E4M3:
        raise NotImplementedError(f"x_fmt: expected e4m3 codes with UE8M0 or fp32 scales, got {x_fmt.name}")


def _check_rows(x_q: Tensor, x_sf: Tensor, x_fmt: QuantFormat) -> None:
    _check_x_format(x_fmt)
    expect_dtype("x_q", x_q, torch.float8_e4m3fn)
    expect_dtype("x_sf", x_sf, SCALE_DTYPES[x_fmt.scale])
    dims: dict[str, int] = {}
    expect_shape("x_q", x_q, "tm", dims)
    expect_multiple("x_q (last axis)", dims["m"], x_fmt.group)
    expect_shape("x_sf", x_sf, "tg", dims | {"g": dims["m"] // x_fmt.group})


def _check_weight(w_q: Tensor, w_sf: Tensor, w_fmt: QuantFormat, m: int) -> None:
    """Codes and scales of one weight, or of one for each expert."""
    packed = w_fmt.code is CodeKind.E2M1
    expect_dtype("w_q", w_q, torch.uint8 if packed else torch.float8_e4m3fn)
    expect_dtype("w_sf", w_sf, SCALE_DTYPES[w_fmt.scale])
    if w_fmt.scale is ScaleKind.E4M3:
        raise NotImplementedError(f"w_fmt: expected UE8M0 or fp32 scales, got {w_fmt.name}")
    if w_fmt.rows == 1:
        expect_multiple("w_q (last axis, in elements)", m, w_fmt.group)
    lead = "e" if w_q.dim() == 3 else ""
    dims: dict[str, int] = {"j": m // 2 if packed else m}
    expect_shape("w_q", w_q, f"{lead}fj", dims)
    expect_shape("w_sf", w_sf, f"{lead}ng", dims | {"n": -(-dims["f"] // w_fmt.rows), "g": -(-m // w_fmt.group)})
