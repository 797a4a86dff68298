from __future__ import annotations

from pathlib import Path

import pytest

from rackserve.kernels.cpu import build
from rackserve.kernels.cpu.library import Library


def test_without_a_compiler_nothing_is_built_and_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    told = build.build(tmp_path / "out")
    assert "g++" in told[""] and not (tmp_path / "out").exists()


def test_a_compiler_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    bad.chmod(0o755)
    monkeypatch.setenv("CXX", str(bad))
    assert build.build(tmp_path / "out", ["portable"]) == {"portable": "no such flag"}
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--sanitize"], 1)])
def test_one_variant_is_enough_to_compute_and_all_are_wanted_to_be_tested(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int
) -> None:
    monkeypatch.setattr(build, "build", lambda extra: {"avx2": "no such flag", "portable": ""})
    assert build.main(arguments) == status


def test_what_is_built_can_be_loaded(tmp_path: Path) -> None:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    assert build.build(tmp_path, ["portable"], ("-O0",)) == {"portable": ""}
    assert Library(tmp_path / "kernels-portable.so").path == "portable"
