"""TileLang programs of the selection at production shapes: functions without arguments that return the program."""

from __future__ import annotations

from typing import Any


def _program(dtype: str, columns: int, k: int, *, step: int, from_parts: bool = False) -> Any:
    from deeptwin.kernels.tilelang_ops.topk_sm90 import select_launch, select_program

    return select_program(dtype, step=step, from_parts=from_parts, launch=select_launch(columns, k))


def sm90_s8192_k512() -> Any:
    """Rows of 8192 fp32 scores, 512 of them."""
    return _program("float32", 8192, 512, step=4)


def sm90_s32768_k2048() -> Any:
    """Rows of 32768 bf16 scores, 2048 of them: the widest part, with all the shared memory that it takes."""
    return _program("bfloat16", 32768, 2048, step=8)


def sm90_of_parts() -> Any:
    """The best of what the parts of a row of 65536 have found."""
    return _program("float32", 65536, 512, step=1, from_parts=True)
