"""TileLang programs of hyper-connections at production widths: functions without arguments that return the program."""

from __future__ import annotations

from typing import Any


def ascend_post_apply_5120() -> Any:
    """V4.1: the update of four streams of 5120 channels, and what the next sub-layer reads."""
    from deeptwin.kernels.ascend_ops.mhc import mhc_post_apply_program

    return mhc_post_apply_program(5120)


def ascend_sinkhorn_20() -> Any:
    """Twenty iterations, a token to a lane."""
    from deeptwin.kernels.ascend_ops.mhc import mhc_sinkhorn_program

    return mhc_sinkhorn_program(20)
