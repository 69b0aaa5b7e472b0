"""TileLang programs of the index scores at production shapes: functions without arguments that return the program."""

from __future__ import annotations

from typing import Any


def sm100_h32() -> Any:
    """V4.1: 32 heads of 128 channels."""
    from deeptwin.kernels.tilelang_ops.indexer import score_program

    return score_program(32)


def ascend_h32() -> Any:
    """V4.1: 32 heads of 128 channels."""
    from deeptwin.kernels.ascend_ops.indexer import score_program

    return score_program(32)
