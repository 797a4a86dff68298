"""Builds the kernels: `python -m rackserve.kernels.cpu.build`, or by itself when the package is installed.

No network, no headers but the compiler's own. One shared object for each instruction set, chosen when it is loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
BUILT = Path(os.environ.get("RACKSERVE_KERNELS_BUILT") or Path(__file__).parent / "built")
"""Where built kernels are looked for; the environment variable is for tests of others than those that were installed."""

COMMON = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-pthread",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "avx512": ("-march=x86-64-v4", "-mavx512vnni"),
    "avx2": ("-march=x86-64-v3",),
    "portable": ("-O2",),
}
"""Instruction sets, best first, and what makes a compiler use them."""

SANITIZE = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
"""What makes kernels look for their own errors; the process that loads them must have loaded libasan first."""

SECONDS = 600
"""How long a whole build may take."""

STALE_SECONDS = 3600
"""How old a build's scratch folder is whose build was killed."""


def compiler() -> str | None:
    """The C++ compiler that $CXX names, or the first that is there."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def variants() -> list[str]:
    """Those that make sense on this kind of machine."""
    return list(VARIANTS) if platform.machine() in ("x86_64", "AMD64") else ["portable"]


def build(folder: Path = BUILT, names: list[str] | None = None, extra: tuple[str, ...] = ()) -> dict[str, str]:
    """Build into `folder`; returns what went wrong by variant, "" for those that are there now. Raises nothing."""
    command = compiler()
    if command is None:
        return {"": "no C++ compiler (set CXX, or install g++)"}
    chosen, end = names or variants(), time.monotonic() + SECONDS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        with (
            tempfile.TemporaryDirectory(prefix=".kernels-", dir=folder, ignore_cleanup_errors=True) as scratch,
            ThreadPoolExecutor(os.cpu_count()) as compilers,
        ):
            compiled = {name: _compile(command, name, extra, Path(scratch), end, compilers) for name in chosen}
            return {name: _link(command, name, extra, compiled[name], folder, end) for name in chosen}
    except OSError as error:
        return {"": f"cannot build in {folder} ({error.strerror})"}


def seal(file: Path) -> None:
    """Append the digest of all before it, which shows that a file is whole; loaders of shared objects never look there."""
    with file.open("rb+") as opened:
        opened.write(hashlib.sha256(opened.read()).digest())


def is_sealed(file: Path) -> bool:
    """Whether the file ends with the digest of all before it. OSError if it cannot be read."""
    content, size = file.read_bytes(), hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _remove_stale(folder: Path) -> None:
    """Remove what builds left that were killed."""
    for scratch in folder.glob(".kernels-*"):
        if time.time() - scratch.lstat().st_mtime > STALE_SECONDS:
            shutil.rmtree(scratch, ignore_errors=True)


def _compile(
    command: str, name: str, extra: tuple[str, ...], scratch: Path, end: float, compilers: Executor
) -> list[tuple[Path, Future[str]]]:
    """Start to compile each source for one variant: the object files to be, and what goes wrong with each."""
    objects = []
    for source in sorted(SOURCES.glob("*.cpp")):
        target = scratch / f"{name}-{source.stem}.o"
        line = [command, *COMMON, *VARIANTS[name], *extra, "-c", "-o", str(target), str(source)]
        objects.append((target, compilers.submit(_run, line, end)))
    return objects


def _link(
    command: str, name: str, extra: tuple[str, ...], objects: list[tuple[Path, Future[str]]], folder: Path, end: float
) -> str:
    """Make one variant of its objects, all at once or not at all; what went wrong, or ""."""
    problem = next((told for _, future in objects if (told := future.result())), "")
    if problem:
        return problem
    part = objects[0][0].with_suffix(".so")
    line = [command, *COMMON, *VARIANTS[name], *extra, "-shared", "-o", str(part), *(str(target) for target, _ in objects)]
    problem = _run(line, end)
    if problem:
        return problem
    target = folder / f"kernels-{name}.so"
    try:
        seal(part)
        part.replace(target)
    except OSError as error:
        return f"cannot write {target} ({error.strerror})"
    return ""


def _run(line: list[str], end: float) -> str:
    """Run a compiler until `end` (monotonic seconds) at most; its last line if it fails, or ""."""
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=max(end - time.monotonic(), 0.1), check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip().splitlines() or ["the compiler failed"])[-1] if done.returncode else ""


def main(arguments: list[str]) -> int:
    """Build and say what was built. `--sanitize`: kernels that stop at reads and writes out of bounds (see make sanitize).

    1 if nothing was built, or with `--sanitize` not everything: what is not there is not tested.
    """
    sanitize = arguments == ["--sanitize"]
    told = build(extra=SANITIZE if sanitize else ())
    for name, problem in told.items():
        print(f"kernels {name}: {problem or 'built'}")
    built = [not problem for problem in told.values()]
    return 0 if (all(built) if sanitize else any(built)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
