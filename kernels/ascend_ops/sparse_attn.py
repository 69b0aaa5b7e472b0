"""Sparse attention decode on Ascend 950: products on the cube core, softmax and sums on its two vector cores.

A core takes one query token after the other and walks its list in blocks of keys. The cube core gathers the rows of a
block into L1, where they serve as keys and as values; each vector core owns half of the heads. Weights are rounded
unnormalised, the sink is in the denominator only, and one division ends a row. The order of summation depends on the
position in the list alone.
"""

# mypy: disable-error-code="valid-type"

from dataclasses import dataclass

from tilelang.ascend import language as T

LANES = 64  # fp32 elements of a vector register
LOWEST = -3.0e38  # start of the running maximum: finite, so that a list that begins with holes never meets inf - inf


@dataclass(frozen=True, kw_only=True)
class SparseLaunch:
    """Query tokens go round the cores. `block_keys` fixes the order of summation."""

    cores: int = 32
    block_keys: int = 128
    columns: int = 128  # output channels of one product


def sparse_attn_decode_program(
    num_heads: int,
    width: int,
    value_dim: int,
    *,
    has_length: bool,
    has_sink: bool,
    launch: SparseLaunch | None = None,
):
    """The program over a paged cache, for any number of tokens, list entries and pages.

    Raises:
        NotImplementedError: heads are not 64, or the block of keys is not 128.
    """
    launch = launch or SparseLaunch()
    keys, columns, half = launch.block_keys, launch.columns, num_heads // 2
    if num_heads != 64:
        raise NotImplementedError(f"num_heads: expected 64, got {num_heads}")
    if keys != 2 * LANES:
        raise NotImplementedError(f"launch: expected blocks of {2 * LANES} keys, got {keys}")
    tokens, entries, pages, slots = T.dynamic("tokens, entries, pages, slots")
    page_step, slot_step = T.dynamic("page_step, slot_step")

    @T.macro
    def gather(kv_pod, idx_tk, token, block, list_end, key):
        """Read the rows of a block; nothing is read for a hole, whose row may hold NaN."""
        for j in T.serial(keys):
            entry = block * keys + j
            row = T.if_then_else(entry < list_end, idx_tk[token, entry], -1)
            if row >= 0 and row < pages * slots:
                T.copy(kv_pod[row // slots, row % slots, :], key[j, :])
            else:
                T.fill(key[j, :], T.bfloat16(0))

    @T.macro
    def softmax(score, weight, idx, top, total, shrink, remaining, scale):
        """One step of the online softmax for the heads of this vector core."""
        with T.SimdVF():
            hole = T.simd.vdup(-T.infinity(T.float32), T.float32)
            first = T.simd.vld(idx[0])
            second = T.simd.vld(idx[LANES])
            in_first = T.simd.update_mask(T.uint32(T.max(T.min(remaining, LANES), 0)))
            in_second = T.simd.update_mask(T.uint32(T.max(T.min(remaining - LANES, LANES), 0)))
            first_valid = T.simd.vcmps(first, T.int32(0), in_first, op="ge")
            second_valid = T.simd.vcmps(second, T.int32(0), in_second, op="ge")
            first_listed = T.simd.vcmps(first, pages * slots, first_valid, op="lt")
            second_listed = T.simd.vcmps(second, pages * slots, second_valid, op="lt")
            one = T.simd.pset(32, "PAT_VL1")
            for h in range(half):
                a = T.simd.vsel(T.simd.vmuls(T.simd.vld(score[h, 0]), scale), hole, first_listed)
                b = T.simd.vsel(T.simd.vmuls(T.simd.vld(score[h, LANES]), scale), hole, second_listed)
                old_top = T.simd.vld(top[h], "BRC_B32")
                new_top = T.simd.vdupv(T.simd.vmax(T.simd.vcmax(T.simd.vmax(a, b)), old_top))
                factor = T.simd.vexp(T.simd.vsub(old_top, new_top))
                p = T.simd.vexp(T.simd.vsub(a, new_top))
                r = T.simd.vexp(T.simd.vsub(b, new_top))
                sums = T.simd.vmul(T.simd.vld(total[h], "BRC_B32"), factor)
                sums = T.simd.vadd(sums, T.simd.vcadd(T.simd.vadd(p, r)))
                T.simd.vsts(top[h], new_top, one, "ONEPT_B32")
                T.simd.vsts(shrink[h], factor, one, "ONEPT_B32")
                T.simd.vsts(total[h], sums, one, "ONEPT_B32")
                T.simd.vsts(weight[h, 0], T.simd.vcvt(p, T.bfloat16), dist="PK_B32")
                T.simd.vsts(weight[h, LANES], T.simd.vcvt(r, T.bfloat16), dist="PK_B32")

    @T.macro
    def add(out, column, product, shrink):
        """The values of a block, on top of what the earlier ones left."""
        with T.SimdVF():
            for h in range(half):
                factor = T.simd.vld(shrink[h], "BRC_B32")
                for u in range(columns // LANES):
                    scaled = T.simd.vmul(T.simd.vld(out[h, column + u * LANES]), factor)
                    T.simd.vsts(out[h, column + u * LANES], T.simd.vadd(scaled, T.simd.vld(product[h, u * LANES])))

    @T.prim_func
    def sparse_attn_decode(
        q_thd: T.Tensor((tokens, num_heads, width), T.bfloat16),
        kv_pod: T.StridedTensor((pages, slots, width), (page_step, slot_step, 1), T.bfloat16),
        idx_tk: T.Tensor((tokens, entries), T.int32),
        topk_length_t: T.Tensor((tokens,), T.int32),
        sink_h: T.Tensor((num_heads,), T.float32),
        out_thu: T.Tensor((tokens, num_heads, value_dim), T.bfloat16),
        lse_th: T.Tensor((tokens, num_heads), T.float32),
        scale: T.float32,
    ):
        with T.Kernel(launch.cores) as core:
            q = T.alloc_l1((num_heads, width), T.bfloat16)
            key = T.alloc_l1((keys, width), T.bfloat16)
            weight_l1 = T.alloc_l1((num_heads, keys), T.bfloat16)
            score_l0 = T.alloc_l0c((num_heads, keys), T.float32)
            weight_l0 = T.alloc_l0a((num_heads, keys), T.bfloat16)
            value_l0 = T.alloc_l0b((keys, columns), T.bfloat16)
            product_l0 = T.alloc_l0c((num_heads, columns), T.float32)
            score = T.alloc_shared((half, keys), T.float32)
            weight = T.alloc_shared((half, keys), T.bfloat16)
            product = T.alloc_shared((half, columns), T.float32)
            out = T.alloc_shared((half, value_dim), T.float32)
            rounded = T.alloc_shared((half, value_dim), T.bfloat16)
            idx = T.alloc_shared((keys,), T.int32)
            sink = T.alloc_shared((LANES,), T.float32)
            top = T.alloc_shared((LANES,), T.float32)
            total = T.alloc_shared((LANES,), T.float32)
            shrink = T.alloc_shared((LANES,), T.float32)
            lse = T.alloc_shared((1, LANES), T.float32)
            T.dual_copy(sink_h, sink[0:half])

            for turn in T.serial(T.ceildiv(tokens - core, launch.cores)):
                # 1. which token this turn owns
                token = turn * launch.cores + core
                list_end = T.min(topk_length_t[token], entries) if has_length else entries
                T.copy(q_thd[token, :, :], q)
                with T.SimdVF():
                    zero = T.simd.vdup(T.float32(0), T.float32)
                    T.simd.vsts(total[0], zero)
                    T.simd.vsts(top[0], T.simd.vdup(T.float32(LOWEST), T.float32))
                    for h in range(half):
                        for u in range(value_dim // LANES):
                            T.simd.vsts(out[h, u * LANES], zero)

                for block in T.serial(T.ceildiv(list_end, keys)):
                    # 2. scores
                    gather(kv_pod, idx_tk, token, block, list_end, key)
                    T.copy(idx_tk[token, block * keys : (block + 1) * keys], idx)
                    T.gemm(q, key, score_l0, transpose_B=True, clear_accum=True)
                    T.dual_copy(score_l0, score)
                    # 3. weights
                    softmax(score, weight, idx, top, total, shrink, list_end - block * keys, scale)
                    T.dual_copy(weight, weight_l1)
                    # 4. values
                    T.copy(weight_l1, weight_l0)
                    for u in T.serial(value_dim // columns):
                        T.copy(key[:, u * columns : (u + 1) * columns], value_l0)
                        T.gemm(weight_l0, value_l0, product_l0, clear_accum=True)
                        T.dual_copy(product_l0, product)
                        add(out, u * columns, product, shrink)

                # 5. divide by the row sum plus the sink, once; a row without keys is 0, and a NaN sum stays visible
                with T.SimdVF():
                    zero = T.simd.vdup(T.float32(0), T.float32)
                    tops = T.simd.vld(top[0])
                    totals = T.simd.vld(total[0])
                    denominator = T.simd.alloc_var(T.float32)
                    denominator = totals
                    if has_sink:
                        # may overflow to inf on purpose: the quotient is then 0
                        denominator = T.simd.vadd(totals, T.simd.vexp(T.simd.vsub(T.simd.vld(sink[0]), tops)))
                    T.simd.vsts(shrink[0], denominator)
                    T.simd.vsts(lse[0, 0], T.simd.vadd(tops, T.simd.vln(totals)))
                    T.simd.mem_bar("VST_VLD")
                    for h in range(half):
                        empty = T.simd.vcmps(T.simd.vld(total[h], "BRC_B32"), T.float32(0), op="eq")
                        divisor = T.simd.vld(shrink[h], "BRC_B32")
                        for u in range(value_dim // LANES):
                            quotient = T.simd.vdiv(T.simd.vld(out[h, u * LANES]), divisor, precision="exact")
                            kept = T.simd.vsel(zero, quotient, empty)
                            T.simd.vsts(rounded[h, u * LANES], T.simd.vcvt(kept, T.bfloat16), dist="PK_B32")
                T.dual_copy(rounded, out_thu[token, :, :])
                T.dual_copy(lse[:, 0:half], lse_th[token : token + 1, :])

    return sparse_attn_decode
