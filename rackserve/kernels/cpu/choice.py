"""Which of the built variants this machine is to load: known without loading one, or numpy."""

from __future__ import annotations

import os
from pathlib import Path

from rackserve.base.errors import ConfigError

NEEDED: dict[str, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "f16c", "fma"}),
    "avx2": frozenset({"avx2", "f16c", "fma", "bmi2"}),
    "portable": frozenset(),
}
"""What the processor must have for each variant, best first."""

FASTER_FOR_LLAMA = frozenset({"avx512"})
"""Variants with which Llama is computed faster than with torch. Others hold 64 bytes in registers that are too narrow."""

VARIABLE = "RACKSERVE_KERNELS"
"""Environment variable that names the variant to load instead of the best, or "none"."""

SPELLINGS = {"avx512-vnni": "avx512"}
"""Names that variants tell of themselves where these are longer than those of their files."""


def file_of(name: str) -> str:
    """The file of a variant, in the folder of built ones."""
    return f"kernels-{name}.so"


def chosen(folder: Path) -> str:
    """The best variant in `folder` that this processor runs, or the one asked for; "" if there is none, or none is wanted.

    ConfigError if one was asked for that is not there, or that this processor does not run.
    """
    wanted, has = asked_for(), features()
    for name, needed in NEEDED.items():
        if wanted in ("", name) and needed <= has and (folder / file_of(name)).exists():
            return name
    if wanted not in ("", "none"):
        raise ConfigError(f"{VARIABLE}={wanted}: not built, or not for this processor; one of {', '.join(NEEDED)} or none")
    return ""


def asked_for() -> str:
    """The variant that the environment names, or "none", or "" for the best."""
    asked = os.environ.get(VARIABLE, "")
    return SPELLINGS.get(asked, asked)


def features() -> frozenset[str]:
    """Instruction sets of this processor, by the names of /proc/cpuinfo; empty where that does not exist."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
