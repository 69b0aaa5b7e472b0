"""TileLang programs of linear layers at production shapes: functions without arguments that return the program."""

from __future__ import annotations

from typing import Any


def sm100_32x32() -> Any:
    """wq_b of V4.1: FP8 rows and an FP8 weight."""
    from deeptwin.kernels.tilelang_ops.linear import linear_codes_program

    return linear_codes_program(32768, 1280, packed=False)


def sm100_mxfp4() -> Any:
    """A routed expert of V4.1, w1 above w3: FP8 rows and an FP4 weight."""
    from deeptwin.kernels.tilelang_ops.linear import linear_codes_program

    return linear_codes_program(4608, 5120, packed=True)


def sm90_128x128() -> Any:
    """V3 by specialised warps: fp32 scales."""
    from deeptwin.kernels.tilelang_ops.linear_sm90 import product_program

    return product_program("f32")


def sm90_32x32() -> Any:
    """V4.1 by specialised warps: four UE8M0 scales a step."""
    from deeptwin.kernels.tilelang_ops.linear_sm90 import product_program

    return product_program("word")


def sm90_grouped() -> Any:
    """V3's experts by specialised warps: fp32 scales."""
    from deeptwin.kernels.tilelang_ops.linear_sm90 import product_program

    return product_program("f32", grouped=True)
