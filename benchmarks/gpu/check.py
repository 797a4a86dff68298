"""NEVER RUN ON A GPU so far: no machine with one was at hand. Checks and times the Triton kernels on one GPU, in a few minutes.

  python benchmarks/gpu/check.py                     kernels against the reference, and their times; exit 1 if one is wrong
  python benchmarks/gpu/check.py --compile 90 100    without a GPU: compile for sm_90 and sm_100, and what that takes
  python benchmarks/gpu/check.py --parse 90          without a GPU: only whether all is Triton's language

Times are medians of CUDA events, the level-two cache flushed before each. The rate is the bytes a kernel must move over
that time; its share is of the memory bandwidth in this project's chip data. Without a GPU: "no GPU: not measured", exit 0.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

import torch

from rackserve.sim.hardware import Chip, chips

ROUNDS = 30
FLUSH_BYTES = 256 << 20


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", nargs="+", type=int, default=[], metavar="CAPABILITY")
    parser.add_argument("--parse", nargs="+", type=int, default=[], metavar="CAPABILITY")
    options = parser.parse_args()
    print("NEVER RUN ON A GPU before: if you are the first, its figures are news (docs/decisions/0021-triton.md)")
    code = 0
    if not torch.cuda.is_available():
        print("no GPU: not measured")
    elif not options.parse and not options.compile:
        code = measure()
    if options.parse:
        parse(options.parse)
    if options.compile:
        compile_all(options.compile)
    return code


def parse(capabilities: list[int]) -> None:
    """Read every kernel as Triton's language. Raises Triton's CompilationError."""
    from cases import FEW, cases
    from compiled import parsing

    for capability in capabilities:
        with parsing(capability) as found:
            for make in cases(FEW, "cpu"):
                make().run()
        print(f"sm_{capability}: {len(set(found))} kernels parse: {', '.join(sorted(set(found)))}")


def compile_all(capabilities: list[int]) -> None:
    """Compile every kernel and print what it takes."""
    from cases import FEW, cases
    from compiled import compiling

    for capability in capabilities:
        with compiling(capability) as found:
            for make in cases(FEW, "cpu"):
                make().run()
        print(f"sm_{capability}, Triton's compiler, not run:")
        for kernel in found:
            cores = "tensor cores" if kernel.tensor_cores else ""
            says = f"{kernel.registers:4} registers {kernel.spilled:5} B spilled {kernel.shared:7} B shared"
            print(f"  {kernel.name:14} {says} {cores}")


def measure() -> int:
    """Check and time every kernel on this GPU. The exit code."""
    from cases import RELEASED, cases

    name = torch.cuda.get_device_name()
    chip = chip_of(name)
    peak = chip.number("memory_bytes_per_s") if chip is not None else None
    share = f"{peak / 1e12:.2f} TB/s of {chip.name}" if chip is not None and peak else "unknown: not in the chip data"
    print(f"{name}, torch {torch.__version__}, memory bandwidth {share}")
    wrong = 0
    for make in cases(RELEASED, "cuda"):
        case = make()
        error = case.error()
        wrong += not error <= 1
        microseconds = timed(case.run)
        rate = case.num_bytes / microseconds * 1e6
        of_peak = f"{100 * rate / peak:4.0f} %" if peak else ""
        verdict = "right" if error <= 1 else "WRONG"
        says = f"{verdict} (error {error:.2g} of the bound)"
        print(f"{case.name:44} {says} {microseconds:9.1f} us {rate / 1e9:7.0f} GB/s {of_peak}")
        del case
        torch.cuda.empty_cache()
    print(f"{wrong} wrong" if wrong else "all right")
    return int(wrong > 0)


def chip_of(name: str) -> Chip | None:
    """The chip whose key is the longest in a device's name, if any: "NVIDIA H200" -> h200."""
    words = name.lower().replace(" ", "-")
    known = [key for key in chips() if key in words]
    return chips()[max(known, key=len)] if known else None


def timed(run: object) -> float:
    """Median microseconds of a call, caches cold."""
    assert callable(run)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(ROUNDS):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return median(times)


if __name__ == "__main__":
    sys.exit(main())
