"""Triton kernels, one source for SM90, SM100 and Ascend 950.

With TRITON_INTERPRET=1 they run on the CPU, on an interpreter that is repaired and probed when this package is
imported.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# the words that triton itself takes for yes
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")

if INTERPRETED:
    from . import interpreter as interpreter


def require_runnable(name: str, x: Tensor) -> None:
    """Refuse a CPU tensor when kernels are compiled for a device.

    Raises:
        RuntimeError: `x` is on the CPU and triton was not imported with TRITON_INTERPRET=1.
    """
    if x.device.type == "cpu" and not INTERPRETED:
        raise RuntimeError(
            f"{name}: expected a tensor on a device, got one on the CPU; "
            "set TRITON_INTERPRET=1 before triton is imported to run kernels on the CPU"
        )
