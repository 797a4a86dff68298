from __future__ import annotations

from hashlib import sha256

import pytest

from rackserve.bench.draw import first_unit, start_share

KNOWN = {
    0: 0.6369616873214543,
    42: 0.7739560485559633,
    2**32: 0.8897387912781343,
    2**64 - 1: 0.6800266789616931,
}
"""First draws of NumPy's default generator."""


@pytest.mark.parametrize(("seed", "drawn"), KNOWN.items())
def test_the_first_draw_is_the_one_numpy_makes(seed: int, drawn: float) -> None:
    assert first_unit(seed) == drawn


def test_many_first_draws_are_the_ones_numpy_makes() -> None:
    numpy = pytest.importorskip("numpy")
    seeds = [int.from_bytes(sha256(str(n).encode()).digest()[: 1 + n % 8], "big") for n in range(300)]
    assert [first_unit(seed) for seed in seeds] == [float(numpy.random.default_rng(seed).random()) for seed in seeds]


def test_a_lane_draws_by_seed_session_and_lane() -> None:
    seed = int.from_bytes(sha256(b"42:trace_7:3").digest()[:8], "big")
    assert start_share(42, "trace_7", 3) == first_unit(seed)
    assert len({start_share(s, name, lane) for s in (1, 2) for name in ("a", "b") for lane in (0, 1)}) == 8
