"""Vendor kernels, found by their distribution and by the parameters of their functions.

Several distributions install the modules `flash_mla` and `deep_gemm`, with other functions and other record layouts, so
a successful import says nothing. What is missing or of another line is refused by name.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


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


def flash_mla_lists(idx_tk: Tensor, slots: int, step: int) -> Tensor:
    """Lists as FlashMLA's decode reads them: −1 in every hole, because it reads any other index, and whole steps."""
    return flash_mla_steps(idx_tk.masked_fill((idx_tk < 0) | (idx_tk >= slots), -1), step)


def flash_mla_steps(lists: Tensor, step: int) -> Tensor:
    """Lists of one step or more, whole ones: holes behind the last entry change no bit."""
    return pad(lists, (0, max(-(-lists.shape[1] // step), 1) * step - lists.shape[1]), value=-1)


def flash_mla_schedule(library: Any, q_bthd: Tensor, blocks_b: Tensor | None) -> Any:
    """A schedule for one decode call; with the number of 64-key blocks of every request it splits none of them.

    The library fills an empty schedule by itself, greedily over the batch, and reuses what it finds without looking at
    lengths: an object serves one call.
    """
    schedule, _ = library.get_mla_metadata()
    if blocks_b is not None:
        tiles = -(-q_bthd.shape[1] * q_bthd.shape[2] // 64)
        parts = max(torch.cuda.get_device_properties(q_bthd.device).multi_processor_count // tiles, 1)
        schedule.tile_scheduler_metadata, schedule.num_splits = whole_requests(blocks_b, parts)
    return schedule


def whole_requests(blocks_b: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """The two tensors of a schedule that gives each part a run of whole requests, as even in number as it can be.

    Shapes:
        blocks_b: int32 [b]; returns int32 [parts, 8] and [b + 1]: the columns are first and last request, first block
        and the end of the last one, first split, two flags of split ends, nothing.
    """
    requests = len(blocks_b)
    edge = torch.arange(parts + 1, dtype=torch.int32, device=blocks_b.device) * requests // parts
    first, last = edge[:-1], edge[1:] - 1
    table = edge.new_zeros(parts, 8)
    table[:, 0] = torch.where(last < first, requests, first)  # an idle part begins behind the last request
    table[:, 1] = last.clamp_min(0)
    table[:, 3] = blocks_b[table[:, 1]]
    return table, torch.arange(requests + 1, dtype=torch.int32, device=blocks_b.device)


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
