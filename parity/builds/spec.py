"""What a kernel is built as, and what the card expects of the build.

Nothing here imports triton at module level: cards hold `BuildCase` rows, and the parent process never imports it.
`capture` belongs in a compile process, which must not have TRITON_INTERPRET set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..outcome import Status

ARCHS = ("sm90", "sm100", "ascend950")
EXPECT_KEYS = ("sm90", "sm100", "ascend950-simd", "ascend950-simt")
DSLS = ("triton", "tilelang")
CAPABILITY = {"sm90": 90, "sm100": 100}
SHARED_LIMIT = 232448  # bytes that one block may use on SM90 and SM100 (227 KiB)
TMEM_LIMIT = 512  # columns of tensor memory on SM100


@dataclass(frozen=True, kw_only=True)
class Expect:
    """What a build must show on one architecture.

    `mma` names the matrix unit: `wgmma` or `tcgen05`, their narrow kinds `wgmma.fp8`, `tcgen05.fp8`, `tcgen05.fp4`,
    `block_scale`, `mma.sync`, or `cube` on the Ascend 950; `None` says that the kernel has no matrix product. A limit
    above the default, and an expected failure, carry their `reason`. With `fails`, the build must fail and the error
    must contain that text: a build that succeeds is then a mismatch.
    """

    mma: str | None
    max_registers: int = 255
    max_stack: int = 0
    max_shared: int = SHARED_LIMIT
    max_tmem: int = TMEM_LIMIT
    reason: str = ""
    fails: str = ""

    def __post_init__(self) -> None:
        if (self.fails or self.max_stack > 0 or self.mma == "mma.sync") and not self.reason:
            raise ValueError("reason: expected why the build may fail, spill or use the old matrix unit, got ''")


def verdict(failure: str, expect: Expect, built: Status) -> tuple[Status, str]:
    """Status and message of a build: `built` without a failure, and an expected failure must fail as expected."""
    if not expect.fails:
        return (Status.MISMATCH, failure) if failure else (built, "")
    if expect.fails in failure:
        return Status.KNOWN_FAILURE, f"{expect.reason}: {failure}"
    what = f"fails otherwise: {failure}" if failure else "builds within its limits: remove the expectation"
    return Status.MISMATCH, f"expected failure: {expect.fails!r} ({expect.reason}), but it {what}"


@dataclass(frozen=True, kw_only=True)
class BuildCase:
    """One kernel as one production call builds it.

    `kernel` is the import string of the jit function (`deeptwin.kernels.triton_ops.mla:_decode_split`), or of the
    TileLang function that returns the program; `launch` is the import string of a function without arguments that
    makes the call inside `capture` (TileLang: that returns the program). A launch that runs several kernels has a
    case for each of them. `expect` has no key for an architecture that the kernel is not written for.
    """

    name: str
    kernel: str
    launch: str
    expect: Mapping[str, Expect]
    dsl: str = "triton"

    def __post_init__(self) -> None:
        unknown = set(self.expect) - set(EXPECT_KEYS)
        if unknown or not self.expect:
            raise ValueError(f"expect: expected some of {', '.join(EXPECT_KEYS)}, got {sorted(self.expect)}")
        if self.dsl not in DSLS:
            raise ValueError(f"dsl: expected one of {DSLS}, got {self.dsl!r}")


@dataclass(frozen=True, kw_only=True)
class Specialisation:
    """One jit function as one launch compiles it: types, constants and alignment of its arguments.

    `signature` has every parameter in order, `constexpr` for those in `constexprs` (which includes integers equal
    to 1, as triton specialises them); `divisible` are the positions that are multiples of 16.
    """

    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    divisible: tuple[int, ...]
    num_warps: int
    num_stages: int
    fp_fusion: bool = True
    max_registers: int | None = None  # of a thread, where the launch limits them
    arch: str = field(default="sm90", compare=False)  # the launch config was chosen for it


def capture(launch: Callable[[], object], arch: str = "sm90") -> list[Specialisation]:
    """Run `launch` without a device and record every `kernel[grid](...)` call, in order, with triton's own binder.

    Tensors that `launch` makes are on a pretended device of `arch` and have no memory: `torch.empty(...)` needs no
    `device`. Nothing is compiled and nothing runs.

    Raises:
        ValueError: `arch` is unknown.
        RuntimeError: kernels are interpreted in this process.
    """
    if arch not in ARCHS:
        raise ValueError(f"arch: expected one of {', '.join(ARCHS)}, got {arch!r}")
    from triton import knobs

    from .pretend import pretended_device

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted in this process and cannot be built")
    found: list[Specialisation] = []

    def record(**call: Any) -> bool:
        found.append(_specialisation(call["fn"], call["compile"], arch))
        return True  # tells triton to stop before it compiles

    with pretended_device(arch, CAPABILITY.get(arch), record):
        launch()
    return found


def ast_source(spec: Specialisation) -> tuple[Any, dict[str, Any]]:
    """`triton.compiler.ASTSource` of a specialisation and the options for `triton.compile`."""
    from triton.compiler import ASTSource

    from ..card import resolve

    source = ASTSource(
        fn=resolve(spec.kernel),
        signature=dict(spec.signature),
        constexprs=dict(spec.constexprs),
        attrs={(i,): [["tt.divisibility", 16]] for i in spec.divisible},
    )
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": spec.fp_fusion}
    if spec.max_registers:
        options["maxnreg"] = spec.max_registers
    return source, options


def _specialisation(fn: Any, call: Mapping[str, Any], arch: str) -> Specialisation:
    names = list(call["signature"])
    (attrs,) = call["configs"]
    aligned = [position for (position, *_), marks in attrs.items() if ["tt.divisibility", 16] in marks]
    return Specialisation(
        kernel=f"{fn.module}:{fn.name}",
        signature=dict(call["signature"]),
        constexprs={names[position]: value for (position, *_), value in call["constants"].items()},
        divisible=tuple(sorted(aligned)),
        num_warps=call["num_warps"],
        num_stages=call["num_stages"],
        fp_fusion=call["enable_fp_fusion"],
        max_registers=json.loads(call["specialization_data"])["options"].get("maxnreg"),
        arch=arch,
    )
