from __future__ import annotations

from itertools import pairwise
from statistics import mean

import msgspec
import pytest

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.units import to_ns
from rackserve.bench.open_loop import OpenLoop
from rackserve.bench.plan import Send
from rackserve.bench.session import Subagent
from tests.bench.toys import drive, request, session


def slow(send: Send) -> float:
    return 50.0


def test_every_request_is_sent_at_its_recorded_time_whatever_became_of_those_before() -> None:
    sub = Subagent("x", to_ns(4), to_ns(20), (request(0), request(3)))
    sessions = [session("a", request(1), sub, request(30)), session("b", request(2))]
    plan = OpenLoop(sessions)
    times = drive(plan, slow, fails=lambda key: key.turn == 0)
    sent = {key: at for key, (at, _) in times.items()}
    assert sent == {"a/0/0/0": 1, "b/0/0/0": 2, "a/0/1/0": 4, "a/0/1/1": 7, "a/0/0/1": 30}
    assert (plan.num_finished, plan.num_failed, plan.done) == (2, 3, True)
    assert (plan.measured_from_ns, plan.steady_end_ns) == (0, to_ns(30))
    assert plan.sessions_ended_ns == [to_ns(52), to_ns(80)], "a session ends with its last answer, whichever that is"


def test_sessions_keep_the_distance_at_which_they_began_unless_a_rate_is_given() -> None:
    sessions = [
        msgspec.structs.replace(session(name, request(0), request(7)), start_ns=to_ns(at))
        for name, at in (("a", 3), ("b", 5.5))
    ]
    sent = {key: at for key, (at, _) in drive(OpenLoop(sessions), slow).items()}
    assert sent == {"a/0/0/0": 3, "b/0/0/0": 5.5, "a/0/0/1": 10, "b/0/0/1": 12.5}
    rated = {key: at for key, (at, _) in drive(OpenLoop(sessions, rate=1, arrival="constant"), slow).items()}
    assert rated == {"a/0/0/0": 0, "b/0/0/0": 1, "a/0/0/1": 7, "b/0/0/1": 8}


def test_a_rate_sets_the_distance_of_sessions_and_not_of_their_turns() -> None:
    sessions = [session(f"s{n}", request(10 * n), request(10 * n + 3)) for n in range(4)]
    sent = {key: at for key, (at, _) in drive(OpenLoop(sessions, rate=2, arrival="constant"), slow).items()}
    assert [sent[f"s{n}/0/0/0"] for n in range(4)] == [0, 0.5, 1, 1.5]
    assert all(sent[f"s{n}/0/0/1"] == sent[f"s{n}/0/0/0"] + 3 for n in range(4))


def test_poisson_arrivals_have_the_mean_asked_for_and_depend_on_the_seed() -> None:
    sessions = [session(f"s{n:04}", request(0)) for n in range(2_000)]

    def arrivals(seed: int) -> list[float]:
        times = drive(OpenLoop(sessions, rate=4, seed=seed), lambda send: 1.0)
        return sorted(sent for sent, _ in times.values())

    one = arrivals(1)
    gaps = [after - before for before, after in pairwise(one)]
    assert mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert mean(gap * gap for gap in gaps) == pytest.approx(2 * 0.25**2, rel=0.2), "exponential: E[x^2] = 2 E[x]^2"
    assert one == arrivals(1) != arrivals(2)


def test_a_stop_ends_the_schedule_but_not_what_is_in_flight() -> None:
    plan = OpenLoop([session("a", request(0), request(5), request(9))])
    times = drive(plan, slow, until_s=6)
    assert set(times) == {"a/0/0/0", "a/0/0/1"}
    plan = OpenLoop([session("a", request(0), request(5))])
    plan.start(0)
    [send] = plan.take_due(0)
    plan.stop(to_ns(1))
    assert (plan.next_due, plan.done, plan.steady_end_ns) == (None, False, to_ns(1))
    plan.on_finished(send.key, to_ns(2))
    assert plan.done and plan.sessions_ended_ns == [], "what was cut off has not ended"
    with pytest.raises(InvariantError, match="not in flight"):
        plan.on_failed(send.key, to_ns(3))


def test_senseless_schedules_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one session"):
        OpenLoop([])
    with pytest.raises(ConfigError, match="rate must be above 0"):
        OpenLoop([session("a", request(0))], rate=0)
    with pytest.raises(ConfigError, match="poisson or constant"):
        OpenLoop([session("a", request(0))], rate=1, arrival="bursty")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="same id"):
        OpenLoop([session("a", request(0)), session("a", request(0))])
