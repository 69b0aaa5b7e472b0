"""Products of dequantised operands as peers of the linear layers; written for tile_kernels 2.1.0, transformers 5.24.0.

The dequantisation is theirs, the product is torch's in fp64, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.config import QuantFormat

from .quant import tile_kernels_cast, tile_kernels_cast_back


def torch_fp64(x_tm: Tensor, w_fm: Tensor, bias_f: Tensor | None = None, *, dtype: torch.dtype) -> Tensor:
    """`torch.nn.functional.linear` in fp64."""
    bias = None if bias_f is None else bias_f.double()
    return torch.nn.functional.linear(x_tm.double(), w_fm.double(), bias).to(dtype)


def tile_kernels_linear_codes(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    add_tf: Tensor | None = None,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    dtype: torch.dtype,
) -> Tensor:
    """Both operands by `cast_back`."""
    x = tile_kernels_cast_back(x_q, x_sf, fmt=x_fmt, dtype=torch.float32)
    w = tile_kernels_cast_back(w_q, w_sf, fmt=w_fmt, dtype=torch.float32)
    y = x.double() @ w.double().T
    return (y if add_tf is None else y + add_tf.double()).to(dtype)


def transformers_linear_codes(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    add_tf: Tensor | None = None,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    dtype: torch.dtype,
) -> Tensor:
    """Both operands as the fine-grained FP8 and MXFP4 integrations read a checkpoint."""
    y = _transformers_values(x_q, x_sf, x_fmt).double() @ _transformers_values(w_q, w_sf, w_fmt).double().T
    return (y if add_tf is None else y + add_tf.double()).to(dtype)


def tile_kernels_linear_quant(
    x_tm: Tensor, w_q: Tensor, w_sf: Tensor, *, x_fmt: QuantFormat, w_fmt: QuantFormat, dtype: torch.dtype
) -> Tensor:
    """Rows by `cast`, both operands by `cast_back`."""
    x_q, x_sf = tile_kernels_cast(x_tm, fmt=x_fmt)
    return tile_kernels_linear_codes(x_q, x_sf, w_q, w_sf, x_fmt=x_fmt, w_fmt=w_fmt, dtype=dtype)


def tile_kernels_linear_grouped(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    group_sizes_e: Tensor,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    dtype: torch.dtype,
) -> Tensor:
    """Every expert apart."""
    sizes = group_sizes_e.tolist()
    experts = zip(x_q.split(sizes), x_sf.split(sizes), w_q, w_sf, strict=True)
    parts = [
        tile_kernels_linear_codes(*operands, x_fmt=x_fmt, w_fmt=w_fmt, dtype=dtype)
        for operands in experts
        if operands[0].shape[0]
    ]
    return torch.cat(parts) if parts else torch.empty(0, w_q.shape[1], dtype=dtype)


def _transformers_values(codes: Tensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    if codes.dtype == torch.uint8:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks = codes.contiguous().unflatten(-1, (-1, fmt.group // 2))
        return convert_moe_packed_tensors(blocks[None], sf[None], dtype=torch.float32)[0].T
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    scale = sf.contiguous().view(torch.float8_e8m0fnu) if sf.dtype == torch.uint8 else sf
    return _dequantize_fp8_weight(codes.contiguous(), scale, [fmt.rows, fmt.group], torch.float32)
