"""TileKernels' torch casts as peers of the group quantisers; written for tile_kernels 2.1.0."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.config import CodeKind, QuantFormat, ScaleKind


def tile_kernels_cast(x_tm: Tensor, *, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """`cast` with plain scales; a UE8M0 scale comes as an fp32 power of two, of which we keep the exponent byte."""
    from tile_kernels.torch.cast import cast

    codes, sf = cast(
        x_tm.contiguous(),
        fmt.code.value,
        (fmt.rows, fmt.group),
        round_sf=fmt.scale is ScaleKind.UE8M0,
        use_e4m3_sf=fmt.scale is ScaleKind.E4M3,
    )
    if fmt.scale is ScaleKind.UE8M0:
        sf = (sf.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    if fmt.scale is ScaleKind.E4M3 and not sf.numel():
        sf = sf.to(torch.float8_e4m3fn)
    return codes.view(torch.uint8) if fmt.code is CodeKind.E2M1 else codes, sf.contiguous()


def tile_kernels_cast_back(codes: Tensor, sf: Tensor, *, fmt: QuantFormat, dtype: torch.dtype) -> Tensor:
    """`cast_back` with the scales given as values."""
    from tile_kernels.torch.cast import cast_back

    scales = sf.to(torch.float32)
    if fmt.scale is ScaleKind.UE8M0:
        scales = (sf.to(torch.int32) << 23).view(torch.float32)
    data = codes.contiguous().view(torch.int8) if fmt.code is CodeKind.E2M1 else codes.contiguous()
    return cast_back((data, scales), "fp32" if dtype == torch.float32 else "bf16", (fmt.rows, fmt.group))
