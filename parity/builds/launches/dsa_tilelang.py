"""TileLang programs of V3.2 at production shapes: functions without arguments that return the program."""

from __future__ import annotations

from typing import Any


def _program(*, exact: bool, paged: bool) -> Any:
    from deeptwin.kernels.tilelang_ops.index_scores_sm90 import score_program

    return score_program(64, exact=exact, paged=paged)


def dense_fp8_h64() -> Any:
    """V3.2, 64 heads, by the FP8 unit."""
    return _program(exact=False, paged=False)


def dense_exact_h64() -> Any:
    """The same with exact products."""
    return _program(exact=True, paged=False)


def paged_fp8_h64() -> Any:
    """Pages of 64 keys, by the FP8 unit."""
    return _program(exact=False, paged=True)


def paged_exact_h64() -> Any:
    """The same with exact products."""
    return _program(exact=True, paged=True)


def sm90_records_h128() -> Any:
    """V3.2 decode over records of 656 bytes, by specialised warps."""
    from deeptwin.kernels.tilelang_ops.sparse_mla_sm90 import sparse_mla_program

    return sparse_mla_program(128, has_length=False)
