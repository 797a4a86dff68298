from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rackserve.base.errors import ConfigError
from rackserve.kernels.cpu import build, library
from rackserve.kernels.cpu.library import NEEDED, features
from tests.kernels.cpu.variants import ALL, KINDS, load, rounded, some_rows

SHAPES = [(16, 32, 1), (48, 96, 3), (32, 576, 7), (64, 64, 8), (16, 128, 12), (16, 128, 13), (80, 64, 24), (48, 608, 110)]


@ALL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs", "rows"), SHAPES)
def test_products_are_those_of_float64(name: str, kind: str, outputs: int, inputs: int, rows: int) -> None:
    make, pack, code = KINDS[kind]
    rng = np.random.default_rng(outputs + inputs + rows)
    stored, matrix = make(rng, outputs, inputs)
    given = some_rows(rng, rows, inputs)
    found = load(name).product(pack(stored), code, given)  # type: ignore[operator]
    seen, between = rounded(given, kind)
    wanted = seen @ matrix.T.astype(np.float64)
    size = np.abs(seen) @ np.abs(matrix.T).astype(np.float64)
    assert (np.abs(found - wanted) <= size * 1e-6 * np.sqrt(inputs) + between @ np.abs(matrix.T) + 1e-9).all()


@ALL
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_and_beside_others(name: str, kind: str) -> None:
    make, pack, code = KINDS[kind]
    rng = np.random.default_rng(3)
    stored, _ = make(rng, 48, 160)
    packed, rows = pack(stored), some_rows(rng, 45, 160)  # type: ignore[operator]
    whole = load(name).product(packed, code, rows)
    for first, end in [(0, 1), (0, 8), (3, 10), (7, 19), (18, 19), (1, 16), (2, 18), (0, 19), (9, 29), (1, 36), (9, 45)]:
        assert np.array_equal(load(name).product(packed, code, rows[first:end]), whole[first:end])


@ALL
@pytest.mark.parametrize("rows", [1, 14])
@pytest.mark.parametrize("kind", ["q4_1", "q4_1, 8 bits"])
def test_numbers_too_small_to_count_give_zeros(name: str, rows: int, kind: str) -> None:
    make, pack, code = KINDS[kind]
    stored, _ = make(np.random.default_rng(4), 16, 64)
    tiny = np.full((rows, 64), 1e-38, np.float32)
    assert not load(name).product(pack(stored), code, tiny).any()  # type: ignore[operator]


def test_the_best_variant_that_can_run_is_found_and_another_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    built = [name for name in NEEDED if (library.BUILT / f"kernels-{name}.so").exists() and NEEDED[name] <= features()]
    if not built:
        pytest.skip("no kernels are built here")
    find = library.find.__wrapped__
    monkeypatch.delenv(library.VARIABLE, raising=False)
    best = find()
    assert best is not None and best.path == load(built[0]).path
    for name in built:
        monkeypatch.setenv(library.VARIABLE, name)
        found = find()
        assert found is not None and found.path == load(name).path
        monkeypatch.setenv(library.VARIABLE, found.path)
        again = find()
        assert again is not None and again.path == found.path, "the name that it tells is known, too"
    monkeypatch.setenv(library.VARIABLE, "none")
    assert find() is None
    monkeypatch.setenv(library.VARIABLE, "sse9")
    with pytest.raises(ConfigError, match="sse9"):
        find()


def test_without_built_kernels_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(library, "BUILT", tmp_path)
    monkeypatch.delenv(library.VARIABLE, raising=False)
    assert library.find.__wrapped__() is None


def test_which_kernels_serve_or_why_none_do_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "compiler", lambda: None)
    monkeypatch.setattr(library, "BUILT", tmp_path)
    for loaded, variable, there, says in (
        (SimpleNamespace(path="avx2"), "", True, "avx2, the best of those built"),
        (SimpleNamespace(path="portable"), "portable", True, "portable, as RACKSERVE_KERNELS says"),
        (None, "none", False, "native kernels are off, as RACKSERVE_KERNELS=none says; unset it"),
        (None, "", False, "no native kernels were built here, for lack of a compiler; install g++, then run python -m"),
    ):
        monkeypatch.setenv(library.VARIABLE, variable)
        monkeypatch.setattr(library, "find", lambda found=loaded: found)
        assert library.found()[0] is there and says in library.found()[1]
    monkeypatch.setattr(library, "compiler", lambda: "/usr/bin/g++")
    assert library.missing() == f"no native kernels were built here; run {library.BUILD}"
    (tmp_path / "kernels-avx512.so").touch()
    assert "were built for this processor, only avx512; run" in library.missing()


def compiled(file: Path, source: str) -> None:
    """A sealed shared object of `source`."""
    command = build.compiler()
    if command is None:
        pytest.skip("no C++ compiler")
    line, bare = (command, "-shared", "-fPIC", "-x", "c++", "-o", str(file), "-"), {**os.environ, "LD_PRELOAD": ""}
    subprocess.run(line, input=source, text=True, check=True, env=bare)  # sanitizers are not meant for the compiler
    build.seal(file)


def sealed(file: Path, content: str) -> None:
    file.write_text(content)
    build.seal(file)


def truncated(file: Path) -> None:
    compiled(file, f'extern "C" int rk_abi() {{ return {library.ABI}; }}')
    file.write_bytes(file.read_bytes()[:-100])


UNUSABLE = {
    "an empty file": (Path.touch, "not whole"),
    "a folder": (Path.mkdir, "Is a directory"),
    "text": (lambda file: file.write_text("no machine code"), "not whole"),
    "a file without its end": (truncated, "not whole"),
    "sealed text": (lambda file: sealed(file, "no machine code"), "file too short|invalid ELF header"),
    "another library": (lambda file: compiled(file, "int other;"), "rk_abi"),
    "another interface": (lambda file: compiled(file, 'extern "C" int rk_abi() { return 1; }'), "built from other sources"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_a_file_that_is_no_library_of_ours_is_named_with_the_remedy_and_never_passed_over(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make, why = UNUSABLE[what]
    make(tmp_path / "kernels-avx512.so")
    (tmp_path / "kernels-portable.so").touch()
    monkeypatch.setattr(library, "BUILT", tmp_path)
    monkeypatch.setitem(NEEDED, "avx512", frozenset())
    monkeypatch.delenv(library.VARIABLE, raising=False)
    says = rf"/kernels-avx512\.so cannot be loaded \(.*({why}).*\); run python -m rackserve\.kernels\.cpu\.build, or name"
    for look in (library.find.__wrapped__, lambda: library.Library(tmp_path / "kernels-avx512.so")):
        with pytest.raises(ConfigError, match=says):
            look()


def test_a_good_variant_beside_a_bad_one_serves_when_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = load("portable").path
    (tmp_path / "kernels-portable.so").write_bytes((library.BUILT / "kernels-portable.so").read_bytes())
    (tmp_path / "kernels-avx512.so").touch()
    monkeypatch.setattr(library, "BUILT", tmp_path)
    monkeypatch.setitem(NEEDED, "avx512", frozenset())
    monkeypatch.setenv(library.VARIABLE, "portable")
    found = library.find.__wrapped__()
    assert found is not None and found.path == path


def test_threads_run_on_the_first_cores_given_or_where_the_system_wants() -> None:
    assert list(library.places((4, 5, 6), 2) or ()) == [4, 5]
    assert library.places((4,), 2) is None and library.places((), 1) is None
