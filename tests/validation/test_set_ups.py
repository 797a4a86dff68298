from __future__ import annotations

from rackserve.validation.set_ups import SET_UPS, run_set_up, run_set_ups


def test_a_set_run_in_a_process_of_its_own_comes_to_the_same() -> None:
    assert list(run_set_ups(("lengths",))) == run_set_up("lengths")


def test_every_published_measurement_without_a_file_is_there() -> None:
    assert set(SET_UPS) == {"pool", "routing", "prefixes", "lengths", "documents"}
