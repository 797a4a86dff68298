from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rackserve.base.errors import ConfigError
from rackserve.kernels.cpu import library
from rackserve.kernels.cpu.library import NEEDED, Floats, features
from tests.kernels.cpu.variants import ALL, KINDS, load

SHAPES = [(16, 32, 1), (48, 96, 3), (32, 576, 7), (64, 64, 8), (16, 128, 12), (16, 128, 13), (80, 64, 24), (48, 608, 110)]


def rounded(rows: Floats) -> np.ndarray:
    """Rows as the quantised kinds see them: 16 bits, the largest number of a row being 32512, in float64."""
    wide = rows.astype(np.float64)
    most = np.abs(wide).max(-1, keepdims=True)
    scale = np.where(most > 0, most / 32512, 1)
    return np.rint(wide / scale) * scale


@ALL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs", "rows"), SHAPES)
def test_products_are_those_of_float64(name: str, kind: str, outputs: int, inputs: int, rows: int) -> None:
    make, pack, code = KINDS[kind]
    rng = np.random.default_rng(outputs + inputs + rows)
    stored, matrix = make(rng, outputs, inputs)
    given = rng.standard_normal((rows, inputs)).astype(np.float32) * rng.choice([0.0, 1e-3, 1.0, 50.0], (rows, 1)).astype(
        np.float32
    )
    found = load(name).product(pack(stored), code, given)  # type: ignore[operator]
    seen = given.astype(np.float64) if kind == "bf16" else rounded(given)
    wanted = seen @ matrix.T.astype(np.float64)
    # A value that lies between two of its steps may round to either.
    slack = 0 if kind == "bf16" else np.abs(given).max(-1, keepdims=True) / 32512 * np.abs(matrix).max() * 2
    size = np.abs(seen) @ np.abs(matrix.T).astype(np.float64)
    assert (np.abs(found - wanted) <= size * 1e-6 * np.sqrt(inputs) + slack + 1e-9).all()


@ALL
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_and_beside_others(name: str, kind: str) -> None:
    make, pack, code = KINDS[kind]
    rng = np.random.default_rng(3)
    stored, _ = make(rng, 48, 160)
    packed, rows = pack(stored), rng.standard_normal((19, 160)).astype(np.float32)  # type: ignore[operator]
    whole = load(name).product(packed, code, rows)
    for first, end in [(0, 1), (0, 8), (3, 10), (7, 19), (18, 19), (1, 5), (2, 13), (0, 12), (0, 13)]:
        assert np.array_equal(load(name).product(packed, code, rows[first:end]), whole[first:end])


@ALL
@pytest.mark.parametrize("rows", [1, 14])
def test_numbers_too_small_to_count_give_zeros(name: str, rows: int) -> None:
    make, pack, code = KINDS["q4_1"]
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
    monkeypatch.setenv(library.VARIABLE, "none")
    assert find() is None
    monkeypatch.setenv(library.VARIABLE, "sse9")
    with pytest.raises(ConfigError, match="sse9"):
        find()


def test_without_built_kernels_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(library, "BUILT", tmp_path)
    monkeypatch.delenv(library.VARIABLE, raising=False)
    assert library.find.__wrapped__() is None


def test_which_kernels_serve_or_why_none_do_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "compiler", lambda: None)
    for loaded, variable, there, says in (
        (SimpleNamespace(path="avx2"), "", True, "avx2, the best of those built"),
        (SimpleNamespace(path="portable"), "portable", True, "portable, as RACKSERVE_KERNELS says"),
        (None, "none", False, "none, as RACKSERVE_KERNELS says: models are computed with torch"),
        (None, "", False, "no compiler: models are computed with torch, several times slower; install g++, then python -m"),
    ):
        monkeypatch.setenv(library.VARIABLE, variable)
        monkeypatch.setattr(library, "find", lambda found=loaded: found)
        assert library.found()[0] is there and says in library.found()[1]
    monkeypatch.setattr(library, "compiler", lambda: "/usr/bin/g++")
    assert library.found()[1].startswith("none was built for this processor: models") and "install" not in library.found()[1]
