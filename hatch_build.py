"""Builds the native kernels when the package is installed or packed. Without a compiler the package is the same but slower."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("rackserve") / "kernels" / "cpu"


class KernelBuildHook(BuildHookInterface[Any]):
    """Runs `rackserve.kernels.cpu.build` from its file: nothing of the package can be imported yet."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, say how it went, and mark a wheel that holds machine code as one for this kind of machine."""
        if self.target_name != "wheel":
            return
        build = runpy.run_path(str(Path(self.root) / KERNELS / "build.py"))
        told = build["build"](Path(self.root) / KERNELS / "built")
        for name, problem in told.items():
            self.app.display_info(f"kernels {name}: {problem or 'built'}")
        if "" in told.values():
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            built = [f"kernels-{name}.so" for name, problem in told.items() if not problem]  # not what an earlier build left
            build_data["artifacts"].extend(str(KERNELS / "built" / name) for name in built)
