"""Production calls of the hyper-connections of V4.1: four streams of 5120 channels."""

from __future__ import annotations

import torch

from deeptwin.optimized.mhc import (
    mhc_apply_triton,
    mhc_boundary_triton,
    mhc_expand_triton,
    mhc_head_triton,
    mhc_mixes_triton,
    mhc_post_triton,
    mhc_sinkhorn_triton,
)
from deeptwin.reference.config import MHC_V4, MHC_V41
from deeptwin.reference.weights import MhcSite

TOKENS, WIDTH = 4096, 5120


def _stream(width: int = WIDTH) -> torch.Tensor:
    return torch.empty(TOKENS, 4, width, dtype=torch.bfloat16)


def _site(outputs: int = 24, kinds: int = 3, width: int = WIDTH) -> MhcSite:
    return MhcSite(fn_wx=torch.empty(outputs, 4 * width), scale_z=torch.empty(kinds), base_w=torch.empty(outputs))


def expand() -> None:
    """The first layer of a model."""
    mhc_expand_triton(torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16), config=MHC_V41)


def apply() -> None:
    """What the final norm reads."""
    mhc_apply_triton(torch.empty(TOKENS, 4), _stream())


def sinkhorn() -> None:
    """Matrices alone."""
    mhc_sinkhorn_triton(torch.empty(TOKENS, 4, 4), iters=20, eps=1e-6)


def mixes() -> None:
    """The coefficients of the first site."""
    mhc_mixes_triton(_stream(), _site(), config=MHC_V41)


def post() -> None:
    """The update in front of an Engram layer."""
    y_tm = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)
    mhc_post_triton(_stream(), y_tm, torch.empty(TOKENS, 4), torch.empty(TOKENS, 4, 4))


def boundary() -> None:
    """From one sub-layer to the next, in one pass."""
    y_tm = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)
    mixes = (torch.empty(TOKENS, 4), torch.empty(TOKENS, 4), torch.empty(TOKENS, 4, 4))
    mhc_boundary_triton(_stream(), y_tm, *mixes, _site(), config=MHC_V41)


def head_v4() -> None:
    """The head of V4-Pro, rows of 7168."""
    mhc_head_triton(_stream(7168), _site(4, 1, 7168), config=MHC_V4)
