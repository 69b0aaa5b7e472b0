"""Expectations that several cards share; a card writes out where it differs."""

from __future__ import annotations

from .spec import Expect

NO_PRODUCT = {"sm90": Expect(mma=None), "sm100": Expect(mma=None)}
PRODUCT = {"sm90": Expect(mma="wgmma"), "sm100": Expect(mma="tcgen05")}

# how many words depends on the compiler: 0 to 72 bytes with triton 3.8, 0 to 40 with 3.6
_SPILLED = "64 heads x 512 channels fill the register file; at most 20 words that a key block reads once or twice spill"
FULL_REGISTERS = {"sm90": Expect(mma="wgmma", max_stack=80, reason=_SPILLED), "sm100": Expect(mma="tcgen05")}

_SMALL = "16 heads a program: wgmma and tcgen05 take 64 rows or more, mma.sync is the unit that fits"
FEW_HEADS = {"sm90": Expect(mma="mma.sync", reason=_SMALL), "sm100": Expect(mma="mma.sync", reason=_SMALL)}

_REDUCTION = "the range reduction of an fp64 cosine keeps its 2/pi product in a local array"
FP64_ANGLES = {
    "sm90": Expect(mma=None, max_stack=48, reason=_REDUCTION),
    "sm100": Expect(mma=None, max_stack=48, reason=_REDUCTION),
}
