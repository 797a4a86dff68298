"""Compiles kernels for a GPU that is not here: what the launchers would run, given tensors in this machine's memory."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction


class Compiled(NamedTuple):
    """A kernel's resources: registers a thread, bytes of local memory a thread (spills), bytes of shared memory a program."""

    name: str
    registers: int
    spilled: int
    shared: int
    tensor_cores: bool


class _Absent:
    """A driver of a GPU that is not here: enough of one to compile for it."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def parsing(capability: int) -> Iterator[list[str]]:
    """Launches inside are only understood as Triton's language, in a second or two; the list gets the kernels' names.

    The interpreter takes some Python that the language is not.
    """
    found: list[str] = []
    run = JITFunction.run

    def parse(source: Any, target: GPUTarget, options: dict[str, Any]) -> None:
        backend = make_backend(target)
        chosen, context = backend.parse_options(options), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        found.append(source.name)
        source.make_ir(target, chosen, backend.get_codegen_implementation(chosen), backend.get_module_map(), context)

    def parse_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    triton.runtime.driver.set_active(_Absent(capability))
    JITFunction.run, whole = parse_only, triton.compiler.compile
    triton.compiler.compile = parse  # where a kernel looks for it at its first launch
    try:
        yield found
    finally:
        JITFunction.run, triton.compiler.compile = run, whole


@contextmanager
def compiling(capability: int) -> Iterator[list[Compiled]]:
    """Launches inside compile for sm_`capability` and run nothing; the list gets what they compiled, once each.

    Afterwards this process still has no GPU.
    """
    found: list[Compiled] = []
    run, seen = JITFunction.run, set[str]()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        if compiled is not None and compiled.hash not in seen:
            seen.add(compiled.hash)
            found.append(_resources(compiled))
        return compiled

    triton.runtime.driver.set_active(_Absent(capability))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run


def _resources(compiled: Any) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    number: Callable[[str], int] = lambda what: int(match[1]) if (match := re.search(rf"{what}:(\d+)", said)) else -1  # noqa: E731
    products = any(word in compiled.asm["ptx"] for word in ("wgmma", "tcgen05.mma", "mma.sync"))
    return Compiled(compiled.name, number("REG"), number("STACK"), compiled.metadata.shared, products)
