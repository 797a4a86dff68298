from __future__ import annotations

import msgspec
import pytest

from rackserve.simulated_rack import FACTORS, SimulatedSetup
from rackserve.whatif.grid import Variant
from rackserve.whatif.points import point_of
from rackserve.whatif.runs import ResultRow
from rackserve.whatif.sensitivity import STEPS, analyse, choose, varied_setups
from tests.whatif.small import SETUP, row

FAST = Variant("fast", SETUP)
WIDE = Variant("wide", msgspec.structs.replace(SETUP, pool=False))


def rows(variants: list[Variant]) -> dict[SimulatedSetup, ResultRow]:
    """Wide does more work unless prefill takes 15 % longer, but is slow; more memory bandwidth makes both faster."""
    made = {}
    for setup in [v.setup for v in variants] + varied_setups(variants):
        work = 1_000 if setup.pool else round(1_200 / max(1, setup.prefill_time) ** 1.5)
        made[setup] = row(setup, work, (5 if setup.pool else 12) / setup.memory_bandwidth)
    return made


def test_the_choice_is_the_most_work_among_those_fast_enough() -> None:
    made = rows([FAST, WIDE])
    results = [point_of(variant, made, 1, intervals=False) for variant in (FAST, WIDE)]
    slow = choose(results, 50)
    assert slow is not None and (slow.label, slow.runner_up) == ("wide", "fast")
    assert slow.lead == pytest.approx(1.2) and not slow.is_close
    quick = choose(results, 150)
    assert quick is not None and (quick.label, quick.lead, quick.runner_up) == ("fast", None, "")
    assert choose(results, 500) is None
    cheap = choose(results, 50, by_cost=True)
    assert cheap is not None and cheap.lead == 1 and cheap.is_close, "both end as many requests"


def test_it_says_where_the_choice_flips_and_how_far_points_move() -> None:
    variants = [FAST, WIDE]
    chosen, found, bands = analyse(variants, rows(variants), 50)
    assert chosen is not None and chosen.label == "wide"
    assert [(v.group, v.factor) for v in found] == [(group, factor) for group in FACTORS for factor in STEPS]
    assert [(v.group, v.factor) for v in found if v.flips] == [("prefill_time", 1.2)]
    assert bands[SETUP].interactivity == pytest.approx((160, 240)) and bands[SETUP].per_gpu[0] == bands[SETUP].per_gpu[1]
    low, high = bands[WIDE.setup].per_gpu
    assert low < high


def test_a_variation_that_cannot_run_counts_as_no_choice_and_leaves_no_band() -> None:
    made = rows([FAST])
    broken = msgspec.structs.replace(SETUP, cache_size=0.8)
    made[broken] = msgspec.structs.replace(made[broken], figures=None, error="too large")
    _, found, bands = analyse([FAST], made, 50)
    assert [(v.group, v.factor, v.choice) for v in found if v.flips] == [("cache_size", 0.8, None)]
    assert not bands


def test_a_choice_between_two_that_are_as_good_does_not_flip() -> None:
    twin = Variant("twin", msgspec.structs.replace(SETUP, prefill_tokens=9_999))
    made = rows([FAST, twin])
    for setup in made:
        if setup.prefill_tokens == 9_999:
            made[setup] = row(setup, 1_010 if setup.cache_size > 1 else 1_030 if setup.cache_size < 1 else 995, 5)
    chosen, found, _ = analyse([FAST, twin], made, 50)
    assert chosen is not None and chosen.label == "fast" and chosen.is_close
    assert [(v.group, v.factor) for v in found if v.flips] == [("cache_size", 0.8), ("cache_size", 0.9)]
    assert {v.choice.label for v in found if v.choice and v.group == "cache_size"} == {"twin"}
