"""What benchmarks of DeepSeek-V4.1's native path begin with: whether they can run here, and the model they measure."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

from measure import Options

if TYPE_CHECKING:
    from v41_model import Sequences

ACCEPTANCE = 3.51
"""Tokens a step in the published account of drafts: set beforehand here, as the weights are random."""

DRAFTS = 5


def why_not() -> str:
    """Why nothing can be measured here, or ""."""
    if find_spec("torch") is None:
        return "the engine extra is not installed"
    from rackserve.kernels.cpu import library, v41

    found = library.find()
    return "no native kernels were built here" if found is None or not v41.serves(found) else ""


def kernel_path() -> str:
    """The instruction set that computes."""
    from rackserve.model.deepseek_v41.native import find_kernels

    return find_kernels().path


@contextmanager
def random_model(options: Options) -> Iterator[str]:
    """Folder of a model of 130 million random weights; for a quick run the name of the tiny model instead."""
    if options.quick:
        yield "golden"
        return
    from v41_model import write_model

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.seed)
        yield folder


def cores() -> list[int]:
    """Those that this process may use."""
    return sorted(os.sched_getaffinity(0))


def fastest(sequences: Sequences, steps: int, num_draft: int) -> float:
    """Nanoseconds by the clock of the fastest of so many steps of one sequence: the one that others disturbed least."""
    took = []
    for _ in range(steps):
        start = perf_counter_ns()
        sequences.decode(1, num_draft)
        took.append(perf_counter_ns() - start)
    return float(min(took))
