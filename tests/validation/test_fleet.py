from __future__ import annotations

import pytest

from rackserve.base.units import NS_PER_S
from rackserve.pool.planner import FetchRates
from rackserve.route.placement import POLICIES
from rackserve.validation.engine import Ask, Limits
from rackserve.validation.fleet import Fleet, Served, total_hits
from tests.validation.test_engine import PerToken, ask

PULL = FetchRates(prefill_tokens_per_s=1_000.0, fetch_bytes_per_s=160_000.0, block_bytes=16, latency_ns=NS_PER_S // 1_000)
"""A block takes 0.1 ms to pull after 1 ms, and 16 ms to compute."""


def fleet(policy: str, num_engines: int = 2, *, pull: FetchRates | None = None, blind: bool = False) -> Fleet:
    return Fleet(num_engines, Limits(100, 4, 512), PerToken(), POLICIES[policy](), pull=pull, blind=blind)


def test_a_request_alone_takes_its_passes() -> None:
    (served,) = fleet("round_robin").run([(2.0, ask(1, (1, 2), outputs=3))])
    assert served.arrived_s == 2.0 and served.ttft_s == pytest.approx(0.034)
    assert served.last_s == pytest.approx(2.038)


def test_round_robin_computes_a_prefix_on_every_engine_and_least_work_on_one() -> None:
    arrivals = [(float(number), ask(number, (1, 2, 3))) for number in range(4)]
    assert total_hits(fleet("round_robin").run(arrivals)) == pytest.approx(2 * 48 / (4 * 49))
    assert total_hits(fleet("least_uncached_work").run(arrivals)) == pytest.approx(3 * 48 / (4 * 49))


def test_booked_work_drives_requests_apart_unless_the_policy_is_blind() -> None:
    warm = [(0.0, ask(0, (1, 2, 3)))]
    together = [(1.0 + number / 1e6, ask(number, (1, 2, 3, *range(10 * number, 10 * number + 9)))) for number in (1, 2)]
    spread, kept = (fleet("least_uncached_work", blind=blind).run([*warm, *together]) for blind in (False, True))
    assert len({each.engine for each in spread if each.ask.number}) == 2
    assert len({each.engine for each in kept if each.ask.number}) == 1


def test_a_prefix_is_pulled_where_that_is_shorter_than_computing_it() -> None:
    arrivals = [(0.0, ask(1, (1, 2, 3))), (1.0, ask(2, (1, 2, 3)))]
    first, second = fleet("round_robin", pull=PULL).run(arrivals)
    assert first.engine != second.engine and second.cached_tokens == 48
    assert second.ttft_s == pytest.approx(0.0013 + 0.002)


def test_an_engine_pulls_one_prefix_at_a_time() -> None:
    fleet_of_two = fleet("round_robin", pull=PULL)
    fleet_of_two.run([(0.0, ask(1, (1, 2, 3)))])  # engine 0 has it
    found = fleet_of_two.run([(1.0, ask(2, (1, 2, 3))), (1.0, ask(3, (9,))), (1.0, ask(4, (1, 2, 3)))])
    starts = {each.ask.number: each.first_s for each in found if each.engine == 1}
    assert starts[4] > starts[2] >= 1.0033


def test_what_ends_gives_rise_to_what_follows() -> None:
    def follow(done: Served) -> list[tuple[float, Ask]]:
        return [(done.last_s + 1.0, ask(done.ask.number + 1, (1,)))] if done.ask.number < 3 else []

    served = fleet("round_robin").run([(0.0, ask(1, (1,)))], follow)
    assert [each.ask.number for each in served] == [1, 2, 3]
    assert served[2].arrived_s == pytest.approx(served[1].last_s + 1.0)
    assert len(fleet("round_robin").run([(0.0, ask(1, (1,)))], follow, until_s=0.5)) == 1
