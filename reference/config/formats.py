"""Formats of numbers and of cache records: how they are rounded, scaled and laid out."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class WeightCast(enum.Enum):
    """Where RMSNorm rounds relative to its weight; published implementations disagree."""

    AFTER_WEIGHT = "after_weight"  # (x * rstd) * w, one rounding: DeepSeek release code, DeepInfer
    BEFORE_WEIGHT = "before_weight"  # round x * rstd, multiply by w, round again: transformers V3, V3.2


class ScaleKind(enum.Enum):
    """How a quantiser rounds and stores its scale."""

    UE8M0 = "ue8m0"  # rounded up to a power of two; stored as the byte exponent + 127
    E4M3 = "e4m3"  # rounded to e4m3fn
    F32 = "f32"  # amax / max_value in fp32
    POW2_F32 = "pow2_f32"  # rounded up to a power of two, but stored as an fp32 number


class CodeKind(enum.Enum):
    """The element format of a quantiser."""

    E4M3 = "e4m3"
    E2M1 = "e2m1"  # packed two to a byte, even index in the low nibble


@dataclass(frozen=True, kw_only=True)
class QuantFormat:
    """A group quantiser: `rows` x `group` elements share one scale (rows = 1 for activations)."""

    name: str
    rows: int
    group: int
    code: CodeKind
    scale: ScaleKind
    amax_floor: float  # applied to amax, never to the scale

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows: expected at least 1, got {self.rows}")
        if self.group < 2 or self.group % 2:
            raise ValueError(f"group: expected a positive even number, got {self.group}")
        if not self.amax_floor > 0:
            raise ValueError(f"amax_floor: expected a positive number, got {self.amax_floor}")

    @property
    def max_value(self) -> float:
        """The largest magnitude of the element format."""
        return 448.0 if self.code is CodeKind.E4M3 else 6.0


Q8 = QuantFormat(name="q8", rows=1, group=32, code=CodeKind.E4M3, scale=ScaleKind.UE8M0, amax_floor=1e-4)
Q4I = QuantFormat(name="q4i", rows=1, group=32, code=CodeKind.E2M1, scale=ScaleKind.UE8M0, amax_floor=6 * 2.0**-126)
Q4K = QuantFormat(name="q4k", rows=1, group=16, code=CodeKind.E2M1, scale=ScaleKind.E4M3, amax_floor=6 * 2.0**-9)
FP8_1X128 = QuantFormat(name="fp8_1x128", rows=1, group=128, code=CodeKind.E4M3, scale=ScaleKind.F32, amax_floor=1e-4)
FP8_1X128_UE8M0 = QuantFormat(
    name="fp8_1x128_ue8m0", rows=1, group=128, code=CodeKind.E4M3, scale=ScaleKind.UE8M0, amax_floor=1e-4
)
FP8_128X128 = QuantFormat(
    name="fp8_128x128", rows=128, group=128, code=CodeKind.E4M3, scale=ScaleKind.F32, amax_floor=1e-4
)
FP8_128X128_UE8M0 = QuantFormat(
    name="fp8_128x128_ue8m0", rows=128, group=128, code=CodeKind.E4M3, scale=ScaleKind.UE8M0, amax_floor=1e-4
)
FP8_32X32 = QuantFormat(name="fp8_32x32", rows=32, group=32, code=CodeKind.E4M3, scale=ScaleKind.UE8M0, amax_floor=1e-4)
MXFP4 = QuantFormat(name="mxfp4", rows=1, group=32, code=CodeKind.E2M1, scale=ScaleKind.UE8M0, amax_floor=6 * 2.0**-126)

# a scale of at least 1e-4 before it is rounded up is an amax of at least 448e-4: both give 2^-13
FP8_1X128_POW2 = QuantFormat(
    name="fp8_1x128_pow2", rows=1, group=128, code=CodeKind.E4M3, scale=ScaleKind.POW2_F32, amax_floor=1e-4
)
FP8_1X128_POW2_SCALE_FLOOR = QuantFormat(
    name="fp8_1x128_pow2_scale_floor", rows=1, group=128, code=CodeKind.E4M3, scale=ScaleKind.POW2_F32,
    amax_floor=448e-4
)  # fmt: skip

QUANT_FORMATS = {
    f.name: f for f in (Q8, Q4I, Q4K, FP8_1X128, FP8_1X128_UE8M0, FP8_128X128, FP8_128X128_UE8M0, FP8_32X32, MXFP4)
}


class PageLayout(enum.Enum):
    """Where a page of a cache keeps the scales of its records."""

    INTERLEAVED = "interleaved"  # [data | scales] of one entry after the other: DeepInfer's main and SWA caches
    SECTIONED = "sectioned"  # the data of all entries, then the scales of all entries: index keys, SGLang's caches


@dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """What one cache entry is stored as: codes of `channels` values, the scales of their groups, `tail` bf16 values."""

    name: str
    channels: int
    quant: QuantFormat
    tail: int = 0  # channels behind the quantised ones that keep their bf16 values

    def __post_init__(self) -> None:
        if self.channels <= 0 or self.channels % self.quant.group:
            raise ValueError(f"channels: expected a positive multiple of {self.quant.group}, got {self.channels}")
        if self.tail < 0:
            raise ValueError(f"tail: expected 0 or more channels, got {self.tail}")

    @property
    def width(self) -> int:
        """Values of one entry, the tail among them."""
        return self.channels + self.tail

    @property
    def data_bytes(self) -> int:
        """Bytes of the element codes of one entry."""
        return self.channels if self.quant.code is CodeKind.E4M3 else self.channels // 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of one entry: four each as fp32 numbers, otherwise one."""
        wide = self.quant.scale in (ScaleKind.F32, ScaleKind.POW2_F32)
        return self.channels // self.quant.group * (4 if wide else 1)

    @property
    def record_bytes(self) -> int:
        """Bytes of one entry."""
        return self.data_bytes + self.scale_bytes + 2 * self.tail


KV_FP8 = RecordFormat(name="kv_fp8", channels=512, quant=Q8)  # 528 bytes: sliding window, optional main cache
KV_FP4 = RecordFormat(name="kv_fp4", channels=512, quant=Q4K)  # 288 bytes: compressed main cache of V4.1
INDEX_FP4 = RecordFormat(name="index_fp4", channels=128, quant=Q4I)  # 68 bytes: index keys of V4.1
# V3.2: 656 bytes of a latent and its rotary key, 132 bytes of an index key. Writers differ in what no reader sees
KV_V32_FMLA = RecordFormat(name="kv_v32_fmla", channels=512, tail=64, quant=FP8_1X128_POW2_SCALE_FLOOR)  # FlashMLA's
KV_V32_DEMO = RecordFormat(name="kv_v32_demo", channels=512, tail=64, quant=FP8_1X128_POW2)  # release code
INDEX_FP8_POW2 = RecordFormat(name="index_fp8_pow2", channels=128, quant=FP8_1X128_POW2)  # release code of V3.2
INDEX_FP8_F32 = RecordFormat(name="index_fp8_f32", channels=128, quant=FP8_1X128)  # scales as they are

# the width of a record names its format; where several writers share it, how it is read
RECORD_FORMATS = {f.record_bytes: f for f in (KV_FP8, KV_FP4, INDEX_FP4, KV_V32_FMLA, INDEX_FP8_F32)}
RECORD_WRITERS = {
    KV_V32_FMLA.record_bytes: (KV_V32_FMLA, KV_V32_DEMO),
    INDEX_FP8_F32.record_bytes: (INDEX_FP8_POW2, INDEX_FP8_F32),
}
