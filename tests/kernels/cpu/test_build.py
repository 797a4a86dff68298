from __future__ import annotations

import os
import time
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


def test_what_is_built_can_be_loaded_and_is_sealed(tmp_path: Path) -> None:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    assert build.build(tmp_path, ["portable"], ("-O0",)) == {"portable": ""}
    assert Library(tmp_path / "kernels-portable.so").path == "portable"
    assert build.is_sealed(tmp_path / "kernels-portable.so") and len(list(tmp_path.iterdir())) == 1


def compiler_that_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that succeeds with a few bytes."""
    good = folder / "good"
    good.write_text('#!/bin/sh\nfor name; do case "$name" in *.so) echo machine code >"$name" && exit;; esac; done\n')
    good.chmod(0o755)
    monkeypatch.setenv("CXX", str(good))


@pytest.mark.parametrize("cut", [0, 1, 31, 32, 40])
def test_a_file_that_lost_its_end_or_a_bit_is_not_sealed(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "kernels.so"
    file.write_bytes(b"some machine code")
    build.seal(file)
    whole = file.read_bytes()
    assert whole.startswith(b"some machine code") and build.is_sealed(file)
    file.write_bytes(whole[:cut] + whole[cut + 1 :])
    assert not build.is_sealed(file)
    file.write_bytes(whole[:cut])
    assert not build.is_sealed(file)


def test_where_nothing_can_be_written_the_problem_is_told_and_nothing_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler_that_writes(tmp_path, monkeypatch)
    (tmp_path / "file").write_text("")
    assert build.build(tmp_path / "file", ["portable"]) == {"": f"cannot build in {tmp_path / 'file'} (File exists)"}
    assert "cannot build in" in build.build(tmp_path / "file" / "below", ["portable"])[""]
    taken = tmp_path / "out" / "kernels-avx2.so"
    (taken / "below").mkdir(parents=True)
    told = build.build(tmp_path / "out", ["portable", "avx2"])
    assert told == {"portable": "", "avx2": f"cannot write {taken} (Is a directory)"}


def test_the_next_build_removes_what_a_killed_one_left_but_not_what_another_is_making(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler_that_writes(tmp_path, monkeypatch)
    out = tmp_path / "out"
    for name, age in (("killed", build.STALE_SECONDS + 60), ("busy", 60)):
        scratch = out / f".kernels-{name}"
        scratch.mkdir(parents=True)
        (scratch / "avx2-matrix.o").write_text("")
        os.utime(scratch, (time.time() - age,) * 2)
    assert build.build(out, ["portable"]) == {"portable": ""}
    assert sorted(path.name for path in out.iterdir()) == [".kernels-busy", "kernels-portable.so"]
