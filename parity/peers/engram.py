"""TileKernels' torch functions and the normalisers of `tokenizers` as peers of the n-gram memory.

Written for tile_kernels 2.1.0 and tokenizers 0.23.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.config import EngramLayout


def tokenizers_classes(texts: list[str], pieces: list[str]) -> Tensor:
    """Classes by the library's own normalisers, numbered as they are first seen."""
    from tokenizers import Regex, normalizers

    fold = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), "\ue000"),
            normalizers.Strip(),
            normalizers.Replace("\ue000", " "),
        ]
    )
    keys = [
        piece if "\ufffd" in text else fold.normalize_str(text) or text
        for text, piece in zip(texts, pieces, strict=True)
    ]
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([number[key] for key in keys], dtype=torch.int32)


def tile_kernels_hash(window_tw: Tensor, image_t: Tensor, *, layout: EngramLayout) -> Tensor:
    """`engram_hash_ref`, its sizes given by n and head."""
    from tile_kernels.torch.engram import engram_hash_ref, make_offsets

    sizes = torch.tensor(layout.primes, dtype=torch.int32).unflatten(1, (-1, layout.num_heads))
    multipliers = torch.tensor(layout.multipliers, dtype=torch.int64)
    return engram_hash_ref(window_tw, multipliers, sizes, make_offsets(sizes), image_t)


def tile_kernels_rows(table_rd: Tensor, table_sf_rg: Tensor, row_tz: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`cast_back` of the gathered rows."""
    from tile_kernels.torch.cast import cast_back

    rows = row_tz.reshape(-1).long()
    scales = (table_sf_rg[rows].to(torch.int32) << 23).view(torch.float32)
    values = cast_back((table_rd[rows], scales), "fp32" if dtype == torch.float32 else "bf16", (1, 32))
    return values.reshape(row_tz.shape[0], -1)


def tile_kernels_gate(
    r_tnm: Tensor, kv_tjm: Tensor, q_weight_nm: Tensor, k_weight_nm: Tensor, image_t: Tensor, *, eps: float
) -> Tensor:
    """`engram_gate_ref` with the clamp of the release."""
    from tile_kernels.torch.engram import engram_gate_ref

    gated_tnm = engram_gate_ref(r_tnm, kv_tjm, q_weight_nm, k_weight_nm, 1e-6, eps, image_token_mask=image_t)
    assert isinstance(gated_tnm, Tensor)
    return gated_tnm
