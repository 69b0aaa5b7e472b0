"""TileLang programs of sparse attention at production shapes: functions without arguments that return the program."""

from __future__ import annotations

from typing import Any


def sm100_h64_d512() -> Any:
    """V4.1: 64 heads, sink."""
    from deeptwin.kernels.tilelang_ops.sparse_attn import attend_program

    return attend_program(64, 512, 512, has_length=False, has_sink=True)


def sm100_h128_d576() -> Any:
    """V3.2: keys of 576 channels, values of 512, no sink."""
    from deeptwin.kernels.tilelang_ops.sparse_attn import attend_program

    return attend_program(128, 576, 512, has_length=True, has_sink=False)


def sm90_h128_d576() -> Any:
    """V3.2 by specialised warps: the largest tiles."""
    from deeptwin.kernels.tilelang_ops.sparse_attn_sm90 import attend_program

    return attend_program(128, 576, 512, has_length=True, has_sink=True)


def ascend_h64_d576() -> Any:
    """V3.2 decode with its heads over two ranks: keys of 576 channels, values of 512, no sink."""
    from deeptwin.kernels.ascend_ops.sparse_attn import sparse_attn_decode_program

    return sparse_attn_decode_program(64, 576, 512, has_length=True, has_sink=False)


def ascend_two_decode() -> Any:
    """V4.1 decode: FP8 rings, FP4 entries, as DeepInfer lays them out."""
    from deeptwin.kernels.ascend_ops.two_cache import two_cache_decode_program

    return two_cache_decode_program(64, main="e2m1", sectioned=False)


def ascend_two_decode_fp8() -> Any:
    """The MXFP8 option of the main cache, in sectioned pages."""
    from deeptwin.kernels.ascend_ops.two_cache import two_cache_decode_program

    return two_cache_decode_program(64, main="e4m3", sectioned=True)


def sm90_two_decode() -> Any:
    """V4.1 decode by specialised warps: FP8 rings, FP4 entries."""
    from deeptwin.kernels.tilelang_ops.two_cache_sm90 import two_cache_program

    return two_cache_program(64, "e4m3", "e2m1", sectioned=False, has_sink=True)


def sm90_two_decode_v4() -> Any:
    """V4 decode by specialised warps: records of 584 bytes in both caches, in sectioned pages."""
    from deeptwin.kernels.tilelang_ops.two_cache_sm90 import two_cache_program

    return two_cache_program(64, "v4", "v4", sectioned=True, has_sink=True)
