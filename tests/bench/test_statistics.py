from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from rackserve.bench.statistics import Interval, bootstrap, paired, saturation


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def run(chance: Random, count: int, level: float = 0.0) -> dict[str, float]:
    return {f"s{n}": chance.gauss(level, 1) for n in range(count)}


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    chance, hits = Random(1), 0
    for number in range(200):
        found = bootstrap([run(chance, 40)], mean, 100, number)
        assert found is not None and found.low <= found.estimate <= found.high
        hits += found.low <= 0 <= found.high
    assert 160 <= hits <= 194, "nine in ten"


def test_pairs_see_a_difference_that_two_means_would_hide() -> None:
    chance = Random(3)
    second = [run(chance, 20, level=10 * chance.random()) for _ in range(5)]
    first = [{name: value + 0.2 + 0.05 * chance.random() for name, value in each.items()} for each in second]
    found = paired(first, second, mean)
    assert found is not None and not found.difference.low <= 0 <= found.difference.high and found.num_agreeing == 5
    assert found.difference.low > 0.19 and found.difference.high < 0.26
    alone = bootstrap(first, mean)
    assert alone is not None and alone.high - alone.low > 1, "between seeds the level moves far more than that"


def test_equal_runs_differ_by_nothing_and_their_ratio_is_one() -> None:
    runs = [{"a": 2.0, "b": 4.0}, {"a": 1.0, "c": 3.0}]
    found = paired(runs, runs, mean)
    assert found is not None and found.ratio is not None
    assert found.difference == Interval(0.0, 0.0, 0.0) and found.ratio == Interval(1.0, 1.0, 1.0)
    assert found.difference.low <= 0 <= found.difference.high and found.num_agreeing == 0


def test_a_run_without_the_figure_has_no_interval() -> None:
    assert bootstrap([{"a": 1.0}, {}], mean) is None
    assert paired([{"a": 1.0}], [{}], mean) is None
    zero = paired([{"a": 1.0}], [{"a": 0.0}], mean)
    assert zero is not None and zero.ratio is None
    with pytest.raises(ValueError, match="as many first runs as second"):
        paired([{"a": 1.0}], [], mean)


def test_the_same_seed_draws_the_same_interval() -> None:
    runs = [run(Random(7), 10), run(Random(8), 10)]
    assert bootstrap(runs, mean, seed=1) == bootstrap(runs, mean, seed=1) != bootstrap(runs, mean, seed=2)


@pytest.mark.parametrize(
    ("utilisation", "waiting", "label"),
    [
        (0.5, (0, 9, 99), "STABLE"),
        (0.97, (50, 40, 52), "SATURATED"),
        (0.97, (50, 60, 90), "OVERLOADED"),
        (0.99, (), "SATURATED"),
        (0.99, (0.0, 0.4, 0.9), "SATURATED"),
    ],
)
def test_a_rack_is_overloaded_only_if_it_is_full_and_more_and_more_wait(
    utilisation: float, waiting: tuple[float, ...], label: str
) -> None:
    assert saturation(utilisation, waiting) == label
