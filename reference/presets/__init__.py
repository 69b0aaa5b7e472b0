"""Whole models in numbers: the released configurations, as the components of this room are sized by them.

Nothing here computes with tensors. A preset is a function; variants are made with `dataclasses.replace`. The tiny ones
have every kind of layer of their model at the released record sizes, and are small enough for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

from .tiny import tiny_v3, tiny_v4_flash, tiny_v4_pro, tiny_v32, tiny_v41_flash
from .v3 import IndexSizes, V3Config, v3, v32
from .v4 import V4AttentionSizes, V4Config, v4_flash, v4_pro
from .v41 import AttentionSizes, DraftSizes, EngramSizes, MoeSizes, V41Config, VisionSizes, v41_flash

ModelConfig = V3Config | V4Config | V41Config

__all__ = [
    "AttentionSizes",
    "DraftSizes",
    "EngramSizes",
    "IndexSizes",
    "ModelConfig",
    "MoeSizes",
    "PRESETS",
    "V3Config",
    "V41Config",
    "V4AttentionSizes",
    "V4Config",
    "VisionSizes",
    "preset",
    "tiny_v3",
    "tiny_v32",
    "tiny_v41_flash",
    "tiny_v4_flash",
    "tiny_v4_pro",
    "v3",
    "v32",
    "v41_flash",
    "v4_flash",
    "v4_pro",
]

PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "v3": v3,
    "v32": v32,
    "v4_pro": v4_pro,
    "v4_flash": v4_flash,
    "v41_flash": v41_flash,
    "tiny_v3": tiny_v3,
    "tiny_v32": tiny_v32,
    "tiny_v4_pro": tiny_v4_pro,
    "tiny_v4_flash": tiny_v4_flash,
    "tiny_v41_flash": tiny_v41_flash,
}


def preset(name: str) -> ModelConfig:
    """The preset called `name`; `-` and `_` are the same.

    Raises:
        ValueError: there is none of this name.
    """
    key = name.replace("-", "_")
    if key not in PRESETS:
        raise ValueError(f"name: expected one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[key]()
