"""Builds the kernels: `python -m rackserve.kernels.cpu.build`, or by itself when the package is installed.

No network, no headers but the compiler's own. One shared object for each instruction set, chosen when it is loaded.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
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
    "-shared",
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

SECONDS = 300


def compiler() -> str | None:
    """The C++ compiler that $CXX names, or the first that is there."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def variants() -> list[str]:
    """Those that make sense on this kind of machine."""
    return list(VARIANTS) if platform.machine() in ("x86_64", "AMD64") else ["portable"]


def build(folder: Path = BUILT, names: list[str] | None = None, extra: tuple[str, ...] = ()) -> dict[str, str]:
    """Build into `folder`; returns what went wrong by variant, "" for those that are there now."""
    command = compiler()
    if command is None:
        return {"": "no C++ compiler (set CXX, or install g++)"}
    folder.mkdir(parents=True, exist_ok=True)
    told = {}
    for name in names or variants():
        target, part = folder / f"kernels-{name}.so", folder / f".kernels-{name}.{os.getpid()}.so"
        sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
        line = [command, *COMMON, *VARIANTS[name], *extra, "-o", str(part), *sources]
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            told[name] = str(error)
            continue
        if done.returncode:
            told[name] = (done.stderr.strip().splitlines() or ["the compiler failed"])[-1]
            continue
        part.replace(target)
        told[name] = ""
    return told


def main(arguments: list[str]) -> int:
    """Build and say what was built. `--sanitize`: kernels that stop at reads and writes out of bounds (see make sanitize)."""
    told = build(extra=SANITIZE if arguments == ["--sanitize"] else ())
    for name, problem in told.items():
        print(f"kernels {name}: {problem or 'built'}")
    return 0 if "" in told.values() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
