"""TileLang programs that lower, or nearly, and must be refused: one of each kind, and a right one for each target."""

from tilelang import language as T
from tilelang.ascend import language as A

WIDTH = 256


def product(*, block_n: int = 128, block_k: int = 64, buffers: int = 1, tensor_memory: bool = True):
    """out = a · bᵀ over one tile; into registers it falls back to mma.sync on SM100."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def product(
        a: T.Tensor((tokens, block_k), T.bfloat16),
        b: T.Tensor((block_n, block_k), T.bfloat16),
        out: T.Tensor((tokens, block_n), T.float32),
    ):
        with T.Kernel(T.ceildiv(tokens, 128), threads=128) as tile:
            left = T.alloc_shared((buffers, 128, block_k), T.bfloat16)
            right = T.alloc_shared((block_n, block_k), T.bfloat16)
            result = T.alloc_fragment((128, block_n), T.float32)
            for n in T.serial(buffers):
                T.copy(a[tile * 128 : (tile + 1) * 128, :], left[n, :, :])
            T.copy(b, right)
            if tensor_memory:
                result_tm = T.alloc_tmem((128, block_n), T.float32)
                done = T.alloc_barrier(1)
                last = buffers - 1
                T.tcgen05_gemm(left[last, :, :], right, result_tm, transpose_B=True, clear_accum=True, mbar=done)
                T.mbarrier_wait_parity(done, 0)
                T.copy(result_tm, result)
            else:
                T.clear(result)
                T.gemm(left[0, :, :], right, result, transpose_B=True)
            T.copy(result, out[tile * 128 : (tile + 1) * 128, :])

    return product


def right():
    """Builds with tcgen05."""
    return product()


def falls_back_to_mma_sync():
    """A product into registers: right numbers, the wrong unit."""
    return product(tensor_memory=False)


def overflows_shared_memory():
    """Fifteen buffers of 16 KiB and one more."""
    return product(buffers=15)


def overflows_tensor_memory():
    """Three results of 256 columns, of 512 that there are."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def product(
        a: T.Tensor((tokens, 64), T.bfloat16),
        b: T.Tensor((256, 64), T.bfloat16),
        out: T.Tensor((3, tokens, 256), T.float32),
    ):
        with T.Kernel(T.ceildiv(tokens, 128), threads=128) as tile:
            left = T.alloc_shared((128, 64), T.bfloat16)
            right = T.alloc_shared((256, 64), T.bfloat16)
            first_tm = T.alloc_tmem((128, 256), T.float32)
            second_tm = T.alloc_tmem((128, 256), T.float32)
            third_tm = T.alloc_tmem((128, 256), T.float32)
            result = T.alloc_fragment((128, 256), T.float32)
            done = T.alloc_barrier(1)
            T.copy(a[tile * 128 : (tile + 1) * 128, :], left)
            T.copy(b, right)
            T.tcgen05_gemm(left, right, first_tm, transpose_B=True, clear_accum=True, mbar=None)
            T.tcgen05_gemm(left, right, second_tm, transpose_B=True, clear_accum=True, mbar=None)
            T.tcgen05_gemm(left, right, third_tm, transpose_B=True, clear_accum=True, mbar=done)
            T.mbarrier_wait_parity(done, 0)
            T.copy(first_tm, result)
            T.copy(result, out[0, tile * 128 : (tile + 1) * 128, :])
            T.copy(second_tm, result)
            T.copy(result, out[1, tile * 128 : (tile + 1) * 128, :])
            T.copy(third_tm, result)
            T.copy(result, out[2, tile * 128 : (tile + 1) * 128, :])

    return product


def spills():
    """A row of 512 fp32 values a thread, each used twice."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def square(x: T.Tensor((tokens, 512), T.float32), y: T.Tensor((tokens, 512), T.float32)):
        with T.Kernel(T.ceildiv(tokens, 128), threads=128) as tile:
            row = T.alloc_fragment((128, 512), T.float32)
            total = T.alloc_fragment((128,), T.float32)
            T.copy(x[tile * 128 : (tile + 1) * 128, :], row)
            T.reduce_sum(row, total, dim=1)
            for i, j in T.Parallel(128, 512):
                row[i, j] = row[i, j] * total[i]
            T.copy(row, y[tile * 128 : (tile + 1) * 128, :])

    return square


def drops_the_end_of_k():
    """A tile of 24 products deep (U80)."""
    return product(block_k=24, tensor_memory=False)


def is_wrong_for_odd_eights():
    """A tile of 24 columns (U81)."""
    return product(block_n=24, tensor_memory=False)


# Ascend 950


def scaled(*, width: int = WIDTH, forgotten: str = "", narrow: bool = False):
    """y = 2 · x, row by row, in vector registers or element by element; one step may be forgotten."""
    tokens = A.dynamic("tokens")
    y_dtype = A.float8_e4m3fn if narrow else A.float32

    @A.prim_func
    def scaled(x_tm: A.Tensor((tokens, width), A.float32), y_tm: A.Tensor((tokens, width), y_dtype)):
        with A.Kernel(64) as core:
            x = A.alloc_shared((width,), A.float32)
            y = A.alloc_shared((width,), y_dtype)
            A.annotate_buffer_versions({x: 2})
            for turn in A.Pipelined(A.ceildiv(tokens - core, 64), num_stages=2):
                row = turn * 64 + core
                if forgotten != "copy":
                    A.copy(x_tm[row, :], x)
                if forgotten != "store":
                    with A.SimdVF():
                        if narrow:
                            for i in A.Parallel(width):
                                y[i] = A.cast(x[i] * 2.0, A.float8_e4m3fn)
                        else:
                            for v in range(width // 64):
                                A.simd.vsts(y[v * 64], A.simd.vmuls(A.simd.vld(x[v * 64]), A.float32(2)))
                A.copy(y, y_tm[row, :])

    return scaled


def ascend_right():
    """Lowers."""
    return scaled()


def overflows_the_unified_buffer():
    """Two rows of 192 KiB, of 248 KiB that there are."""
    return scaled(width=49152)


def stores_what_nobody_wrote():
    """The row that is copied out is never computed; the compiler only warns."""
    return scaled(forgotten="store")


def is_not_scheduled_as_asked():
    """Two rows shall be in flight, but nothing fills them; the compiler only warns."""
    return scaled(forgotten="copy")


def casts_without_a_vector_instruction():
    """An fp8 cast element by element, which the vector unit has no form for."""
    return scaled(narrow=True)


def ascend_product(*, rows: int = 64, dtype: str = "bfloat16", accumulator: str = "float32"):
    """out = a · bᵀ, one tile of 128 columns for each block of rows."""
    tokens = A.dynamic("tokens")

    @A.prim_func
    def product(
        a: A.Tensor((tokens, 128), dtype), b: A.Tensor((128, 128), dtype), out: A.Tensor((tokens, 128), accumulator)
    ):
        with A.Kernel(32) as core:
            left = A.alloc_l1((rows, 128), dtype)
            right = A.alloc_l1((128, 128), dtype)
            result = A.alloc_l0c((rows, 128), accumulator)
            A.copy(b, right)
            for turn in A.serial(A.ceildiv(tokens - core * rows, 32 * rows)):
                first = (turn * 32 + core) * rows
                A.copy(a[first : first + rows, :], left)
                A.gemm(left, right, result, transpose_B=True, clear_accum=True)
                A.copy(result, out[first : first + rows, :])

    return product


def ascend_right_product():
    """Lowers, on the cube unit."""
    return ascend_product()


def overflows_the_accumulator():
    """1024 x 128 sums of 4 bytes, of 256 KiB that there are."""
    return ascend_product(rows=1024)


def multiplies_bytes():
    """8-bit integer products (U84)."""
    return ascend_product(dtype="int8", accumulator="int32")
