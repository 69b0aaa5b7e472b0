"""Which components a change touches: the changed files and everything that imports them."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable
from pathlib import Path

from .card import card_names
from .house import HOUSE, ROOMS


class GitError(Exception):
    """git could not say what changed."""


def changed_files(ref: str) -> list[str]:
    """Paths, relative to the house, that differ from `ref` in the working tree, untracked files included.

    Raises:
        GitError: not a repository, or no such revision.
    """
    commands = (["diff", "--name-only", ref, "--"], ["ls-files", "--others", "--exclude-standard"])
    found: set[str] = set()
    for command in commands:
        result = subprocess.run(["git", "-C", str(HOUSE), *command], capture_output=True, text=True, check=False)
        if result.returncode:
            raise GitError(f"changed: git cannot compare with {ref!r}: {result.stderr.strip().splitlines()[-1]}")
        found |= set(result.stdout.split("\n")) - {""}
    return sorted(found)


def affected_components(files: Iterable[str]) -> tuple[str, ...]:
    """Components whose verdict the changed files can move, in alphabetical order.

    A component is affected when its own file in any room changed, when a module that one of its files imports
    changed, or when something that judges every component did (the parity core, the interpreter repair, pins).
    """
    names = card_names()
    touched = {_module_of(path) for path in files}
    if any(_judges_everything(path, names) for path in files):
        return names
    imports = import_graph()
    return tuple(name for name in names if touched & (reachable(_roots(name), imports) | _data(name)))


def _module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def _judges_everything(path: str, names: tuple[str, ...]) -> bool:
    if path in ("constraints.txt", "pyproject.toml"):
        return True
    parts = Path(path).parts
    if parts[0] != "parity" or not path.endswith((".py", "ledger.json")):
        return False
    if path.startswith("parity/builds/launches/"):  # the cards name them
        return False
    return Path(path).stem not in names


def _roots(name: str) -> set[str]:
    rooms = (
        *("reference", "optimized", "kernels.triton_ops", "kernels.tilelang_ops", "kernels.ascend_ops", "tests"),
        *("parity.cards", "parity.mutants", "parity.peers", "parity.builds.launches"),
    )
    return {f"{room}.{name}" for room in rooms} | {f"tests.test_{name}"}


def _data(name: str) -> set[str]:
    return {f"golden.{name}.manifest.json", f"golden.{name}.vectors.safetensors"}


def import_graph() -> dict[str, set[str]]:
    """Every module of the rooms with what it imports, lazily or not; names without `deeptwin.`."""
    graph: dict[str, set[str]] = {}
    for room in ROOMS:
        for path in (HOUSE / room).rglob("*.py"):
            module = _module_of(str(path.relative_to(HOUSE)))
            graph[module] = _imports(path, module)
    return graph


def _imports(path: Path, module: str) -> set[str]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base]).rstrip(".")
            base = base.removeprefix("deeptwin.")
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("deeptwin.") for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("deeptwin."):
            found.add(node.value.removeprefix("deeptwin.").partition(":")[0])  # a lazy import string
    return found


def reachable(roots: set[str], graph: dict[str, set[str]]) -> set[str]:
    """The roots and everything that they import, directly or not."""
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        waiting.extend(graph.get(module, ()))
    return seen
