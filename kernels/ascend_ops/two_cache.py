"""Sparse attention over two caches on Ascend 950: records decoded by the vector cores, products on the cube core.

A core takes one query token after the other and walks its window list, then its main list, in blocks of keys under one
softmax. Each vector core gathers and decodes one half of the channels of a block, and owns one half of the heads; no
decoded copy leaves the chip. The order of summation depends on the position in the lists alone.
"""

# mypy: disable-error-code="valid-type"

from dataclasses import dataclass

from tilelang.ascend import language as T

LANES = 64  # fp32 elements of a vector register
LOWEST = -3.0e38  # start of the running maximum: finite, so that a list that begins with holes never meets inf - inf
WIDTH = 512


@dataclass(frozen=True, kw_only=True)
class TwoCacheLaunch:
    """Query tokens go round the cores. `block_keys` fixes the order of summation."""

    cores: int = 32
    block_keys: int = 64
    columns: int = 128  # output channels of one product
    threads: int = 512  # of the decoding


def two_cache_decode_program(num_heads: int, *, main: str, sectioned: bool, launch: TwoCacheLaunch | None = None):
    """The program over rings of FP8 records and pages of `main` records ("e4m3" or "e2m1"), 512 channels each.

    Caches come as bytes, one row for a page: [pages, bytes of a page], pages any step apart.

    Raises:
        NotImplementedError: heads are not 64, `main` is another format, or the block of keys is not 64.
    """
    launch = launch or TwoCacheLaunch()
    keys, columns, half = launch.block_keys, launch.columns, num_heads // 2
    if num_heads != 64:
        raise NotImplementedError(f"num_heads: expected 64, got {num_heads}")
    if main not in ("e4m3", "e2m1"):
        raise NotImplementedError(f"main: expected 'e4m3' or 'e2m1', got {main!r}")
    if keys != LANES:
        raise NotImplementedError(f"launch: expected blocks of {LANES} keys, got {keys}")
    tokens, window_entries, main_entries = T.dynamic("tokens, window_entries, main_entries")
    rings, ring_slots, ring_step = T.dynamic("rings, ring_slots, ring_step")
    pages, page_slots, page_step = T.dynamic("pages, page_slots, page_step")
    main_bytes = 528 if main == "e4m3" else 288

    @T.macro
    def gather(cache, slots, rows, idx_tk, token, first, entries, codes, scales, data, groups):
        """Read the records of a block, half of the channels on each vector core; nothing is read for a hole."""
        for j in T.serial(keys):
            row = T.if_then_else(first + j < entries, idx_tk[token, first + j], -1)
            if row >= 0 and row < rows:
                slot = row % slots
                data_at = slot * (data if sectioned else data + groups)
                scale_at = slots * data + slot * groups if sectioned else data_at + data
                T.dual_copy(cache[row // slots, data_at : data_at + data], codes[j : j + 1, 0 : data // 2])
                T.dual_copy(cache[row // slots, scale_at : scale_at + groups], scales[j : j + 1, 0 : groups // 2])

    @T.macro
    def e4m3(byte):
        """A normal code is the top of an fp32 mantissa and its exponent, 120 too low; below 8 codes count 2^-9."""
        size = byte & 0x7F
        normal = T.reinterpret(T.if_then_else(size == 0x7F, 0x7FC00000, (size << 20) + (120 << 23)), "float32")
        value = T.if_then_else(size < 8, T.cast(size, "float32") * T.float32(2.0**-9), normal)
        return T.if_then_else(byte > 127, value * T.float32(-1), value)

    @T.macro
    def ue8m0(byte):
        """0 is the subnormal 2^-127 and 255 is NaN, neither is its exponent field."""
        bits = T.if_then_else(byte == 0, 0x00400000, T.if_then_else(byte == 255, 0x7FC00000, byte << 23))
        return T.reinterpret(bits, "float32")

    @T.macro
    def e2m1(nibble):
        """Exponent and mantissa bit of an fp32 number, right from code 2 on; codes 0 and 1 come out as 0.5 and 0.75."""
        size = nibble & 7
        normal = T.reinterpret((size << 22) + (126 << 23), "float32")
        value = T.if_then_else(size < 2, normal * T.float32(2) - T.float32(1), normal)
        return T.if_then_else(nibble > 7, value * T.float32(-1), value)

    @T.macro
    def decode_fp8(codes, scales, idx, rows, remaining, key):
        """Half of the channels of a block of FP8 records, exact in bf16; holes are zero."""
        with T.SimtVF(threads=launch.threads):
            for step in T.serial(keys * WIDTH // 2 // launch.threads):
                at = step * launch.threads + T.get_thread_binding()
                j = at // (WIDTH // 2)
                c = at % (WIDTH // 2)
                listed = j < remaining and idx[j] >= 0 and idx[j] < rows
                value = e4m3(T.cast(codes[j, c], "int32")) * ue8m0(T.cast(scales[j, c // 32], "int32"))
                key[j, c] = T.cast(T.if_then_else(listed, value, T.float32(0)), "bfloat16")

    @T.macro
    def decode_fp4(codes, scales, idx, rows, remaining, key):
        """Half of the channels of a block of FP4 records: even channels in the low nibble."""
        with T.SimtVF(threads=launch.threads):
            for step in T.serial(keys * WIDTH // 2 // launch.threads):
                at = step * launch.threads + T.get_thread_binding()
                j = at // (WIDTH // 2)
                c = at % (WIDTH // 2)
                listed = j < remaining and idx[j] >= 0 and idx[j] < rows
                nibble = (T.cast(codes[j, c // 2], "int32") >> (4 * (c % 2))) & 15
                value = e2m1(nibble) * e4m3(T.cast(scales[j, c // 16], "int32"))
                key[j, c] = T.cast(T.if_then_else(listed, value, T.float32(0)), "bfloat16")

    @T.macro
    def softmax(score, weight, idx, rows, top, total, shrink, remaining, scale):
        """One step of the online softmax for the heads of this vector core."""
        with T.SimdVF():
            hole = T.simd.vdup(-T.infinity(T.float32), T.float32)
            listed = T.simd.vld(idx[0])
            inside = T.simd.update_mask(T.uint32(T.max(T.min(remaining, LANES), 0)))
            valid = T.simd.vcmps(listed, T.int32(0), inside, op="ge")
            valid = T.simd.vcmps(listed, rows, valid, op="lt")
            one = T.simd.pset(32, "PAT_VL1")
            for h in range(half):
                a = T.simd.vsel(T.simd.vmuls(T.simd.vld(score[h, 0]), scale), hole, valid)
                old_top = T.simd.vld(top[h], "BRC_B32")
                new_top = T.simd.vdupv(T.simd.vmax(T.simd.vcmax(a), old_top))
                factor = T.simd.vexp(T.simd.vsub(old_top, new_top))
                p = T.simd.vexp(T.simd.vsub(a, new_top))
                sums = T.simd.vmul(T.simd.vld(total[h], "BRC_B32"), factor)
                sums = T.simd.vadd(sums, T.simd.vcadd(p))
                T.simd.vsts(top[h], new_top, one, "ONEPT_B32")
                T.simd.vsts(shrink[h], factor, one, "ONEPT_B32")
                T.simd.vsts(total[h], sums, one, "ONEPT_B32")
                T.simd.vsts(weight[h, 0], T.simd.vcvt(p, T.bfloat16), dist="PK_B32")

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
    def two_cache_decode(
        q_thd: T.Tensor((tokens, num_heads, WIDTH), T.bfloat16),
        window_pq: T.StridedTensor((rings, ring_slots * 528), (ring_step, 1), T.uint8),
        window_idx_tk: T.Tensor((tokens, window_entries), T.int32),
        main_pq: T.StridedTensor((pages, page_slots * main_bytes), (page_step, 1), T.uint8),
        main_idx_tk: T.Tensor((tokens, main_entries), T.int32),
        sink_h: T.Tensor((num_heads,), T.float32),
        out_thd: T.Tensor((tokens, num_heads, WIDTH), T.bfloat16),
        lse_th: T.Tensor((tokens, num_heads), T.float32),
        scale: T.float32,
    ):
        with T.Kernel(launch.cores) as core:
            q = T.alloc_l1((num_heads, WIDTH), T.bfloat16)
            key = T.alloc_l1((keys, WIDTH), T.bfloat16)
            weight_l1 = T.alloc_l1((num_heads, keys), T.bfloat16)
            score_l0 = T.alloc_l0c((num_heads, keys), T.float32)
            weight_l0 = T.alloc_l0a((num_heads, keys), T.bfloat16)
            value_l0 = T.alloc_l0b((keys, columns), T.bfloat16)
            product_l0 = T.alloc_l0c((num_heads, columns), T.float32)
            codes = T.alloc_shared((keys, WIDTH // 2), T.uint8)
            scales = T.alloc_shared((keys, 32), T.uint8)
            decoded = T.alloc_shared((keys, WIDTH // 2), T.bfloat16)
            score = T.alloc_shared((half, keys), T.float32)
            weight = T.alloc_shared((half, keys), T.bfloat16)
            product = T.alloc_shared((half, columns), T.float32)
            out = T.alloc_shared((half, WIDTH), T.float32)
            rounded = T.alloc_shared((half, WIDTH), T.bfloat16)
            idx = T.alloc_shared((keys,), T.int32)
            sink = T.alloc_shared((LANES,), T.float32)
            top = T.alloc_shared((LANES,), T.float32)
            total = T.alloc_shared((LANES,), T.float32)
            shrink = T.alloc_shared((LANES,), T.float32)
            lse = T.alloc_shared((1, LANES), T.float32)
            T.dual_copy(sink_h, sink[0:half])
            window_blocks = T.ceildiv(window_entries, keys)

            for turn in T.serial(T.ceildiv(tokens - core, launch.cores)):
                # 1. which token this turn owns
                token = turn * launch.cores + core
                T.copy(q_thd[token, :, :], q)
                with T.SimdVF():
                    zero = T.simd.vdup(T.float32(0), T.float32)
                    T.simd.vsts(total[0], zero)
                    T.simd.vsts(top[0], T.simd.vdup(T.float32(LOWEST), T.float32))
                    for h in range(half):
                        for u in range(WIDTH // LANES):
                            T.simd.vsts(out[h, u * LANES], zero)

                for block in T.serial(window_blocks + T.ceildiv(main_entries, keys)):
                    # 2. the records of a block, as bf16 rows of the cube core
                    is_window = block < window_blocks
                    first = T.if_then_else(is_window, block, block - window_blocks) * keys
                    remaining = T.if_then_else(is_window, window_entries, main_entries) - first
                    rows = T.if_then_else(is_window, rings * ring_slots, pages * page_slots)
                    if is_window:
                        T.copy(window_idx_tk[token, first : first + keys], idx)
                        gather(
                            window_pq,
                            ring_slots,
                            rows,
                            window_idx_tk,
                            token,
                            first,
                            window_entries,
                            codes,
                            scales,
                            512,
                            16,
                        )
                        decode_fp8(codes, scales, idx, rows, remaining, decoded)
                    else:
                        T.copy(main_idx_tk[token, first : first + keys], idx)
                        if main == "e4m3":
                            gather(
                                main_pq,
                                page_slots,
                                rows,
                                main_idx_tk,
                                token,
                                first,
                                main_entries,
                                codes,
                                scales,
                                512,
                                16,
                            )
                            decode_fp8(codes, scales, idx, rows, remaining, decoded)
                        else:
                            gather(
                                main_pq,
                                page_slots,
                                rows,
                                main_idx_tk,
                                token,
                                first,
                                main_entries,
                                codes,
                                scales,
                                256,
                                32,
                            )
                            decode_fp4(codes, scales, idx, rows, remaining, decoded)
                    T.dual_copy(decoded, key)
                    # 3. scores and weights
                    T.gemm(q, key, score_l0, transpose_B=True, clear_accum=True)
                    T.dual_copy(score_l0, score)
                    softmax(score, weight, idx, rows, top, total, shrink, remaining, scale)
                    T.dual_copy(weight, weight_l1)
                    # 4. values
                    T.copy(weight_l1, weight_l0)
                    for u in T.serial(WIDTH // columns):
                        T.copy(key[:, u * columns : (u + 1) * columns], value_l0)
                        T.gemm(weight_l0, value_l0, product_l0, clear_accum=True)
                        T.dual_copy(product_l0, product)
                        add(out, u * columns, product, shrink)

                # 5. divide by the row sum plus the sink, once; a row without keys is 0, and a NaN sum stays visible
                with T.SimdVF():
                    zero = T.simd.vdup(T.float32(0), T.float32)
                    tops = T.simd.vld(top[0])
                    totals = T.simd.vld(total[0])
                    # may overflow to inf on purpose: the quotient is then 0
                    denominator = T.simd.vadd(totals, T.simd.vexp(T.simd.vsub(T.simd.vld(sink[0]), tops)))
                    T.simd.vsts(shrink[0], denominator)
                    T.simd.vsts(lse[0, 0], T.simd.vadd(tops, T.simd.vln(totals)))
                    T.simd.mem_bar("VST_VLD")
                    for h in range(half):
                        empty = T.simd.vcmps(T.simd.vld(total[h], "BRC_B32"), T.float32(0), op="eq")
                        divisor = T.simd.vld(shrink[h], "BRC_B32")
                        for u in range(WIDTH // LANES):
                            quotient = T.simd.vdiv(T.simd.vld(out[h, u * LANES]), divisor, precision="exact")
                            kept = T.simd.vsel(zero, quotient, empty)
                            T.simd.vsts(rounded[h, u * LANES], T.simd.vcvt(kept, T.bfloat16), dist="PK_B32")
                T.dual_copy(rounded, out_thd[token, :, :])
                T.dual_copy(lse[:, 0:half], lse_th[token : token + 1, :])

    return two_cache_decode
