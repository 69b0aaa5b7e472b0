"""Products of e4m3 bytes on SM90 with specialised warps: 128 threads read tiles, groups of 128 multiply and add.

A program owns tiles of rows and features in turn and walks the whole width of each in steps of 128. The producer keeps
several steps ahead in shared memory, read by the tensor copy engine; every group of consumers multiplies 64 rows.

The FP8 unit keeps about 14 bits of a sum. So no sum of it spans more than one block of the width that shares a scale
(128 elements, or 32): the partial sum times its scales is added to an fp32 sum in registers, block after block. That
order depends on neither tile, so both tiles, and a row alone or in any batch, give the same bits.
"""

# mypy: disable-error-code="valid-type"

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import tilelang
import torch
from tilelang import PassConfigKey
from tilelang import language as T

STEP = 128
GROUP = 128  # threads of a role
NAN_BITS = 0x7FC00000
# the copy engine fills what lies beyond a tensor with zeros and leaves out what would be stored there
PASS_CONFIGS = {PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}


@dataclass(frozen=True, kw_only=True)
class ProductLaunch:
    """Tile and number of programs; nothing of it changes a result."""

    rows: int = 192  # 64 for each group of consumers
    features: int = 128  # one block of scales of 128, or a part of one
    buffers: int = 4
    programs: int = 132
    band: int = 16  # rows of tiles that are visited together, for the cache
    consumer_registers: int = 160
    producer_registers: int = 24


# few rows: the weight is read once whatever the tile, and narrow tiles keep more readers busy
FEW_ROWS = ProductLaunch(rows=64, features=32, buffers=8, programs=1056, consumer_registers=232, producer_registers=40)


def codes_launch(tokens: int) -> ProductLaunch:
    """The tile for a number of rows."""
    return FEW_ROWS if tokens <= FEW_ROWS.rows else ProductLaunch()


def product_program(scale: str, *, grouped: bool = False, launch: ProductLaunch | None = None):
    """The program for any number of rows, features and width, a multiple of 128; rows may lie apart.

    `scale` is `f32` or `byte` (UE8M0) for blocks of 128 and of 128 x 128, `word` for blocks of 32 and of 32 x 32, whose
    four UE8M0 scales of a step come as one int32. `grouped`: the weights of all experts lie one below the other, and
    each of `count` tiles of rows has an expert, a first row and an end.
    """
    launch = launch or ProductLaunch()
    rows, columns, buffers, programs, band = launch.rows, launch.features, launch.buffers, launch.programs, launch.band
    consumers = rows // 64 * GROUP
    block = 32 if scale == "word" else 128
    kind = {"f32": T.float32, "byte": T.uint8, "word": T.int32}[scale]
    tokens, features, width = T.dynamic("tokens, features, width")
    num_tiles, w_rows, w_sf_rows = T.dynamic("num_tiles, w_rows, w_sf_rows")
    x_stride, w_stride, x_sf_stride, w_sf_stride = T.dynamic("x_stride, w_stride, x_sf_stride, w_sf_stride")

    @T.macro
    def power(word, g):
        """2^(b - 127) of byte g; 255 is NaN."""
        byte = (T.cast(word, T.int32) >> (8 * g)) & 255
        return T.reinterpret(T.if_then_else(byte == 255, T.int32(NAN_BITS), byte << 23), T.float32)

    @T.macro
    def multiply(x, w, part, slot, g):
        """The product of one block of a step."""
        T.wgmma_gemm(
            x[slot, :, g * block : (g + 1) * block],
            w[slot, :, g * block : (g + 1) * block],
            part,
            transpose_B=True,
            clear_accum=True,
            policy=T.GemmWarpPolicy.FullRow,
        )

    @T.macro
    def promote(total, part, x_now, w_now, g):
        """Add a partial sum, scaled."""
        for i, j in T.Parallel(rows, columns):
            if scale == "f32":
                total[i, j] += part[i, j] * (x_now[i] * w_now[j])
            else:
                total[i, j] += part[i, j] * (power(x_now[i], g) * power(w_now[j], g))

    @T.macro
    def read_scales(x_sf_tg, w_sf_gg, x_next, w_next, row0, sf_row, sf_last, step):
        """The scales of a step for every row and feature of the tile; rows beyond the last repeat it."""
        for i in T.Parallel(rows):
            x_next[i] = x_sf_tg[T.min(row0 + i, tokens - 1), step]
        for j in T.Parallel(columns):
            if block < STEP:
                w_next[j] = w_sf_gg[T.min(sf_row + j // block, sf_last), step]
            else:  # no tile has features of two blocks
                w_next[j] = w_sf_gg[sf_row, step]

    @T.prim_func
    def linear_codes(
        x_tm: T.StridedTensor((tokens, width), (x_stride, 1), T.float8_e4m3fn),
        x_sf_tg: T.StridedTensor((tokens, width // STEP), (x_sf_stride, 1), kind),
        w_fm: T.StridedTensor((w_rows, width), (w_stride, 1), T.float8_e4m3fn),
        w_sf_gg: T.StridedTensor((w_sf_rows, width // STEP), (w_sf_stride, 1), kind),
        tile_t3: T.Tensor((num_tiles, 3), T.int32),
        count: T.Tensor((1,), T.int32),
        y_tf: T.Tensor((tokens, features), T.bfloat16),
    ):
        with T.Kernel(
            T.min((num_tiles if grouped else T.ceildiv(tokens, rows)) * T.ceildiv(features, columns), programs),
            threads=consumers + GROUP,
        ) as program:
            x = T.alloc_shared((buffers, rows, STEP), T.float8_e4m3fn)
            w = T.alloc_shared((buffers, columns, STEP), T.float8_e4m3fn)
            y = T.alloc_shared((rows, columns), T.bfloat16)
            part = T.alloc_fragment((rows, columns), T.float32)
            total = T.alloc_fragment((rows, columns), T.float32)
            x_now = T.alloc_fragment((rows,), kind)
            x_next = T.alloc_fragment((rows,), kind)
            w_now = T.alloc_fragment((columns,), kind)
            w_next = T.alloc_fragment((columns,), kind)
            ready = T.alloc_barrier([GROUP] * buffers)
            free = T.alloc_barrier([consumers] * buffers)
            thread = T.get_thread_binding()
            # variables: an expression would be computed again wherever it is used
            row_tiles = T.alloc_var(T.int32)
            feature_tiles = T.alloc_var(T.int32)
            tile = T.alloc_var(T.int32)
            top = T.alloc_var(T.int32)
            height = T.alloc_var(T.int32)
            expert = T.alloc_var(T.int32)
            row0 = T.alloc_var(T.int32)
            row_tile = T.alloc_var(T.int32)
            end = T.alloc_var(T.int32)
            sf_row = T.alloc_var(T.int32)
            sf_last = T.alloc_var(T.int32)
            feature0 = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            phase = T.alloc_var(T.int32)

            # 1. tiles of this program: bands of `band` rows of tiles, column after column
            row_tiles = count[0] if grouped else T.ceildiv(tokens, rows)
            feature_tiles = T.ceildiv(features, columns)
            steps = width // STEP
            slot = 0
            phase = 0
            if thread < consumers:
                T.set_max_nreg(launch.consumer_registers, 1)
                for turn in T.serial(T.ceildiv(row_tiles * feature_tiles - program, programs)):
                    tile = program + turn * programs
                    top = tile // (band * feature_tiles) * band
                    height = T.min(row_tiles - top, band)
                    row_tile = top + (tile - top * feature_tiles) % height
                    expert = tile_t3[row_tile, 0] if grouped else 0
                    row0 = tile_t3[row_tile, 1] if grouped else row_tile * rows
                    end = tile_t3[row_tile, 2] if grouped else tokens
                    feature0 = (tile - top * feature_tiles) // height * columns
                    sf_last = (expert + 1) * T.ceildiv(features, block) - 1
                    sf_row = expert * T.ceildiv(features, block) + feature0 // block
                    T.fill(total, 0.0)
                    read_scales(x_sf_tg, w_sf_gg, x_next, w_next, row0, sf_row, sf_last, 0)
                    for step in T.serial(steps):
                        # 2. products of a step; its scales came with the step before
                        T.barrier_wait(ready[slot], phase)
                        multiply(x, w, part, slot, 0)
                        T.copy(x_next, x_now)
                        T.copy(w_next, w_now)
                        ahead = T.min(step + 1, steps - 1)
                        read_scales(x_sf_tg, w_sf_gg, x_next, w_next, row0, sf_row, sf_last, ahead)
                        T.wait_wgmma(0)
                        if block < STEP:
                            for g in T.unroll(STEP // block - 1):
                                promote(total, part, x_now, w_now, g)
                                multiply(x, w, part, slot, g + 1)
                                T.wait_wgmma(0)
                        T.barrier_arrive(free[slot])
                        promote(total, part, x_now, w_now, STEP // block - 1)
                        slot = T.if_then_else(slot == buffers - 1, 0, slot + 1)
                        phase = T.if_then_else(slot == 0, phase ^ 1, phase)
                    # 3. the only rounding of the sum
                    T.copy(total, y)
                    if grouped:
                        if row0 + rows <= end:
                            T.copy(y, y_tf[row0 : row0 + rows, feature0 : feature0 + columns])
                        else:  # an expert with fewer rows: those behind are the next one's
                            for n in T.serial(rows * columns // consumers):
                                i, j = (n * consumers + thread) // columns, thread % columns
                                if row0 + i < end and feature0 + j < features:
                                    y_tf[row0 + i, feature0 + j] = y[i, j]
                    else:
                        T.copy(y, y_tf[row0 : row0 + rows, feature0 : feature0 + columns])
            else:
                # 4. tiles of both operands, as far ahead as there are buffers
                T.set_max_nreg(launch.producer_registers, 0)
                for turn in T.serial(T.ceildiv(row_tiles * feature_tiles - program, programs)):
                    tile = program + turn * programs
                    top = tile // (band * feature_tiles) * band
                    height = T.min(row_tiles - top, band)
                    row_tile = top + (tile - top * feature_tiles) % height
                    expert = tile_t3[row_tile, 0] if grouped else 0
                    row0 = tile_t3[row_tile, 1] if grouped else row_tile * rows
                    feature0 = (tile - top * feature_tiles) // height * columns
                    for step in T.serial(steps):
                        T.barrier_wait(free[slot], phase ^ 1)
                        left = step * STEP
                        T.tma_copy(x_tm[row0 : row0 + rows, left : left + STEP], x[slot, :, :], barrier=ready[slot])
                        row = expert * features + feature0
                        T.tma_copy(w_fm[row : row + columns, left : left + STEP], w[slot, :, :], barrier=ready[slot])
                        T.barrier_arrive(ready[slot])
                        slot = T.if_then_else(slot == buffers - 1, 0, slot + 1)
                        phase = T.if_then_else(slot == 0, phase ^ 1, phase)

    return linear_codes


@lru_cache(maxsize=16)
def _compiled(scale: str, grouped: bool, launch: ProductLaunch) -> Any:
    program = product_program(scale, grouped=grouped, launch=launch)
    return tilelang.compile(program, target={"kind": "cuda", "arch": "sm_90a"}, pass_configs=PASS_CONFIGS)


def linear_codes(x_q: torch.Tensor, x_sf: torch.Tensor, w_q: torch.Tensor, w_sf: torch.Tensor) -> torch.Tensor:
    """Build once for the kind of scale, and launch; fp32 scales, or UE8M0 bytes of blocks of 128 or of 32.

    Raises:
        NotImplementedError: the width is no multiple of 128, features no multiple of 8, or rows are not aligned as the
            copy engine takes them.
    """
    (tokens, width), features = x_q.shape, w_q.shape[0]
    scale, x_sf, w_sf = _operands(x_q, x_sf, w_q, w_sf)
    y_tf = torch.empty(tokens, features, dtype=torch.bfloat16, device=x_q.device)
    if y_tf.numel() and width:
        tile_t3, count = x_q.new_empty(1, 3, dtype=torch.int32), x_q.new_empty(1, dtype=torch.int32)
        _compiled(scale, False, codes_launch(tokens))(x_q, x_sf, w_q, w_sf, tile_t3, count, y_tf)
    return y_tf if width else y_tf.zero_()


def linear_grouped(
    x_q: torch.Tensor, x_sf: torch.Tensor, w_q: torch.Tensor, w_sf: torch.Tensor, group_sizes_e: torch.Tensor
) -> torch.Tensor:
    """`linear_codes` for rows in the order of their experts, with the same bits; sizes stay on the device.

    Raises:
        NotImplementedError: as `linear_codes`; the weights of the experts do not lie one below the other.
    """
    (rows, width), (experts, features, _) = x_q.shape, w_q.shape
    if w_q.stride(0) != features * w_q.stride(1) or w_sf.stride(0) != w_sf.shape[1] * w_sf.stride(1):
        raise NotImplementedError(f"w_q, w_sf: expected experts one below the other, got {w_q.stride()}")
    scale, x_sf, w_sf = _operands(x_q, x_sf, w_q.flatten(0, 1), w_sf.flatten(0, 1), features)
    y_yf = torch.empty(rows, features, dtype=torch.bfloat16, device=x_q.device)
    if y_yf.numel() and width:
        launch = codes_launch(rows // experts)
        tile_t3, count = _tiles(group_sizes_e, rows, launch.rows)
        _compiled(scale, True, launch)(x_q, x_sf, w_q.flatten(0, 1), w_sf, tile_t3, count, y_yf)
    return y_yf if width else y_yf.zero_()


def _tiles(group_sizes_e: torch.Tensor, rows: int, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert, first row and end of as many tiles as any sizes can need, and how many these sizes do.

    The last tile of an expert ends with it: rows that it shares with the tile before have the same bits in both.
    """
    ends_e = group_sizes_e.cumsum(0)
    tiles_e = (group_sizes_e + height - 1) // height
    tile_ends_e = tiles_e.cumsum(0)
    tile = torch.arange(rows // height + min(len(ends_e), rows), device=ends_e.device)
    expert = torch.bucketize(tile, tile_ends_e, right=True).clamp(max=len(ends_e) - 1)
    start, end = (ends_e - group_sizes_e)[expert], ends_e[expert]
    row = start + (tile - (tile_ends_e - tiles_e)[expert]) * height
    row = torch.maximum(start, torch.minimum(row, end - height))
    return torch.stack([expert, row, end], 1).to(torch.int32), tile_ends_e[-1:].to(torch.int32)


def _operands(
    x_q: torch.Tensor, x_sf: torch.Tensor, w_q: torch.Tensor, w_sf: torch.Tensor, features: int | None = None
) -> tuple[str, torch.Tensor, torch.Tensor]:
    """The kind of scale, and both scales as the program reads them."""
    width, features = x_q.shape[1], features or w_q.shape[0]
    if width % STEP or features % 8:
        raise NotImplementedError(f"x_q, w_q: expected a width of 128·n and 8·n features, got {width}, {features}")
    for name, x in (("x_q", x_q), ("w_q", w_q)):
        if x.stride(1) != 1 or x.stride(0) % 16 or x.data_ptr() % 16:
            raise NotImplementedError(f"{name}: expected rows that begin at multiples of 16 bytes, got {x.stride()}")
    if x_sf.dtype == torch.float32:
        return "f32", x_sf, w_sf
    if x_sf.shape[1] == width // STEP:
        return "byte", x_sf, w_sf
    return "word", _words("x_sf", x_sf), _words("w_sf", w_sf)


def _words(name: str, sf: torch.Tensor) -> torch.Tensor:
    if sf.stride(1) != 1 or sf.stride(0) % 4 or sf.data_ptr() % 4:
        raise NotImplementedError(f"{name}: expected rows that begin at multiples of 4 bytes, got {sf.stride()}")
    return sf.view(torch.int32)
