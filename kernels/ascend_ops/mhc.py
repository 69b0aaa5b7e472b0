"""Hyper-connections of four streams on the vector cores of Ascend 950: update and read in one pass, and Sinkhorn.

`mhc_post_apply_program` takes a token after the other, tokens by core: the old streams and the output of the sub-layer
lie in the unified buffer, the new streams are rounded there, and what the next sub-layer reads is made of the rounded
values. `mhc_sinkhorn_program` gives every lane a token of its own, so that sums over rows and columns are plain sums
of vectors. No result depends on the other tokens of a call.
"""

# mypy: disable-error-code="valid-type"

from dataclasses import dataclass

from tilelang.ascend import language as T

LANES = 64  # fp32 elements of a vector register
STREAMS = 4


@dataclass(frozen=True, kw_only=True)
class MhcLaunch:
    """Tokens go round the cores; `buffers` of them are in flight. Neither changes a result."""

    cores: int = 64
    buffers: int = 2


def mhc_post_apply_program(width: int, *, launch: MhcLaunch | None = None):
    """The program for streams of `width` channels, any number of tokens: new streams, and their weighted sum.

    Raises:
        NotImplementedError: `width` is no multiple of 64.
    """
    launch = launch or MhcLaunch()
    if width % LANES:
        raise NotImplementedError(f"width: expected a multiple of {LANES}, got {width}")
    tokens = T.dynamic("tokens")

    @T.prim_func
    def mhc_post_apply(
        stream_tnm: T.Tensor((tokens, STREAMS, width), T.bfloat16),
        y_tm: T.Tensor((tokens, width), T.bfloat16),
        pre_tn: T.Tensor((tokens, STREAMS), T.float32),
        post_tn: T.Tensor((tokens, STREAMS), T.float32),
        comb_ti: T.Tensor((tokens, STREAMS * STREAMS), T.float32),
        new_tnm: T.Tensor((tokens, STREAMS, width), T.bfloat16),
        x_tm: T.Tensor((tokens, width), T.bfloat16),
    ):
        with T.Kernel(launch.cores) as core:
            old = T.alloc_shared((STREAMS, width), T.bfloat16)
            y = T.alloc_shared((width,), T.bfloat16)
            new = T.alloc_shared((STREAMS, width), T.bfloat16)
            x = T.alloc_shared((width,), T.bfloat16)
            pre = T.alloc_shared((LANES,), T.float32)
            post = T.alloc_shared((LANES,), T.float32)
            comb = T.alloc_shared((LANES,), T.float32)
            T.annotate_buffer_versions(dict.fromkeys((old, y, new, x, pre, post, comb), launch.buffers))

            for turn in T.Pipelined(T.ceildiv(tokens - core, launch.cores), num_stages=launch.buffers):
                token = turn * launch.cores + core
                T.copy(stream_tnm[token, :, :], old)
                T.copy(y_tm[token, :], y)
                T.copy(pre_tn[token, :], pre[0:STREAMS])
                T.copy(post_tn[token, :], post[0:STREAMS])
                T.copy(comb_ti[token, :], comb[0 : STREAMS * STREAMS])
                with T.SimdVF():
                    for v in range(width // LANES):
                        wide_y = T.simd.vcvt(T.simd.vld(y[v * LANES], "UNPK_B16"), T.float32)
                        read = T.simd.alloc_var(T.float32)
                        read = T.simd.vdup(T.float32(0), T.float32)
                        for o in range(STREAMS):
                            # 1. the product with y first, then the streams in order, rounded once
                            total = T.simd.alloc_var(T.float32)
                            total = T.simd.vmul(T.simd.vld(post[o], "BRC_B32"), wide_y)
                            for i in range(STREAMS):
                                row = T.simd.vcvt(T.simd.vld(old[i, v * LANES], "UNPK_B16"), T.float32)
                                share = T.simd.vld(comb[i * STREAMS + o], "BRC_B32")
                                total = T.simd.vadd(total, T.simd.vmul(share, row))
                            rounded = T.simd.vcvt(total, T.bfloat16, sat=False)
                            T.simd.vsts(new[o, v * LANES], rounded, dist="PK_B32")
                            # 2. the next sub-layer reads the rounded value
                            again = T.simd.vcvt(rounded, T.float32)
                            read = T.simd.vadd(read, T.simd.vmul(T.simd.vld(pre[o], "BRC_B32"), again))
                        T.simd.vsts(x[v * LANES], T.simd.vcvt(read, T.bfloat16, sat=False), dist="PK_B32")
                T.copy(new, new_tnm[token, :, :])
                T.copy(x, x_tm[token, :])

    return mhc_post_apply


def mhc_sinkhorn_program(iters: int, *, launch: MhcLaunch | None = None):
    """The program for a multiple of 64 matrices, which lie entry by entry: sixteen rows of one number a token.

    Raises:
        NotImplementedError: `iters` is below 1.
    """
    launch = launch or MhcLaunch()
    if iters < 1:
        raise NotImplementedError(f"iters: expected at least 1, got {iters}")
    blocks = T.dynamic("blocks")
    entries = STREAMS * STREAMS

    @T.macro
    def normalise(entry, first, step, eps):
        """Divide four entries, `step` apart, by their sum and eps."""
        a = T.simd.vld(entry[first, 0])
        b = T.simd.vld(entry[first + step, 0])
        c = T.simd.vld(entry[first + 2 * step, 0])
        d = T.simd.vld(entry[first + 3 * step, 0])
        total = T.simd.vadds(T.simd.vadd(T.simd.vadd(a, b), T.simd.vadd(c, d)), eps)
        T.simd.vsts(entry[first, 0], T.simd.vdiv(a, total, precision="exact"))
        T.simd.vsts(entry[first + step, 0], T.simd.vdiv(b, total, precision="exact"))
        T.simd.vsts(entry[first + 2 * step, 0], T.simd.vdiv(c, total, precision="exact"))
        T.simd.vsts(entry[first + 3 * step, 0], T.simd.vdiv(d, total, precision="exact"))

    @T.prim_func
    def mhc_sinkhorn(
        logits_bit: T.Tensor((blocks, entries, LANES), T.float32),
        comb_bit: T.Tensor((blocks, entries, LANES), T.float32),
        eps: T.float32,
    ):
        with T.Kernel(launch.cores) as core:
            entry = T.alloc_shared((entries, LANES), T.float32)
            T.annotate_buffer_versions({entry: launch.buffers})
            for turn in T.Pipelined(T.ceildiv(blocks - core, launch.cores), num_stages=launch.buffers):
                block = turn * launch.cores + core
                T.copy(logits_bit[block, :, :], entry)
                with T.SimdVF():
                    # 1. softmax over the output stream, the first row step; eps comes after its division
                    for row in range(STREAMS):
                        at = row * STREAMS
                        a = T.simd.vld(entry[at, 0])
                        b = T.simd.vld(entry[at + 1, 0])
                        c = T.simd.vld(entry[at + 2, 0])
                        d = T.simd.vld(entry[at + 3, 0])
                        top = T.simd.vmax(T.simd.vmax(a, b), T.simd.vmax(c, d))
                        p = T.simd.vexp(T.simd.vsub(a, top))
                        q = T.simd.vexp(T.simd.vsub(b, top))
                        r = T.simd.vexp(T.simd.vsub(c, top))
                        s = T.simd.vexp(T.simd.vsub(d, top))
                        total = T.simd.vadd(T.simd.vadd(p, q), T.simd.vadd(r, s))
                        T.simd.vsts(entry[at, 0], T.simd.vadds(T.simd.vdiv(p, total, precision="exact"), eps))
                        T.simd.vsts(entry[at + 1, 0], T.simd.vadds(T.simd.vdiv(q, total, precision="exact"), eps))
                        T.simd.vsts(entry[at + 2, 0], T.simd.vadds(T.simd.vdiv(r, total, precision="exact"), eps))
                        T.simd.vsts(entry[at + 3, 0], T.simd.vadds(T.simd.vdiv(s, total, precision="exact"), eps))
                    # 2. columns, then rows and columns in turn
                    T.simd.mem_bar("VST_VLD")
                    for column in range(STREAMS):
                        normalise(entry, column, STREAMS, eps)
                    for _ in range(iters - 1):
                        T.simd.mem_bar("VST_VLD")
                        for row in range(STREAMS):
                            normalise(entry, row * STREAMS, 1, eps)
                        T.simd.mem_bar("VST_VLD")
                        for column in range(STREAMS):
                            normalise(entry, column, STREAMS, eps)
                T.copy(entry, comb_bit[block, :, :])

    return mhc_sinkhorn
