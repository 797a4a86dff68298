from __future__ import annotations

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
    assert len(setups.all_setups()) == 4 + len(setups.RUBIN_LANES) + len(setups.GB300_LANES)
