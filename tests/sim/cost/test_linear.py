from __future__ import annotations

import pytest

from rackserve.sim.cost.linear import decode_cost, decode_plane, plane_error, prefill_cost
from rackserve.sim.cost.load import decode_load, prefill_load
from rackserve.sim.cost.step_model import StepModel
from tests.sim.cost.models import flash

DEP16 = flash("gb300", "decode", ep=16)
DEP32 = flash("vr", "decode", ep=32)
PREFILL = flash("vr", "prefill", ep=2)


@pytest.mark.parametrize("model", [DEP16, DEP32], ids=["dep16", "dep32"])
@pytest.mark.parametrize("sequences", [8, 32, 64])
def test_decode_is_nearly_a_plane_in_sequences_and_contexts(model: StepModel, sequences: int) -> None:
    plane = decode_plane(model, sequences, 150_000, 6)
    around = [(sequences * share, context) for share in (0.75, 1, 1.25) for context in (100_000, 150_000, 250_000)]
    assert plane_error(model, plane, 6, [(sequences, 150_000)]) < 1e-9
    assert plane_error(model, plane, 6, around) < 0.02


def test_a_plane_says_how_wrong_it_is_far_away() -> None:
    plane = decode_plane(DEP16, 64, 150_000, 6)
    assert plane_error(DEP16, plane, 6, [(1, 150_000)]) > plane_error(DEP16, plane, 6, [(48, 150_000)])


def test_the_line_of_sixteen_gb300_starts_where_component_times_say() -> None:
    plane = decode_plane(DEP16, 16, 150_000, 6)
    assert plane.base_ns / 1e6 == pytest.approx(7.2 + 2.25, rel=0.03)  # and what a step takes around its kernels


def test_step_costs_of_decode_are_the_plane() -> None:
    cost = decode_cost(DEP16, 32, 150_000, 6)
    plane = decode_plane(DEP16, 32, 150_000, 6)
    assert cost.duration_ns(20 * 6, 10**9, 20, 20 * 100_000) == round(plane.seconds(20, 20 * 100_000) * 1e9)


def test_step_costs_of_prefill_touch_the_model_and_stay_near_it() -> None:
    cost = prefill_cost(PREFILL, 32768, 200_000, 128)
    for tokens, start, bound in (
        (32768, 200_000, 1e-6),
        (20_000, 200_000, 0.01),
        (32768, 100_000, 0.01),
        (16384, 50_000, 0.02),
    ):
        load = prefill_load(tokens, start, 128)
        predicted = cost.duration_ns(tokens, round(load.attended), 1, start)
        assert predicted == pytest.approx(PREFILL.seconds([load]) * 1e9, rel=bound)


def test_without_context_a_plane_has_no_price_for_it() -> None:
    assert decode_plane(DEP16, 8, 0, 1).per_context_token_ns == 0
    assert decode_load(8, 0, 1).mean_context == 1
