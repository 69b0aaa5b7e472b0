"""Vendor kernels, found by their distribution and by the parameters of their functions.

Several distributions install the modules `flash_mla` and `deep_gemm`, with other functions and other record layouts,
and the two lines of `tile_kernels` share little but the name, so a successful import says nothing. What is missing or
of another line is refused by name.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def flash_mla_legacy() -> Any:
    """The module `flash_mla` with the kernels of V3, V3.2 and V4, which the current line dropped.

    Raises:
        NotImplementedError: absent, or of a line without `use_legacy`.
    """
    try:
        import flash_mla
    except ImportError as error:
        raise NotImplementedError(f"flash_mla: expected sgl-flash-mla 1.0.0, got none ({error})") from error
    if "use_legacy" not in inspect.signature(flash_mla.flash_mla_sparse_fwd).parameters:
        raise NotImplementedError(f"flash_mla: expected sgl-flash-mla with use_legacy, got {_provider('flash_mla')}")
    return flash_mla


def deep_gemm() -> Any:
    """The module `deep_gemm` with FP8 products of a pair of codes and scales.

    Raises:
        NotImplementedError: absent, or the February 2025 placeholder without `fp8_gemm_nt`.
    """
    try:
        import deep_gemm as module
    except (ImportError, OSError) as error:
        raise NotImplementedError(f"deep_gemm: expected tokenspeed-deepgemm 2.5.0, got none ({error})") from error
    if not hasattr(module, "fp8_gemm_nt"):
        raise NotImplementedError(f"deep_gemm: expected fp8_gemm_nt, got {_provider('deep_gemm')}")
    return module


def tile_kernels() -> Any:
    """The package `tile_kernels` of the line 2.x, written for 2.1.0, on a device that it has CUDA kernels for.

    Raises:
        NotImplementedError: absent, of the line 1.x or an unknown distribution, or no CUDA device of SM90 or SM100.
    """
    try:
        import tile_kernels as module
    except (ImportError, OSError) as error:
        raise NotImplementedError(f"tile_kernels: expected tile-kernels 2.x, got none ({error})") from error
    refused = _other_line(module)
    if refused is not None:
        raise NotImplementedError(f"tile_kernels: expected tile-kernels 2.x, got {refused}")
    chip = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
    if chip not in (9, 10):
        raise NotImplementedError(f"tile_kernels: expected a CUDA device of SM90 or SM100, got {chip or 'none'}")
    return module


def packed(x: Tensor) -> Tensor:
    """`x` with its rows one behind the other; of a single row torch calls any stride contiguous, libraries do not."""
    step, strides = 1, []
    for size in reversed(x.shape):
        strides.append(step)
        step *= max(size, 1)
    return x if list(reversed(x.stride())) == strides else x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=4)
def _other_line(module: ModuleType) -> str | None:
    """What provides `tile_kernels` if it is not the line 2.x, whose casts know e4m3 scales and whose gate images."""
    found = _provider("tile_kernels")
    known = _takes(module, "quant.per_token_cast", "use_e4m3_sf")
    known = known and _takes(module, "moe.moe_topk_gate_forward", "image_token_mask")
    return None if known and re.match(r"tile[-_]kernels 2\.", found) else found


def _takes(module: ModuleType, function: str, parameter: str) -> bool:
    """Whether a function of a package exists and has a parameter."""
    value: Any = module
    for name in function.split("."):
        value = getattr(value, name, None)
    return value is not None and parameter in inspect.signature(value).parameters


def _provider(module: str) -> str:
    """`name version` of the distributions that install a module."""
    names = importlib.metadata.packages_distributions().get(module, [])
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names) or "an unknown distribution"
