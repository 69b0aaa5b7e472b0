"""Records on SM90: how a group of threads reads codes and scales, and writes them as bf16 keys to shared memory.

Four threads share a row. Each reads 64 channels of half a row, with the scales of these alone, into registers, and
writes them two halves later: a code times its scale is exact in bf16, or rounded once where a scale is no power of two.
Eight rows lie side by side in a warp, so that what it writes at a time lies in different banks. The fence between its
writes and the matrix unit is for those who multiply: before it, a thread would have to wait for all that it reads.
"""

# mypy: disable-error-code="valid-type"

import torch
from tilelang import language as T

from .roles_sm90 import GROUP, HALF, KEYS

LANES = 4  # threads that bring one row, 64 channels each of a half
STEP = GROUP // LANES
PASSES = KEYS // STEP  # rows of a block that a thread brings a part of
PARTS = HALF // (16 * LANES)  # sixteens of channels that it brings of half a row
UNIT = 16  # bytes in which places of records are counted, so that 32 bits hold one

# two instructions for a pair of codes, which no expression of the language lowers to
DECODE = """
#include <cuda_fp8.h>

__device__ __forceinline__ void dt_read16(void *to, const void *at, bool is_key) {
  *(uint4 *)to = is_key ? __ldg((const uint4 *)at) : make_uint4(0u, 0u, 0u, 0u);
}

__device__ __forceinline__ void dt_read4(void *to, const void *at, bool is_key) {
  *(unsigned *)to = is_key ? __ldg((const unsigned *)at) : 0u;
}

__device__ __forceinline__ void dt_read2(void *to, const void *at, bool is_key) {
  *(unsigned *)to = is_key ? __ldg((const unsigned short *)at) : 0u;
}

// eight e2m1 codes and an e4m3 scale
__device__ __forceinline__ void dt_put_e2m1(void *out, unsigned code, unsigned scale_byte) {
  const __half_raw wide = __nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)scale_byte, __NV_E4M3);
  const __nv_bfloat162 scale = __float2bfloat162_rn(__half2float(__half(wide)) * 64.0f);
  const __nv_bfloat162 lift = __float2bfloat162_rn(0x1p120f);
  unsigned pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // magnitude and sign of codes i and i + 4 at their places in bf16: 2^-126 of their values
    const unsigned at = code >> (4 * i);
    unsigned bits = ((at & 0x00070007u) << 6) | ((at & 0x00080008u) << 12);
    __nv_bfloat162 value = __hmul2(__hmul2(*reinterpret_cast<__nv_bfloat162 *>(&bits), lift), scale);
    pair[i] = *reinterpret_cast<unsigned *>(&value);
  }
  uint4 all;
  all.x = __byte_perm(pair[0], pair[1], 0x5410);
  all.y = __byte_perm(pair[2], pair[3], 0x5410);
  all.z = __byte_perm(pair[0], pair[1], 0x7632);
  all.w = __byte_perm(pair[2], pair[3], 0x7632);
  *reinterpret_cast<uint4 *>(out) = all;
}

__device__ __forceinline__ float dt_e8m0(unsigned scale_byte) {
  return __uint_as_float(scale_byte == 255u ? 0x7FC00000u : scale_byte == 0u ? 0x00400000u : scale_byte << 23);
}

// eight e4m3 codes and their scale
__device__ __forceinline__ void dt_put_e4m3(void *out, unsigned low, unsigned high, float scale) {
  unsigned part[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned code = (i < 2 ? low : high) >> (16 * (i & 1));
    const __half2_raw wide = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(code & 0xFFFFu), __NV_E4M3);
    const float2 value = __half22float2(__half2(wide));
    __nv_bfloat162 narrow = __floats2bfloat162_rn(value.x * scale, value.y * scale);
    part[i] = *reinterpret_cast<unsigned *>(&narrow);
  }
  *reinterpret_cast<uint4 *>(out) = make_uint4(part[0], part[1], part[2], part[3]);
}
"""


@T.macro
def put_e4m3(shared, half, now, j, lane, code, i, v, scale):
    """Write sixteen channels of half a key, the `v`-th of this thread, as bf16."""
    at, word = (lane * PARTS + v) * 16, (i * PARTS + v) * 4
    for w in T.unroll(2):
        T.call_extern(
            "handle",
            "dt_put_e4m3",
            T.address_of(shared.key[half, now, j, at + 8 * w]),
            code[word + 2 * w],
            code[word + 2 * w + 1],
            scale,
        )


@T.macro
def read_words(pages_pb, page, at, words, is_key, code, i):
    """Start reading `words` sixteen bytes of this thread."""
    for u in T.unroll(words):
        T.call_extern(
            "handle",
            "dt_read16",
            T.address_of(code[(i * PARTS + u) * 4]),
            T.address_of(pages_pb[page, at + u * 16]),
            is_key,
        )


def units_of(pages_pow: torch.Tensor) -> torch.Tensor:
    """Pages, and what lies between them, as rows of `UNIT` bytes."""
    span = (pages_pow.shape[0] - 1) * pages_pow.stride(0) + pages_pow[0].numel()
    return pages_pow.as_strided((span // UNIT, UNIT), (UNIT, 1))


def places_of(pages_pow: torch.Tensor) -> tuple[int, int, int]:
    """Records, records of a page, and units from page to page."""
    pages, slots, _ = pages_pow.shape
    return pages * slots, max(slots, 1), pages_pow.stride(0) // UNIT
