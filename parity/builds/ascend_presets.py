"""What the Ascend 950 makes of a kernel, by kind: joined to the other presets in the cards, `{**NO_PRODUCT, **VECTOR}`.

The thread path (`simt`) has no matrix unit, so nothing is declared there. A kernel has a key for every path that it is
meant for; where the compilers cannot, the failure is expected by its text and has its reason.
"""

from __future__ import annotations

from .spec import Expect

VECTOR = {"ascend950-simd": Expect(mma=None), "ascend950-simt": Expect(mma=None)}
MATRIX = {"ascend950-simd": Expect(mma="cube"), "ascend950-simt": Expect(mma=None)}

# a kernel that takes the bits apart itself would pass
_WIDENING = "the adapter of triton-ascend 3.2.0 has no conversion of an e4m3 tensor to a wider float"
WIDENS_E4M3 = {
    "ascend950-simd": Expect(mma=None, fails="leaves tt.fp_to_fp as it is", reason=_WIDENING),
    "ascend950-simt": Expect(mma=None),
}

_DOUBLE = "the vector cores have no fp64, and the contract of the table asks for it"
FP64 = {
    "ascend950-simd": Expect(mma=None, fails="unsupported datatype", reason=_DOUBLE),
    "ascend950-simt": Expect(mma=None),
}
