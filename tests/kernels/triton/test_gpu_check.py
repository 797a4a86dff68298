"""The script that checks kernels on a GPU, without one: its cases in the interpreter; whether kernels are Triton's language."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
pytest.importorskip("triton")


def script(*words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "benchmarks/gpu/check.py", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_its_cases_are_right_in_the_interpreter_and_would_tell_if_they_were_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/gpu"))
    cases = __import__("cases")
    made = [make() for make in cases.cases(cases.TINY, "cpu", torch.float32)]
    assert [(case.name, case.error()) for case in made if not case.error() <= 1] == []
    wanted = torch.ones(3, 4)
    assert cases.largest(wanted + 0.5, wanted, 0.01) > 1
    assert not cases.largest(wanted * torch.nan, wanted, 0.01) <= 1


def test_without_a_gpu_it_measures_nothing_and_parses_every_kernel() -> None:
    lines = script("--parse", "90").splitlines()
    assert lines[0].startswith("NEVER RUN ON A GPU")
    if not torch.cuda.is_available():
        assert lines.pop(1) == "no GPU: not measured"
    sources = "".join(path.read_text() for path in (ROOT / "rackserve/kernels/triton").glob("*.py"))
    launched = {part.split("[")[0] for part in sources.split("    _")[1:] if "[(" in part.splitlines()[0]}
    assert len(launched) == 12
    parsed = lines[1].partition(": ")[2].partition(": ")[2].split(", ")
    assert set(parsed) == {f"_{name}" for name in launched}
