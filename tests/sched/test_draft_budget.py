from __future__ import annotations

import math
from itertools import pairwise, product
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.sched.draft_budget import (
    POLICIES,
    UNMEASURED,
    Adaptive,
    CostTable,
    DraftCosts,
    Drafted,
    VerifyAll,
    acceptance,
    fit_costs,
)

FEW = settings(derandomize=True, max_examples=150, deadline=None)
CHANCES = st.lists(st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.7, 0.9, 1.0]), max_size=3).map(tuple), max_size=3).map(tuple)
DRAFTED = st.builds(Drafted, CHANCES, st.integers(0, 5), st.integers(0, 3), st.integers(0, 7))


def table(steps: list[tuple[int, float]]) -> CostTable:
    """Points from (tokens, seconds) increments."""
    tokens, seconds, points = 0, 1.0, []
    for more, slower in steps:
        tokens, seconds = tokens + more, seconds + slower
        points.append((tokens, seconds))
    return CostTable(tuple(points))


STEPS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.0, 0.01, 0.1, 0.4, 2.0])), min_size=1, max_size=5)
TABLES = STEPS.map(table)
CONVEX = STEPS.map(lambda steps: table(sorted(steps, key=lambda step: step[1] / step[0])))


def rate(drafted: Drafted, costs: DraftCosts, verify: CostTable, counts: tuple[int, ...]) -> float:
    """Expected tokens per second, by the definition."""
    expected = sum(
        1 + sum(math.prod(chances[: draft + 1]) for draft in range(count))
        for chances, count in zip(drafted.acceptance, counts, strict=True)
    )
    tokens = drafted.other_tokens + len(counts) + sum(counts)
    return expected / (costs.draft.at(sum(bool(chances) for chances in drafted.acceptance)) + verify.at(tokens))


def choices(drafted: Drafted) -> list[tuple[int, ...]]:
    """Every prefix-closed choice within the limits."""
    limits = [range(min(len(chances), drafted.max_drafts) + 1) for chances in drafted.acceptance]
    return [counts for counts in product(*limits) if sum(counts) <= drafted.budget]


@FEW
@given(DRAFTED, TABLES, CONVEX)
def test_adaptive_gives_most_tokens_per_second_of_all_choices(drafted: Drafted, draft: CostTable, verify: CostTable) -> None:
    costs = DraftCosts(draft, verify)
    counts = tuple(Adaptive().choose(drafted, costs))
    possible = choices(drafted)
    assert counts in possible
    if counts:
        assert rate(drafted, costs, verify, counts) >= max(rate(drafted, costs, verify, c) for c in possible) * (1 - 1e-12)


@FEW
@given(DRAFTED, TABLES, TABLES, st.sampled_from([0.0, 1.0]))
def test_where_all_survive_alike_adaptive_is_best_with_any_costs(
    shape: Drafted, draft: CostTable, verify: CostTable, chance: float
) -> None:
    alike = tuple(tuple(chance for _ in chances) for chances in shape.acceptance)
    drafted = Drafted(alike, shape.other_tokens, shape.max_drafts, shape.budget)
    costs = DraftCosts(draft, verify)
    counts = tuple(Adaptive().choose(drafted, costs))
    if counts:
        assert rate(drafted, costs, verify, counts) >= max(rate(drafted, costs, verify, c) for c in choices(drafted)) * (
            1 - 1e-12
        )


def naive(drafted: Drafted, costs: DraftCosts) -> list[int]:
    """The rule of `Adaptive` over a sorted list of slots, trying every number of further drafts."""
    slots = []
    for number, chances in enumerate(drafted.acceptance):
        survivals = [math.prod(chances[: draft + 1]) for draft in range(min(len(chances), drafted.max_drafts))]
        slots += [(-survival, position, number) for position, survival in enumerate(survivals)]
    slots.sort()
    most, base = min(len(slots), drafted.budget), len(drafted.acceptance) + drafted.other_tokens
    cost = [costs.draft.at(sum(bool(c) for c in drafted.acceptance)) + costs.verify.at(base + n) for n in range(most + 1)]
    taken, expected = 0, float(len(drafted.acceptance))
    while taken < most:
        survival = -slots[taken][0]
        if max((expected + survival * (n - taken)) / cost[n] for n in range(taken + 1, most + 1)) <= expected / cost[taken]:
            break
        taken, expected = taken + 1, expected + survival
    return [sum(1 for _, _, owner in slots[:taken] if owner == number) for number in range(len(drafted.acceptance))]


@FEW
@given(DRAFTED, TABLES, TABLES)
def test_with_any_costs_drafts_are_taken_while_more_as_likely_would_pay(
    drafted: Drafted, draft: CostTable, verify: CostTable
) -> None:
    costs = DraftCosts(draft, verify)
    counts = Adaptive().choose(drafted, costs)
    assert tuple(counts) in choices(drafted)
    assert counts == naive(drafted, costs)


@FEW
@given(DRAFTED, TABLES, TABLES, st.data())
def test_choosing_a_draft_looks_at_no_later_draft_of_its_sequence(
    drafted: Drafted, draft: CostTable, verify: CostTable, data: st.DataObject
) -> None:
    # The chance of a draft may depend on the values of those before it: were they chosen by it, sampled output would be bent.
    costs = DraftCosts(draft, verify)
    counts = Adaptive().choose(drafted, costs)
    for number, chances in enumerate(drafted.acceptance):
        for position in range(len(chances)):
            later = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
            changed = tuple(later if at > position else chance for at, chance in enumerate(chances))
            others = (*drafted.acceptance[:number], changed, *drafted.acceptance[number + 1 :])
            again = Adaptive().choose(Drafted(others, drafted.other_tokens, drafted.max_drafts, drafted.budget), costs)
            assert (again[number] > position) == (counts[number] > position)


@FEW
@given(DRAFTED)
def test_all_takes_every_draft_the_limits_allow_first_drafts_first(drafted: Drafted) -> None:
    counts = VerifyAll().choose(drafted, UNMEASURED)
    limits = [min(len(chances), drafted.max_drafts) for chances in drafted.acceptance]
    slots = sorted((position, number) for number, limit in enumerate(limits) for position in range(limit))[: drafted.budget]
    assert counts == [sum(1 for _, taken in slots if taken == number) for number in range(len(limits))]


def test_equal_survivals_are_taken_by_lowest_position_then_lowest_sequence() -> None:
    chances = ((1.0, 1.0), (1.0, 1.0))
    found = [Adaptive().choose(Drafted(chances, 0, 2, budget), UNMEASURED) for budget in range(5)]
    assert found == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_without_sequences_or_drafts_or_room_nothing_is_verified(policy: type[Adaptive] | type[VerifyAll]) -> None:
    assert policy().choose(Drafted((), 4, 5, 9), UNMEASURED) == []
    assert policy().choose(Drafted(((), ()), 4, 5, 9), UNMEASURED) == [0, 0]
    assert policy().choose(Drafted(((0.5,), ()), 4, 0, 9), UNMEASURED) == [0, 0]
    assert policy().choose(Drafted(((0.5,), (1.0,)), 4, 5, -1), UNMEASURED) == [0, 0]


def test_where_tokens_cost_nothing_every_draft_with_a_chance_is_verified_and_no_other() -> None:
    assert Adaptive().choose(Drafted(((0.01, 0.0, 1.0), (0.0,), (1.0, 1.0)), 3, 5, 99), UNMEASURED) == [1, 0, 2]


def test_drafting_dear_or_passes_dear_shift_the_number_verified() -> None:
    drafted = Drafted(((0.9, 0.6, 0.4),), 0, 5, 99)
    steep, flat = CostTable(((1, 1.0), (2, 1.8))), CostTable(((1, 1.0), (2, 1.2)))
    cheap, dear = CostTable(((1, 0.01),)), CostTable(((1, 9.0),))
    assert Adaptive().choose(drafted, DraftCosts(cheap, steep)) == [1]
    assert Adaptive().choose(drafted, DraftCosts(dear, steep)) == [3]
    assert Adaptive().choose(drafted, DraftCosts(cheap, flat)) == [2]


def test_drafting_costs_by_the_sequences_drafted_for() -> None:
    costs = DraftCosts(CostTable(((1, 0.01), (2, 9.0))), CostTable(((2, 1.0), (3, 1.8))))
    assert Adaptive().choose(Drafted(((0.9, 0.6, 0.4), ()), 0, 5, 99), costs) == [0, 0]
    assert Adaptive().choose(Drafted(((0.9, 0.6, 0.4), (0.0,)), 0, 5, 99), costs) == [2, 0]


def test_a_dip_is_crossed_only_if_what_lies_behind_may_be_worth_it() -> None:
    stair = DraftCosts(CostTable(((1, 0.1),)), CostTable(((1, 1.0), (2, 1.7), (4, 1.7))))
    assert Adaptive().choose(Drafted(((0.5, 0.9, 0.9),), 0, 5, 99), stair) == [3]
    assert Adaptive().choose(Drafted(((0.5, 0.9, 0.9),), 0, 1, 99), stair) == [0]
    assert Adaptive().choose(Drafted(((0.2, 0.9, 0.9),), 0, 5, 99), stair) == [0]


@pytest.mark.parametrize("chance", [math.nan, -0.1, 1.1, math.inf])
def test_what_is_no_chance_is_refused(chance: float) -> None:
    with pytest.raises(InvariantError, match="acceptance of sequence 1"):
        Drafted(((0.5,), (0.5, chance)), 0, 5, 9)


@FEW
@given(TABLES, st.integers(0, 30))
def test_a_table_is_linear_between_its_points_flat_before_and_goes_on_beyond(costs: CostTable, number: int) -> None:
    points = costs.points
    if number <= points[0][0] or len(points) == 1:
        expected = points[0][1]
    else:
        (low, fast), (high, slow) = next((pair for pair in pairwise(points) if number <= pair[1][0]), points[-2:])
        expected = fast + (slow - fast) * (number - low) / (high - low)
    assert costs.at(number) == pytest.approx(expected, rel=1e-12)
    assert costs.at(number) <= costs.at(number + 1)


@pytest.mark.parametrize(
    "points",
    [
        (),
        ((1, 0.0),),
        ((1, math.nan),),
        ((1, math.inf),),
        ((-1, 1.0),),
        ((1, 1.0), (1, 2.0)),
        ((2, 1.0), (1, 2.0)),
        ((1, 2.0), (2, 1.0)),
    ],
)
def test_a_table_that_is_no_cost_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ConfigError, match="points of a cost table"):
        CostTable(points)


def test_fitted_costs_are_medians_by_number_and_neighbours_out_of_order_share_their_mean() -> None:
    samples = [(4, 3.0), (1, 1.0), (1, 9.0), (1, 1.1), (2, 2.0), (3, 1.4), (3, 1.4), (3, 1.4)]
    points = fit_costs(samples).points
    assert points == ((1, 1.1), (2, pytest.approx(1.55)), (3, pytest.approx(1.55)), (4, 3.0))


@FEW
@given(st.lists(st.tuples(st.integers(1, 6), st.floats(0.1, 10.0)), min_size=1, max_size=20))
def test_fitted_costs_never_fall_and_are_nearest_to_the_medians(samples: list[tuple[int, float]]) -> None:
    points = fit_costs(samples).points
    numbers = sorted({number for number, _ in samples})
    groups = {n: [seconds for number, seconds in samples if number == n] for n in numbers}
    assert [number for number, _ in points] == numbers
    for at, (number, seconds) in enumerate(points):  # the known closed form of the nearest rising sequence

        def mean(first: int, last: int) -> float:
            part = [groups[n] for n in numbers[first : last + 1]]
            return sum(median(group) * len(group) for group in part) / sum(map(len, part))

        closed = max(min(mean(first, last) for last in range(at, len(numbers))) for first in range(at + 1))
        assert seconds == pytest.approx(closed), number


@pytest.mark.parametrize("samples", [[], [(1, math.nan)], [(1, 1.0), (2, 0.0)], [(3, math.inf)]])
def test_costs_are_not_fitted_to_nothing_or_to_what_is_no_time(samples: list[tuple[int, float]]) -> None:
    with pytest.raises(ConfigError):
        fit_costs(samples)


def test_chances_are_the_sigmoid_of_the_confidence_by_the_temperature_of_its_position() -> None:
    assert acceptance([0.0, 2.0, -2.0]) == pytest.approx((0.5, 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))))
    assert acceptance([2.0, 2.0], [1.0, 2.0, 9.0]) == pytest.approx(acceptance([2.0, 1.0]))
    assert acceptance([1e4, -1e4]) == (1.0, 0.0)
    assert acceptance([]) == ()


@pytest.mark.parametrize("temperatures", [[1.0], [1.0, 0.0], [1.0, math.nan], [1.0, -1.0]])
def test_temperatures_that_fit_no_position_are_refused(temperatures: list[float]) -> None:
    with pytest.raises(ConfigError, match="confidence temperatures"):
        acceptance([1.0, 2.0], temperatures)
