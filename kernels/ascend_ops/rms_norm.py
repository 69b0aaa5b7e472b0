"""RMSNorm fused with an e4m3 group quantiser on the vector cores of Ascend 950: one row at a time, rows by core.

A row lies in the unified buffer as it was read. Its squares are added in 64 lanes, vector after vector, and the lanes
in the fixed tree of the hardware: the order depends on the width alone. Codes and scales describe the bf16 row.
"""

# mypy: disable-error-code="valid-type"

from dataclasses import dataclass

from tilelang.ascend import language as T

LANES = 64  # fp32 elements of a vector register
E4M3_MAX = 448.0


@dataclass(frozen=True, kw_only=True)
class NormLaunch:
    """Rows go round the cores; `buffers` rows are in flight. Neither changes a result."""

    cores: int = 64
    buffers: int = 2


def rms_norm_quant_program(
    width: int, group: int, scale: str, *, before_weight: bool = False, launch: NormLaunch | None = None
):
    """The program for rows of `width` elements, any number of them: bf16 rows, e4m3 codes, scales of `group` elements.

    Raises:
        NotImplementedError: `group` is no 32 or multiple of 64, `scale` no UE8M0 or F32, or the row no multiple.
    """
    launch = launch or NormLaunch()
    if group != LANES // 2 and group % LANES:
        raise NotImplementedError(f"group: expected 32 or a multiple of {LANES}, got {group}")
    if scale not in ("ue8m0", "f32"):
        raise NotImplementedError(f"scale: expected ue8m0 or f32, got {scale!r}")
    if width % max(group, LANES):
        raise NotImplementedError(f"width: expected a multiple of {max(group, LANES)}, got {width}")
    tokens = T.dynamic("tokens")
    groups, vectors = width // group, max(group // LANES, 1)
    sf_dtype = T.uint8 if scale == "ue8m0" else T.float32
    sf_space = -(-groups // LANES) * LANES

    @T.macro
    def put_scale(amax, amax_floor, exact, at):
        """Store the scale of a group, of which lane 0 holds the largest magnitude; return it in every lane."""
        value = T.simd.vdiv(T.simd.vmaxs(amax, amax_floor), T.simd.vdup(E4M3_MAX, T.float32), precision="exact")
        if scale == "ue8m0":
            # up to a power of two by the exponent field; the value is a normal number, the floor sees to it
            bits = T.simd.vshrs(T.simd.vadds(T.reinterpret(value, "int32x64"), T.int32(-1)), 23)
            byte = T.simd.vadds(bits, T.int32(1))
            T.simd.vsts(exact[at], byte, dist="ONEPT_B32")
            value = T.reinterpret(T.simd.vshls(byte, 23), "float32x64")
        else:
            T.simd.vsts(exact[at], value, dist="ONEPT_B32")
        return T.simd.vdupv(value)

    @T.macro
    def put_codes(codes, at, rounded, sf):
        """Store one vector of codes; the cast saturates at 448."""
        code = T.simd.vcvt(T.simd.vdiv(rounded, sf, precision="exact"), "float8_e4m3fn")
        T.simd.vsts(codes[at], code, dist="PK4_B32")

    @T.prim_func
    def rms_norm_quant(
        x_tm: T.Tensor((tokens, width), T.bfloat16),
        weight_m: T.Tensor((width,), T.bfloat16),
        y_tm: T.Tensor((tokens, width), T.bfloat16),
        codes_tm: T.Tensor((tokens, width), T.float8_e4m3fn),
        sf_tg: T.Tensor((tokens, groups), sf_dtype),
        eps: T.float32,
        amax_floor: T.float32,
    ):
        with T.Kernel(launch.cores) as core:
            x = T.alloc_shared((width,), T.bfloat16)
            weight = T.alloc_shared((width,), T.bfloat16)
            y = T.alloc_shared((width,), T.bfloat16)
            codes = T.alloc_shared((width,), T.float8_e4m3fn)
            exact = T.alloc_shared((sf_space,), T.int32 if scale == "ue8m0" else T.float32)
            sf = T.alloc_shared((sf_space,), sf_dtype)
            T.annotate_buffer_versions(
                {x: launch.buffers, y: launch.buffers, codes: launch.buffers, sf: launch.buffers}
            )
            T.copy(weight_m, weight)

            for turn in T.Pipelined(T.ceildiv(tokens - core, launch.cores), num_stages=launch.buffers):
                row = turn * launch.cores + core
                T.copy(x_tm[row, :], x)
                with T.SimdVF():
                    # 1. statistics
                    squares = T.simd.alloc_var(T.float32)
                    squares = T.simd.vdup(T.float32(0), T.float32)
                    for v in range(width // LANES):
                        wide = T.simd.vcvt(T.simd.vld(x[v * LANES], "UNPK_B16"), T.float32)
                        squares = T.simd.vadd(squares, T.simd.vmul(wide, wide))
                    total = T.simd.vdupv(T.simd.vcadd(squares))
                    count = T.simd.vdup(T.float32(width), T.float32)
                    mean = T.simd.vdiv(total, count, precision="exact")
                    root = T.simd.vsqrt(T.simd.vadds(mean, eps))
                    rstd = T.simd.vdiv(T.simd.vdup(T.float32(1), T.float32), root, precision="exact")
                    # 2. elements
                    for v in range(width // LANES):
                        wide = T.simd.vcvt(T.simd.vld(x[v * LANES], "UNPK_B16"), T.float32)
                        factor = T.simd.vcvt(T.simd.vld(weight[v * LANES], "UNPK_B16"), T.float32)
                        unit = T.simd.vmul(wide, rstd)
                        if before_weight:
                            unit = T.simd.vcvt(T.simd.vcvt(unit, T.bfloat16, sat=False), T.float32)
                        rounded = T.simd.vcvt(T.simd.vmul(unit, factor), T.bfloat16, sat=False)
                        T.simd.vsts(y[v * LANES], rounded, dist="PK_B32")
                    T.simd.mem_bar("VST_VLD")
                    # 3. scales and codes of the rounded elements
                    if group < LANES:
                        low = T.simd.pset(32, "PAT_VL32")
                        every = T.simd.pset(32, "PAT_ALL")
                        high = T.simd.pnot(low, every)
                        for v in range(width // LANES):
                            wide = T.simd.vcvt(T.simd.vld(y[v * LANES], "UNPK_B16"), T.float32)
                            size = T.simd.vabs(wide)
                            sf_low = put_scale(T.simd.vcmax(size, low), amax_floor, exact, 2 * v)
                            sf_high = put_scale(T.simd.vcmax(size, high), amax_floor, exact, 2 * v + 1)
                            put_codes(codes, v * LANES, wide, T.simd.vsel(sf_low, sf_high, low))
                    else:
                        for g in range(groups):
                            size = T.simd.alloc_var(T.float32)
                            size = T.simd.vdup(T.float32(0), T.float32)
                            for v in range(vectors):
                                wide = T.simd.vcvt(T.simd.vld(y[g * group + v * LANES], "UNPK_B16"), T.float32)
                                size = T.simd.vmax(size, T.simd.vabs(wide))
                            sf_all = put_scale(T.simd.vcmax(size), amax_floor, exact, g)
                            for v in range(vectors):
                                wide = T.simd.vcvt(T.simd.vld(y[g * group + v * LANES], "UNPK_B16"), T.float32)
                                put_codes(codes, g * group + v * LANES, wide, sf_all)
                    # 4. a scale of 4 bytes each becomes a byte each, or stays
                    T.simd.mem_bar("VST_VLD")
                    for v in range(sf_space // LANES):
                        word = T.simd.vld(exact[v * LANES])
                        if scale == "ue8m0":
                            T.simd.vsts(sf[v * LANES], T.simd.vcvt(word, T.uint8), dist="PK4_B32")
                        else:
                            T.simd.vsts(sf[v * LANES], word)
                T.copy(y, y_tm[row, :])
                T.copy(codes, codes_tm[row, :])
                T.copy(sf[0:groups], sf_tg[row, :])

    return rms_norm_quant
