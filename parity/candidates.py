"""Finds a candidate's function from `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .house import HOUSE, ROOMS, worker_environment

IMPORT_LIMIT_S = 120
MARK = "@operations:"  # whatever a candidate prints on import stands before it


class CandidateNotFound(Exception):
    """The candidate's module, file or function does not exist or does not import."""


def is_path(spec: str) -> bool:
    """Whether `spec` names a file rather than a module."""
    return spec.rpartition(":")[0].endswith(".py")


def check_spec(spec: str) -> None:
    """Raise ValueError unless `spec` has the form of a candidate and its file, if it names one, exists."""
    module, colon, function = spec.rpartition(":")
    if not colon or not module or not function.isidentifier():
        raise ValueError(f"candidate: expected path/to/file.py:function or package.module:function, got {spec!r}")
    if is_path(spec) and not Path(module).is_file():
        raise ValueError(f"candidate: no such file {module!r} (working directory {os.getcwd()})")


def load(spec: str) -> Callable[..., Any]:
    """Import the function that `spec` names.

    A file inside the house is imported as its `deeptwin.` module; any other file under a name of its own, with its
    folder importable for siblings.

    Raises:
        CandidateNotFound: the module does not import or has no such function.
    """
    module_name, _, function = spec.rpartition(":")
    try:
        module = _from_file(Path(module_name).resolve()) if is_path(spec) else _from_name(module_name)
    except BaseException as error:
        raise CandidateNotFound(f"{module_name} does not import: {type(error).__name__}: {error}") from error
    if "triton" in sys.modules:
        importlib.import_module("deeptwin.kernels.triton_ops")  # repairs the interpreter for foreign kernels too
    found = getattr(module, function, None)
    if not callable(found):
        raise CandidateNotFound(f"{module_name} has no function {function!r}")
    return found


def fitting_ops(component: str, spec: str) -> list[str]:
    """Operations of a component whose parameters the candidate takes, read in a process of its own.

    Raises:
        CandidateNotFound: it does not import, or not in time.
    """
    command = [sys.executable, "-m", "deeptwin.parity.candidates", component, spec]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, env=worker_environment("cpu"), check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CandidateNotFound(f"{spec} does not import within {IMPORT_LIMIT_S} s") from error
    if result.returncode:
        last = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        raise CandidateNotFound(last.partition("CandidateNotFound: ")[2] or last)
    return result.stdout.rpartition(MARK)[2].split()


def _from_name(name: str) -> Any:
    cwd = os.getcwd()
    if cwd not in sys.path and Path(cwd) != HOUSE:
        sys.path.append(cwd)
    return importlib.import_module(name)


def _from_file(path: Path) -> Any:
    if HOUSE in path.parents and path.relative_to(HOUSE).parts[0] in ROOMS:
        return importlib.import_module(".".join(("deeptwin", *path.relative_to(HOUSE).with_suffix("").parts)))
    folder = str(path.parent)
    if folder not in sys.path and path.parent != HOUSE:
        sys.path.append(folder)
    name = f"deeptwin_candidate_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Print the operations of component argv[1] that candidate argv[2] fits."""
    from .card import load_card
    from .guard import SignatureError, accepted_parameters

    function = load(sys.argv[2])
    fits = []
    for op in load_card(sys.argv[1]).ops:
        try:
            accepted_parameters(function, op)
        except SignatureError:
            continue
        fits.append(op.name)
    sys.stdout.write(f"\n{MARK} {' '.join(fits)}\n")


if __name__ == "__main__":
    main()
