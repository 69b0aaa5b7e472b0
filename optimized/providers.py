"""Vendor kernels, found by their distribution and by the parameters of their functions.

Several distributions install the modules `flash_mla` and `deep_gemm`, with other functions and other record layouts,
and the two lines of `tile_kernels` share little but the name, so a successful import says nothing. What is missing or
of another line is refused by name, and so is a chip that a kernel is not written for.
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


def expect_sm90(name: str, x: Tensor) -> None:
    """What is written for the matrix unit of one chip asks for it.

    Raises:
        NotImplementedError: `x` lies elsewhere.
    """
    if not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] != 9:
        raise NotImplementedError(f"{name}: expected a tensor on SM90, got one on {x.device}")


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
