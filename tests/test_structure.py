"""What can be read off the source: who imports whom, where numbers are rounded, which files belong together.

Every rule is a function from a source to its violations, is applied to the whole house, and is shown to fail on a
snippet that breaks it. Nothing here imports the code that it reads, except one subprocess.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from deeptwin.parity.house import HOUSE, ROOMS, SUPPORT, UNPAIRED

NO_REFERENCE = ("engine",)
DSL = {"triton_ops": "triton", "tilelang_ops": "tilelang", "ascend_ops": "tilelang"}
# the repair of the interpreter is no kernel: it handles the interpreter's numpy arrays
KERNEL_TOOLS = ("__init__", "interpreter", "interpreter_probe")
NOT_IN_THE_PARENT = ("triton", "tilelang", "tvm", "tile_kernels", "transformers", "flash_mla", "deep_gemm")
# configurations, checks and containers: nothing that computes
SHARED_WITH_OPTIMIZED = tuple(
    f"deeptwin.reference.{name}"
    for name in (
        *("config", "checks", "topology", "csa2_config", "csa2_state", "dsa_state", "v4_state", "dspark_state"),
        *("weights", "v4_weights", "mtp_weights", "ffn_weights", "block_weights", "model_weights"),
        *("serving_checks", "presets", "taps", "cache_plan"),
    )
)
SECTIONS = ("Math", "Shapes", "Rounding", "Edges", "Raises", "Source")
HEADINGS = (
    "properties of the reference",
    "parity with each candidate",
    "batch invariance",
    "golden vectors",
    "rejected input",
)
# support modules whose functions an operation of a component may be, beside those named after it
PARTS = {"csa": ("v4_",), "hca": ("v4_",), "sampling": ("philox",)}
OUR_ERRORS = ("ValueError", "TypeError", "NotImplementedError")
LIMITS = {"lines of a file": 300, "lines of a body": 40, "parameters": 8}
PLACES = ("reference", "optimized", "cards", "golden", "tests")

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file, with its path relative to the repository."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        return self.path.split("/")[0]

    @property
    def stem(self) -> str:
        return Path(self.path).stem

    def functions(self) -> list[AnyFunction]:
        return [node for node in ast.walk(self.tree) if isinstance(node, AnyFunction)]

    def public_functions(self) -> list[AnyFunction]:
        return [node for node in self.tree.body if isinstance(node, AnyFunction) and not node.name.startswith("_")]

    def at(self, node: ast.AST | int, message: str) -> str:
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return f"{self.path}:{line}: {message}"


def house_sources(*folders: str) -> list[Source]:
    paths = sorted(path for folder in folders for path in (HOUSE / folder).rglob("*.py"))
    return [Source(path.relative_to(HOUSE).as_posix(), path.read_text()) for path in paths]


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Every call with the last part of the called name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            yield node, called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def mentions(tree: ast.AST, name: str) -> bool:
    return any(name in (getattr(node, "id", ""), getattr(node, "attr", "")) for node in ast.walk(tree))


# imports


@dataclass(frozen=True)
class Imported:
    name: str
    level: int
    when: str  # "module", "function" or "typing"
    node: ast.AST


def imports(tree: ast.AST, when: str = "module") -> Iterator[Imported]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Imported(alias.name, 0, when, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Imported(f"{node.module}.{alias.name}", node.level, when, node) for alias in node.names)
        elif isinstance(node, AnyFunction | ast.Lambda):
            yield from imports(node, "function")
        elif isinstance(node, ast.If) and mentions(node.test, "TYPE_CHECKING"):
            yield from imports(node, "typing")
        else:
            yield from imports(node, when)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def house_import_fault(source: Source, found: Imported) -> str | None:
    """What is wrong with an absolute import of one of the rooms."""
    target = found.name.split(".")[1]
    if target == source.room:
        return "inside a room imports are relative"
    if source.room in ("reference", "kernels", "golden"):
        return f"{source.room} imports no other room"
    if source.room == "optimized":
        allowed = (*SHARED_WITH_OPTIMIZED, "deeptwin.kernels") if found.when != "module" else SHARED_WITH_OPTIMIZED
        return None if within(found.name, allowed) else f"optimized may import {', '.join(allowed)} here"
    if source.room == "parity" and found.when == "module" and target == "kernels":
        return "kernels are imported in a worker, inside a function"
    return None


def other_import_fault(source: Source, found: Imported) -> str | None:
    root = found.name.split(".")[0]
    if root in sys.stdlib_module_names:
        return None
    allowed = {"reference": ("torch", "numpy"), "golden": ()}.get(source.room)
    if source.room == "optimized" and found.when == "module":
        allowed = ("torch",)
    if source.room == "kernels":
        allowed = ("torch", DSL.get(source.path.split("/")[1], ""))
        if source.stem in KERNEL_TOOLS:
            allowed = (*allowed, "numpy")
    if allowed is not None and root not in allowed:
        return f"{source.room} may import {' and '.join(filter(None, allowed)) or 'nothing'} here"
    if source.room == "parity" and found.when == "module" and root in NOT_IN_THE_PARENT:
        return f"{root} is imported in a worker, inside a function"
    return None


def import_direction(source: Source) -> list[str]:
    faults = []
    for found in imports(source.tree):
        if found.level:
            outside = found.level > source.path.count("/")
            fault = "a relative import leaves the room" if outside else None
        elif found.name.startswith("deeptwin."):
            fault = house_import_fault(source, found)
        else:
            fault = other_import_fault(source, found)
        if fault:
            faults.append(source.at(found.node, f"{found.name}: {fault}"))
    return faults


# arithmetic of the reference

CASTS = ("float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda")
CONTRACTIONS = (
    *("einsum", "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "tensordot", "addmm", "addbmm", "baddbmm"),
    *("sum", "nansum", "mean", "var", "std", "norm", "linear", "scaled_dot_product_attention", "logsumexp"),
)
INDEX_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "long")


def is_integer_dtype(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in INDEX_DTYPES


def rounding_is_marked(source: Source) -> list[str]:
    """No bare cast, contraction or device move outside `num`."""
    if source.stem == "numerics":
        return []
    faults = [
        source.at(node, "bare @: use num.einsum")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult)
    ]
    for node, name in calls(source.tree):
        if not isinstance(node.func, ast.Attribute) or getattr(node.func.value, "id", "") == "num":
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in CASTS:
            faults.append(source.at(node, f".{name}(): a cast is a num. mark, and nothing moves between devices"))
        elif name in CONTRACTIONS and not is_integer_dtype(keywords.get("dtype")):
            faults.append(source.at(node, f".{name}(): a contraction is num.einsum or num.sum"))
        elif name == "to" and not (len(node.args) == 1 and not keywords and is_integer_dtype(node.args[0])):
            faults.append(source.at(node, ".to(): a cast is a num. mark; only index casts are free"))
    return faults


def numerics_is_an_argument(source: Source) -> list[str]:
    """A public function that uses `num` has it keyword-only, with CONTRACT as default; a private one is given it."""
    faults = []
    for function in source.functions():
        if not mentions(ast.Module(body=function.body, type_ignores=[]), "num"):
            continue
        named = [*function.args.posonlyargs, *function.args.args]
        keyword_only = {arg.arg: default for arg, default in zip_keywords(function)}
        is_public = function in source.public_functions()
        if is_public and getattr(keyword_only.get("num"), "id", None) != "CONTRACT":
            faults.append(source.at(function, f"{function.name}: expected a keyword `num: Numerics = CONTRACT`"))
        given = "num" in keyword_only or "num" in [arg.arg for arg in named] or is_nested(source, function)
        if not is_public and not given:
            faults.append(source.at(function, f"{function.name}: uses a `num` that it was not given"))
    return faults


def zip_keywords(function: AnyFunction) -> list[tuple[ast.arg, ast.expr | None]]:
    return list(zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True))


def is_nested(source: Source, function: AnyFunction) -> bool:
    return any(other is not function and function in ast.walk(other) for other in source.functions())


def sizes_are_bounded(source: Source) -> list[str]:
    faults = []
    num_lines = source.text.count("\n")
    if num_lines > LIMITS["lines of a file"]:
        faults.append(source.at(1, f"{num_lines} lines, expected at most {LIMITS['lines of a file']}"))
    for function in source.functions():
        body = function.body[1:] if ast.get_docstring(function) is not None else function.body
        length = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
        if length > LIMITS["lines of a body"]:
            faults.append(source.at(function, f"{function.name}: body of {length} lines, expected at most 40"))
        every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        counted = [arg.arg for arg in every if arg.arg not in ("self", "cls", "num")]
        if len(counted) > LIMITS["parameters"]:
            faults.append(source.at(function, f"{function.name}: {len(counted)} parameters beside num, expected 8"))
    return faults


# text


def docstrings_follow_the_template(source: Source) -> list[str]:
    faults = [] if ast.get_docstring(source.tree) or not source.text else [source.at(1, "no module docstring")]
    for function in source.public_functions():
        text = ast.get_docstring(function)
        if text is None:
            faults.append(source.at(function, f"{function.name}: no docstring"))
            continue
        headings = re.findall(r"^([A-Z]\w+):$", text, re.MULTILINE)
        in_order = [section for section in SECTIONS if section in headings]
        if headings != in_order:
            faults.append(source.at(function, f"{function.name}: sections {headings}, expected a part of {SECTIONS}"))
    return faults


def errors_name_the_argument(source: Source) -> list[str]:
    faults = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        if getattr(node.exc.func, "id", "") in OUR_ERRORS and not names_an_argument(node.exc):
            faults.append(source.at(node, "the message starts with the argument's name and a colon"))
    return faults


def names_an_argument(error: ast.Call) -> bool:
    if not error.args:
        return False
    message = error.args[0]
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)
    return re.match(r"[A-Za-z_][\w.\[\]]*((, | and | or )[A-Za-z_][\w.\[\]]*)*: ", text) is not None


def comments_are_plain(source: Source) -> list[str]:
    faults = []
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if re.match(r"#\s*([-=*#~])\1\1", token.string):
            faults.append(source.at(token.start[0], "a banner"))
        is_open = re.search(r"\b(TODO|FIXME|XXX)\b", token.string)
        if is_open and not re.search(r"#\d+|\d+\.\d+|\buntil\b", token.string):
            faults.append(source.at(token.start[0], "a TODO names an issue, a version or an event"))
    return faults


def nothing_prints(source: Source) -> list[str]:
    if source.path == "parity/__main__.py":
        return []
    printed = (node for node, name in calls(source.tree) if name == "print" and isinstance(node.func, ast.Name))
    return [source.at(node, "print outside the command line") for node in printed]


# kernels

NOT_PORTABLE = (
    *("autotune", "heuristics", "inline_asm_elementwise", "extern_elementwise", "libdevice", "dot_scaled"),
    *("make_tensor_descriptor", "make_block_ptr"),
)


# the block-scaled instruction of SM100 has a file of its own, beside the kernels that every target runs
BLOCK_SCALED = ("linear_native",)


def is_jitted(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(mentions(mark, "jit") for mark in node.decorator_list)


def kernel_files_have_three_parts(source: Source) -> list[str]:
    """Frozen launch config, then kernels, then launchers; a config or kernels may come from a file beside."""
    if source.stem in KERNEL_TOOLS:
        return []
    faults = []
    configs = [node for node in source.tree.body if isinstance(node, ast.ClassDef)]
    kernels = [node for node in source.tree.body if is_jitted(node)]
    borrows = any(found.level and found.name.count(".") for found in imports(source.tree))
    if not borrows and not (configs and kernels):
        return [source.at(1, "expected a launch config and a kernel")]
    for config in configs:
        marks = [ast.unparse(mark) for mark in config.decorator_list]
        if not any("frozen=True" in mark and "kw_only=True" in mark for mark in marks):
            faults.append(source.at(config, f"{config.name}: expected @dataclass(frozen=True, kw_only=True)"))
        if kernels and config.lineno > kernels[0].lineno:
            faults.append(source.at(config, f"{config.name}: the launch config comes before the kernels"))
    for function in source.tree.body:
        if kernels and launches(function) and function.lineno < kernels[-1].lineno:
            faults.append(source.at(function, "launchers come after the kernels"))
    return faults


def launches(node: ast.AST) -> bool:
    """Whether `node` holds a call of the form `kernel[grid](...)`."""
    return any(isinstance(call.func, ast.Subscript) for call, _ in calls(node))


def kernels_are_portable(source: Source) -> list[str]:
    faults = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in NOT_PORTABLE:
            if node.attr == "dot_scaled" and source.stem in BLOCK_SCALED:
                continue
            faults.append(source.at(node, f"{node.attr} does not run on every target, or chooses its own order"))
    for node, name in calls(source.tree):
        given = {keyword.arg for keyword in node.keywords}
        if name == "load" and ("mask" in given or len(node.args) > 1) and "other" not in given and len(node.args) < 3:
            faults.append(source.at(node, "a masked load gives other="))
    return faults


# tests


def every_test_asserts(source: Source) -> list[str]:
    tests = [function for function in source.functions() if function.name.startswith("test")]
    if not source.stem.startswith("test_"):
        return [source.at(function, f"{function.name}: pytest never collects it here") for function in tests]
    if not tests:
        return [source.at(1, "no tests")]
    asserting = {function.name for function in source.functions() if asserts(function)}
    return [
        source.at(test, f"{test.name}: asserts nothing")
        for test in tests
        if test.name not in asserting and not any(name in asserting for _, name in calls(test))
    ]


def asserts(function: AnyFunction) -> bool:
    if any(isinstance(node, ast.Assert) for node in ast.walk(function)):
        return True
    return any(name in ("raises", "warns") or name.startswith("assert_") for _, name in calls(function))


def component_tests_have_the_headings(source: Source) -> list[str]:
    name = source.stem.removeprefix("test_")
    if name not in components() or not source.stem.startswith("test_"):
        return []
    # a part without a fast twin or without golden vectors leaves its heading out
    expected = [HEADINGS[0], HEADINGS[-1]] if name in UNPAIRED else list(HEADINGS)
    found = re.findall(rf"^# ({'|'.join(HEADINGS)})\b", source.text, re.MULTILINE)
    return [] if found == expected else [source.at(1, f"headings {found}, expected {expected}")]


# every rule on the house, and on a snippet that breaks it


@dataclass(frozen=True)
class Check:
    rule: Callable[[Source], list[str]]
    folders: tuple[str, ...]
    bad: tuple[tuple[str, str], ...]
    good: tuple[tuple[str, str], ...]


LAUNCH = "@dataclass(frozen=True, kw_only=True)\nclass L:\n    n: int = 1\n"
KERNEL = "@triton.jit\ndef k(x): pass\n"
TEST_BODY = "def test_a():\n    assert 1\n"

CHECKS = (
    Check(
        rule=import_direction,
        folders=ROOMS,
        bad=(
            ("reference/a.py", "import triton"),
            ("reference/a.py", "def f():\n    import einops"),
            ("reference/a.py", "from deeptwin.kernels import triton_ops"),
            ("reference/a.py", "from deeptwin.reference.rope import rope"),
            ("reference/a.py", "from ..optimized import rope"),
            ("kernels/triton_ops/a.py", "import numpy"),
            ("kernels/triton_ops/a.py", "import tilelang"),
            ("kernels/triton_ops/a.py", "from deeptwin.reference.config import QuantFormat"),
            ("optimized/a.py", "import triton"),
            ("optimized/a.py", "from deeptwin.reference.quant import quantize"),
            ("optimized/a.py", "from deeptwin.kernels.triton_ops import a"),
            ("optimized/a.py", "def f():\n    from deeptwin.reference import quant"),
            ("optimized/a.py", "def f():\n    from deeptwin.parity import gate"),
            ("parity/a.py", "import triton"),
            ("parity/a.py", "from deeptwin.kernels import triton_ops"),
            ("parity/cards/a.py", "from deeptwin.parity.card import Card"),
            ("golden/__init__.py", "import torch"),
        ),
        good=(
            ("reference/a.py", "import math\nimport torch\nfrom .numerics import CONTRACT"),
            ("kernels/triton_ops/a.py", "import triton.language as tl\nfrom . import require_runnable"),
            ("optimized/a.py", "import torch\nfrom deeptwin.reference.checks import expect_shape"),
            ("optimized/a.py", "if TYPE_CHECKING:\n    from deeptwin.kernels.triton_ops.a import L"),
            ("optimized/a.py", "def f():\n    import flash_mla\n    from deeptwin.kernels.triton_ops import a"),
            ("parity/cards/a.py", "from ..card import Card\nfrom deeptwin.reference.quant import quantize"),
            ("parity/a.py", "def f():\n    import transformers"),
        ),
    ),
    Check(
        rule=rounding_is_marked,
        folders=("reference",),
        bad=tuple(
            ("reference/a.py", line)
            for line in (
                *("y = x.float()", "y = x.to(torch.float32)", "y = x.to(dtype)", "y = x.to(y)", "y = a @ b", "a @= b"),
                *("y = torch.matmul(a, b)", "y = torch.einsum('ab,bc->ac', a, b)", "y = x.sum(-1)", "y = x.mean()"),
                *("y = x.to('cuda')", "y = x.to(torch.int64, copy=True)", "y = F.linear(x, w)", "y = x.bfloat16()"),
            )
        ),
        good=tuple(
            ("reference/a.py", line)
            for line in (
                *("y = num.sum(x, dim=-1)", "y = num.einsum('ab,bc->ac', a, b)", "y = num.bf16(x)"),
                *(
                    "i = x.to(torch.int64)",
                    "i = x.long()",
                    "n = m.sum(-1, dtype=torch.int64)",
                    "b = x.view(torch.uint8)",
                ),
            )
        ),
    ),
    Check(
        rule=numerics_is_an_argument,
        folders=("reference",),
        bad=(
            ("reference/a.py", "def f(x):\n    return num.f32(x)"),
            ("reference/a.py", "def f(x, num=CONTRACT):\n    return num.f32(x)"),
            ("reference/a.py", "def f(x, *, num):\n    return num.f32(x)"),
            ("reference/a.py", "def f(x, *, num=RIVAL):\n    return num.f32(x)"),
            ("reference/a.py", "def _f(x):\n    return num.f32(x)"),
        ),
        good=(
            ("reference/a.py", "def f(x, *, num=CONTRACT):\n    return num.f32(x)"),
            ("reference/a.py", "def _f(x, num):\n    return num.f32(x)"),
            ("reference/a.py", "def f(x, *, num=CONTRACT):\n    def g(y):\n        return num.f32(y)\n    return g(x)"),
        ),
    ),
    Check(
        rule=sizes_are_bounded,
        folders=("reference",),
        bad=(
            ("reference/a.py", "x = 1\n" * 301),
            ("reference/a.py", "def f():\n    'text'\n" + "    x = 1\n" * 41),
            ("reference/a.py", "def f(a, b, c, d, e, *, g, h, i, j, num=CONTRACT): pass"),
        ),
        good=(
            ("reference/a.py", "x = 1\n" * 300),
            ("reference/a.py", "def f():\n    'text'\n" + "    x = 1\n" * 40),
            ("reference/a.py", "def f(a, b, c, d, e, *, g, h, i, num=CONTRACT): pass"),
        ),
    ),
    Check(
        rule=docstrings_follow_the_template,
        folders=("reference", "optimized", "kernels", "parity"),
        bad=(
            ("reference/a.py", "x = 1"),
            ("reference/a.py", "'m'\ndef f(): pass"),
            ("reference/a.py", "'m'\ndef f():\n    '''s\n\n    Args:\n        x\n    '''"),
            ("reference/a.py", "'m'\ndef f():\n    '''s\n\n    Raises:\n        x\n\n    Math:\n        y\n    '''"),
        ),
        good=(
            ("reference/a.py", "'m'\ndef f():\n    '''s\n\n    Math:\n        y\n\n    Raises:\n        x\n    '''"),
        ),
    ),
    Check(
        rule=errors_name_the_argument,
        folders=ROOMS,
        bad=(
            ("optimized/a.py", "raise ValueError('bad shape')"),
            ("optimized/a.py", "raise TypeError()"),
            ("optimized/a.py", "raise NotImplementedError(f'cannot do {x}')"),
        ),
        good=(
            ("optimized/a.py", "raise ValueError(f'x_tm: expected 3, got {n}')"),
            ("optimized/a.py", "raise ValueError(f'{name}: expected 3')"),
            ("optimized/a.py", "raise ValueError('k_sd, v_su: lengths differ')"),
            ("optimized/a.py", "raise RuntimeError('no device')"),
        ),
    ),
    Check(
        rule=comments_are_plain,
        folders=(*ROOMS, "tests"),
        bad=(
            ("reference/a.py", "# ------"),
            ("reference/a.py", "# ==== part"),
            ("reference/a.py", "x = 1  # TODO later"),
        ),
        good=(("reference/a.py", "# TODO(#12): drop with triton 3.6\n# a word - and another"),),
    ),
    Check(
        rule=nothing_prints,
        folders=(*ROOMS, "tests"),
        bad=(("parity/gate.py", "print(1)"), ("tests/test_a.py", "def test_a():\n    print(1)")),
        good=(("parity/__main__.py", "print(1)"), ("parity/gate.py", "console.print(1)")),
    ),
    Check(
        rule=kernel_files_have_three_parts,
        folders=("kernels/triton_ops",),
        bad=(
            ("kernels/triton_ops/a.py", KERNEL),
            ("kernels/triton_ops/a.py", LAUNCH),
            ("kernels/triton_ops/a.py", KERNEL + LAUNCH),
            ("kernels/triton_ops/a.py", LAUNCH + "def launch(x):\n    k[(1,)](x)\n" + KERNEL),
            ("kernels/triton_ops/a.py", LAUNCH.replace("frozen=True, ", "") + KERNEL),
        ),
        good=(
            (
                "kernels/triton_ops/a.py",
                LAUNCH + "def of(n: int) -> L: pass\n" + KERNEL + "def launch(x):\n    k[(1,)](x)",
            ),
            ("kernels/triton_ops/a.py", "from .split import attend\ndef launch(x): attend(x)"),
            ("kernels/triton_ops/interpreter.py", KERNEL),
        ),
    ),
    Check(
        rule=kernels_are_portable,
        folders=("kernels/triton_ops",),
        bad=(
            ("kernels/triton_ops/a.py", "@triton.autotune(configs=[])\ndef k(): pass"),
            ("kernels/triton_ops/a.py", "y = tl.dot_scaled(a, b)"),
            ("kernels/triton_ops/a.py", "y = tl.load(p, mask=m)"),
            ("kernels/triton_ops/a.py", "y = tl.load(p, m)"),
        ),
        good=(
            ("kernels/triton_ops/a.py", "y = tl.load(p, mask=m, other=0.0)\nz = tl.load(p)"),
            ("kernels/triton_ops/linear_native.py", "y = tl.dot_scaled(a, b)"),
        ),
    ),
    Check(
        rule=every_test_asserts,
        folders=("tests",),
        bad=(
            ("tests/test_a.py", "x = 1"),
            ("tests/test_a.py", "def test_a():\n    f(1)"),
            ("tests/a_test.py", TEST_BODY),
        ),
        good=(
            ("tests/test_a.py", TEST_BODY),
            ("tests/test_a.py", "def test_a():\n    with pytest.raises(ValueError):\n        f(1)"),
            ("tests/test_a.py", "def same(x):\n    assert x\n\ndef test_a():\n    same(1)"),
            ("tests/child.py", "def measure(): pass"),
        ),
    ),
    Check(
        rule=component_tests_have_the_headings,
        folders=("tests",),
        bad=(
            ("tests/test_quant.py", TEST_BODY),
            ("tests/test_quant.py", "".join(f"# {heading}\n" for heading in reversed(HEADINGS))),
            ("tests/test_quant.py", "".join(f"# {heading}\n" for heading in HEADINGS[:-1])),
        ),
        good=(
            ("tests/test_quant.py", "".join(f"# {heading}\n" for heading in HEADINGS)),
            ("tests/test_structure.py", TEST_BODY),
        ),
    ),
)

SNIPPETS = [
    (check.rule, kind, snippet) for check in CHECKS for kind in ("bad", "good") for snippet in getattr(check, kind)
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.rule.__name__)
def test_the_house_obeys(check: Check) -> None:
    faults = [fault for source in house_sources(*check.folders) for fault in check.rule(source)]
    assert not faults, "\n".join(["", *faults])


@pytest.mark.parametrize(("rule", "kind", "snippet"), SNIPPETS, ids=lambda value: getattr(value, "__name__", None))
def test_a_rule_tells_good_from_bad(rule: Callable[[Source], list[str]], kind: str, snippet: tuple[str, str]) -> None:
    faults = rule(Source(*snippet))
    assert bool(faults) == (kind == "bad"), (snippet, faults)


# one component, one name, everywhere


def names_in(folder: str, prefix: str = "") -> set[str]:
    stems = {path.stem for path in (HOUSE / folder).glob(f"{prefix}*.py")}
    return {stem.removeprefix(prefix) for stem in stems if not stem.startswith("__")}


def components() -> set[str]:
    return (names_in("reference") - set(SUPPORT)) | {
        name for name in NO_REFERENCE if (HOUSE / "optimized" / f"{name}.py").exists()
    }


def places() -> dict[str, set[str]]:
    golden = {path.name for path in (HOUSE / "golden").iterdir() if path.is_dir() and path.name[0] not in "_."}
    return {
        "reference": names_in("reference") - set(SUPPORT),
        "optimized": names_in("optimized") - set(SUPPORT),
        "cards": names_in("parity/cards"),
        "golden": golden - {"records"},
        "tests": names_in("tests", "test_"),
    }


def pairing_faults(found: Mapping[str, set[str]]) -> list[str]:
    """A missing twin, or a file without a component. Tests beyond the components are free to exist."""
    faults = []
    known = found["reference"] | (set(NO_REFERENCE) & found["optimized"])
    for name in sorted(known):
        optional = {"golden"} if name in UNPAIRED else set()
        absent = ("reference",) if name in NO_REFERENCE else ("optimized",) if name in UNPAIRED else ()
        for place in PLACES:
            is_there = name in found[place]
            if place in absent and is_there:
                faults.append(f"{name}: is unpaired but stands in {place}")
            elif place not in absent and place not in optional and not is_there:
                faults.append(f"{name}: is not in {place}")
    for place in ("optimized", "cards", "golden"):
        faults += [f"{name}: stands in {place} without a component" for name in sorted(found[place] - known)]
    return faults


def test_every_component_has_its_five_places() -> None:
    assert pairing_faults(places()) == []


WHOLE = {place: {"rope"} for place in PLACES}


@pytest.mark.parametrize("place", PLACES)
def test_a_missing_place_is_found(place: str) -> None:
    assert pairing_faults(WHOLE) == []
    assert pairing_faults({**WHOLE, place: set()})


@pytest.mark.parametrize("place", ["optimized", "cards", "golden"])
def test_a_place_without_a_component_is_found(place: str) -> None:
    assert pairing_faults({**WHOLE, place: {"rope", "ropes"}}) == [f"ropes: stands in {place} without a component"]


def test_unpaired_components_need_no_twin_and_may_have_none() -> None:
    found = {**{place: {"model"} for place in PLACES}, "optimized": set(), "golden": set()}
    assert pairing_faults(found) == []
    assert pairing_faults({**found, "optimized": {"model"}}) == ["model: is unpaired but stands in optimized"]


# the reference signature is the contract


@dataclass(frozen=True)
class Parameter:
    name: str
    keyword_only: bool
    has_default: bool


def parameters(function: AnyFunction) -> list[Parameter]:
    positional = [*function.args.posonlyargs, *function.args.args]
    first_default = len(positional) - len(function.args.defaults)
    plain = [Parameter(arg.arg, False, i >= first_default) for i, arg in enumerate(positional)]
    return plain + [Parameter(arg.arg, True, default is not None) for arg, default in zip_keywords(function)]


def signature_faults(reference: Source, optimized: Source, *parts: Source) -> list[str]:
    """A candidate is `<op>_<backend>`, has the reference's parameters, and else only keywords with defaults.

    Numerics and listeners are the reference's alone: kernels have neither.
    """
    ops = {function.name: function for source in (*parts, reference) for function in source.public_functions()}
    faults = []
    for candidate in optimized.public_functions():
        names = [name for name in ops if candidate.name.startswith(f"{name}_")]
        if not names:
            faults.append(optimized.at(candidate, f"{candidate.name}: no function of {reference.path} has this name"))
            continue
        wanted = [p for p in parameters(ops[max(names, key=len)]) if p.name not in ("num", "tap")]
        given = parameters(candidate)
        shared = [p for p in given if p.name in {w.name for w in wanted}]
        without_dtype = [
            (w.name, w.keyword_only) for w in wanted if w.name != "dtype" or "dtype" in {p.name for p in given}
        ]
        if [(p.name, p.keyword_only) for p in shared] != without_dtype:
            faults.append(optimized.at(candidate, f"{candidate.name}: expected the parameters {without_dtype}"))
        extra = [p.name for p in given if p not in shared and not (p.keyword_only and p.has_default)]
        if extra:
            faults.append(optimized.at(candidate, f"{candidate.name}: {extra} are no keywords with defaults"))
    return faults


def read(path: str) -> Source:
    return Source(path, (HOUSE / path).read_text())


def paired() -> list[str]:
    return sorted(names_in("reference") & names_in("optimized") - set(UNPAIRED))


def test_candidates_have_the_signature_of_the_reference() -> None:
    faults = []
    for name in paired():
        # a reference too long for one file has its other functions in support modules that begin with its name
        parts = [
            read(f"reference/{part}.py") for part in SUPPORT if part.startswith((f"{name}_", *PARTS.get(name, ())))
        ]
        faults += signature_faults(read(f"reference/{name}.py"), read(f"optimized/{name}.py"), *parts)
    assert not faults, "\n".join(["", *faults])


SIGNATURE = "def rope(x, table, *, pairing, dtype=bf16, num=CONTRACT): pass"


@pytest.mark.parametrize(
    ("candidate", "is_right"),
    [
        ("def rope_triton(x, table, *, pairing): pass", True),
        ("def rope_triton(x, table, *, pairing, dtype=bf16, out=None): pass", True),
        ("def rope_triton(x, t, *, pairing): pass", False),
        ("def rope_triton(table, x, *, pairing): pass", False),
        ("def rope_triton(x, table, pairing): pass", False),
        ("def rope_triton(x, table): pass", False),
        ("def rope_triton(x, table, *, pairing, out): pass", False),
        ("def rope_triton(x, table, out=None, *, pairing): pass", False),
        ("def rotate_triton(x, table, *, pairing): pass", False),
    ],
)
def test_a_signature_that_differs_is_found(candidate: str, is_right: bool) -> None:
    faults = signature_faults(Source("reference/rope.py", SIGNATURE), Source("optimized/rope.py", candidate))
    assert bool(faults) != is_right


# every promised error is provoked


def promised_errors(source: Source) -> list[tuple[str, str]]:
    promised = []
    for function in source.public_functions():
        _, _, section = (ast.get_docstring(function) or "").partition("Raises:\n")
        section = re.split(r"\n(?=\S)", section)[0]
        promised += [(function.name, error) for error in re.findall(r"^ +(\w+Error):", section, re.MULTILINE)]
    return promised


def unprovoked(source: Source, tests: Source) -> list[str]:
    bodies = [f for f in tests.functions() if f.name.startswith("test") and mentions(f, "raises")]
    return [
        source.at(1, f"{name}: no test in {tests.path} provokes its {error}")
        for name, error in promised_errors(source)
        if not any(mentions(body, name) and mentions(body, error) for body in bodies)
    ]


def test_every_promised_error_is_provoked() -> None:
    faults = [
        fault
        for name in sorted(components() & names_in("tests", "test_"))
        for room in ("reference", "optimized")
        if (HOUSE / room / f"{name}.py").exists()
        for fault in unprovoked(read(f"{room}/{name}.py"), read(f"tests/test_{name}.py"))
    ]
    assert not faults, "\n".join(["", *faults])


def test_an_unprovoked_error_is_found() -> None:
    source = Source(
        "reference/a.py", "def f(x):\n    '''s\n\n    Raises:\n        ValueError: x\n        TypeError: y\n    '''"
    )
    tests = Source("tests/test_a.py", "def test_f():\n    with pytest.raises(ValueError):\n        f(1)")
    assert promised_errors(source) == [("f", "ValueError"), ("f", "TypeError")]
    assert [fault.split()[-1] for fault in unprovoked(source, tests)] == ["TypeError"]


# cards name what exists, and everything that is fast is named by a card


def named_functions(source: Source) -> set[tuple[str, str]]:
    strings = (node.value for node in ast.walk(source.tree) if isinstance(node, ast.Constant))
    found = (re.fullmatch(r"deeptwin\.([\w.]+):(\w+)", s) for s in strings if isinstance(s, str))
    return {(match[1].replace(".", "/") + ".py", match[2]) for match in found if match}


def defined_names(source: Source) -> set[str]:
    return {node.name for node in source.tree.body if isinstance(node, AnyFunction | ast.ClassDef)}


def card_faults(card: Source, sources: Mapping[str, Source]) -> list[str]:
    named = named_functions(card)
    faults = [
        card.at(1, f"{path}:{name} does not exist")
        for path, name in sorted(named)
        if path not in sources or name not in defined_names(sources[path])
    ]
    fast = sources.get(f"optimized/{card.stem}.py")
    if fast is not None and card.stem not in UNPAIRED:
        public = {(fast.path, function.name) for function in fast.public_functions()}
        faults += [card.at(1, f"{name} of {path} is judged by no row") for path, name in sorted(public - named)]
    return faults


def test_cards_name_what_exists() -> None:
    sources = {source.path: source for source in house_sources(*ROOMS)}
    cards = [source for source in sources.values() if source.path.startswith("parity/cards/")]
    faults = [fault for card in cards for fault in card_faults(card, sources)]
    assert cards
    assert not faults, "\n".join(["", *faults])


def test_a_card_with_a_wrong_or_missing_row_is_found() -> None:
    sources = {"optimized/rope.py": Source("optimized/rope.py", "def rope_triton(): pass")}
    right = Source("parity/cards/rope.py", "C = 'deeptwin.optimized.rope:rope_triton'")
    wrong = Source("parity/cards/rope.py", "C = 'deeptwin.optimized.rope:rope_cuda'")
    assert card_faults(right, sources) == []
    assert len(card_faults(wrong, sources)) == 2


# every kernel is built for the chips that the project names, and its card says what the build must show

KERNEL_FOLDERS = tuple(f"kernels/{dsl}" for dsl in DSL)


def kernels_to_build(sources: Mapping[str, Source]) -> set[tuple[str, str]]:
    """Triton kernels that some launcher of the house starts, and functions that return a TileLang program."""
    jitted: dict[str, set[tuple[str, str]]] = {}
    programs = set()
    for source in sources.values():
        for node in source.tree.body:
            if not isinstance(node, ast.FunctionDef) or source.stem in KERNEL_TOOLS:
                continue
            if is_jitted(node):
                jitted.setdefault(node.name, set()).add((source.path, node.name))
            elif any(mentions(mark, "prim_func") for inner in ast.walk(node) for mark in decorators(inner)):
                programs.add((source.path, node.name))
    started = {
        (source.path, getattr(call.func.value, "id", ""))
        for source in sources.values()
        for call, _ in calls(source.tree)
        if isinstance(call.func, ast.Subscript)
    }
    # a file that starts a name which it defines means its own; other files may have helpers of that name
    for path, name in started:
        programs |= {own for own in jitted.get(name, set()) if own == (path, name)} or jitted.get(name, set())
    return programs


def decorators(node: ast.AST) -> list[ast.expr]:
    return node.decorator_list if isinstance(node, ast.FunctionDef) else []


def built_kernels(card: Source) -> set[tuple[str, str]]:
    """What the `BuildCase(kernel=…)` rows of a card name."""
    rows = [node for node, name in calls(card.tree) if name == "BuildCase"]
    strings = [keyword.value for row in rows for keyword in row.keywords if keyword.arg == "kernel"]
    found = [re.fullmatch(r"deeptwin\.([\w.]+):(\w+)", str(getattr(value, "value", ""))) for value in strings]
    return {(match[1].replace(".", "/") + ".py", match[2]) for match in found if match}


def unbuilt(sources: Mapping[str, Source], cards: list[Source]) -> list[str]:
    built = set().union(*(built_kernels(card) for card in cards))
    return [
        f"{path}: {name} is built for no chip: give its card a BuildCase with the matrix unit and limits it must have"
        for path, name in sorted(kernels_to_build(sources) - built)
    ]


def test_every_kernel_has_a_build_in_a_card() -> None:
    sources = {source.path: source for source in house_sources(*KERNEL_FOLDERS)}
    assert len(kernels_to_build(sources)) >= 12
    assert unbuilt(sources, house_sources("parity/cards")) == []


def test_a_kernel_without_a_build_is_found() -> None:
    path = "kernels/triton_ops/a.py"
    helper = "@triton.jit\ndef helper(x): pass\n"
    sources = {path: Source(path, LAUNCH + helper + KERNEL + "def launch(x):\n    k[(1,)](x)")}
    card = Source("parity/cards/a.py", "B = BuildCase(name='b', kernel='deeptwin.kernels.triton_ops.a:k')")
    other = Source("parity/cards/a.py", "B = BuildCase(name='b', kernel='deeptwin.kernels.triton_ops.a:j')")
    assert unbuilt(sources, [card]) == []
    assert [fault.split()[1] for fault in unbuilt(sources, [other])] == ["k"]
    path = "kernels/ascend_ops/a.py"
    program = "def make(n):\n    @T.prim_func\n    def run(x): pass\n    return run\n"
    assert [fault.split()[1] for fault in unbuilt({path: Source(path, program)}, [card])] == ["make"]


# the doorway


def doorway_faults(folder: Path) -> list[str]:
    faults = [f"{room}: expected a link to ../../{room}" for room in ROOMS if not is_link_to_room(folder / room)]
    allowed = {"__init__.py", "py.typed", "__pycache__", *ROOMS}
    return faults + [f"{path.name}: does not belong here" for path in folder.iterdir() if path.name not in allowed]


def is_link_to_room(path: Path) -> bool:
    return path.is_symlink() and os.readlink(path) == f"../../{path.name}"


def test_the_doorway_holds_links_only() -> None:
    assert doorway_faults(HOUSE / "src" / "deeptwin") == []


def test_a_wrong_doorway_is_found(tmp_path: Path) -> None:
    for room in ROOMS:
        (tmp_path / room).symlink_to(f"../../{room}")
    assert doorway_faults(tmp_path) == []
    (tmp_path / "helpers.py").touch()
    (tmp_path / "golden").unlink()
    (tmp_path / "golden").mkdir()
    assert len(doorway_faults(tmp_path)) == 2


def test_tests_are_no_package() -> None:
    assert not (HOUSE / "tests" / "__init__.py").exists()


IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
for room in ("reference", "optimized", "parity", "golden"):
    package = importlib.import_module(f"deeptwin.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"deeptwin.{room}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items() if "." not in name}
json.dump(files, sys.stdout)
"""


def run_from_the_root(script: str) -> dict[str, str | None]:
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(HOUSE / "src")}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=HOUSE, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_generic_names_and_kernel_languages_are_not_imported() -> None:
    loaded = run_from_the_root(IMPORT_EVERYTHING)
    assert "deeptwin" in loaded
    # a package of this name may be installed; ours must not be reachable under it
    ours = [name for name in (*ROOMS, "tests") if str(loaded.get(name) or "").startswith(str(HOUSE))]
    assert ours == []
    assert [name for name in NOT_IN_THE_PARENT if name in loaded] == []


def test_a_generic_import_is_found() -> None:
    loaded = run_from_the_root("import sys; sys.path.insert(0, '.')\nimport golden\n" + IMPORT_EVERYTHING)
    assert str(loaded["golden"]).startswith(str(HOUSE))
