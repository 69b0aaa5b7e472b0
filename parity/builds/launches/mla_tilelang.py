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


def sm90_h128_scores() -> Any:
    """Few tokens: the scores."""
    from deeptwin.kernels.tilelang_ops.mla_few_sm90 import score_program

    return score_program(128, 576)


def sm90_h128_weights() -> Any:
    """Few tokens: the weights."""
    from deeptwin.kernels.tilelang_ops.mla_few_sm90 import weight_program

    return weight_program(128)


def sm90_h128_values() -> Any:
    """Few tokens: the sums of a slice of channels."""
    from deeptwin.kernels.tilelang_ops.mla_few_sm90 import value_program

    return value_program(128, 576)
