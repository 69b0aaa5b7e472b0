"""A candidate whose module fails on import."""

import deeptwin_has_no_such_module  # noqa: F401


def rms_norm(x_tm, weight_m, *, eps, cast):
    return x_tm
