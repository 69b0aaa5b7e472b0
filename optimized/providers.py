"""Vendor kernels, found by their distribution and by the parameters of their functions.

Several distributions install the modules `flash_mla` and `deep_gemm`, with other functions and other record layouts, so
a successful import says nothing. What is missing or of another line is refused by name.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any


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


def _provider(module: str) -> str:
    """`name version` of the distributions that install a module."""
    names = importlib.metadata.packages_distributions().get(module, [])
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names) or "an unknown distribution"
