"""Index scores on Ascend 950, in the order of four bf16 chains: products on the cube core, sums on its vector cores.

A core takes one query after the other and walks its keys in blocks. Heads are the rows of a product and keys its
columns, which the two vector cores share: the scores of 64 keys lie side by side in a register, and one head after the
other is added to four registers, in the order of the contract.
"""

# mypy: disable-error-code="valid-type"

from dataclasses import dataclass

from tilelang.ascend import language as T

LANES = 64  # fp32 elements of a vector register
CHANNELS = 128


@dataclass(frozen=True, kw_only=True)
class ScoreLaunch:
    """Query tokens go round the cores; `block_keys` keys are scored at a time. Neither changes a result."""

    cores: int = 32
    block_keys: int = 128


def score_program(num_heads: int, *, launch: ScoreLaunch | None = None):
    """The program over a buffer of decoded keys, for any number of queries and keys; scores in bf16.

    Queries and keys are the bf16 values of their records, weights fp32 numbers that are bf16. Column j of a row is key
    `first + j`; rows are padded to whole blocks, and columns at or beyond the length are 0 or undefined: the selection
    behind never looks there.

    Raises:
        NotImplementedError: heads are no multiple of 16 up to 64, or the block is not a register for each vector core.
    """
    launch = launch or ScoreLaunch()
    keys = launch.block_keys
    if num_heads % 16 or num_heads > 64:
        raise NotImplementedError(f"num_heads: expected a multiple of 16 up to 64, got {num_heads}")
    if keys != 2 * LANES:
        raise NotImplementedError(f"launch: expected blocks of {2 * LANES} keys, got {keys}")
    tokens, entries, blocks = T.dynamic("tokens, entries, blocks")

    @T.macro
    def gather(k_sd, first, block, key):
        """Read the keys of a block; a row behind the buffer is zero."""
        for j in T.serial(keys):
            row = first + block * keys + j
            if row < entries:
                T.copy(k_sd[row, :], key[j, :])
            else:
                T.fill(key[j, :], T.bfloat16(0))

    @T.macro
    def to_bf16(x):
        return T.simd.vcvt(T.simd.vcvt(x, T.bfloat16, sat=False), T.float32)

    @T.macro
    def add_head(total, dots, weight):
        """bf16(t * w + total) in one rounding: a sum on the midpoint of two bf16 numbers moves to its error's side."""
        zero = T.simd.vdup(T.float32(0), T.float32)
        # not a maximum: a NaN of a key has to stay visible
        positive = to_bf16(T.simd.vsel(zero, dots, T.simd.vcmps(dots, T.float32(0), op="lt")))
        product = T.simd.vmul(positive, weight)
        wide = T.simd.vadd(total, product)
        part = T.simd.vsub(wide, total)
        error = T.simd.vadd(T.simd.vsub(total, T.simd.vsub(wide, part)), T.simd.vsub(product, part))
        bits = T.reinterpret(wide, "int32x64")
        tail = T.simd.vand(bits, T.simd.vdup(T.int32(0xFFFF), T.int32))
        is_tie = T.simd.vcmps(error, T.float32(0), T.simd.vcmps(tail, T.int32(0x8000), op="eq"), op="ne")
        inward = T.simd.vcmps(T.simd.vxor(bits, T.reinterpret(error, "int32x64")), T.int32(0), op="lt")
        moved = T.simd.vsel(T.simd.vadds(bits, T.int32(-1)), T.simd.vadds(bits, T.int32(1)), inward)
        return to_bf16(T.reinterpret(T.simd.vsel(moved, bits, is_tie), "float32x64"))

    @T.prim_func
    def index_scores(
        q_thd: T.Tensor((tokens, num_heads, CHANNELS), T.bfloat16),
        k_sd: T.Tensor((entries, CHANNELS), T.bfloat16),
        w_th: T.Tensor((tokens, num_heads), T.float32),
        first_t: T.Tensor((tokens,), T.int32),
        length_t: T.Tensor((tokens,), T.int32),
        scores_ts: T.Tensor((tokens, blocks * keys), T.bfloat16),
    ):
        with T.Kernel(launch.cores) as core:
            q = T.alloc_l1((num_heads, CHANNELS), T.bfloat16)
            key = T.alloc_l1((keys, CHANNELS), T.bfloat16)
            dots_l0 = T.alloc_l0c((num_heads, keys), T.float32)
            dots = T.alloc_shared((num_heads, LANES), T.float32)
            weight = T.alloc_shared((num_heads,), T.float32)
            scores = T.alloc_shared((1, LANES), T.bfloat16)

            for turn in T.serial(T.ceildiv(tokens - core, launch.cores)):
                # 1. which query this turn owns
                token = turn * launch.cores + core
                T.copy(q_thd[token, :, :], q)
                T.copy(w_th[token, :], weight)
                for block in T.serial(T.ceildiv(length_t[token], keys)):
                    # 2. all heads with the keys of a block
                    gather(k_sd, first_t[token], block, key)
                    T.gemm(q, key, dots_l0, transpose_B=True, clear_accum=True)
                    T.dual_copy(dots_l0, dots)
                    # 3. four chains, each in ascending order of its heads
                    with T.SimdVF():
                        a0 = T.simd.alloc_var(T.float32)
                        a1 = T.simd.alloc_var(T.float32)
                        a2 = T.simd.alloc_var(T.float32)
                        a3 = T.simd.alloc_var(T.float32)
                        a0 = T.simd.vdup(T.float32(0), T.float32)
                        a1 = T.simd.vdup(T.float32(0), T.float32)
                        a2 = T.simd.vdup(T.float32(0), T.float32)
                        a3 = T.simd.vdup(T.float32(0), T.float32)
                        for step in range(num_heads // 4):
                            h = step * 4
                            a0 = add_head(a0, T.simd.vld(dots[h, 0]), T.simd.vld(weight[h], "BRC_B32"))
                            a1 = add_head(a1, T.simd.vld(dots[h + 1, 0]), T.simd.vld(weight[h + 1], "BRC_B32"))
                            a2 = add_head(a2, T.simd.vld(dots[h + 2, 0]), T.simd.vld(weight[h + 2], "BRC_B32"))
                            a3 = add_head(a3, T.simd.vld(dots[h + 3, 0]), T.simd.vld(weight[h + 3], "BRC_B32"))
                        # 4. the chains together
                        total = T.simd.vadd(to_bf16(T.simd.vadd(a0, a2)), to_bf16(T.simd.vadd(a1, a3)))
                        T.simd.vsts(scores[0, 0], T.simd.vcvt(total, T.bfloat16, sat=False), dist="PK_B32")
                    T.dual_copy(scores, scores_ts[token : token + 1, block * keys : (block + 1) * keys])

    return index_scores
