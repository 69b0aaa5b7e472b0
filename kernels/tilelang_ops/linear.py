"""Products of quantised bytes on SM100 with tensor memory: the accumulator and the scales of both operands lie there.

A program owns one tile of rows and features and walks the whole width in steps of 128. The block-scaled instruction
takes e4m3 codes and UE8M0 bytes as they are; `T.tcgen05_gemm_blockscaled` fails to build where another form would
quietly fall back. e2m1 codes are spelled as e4m3 codes on their way into shared memory, which is exact, and keep their
scales. While one step is multiplied, the next is read into the other buffers.

Scales come as words of four bytes along the width, [width / 128, rows]: the rows of one word column side by side.
"""

# mypy: disable-error-code="valid-type"

from dataclasses import dataclass

from tilelang import PassConfigKey
from tilelang import language as T

STEP = 128  # four scales of 32 elements: one word
PASS_CONFIGS = {PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}


@dataclass(frozen=True, kw_only=True)
class LinearLaunch:
    """Tile of one program: the instruction takes 128 rows. Two `buffers` let reads overlap products."""

    block_rows: int = 128
    block_features: int = 128
    threads: int = 256
    buffers: int = 2


def linear_codes_program(features: int, width: int, *, packed: bool, launch: LinearLaunch | None = None):
    """The program for any number of rows of `width` codes and a weight of `features` rows, `packed` for e2m1.

    Raises:
        NotImplementedError: features are no multiple of the tile, or the width none of 128.
    """
    launch = launch or LinearLaunch()
    rows, columns, buffers, threads = launch.block_rows, launch.block_features, launch.buffers, launch.threads
    if features % columns:
        raise NotImplementedError(f"features: expected a multiple of {columns}, got {features}")
    if width % STEP:
        raise NotImplementedError(f"width: expected a multiple of {STEP}, got {width}")
    steps = width // STEP
    tokens = T.dynamic("tokens")
    w_width, w_dtype = (width // 2, T.uint8) if packed else (width, T.float8_e4m3fn)

    @T.macro
    def read_step(x_tm, x_sf_gt, w_fm, w_sf_gf, x, w, x_sf, w_sf, step, row0, feature0):
        """Bring the codes and scales of a step to shared memory; rows beyond the last are zero."""
        slot = step % buffers
        for i, j, v in T.Parallel(rows, STEP // 16, 16):
            at = row0 + i
            x[slot, i, j * 16 + v] = T.if_then_else(at < tokens, x_tm[at, step * STEP + j * 16 + v], T.float8_e4m3fn(0))
        if packed:
            for i, j in T.Parallel(columns, STEP // 2):
                byte = T.cast(w_fm[feature0 + i, step * (STEP // 2) + j], T.int32)
                for v in T.unroll(2):
                    nibble = (byte >> (4 * v)) & 15
                    size = nibble & 7
                    # 0.5 is a subnormal e2m1 code and a normal e4m3 code; from 1 on the bits only move
                    code = T.if_then_else(size < 2, size * 0x30, 0x30 + (size << 2)) | ((nibble >> 3) << 7)
                    w[slot, i, 2 * j + v] = T.reinterpret(T.cast(code, T.uint8), T.float8_e4m3fn)
        else:
            for i, j, v in T.Parallel(columns, STEP // 16, 16):
                w[slot, i, j * 16 + v] = w_fm[feature0 + i, step * STEP + j * 16 + v]
        for i in T.Parallel(rows):
            at = row0 + i
            x_sf[slot, i] = T.if_then_else(at < tokens, x_sf_gt[step, at], T.uint32(0))
        for i in T.Parallel(columns):
            w_sf[slot, i] = w_sf_gf[step, feature0 + i]

    @T.prim_func
    def linear_codes(
        x_tm: T.Tensor((tokens, width), T.float8_e4m3fn),
        x_sf_gt: T.Tensor((steps, tokens), T.uint32),
        w_fm: T.Tensor((features, w_width), w_dtype),
        w_sf_gf: T.Tensor((steps, features), T.uint32),
        y_tf: T.Tensor((tokens, features), T.bfloat16),
    ):
        with T.Kernel(T.ceildiv(tokens, rows), features // columns, threads=threads) as (row_tile, feature_tile):
            x = T.alloc_shared((buffers, rows, STEP), T.float8_e4m3fn)
            w = T.alloc_shared((buffers, columns, STEP), T.float8_e4m3fn)
            x_sf = T.alloc_shared((buffers, rows), T.uint32)
            w_sf = T.alloc_shared((buffers, columns), T.uint32)
            x_sf_tm = T.alloc_tmem((rows, rows // 128 * 4), T.uint32)
            w_sf_tm = T.alloc_tmem((rows, columns // 128 * 4), T.uint32)
            acc_tm = T.alloc_tmem((rows, columns), T.float32)
            acc = T.alloc_fragment((rows, columns), T.float32)
            y = T.alloc_shared((rows, columns), T.bfloat16)
            added = T.alloc_barrier(1)
            thread = T.get_thread_binding()

            # 1. the first step
            row0, feature0 = row_tile * rows, feature_tile * columns
            read_step(x_tm, x_sf_gt, w_fm, w_sf_gf, x, w, x_sf, w_sf, 0, row0, feature0)
            for step in T.serial(steps):
                slot = step % buffers
                # 2. scales in the order of the instruction, then the product
                T.sync_threads()
                if thread < 32:
                    T.tcgen05_sf_warp_transpose(x_sf[slot, :])
                    T.tcgen05_sf_warp_transpose(w_sf[slot, :])
                T.fence_proxy_async()
                T.sync_threads()
                if thread < 32:
                    T.tcgen05_cp_warpx4(x_sf[slot, :], x_sf_tm)
                    T.tcgen05_cp_warpx4(w_sf[slot, :], w_sf_tm)
                T.tcgen05_gemm_blockscaled(
                    x[slot, :, :],
                    w[slot, :, :],
                    acc_tm,
                    x_sf_tm,
                    w_sf_tm,
                    transpose_B=True,
                    clear_accum=(step == 0),
                    mbar=added,
                    k_start=step * STEP,
                    sf_a_granularity_k=32,
                    sf_b_granularity_k=32,
                )
                # 3. meanwhile the next step, into the buffers that the product before has left
                if step + 1 < steps:
                    read_step(x_tm, x_sf_gt, w_fm, w_sf_gf, x, w, x_sf, w_sf, step + 1, row0, feature0)
                T.mbarrier_wait_parity(added, step % 2)
            # 4. the only rounding
            T.copy(acc_tm, acc)
            T.copy(acc, y)
            for i, j in T.Parallel(rows, columns):
                if row0 + i < tokens:
                    y_tf[row0 + i, feature0 + j] = y[i, j]

    return linear_codes
