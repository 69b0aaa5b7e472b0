"""TileLang programs of latent decode at production shapes: functions without arguments that return the program."""

from __future__ import annotations

from typing import Any


def sm90_h128() -> Any:
    """V3: a program for each row."""
    from deeptwin.kernels.tilelang_ops.mla_sm90 import decode_program

    return decode_program(128, 576, chained=True)


def sm90_h128_combine() -> Any:
    """The merge of splits."""
    from deeptwin.kernels.tilelang_ops.mla_sm90 import combine_program

    return combine_program(128)
