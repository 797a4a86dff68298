from __future__ import annotations

import msgspec

from rackserve.reproduction import setups
from rackserve.reproduction.figures import published


def test_inputs_of_the_table_are_those_that_set_ups_use() -> None:
    inputs = {name: figure.value for name, figure in published().items() if figure.role == "input"}
    assert inputs == {
        "acceptance": setups.ACCEPTED,
        "speed": setups.SPEED,
        "median-prompt": setups.MEDIAN_PROMPT,
        "rubin-rank-cache": setups.RUBIN_RANK_CACHE / 1e9,
        "gb300-rank-cache": setups.GB300_RANK_CACHE / 1e9,
    }


def test_both_arms_of_a_comparison_differ_in_caches_and_placement_alone() -> None:
    for pair in (setups.three_pairs(), setups.twelve_pairs()):
        pinned, other = pair.values()
        assert (pinned.pool, pinned.policy) == (False, "session_affinity")
        assert (other.pool, other.policy) == (True, "least_uncached_work")
        for name in pinned.__struct_fields__:
            if name not in ("pool", "policy", "rank_cache_bytes"):
                assert getattr(pinned, name) == getattr(other, name)


def test_a_slice_has_its_share_of_the_rack() -> None:
    for setup in (setups.rubin_curve() | setups.gb300_curve()).values():
        assert setup.num_gpus * setups.SLICE == 72
    assert [setup.concurrency * setups.SLICE for setup in setups.rubin_curve().values()] == list(setups.RUBIN_LANES)


def test_every_set_up_has_a_name_of_its_own() -> None:
    curves = (setups.RUBIN_LANES, setups.GB300_LANES, setups.RECIPE_LANES)
    assert len(setups.all_setups()) == 4 + sum(len(lanes) for lanes in curves)


def test_the_recipe_is_whole() -> None:
    assert all(setup.num_gpus == 4 + 16 for setup in setups.gb300_recipe().values())
    assert [setup.concurrency for setup in setups.gb300_recipe().values()] == list(setups.RECIPE_LANES)


def test_other_step_times_change_nothing_else() -> None:
    plain = setups.three_pairs() | setups.twelve_pairs()
    for name, setup in setups.at_step_times().items():
        base, _, kind = name.rpartition("-")
        assert (setup.prefill_time, setup.decode_time) == (setups.STEP_TIMES[kind],) * 2
        assert msgspec.structs.replace(setup, prefill_time=1.0, decode_time=1.0) == plain[base]
