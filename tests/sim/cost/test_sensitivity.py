from __future__ import annotations

import pytest

from rackserve.sim.cost.load import decode_load
from rackserve.sim.cost.sensitivity import GROWTH, changes, scaled, term_mark
from tests.sim.cost.models import flash

MODEL = flash("gb300", "decode", ep=16)
LOAD = decode_load(16, 16 * 150_000, 6)


def test_a_latency_that_alone_makes_a_term_moves_it_by_its_own_share() -> None:
    found = changes(MODEL, [LOAD])
    launches = next(term.seconds for term in MODEL.terms([LOAD]) if term.name == "launches")
    assert found["launch_us"].terms["launches"] == pytest.approx(GROWTH * launches)
    assert found["launch_us"].step >= found["launch_us"].terms["launches"]  # the draft head launches too


def test_the_strongest_coefficient_comes_first_and_unused_ones_do_nothing() -> None:
    found = changes(MODEL, [LOAD])
    sizes = [abs(change.step) for change in found.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert next(iter(found)) == "memory_efficiency" and found["memory_efficiency"].step < 0
    assert found["dense_attention_us"].step == 0


def test_a_coefficient_of_zero_grows_too() -> None:
    kernels = MODEL.setup.kernels
    assert scaled(kernels, "overlap", 1.1).number("overlap") == pytest.approx(0.1)
    assert scaled(kernels, "launch_us", 0.5).number("launch_us") == kernels.number("launch_us") / 2


def test_a_term_is_known_as_well_as_what_it_hangs_on_most() -> None:
    found = changes(MODEL, [LOAD])
    marks = {term.name: term_mark(term.name, found, MODEL.setup.kernels) for term in MODEL.terms([LOAD])}
    assert marks["launches"] == "fitted"
    assert marks["all-to-all"] == "assumed"
    assert marks["residual streams"] == marks["experts"] == "published"
    assert term_mark("no such term", found, MODEL.setup.kernels) == "published"
