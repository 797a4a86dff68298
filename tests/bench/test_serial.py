from __future__ import annotations

import pytest

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.units import to_ns
from rackserve.bench.plan import RequestKey
from rackserve.bench.serial import SerialReplay
from rackserve.bench.session import Subagent
from tests.bench.toys import drive, request, session


def test_one_request_at_a_time_in_trace_order_without_pauses() -> None:
    sub = Subagent("x", to_ns(5), to_ns(20), (request(0, 1), request(10, 1)))
    plan = SerialReplay([session("a", request(0, 1), sub, request(8, 1)), session("b", request(3, 1))])
    times = drive(plan, lambda send: 2.0, fails=lambda key: key.stream == 1)
    assert list(times) == ["a/0/0/0", "a/0/1/0", "a/0/0/1", "a/0/1/1", "b/0/0/0"]
    assert list(times.values()) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
    assert (plan.num_finished, plan.num_failed, plan.done) == (3, 2, True)
    assert plan.sessions_ended_ns == [to_ns(8), to_ns(10)]


def test_stopping_sends_nothing_more() -> None:
    plan = SerialReplay([session("a", request(0, 1), request(5, 1))])
    assert list(drive(plan, lambda send: 2.0, until_s=1)) == ["a/0/0/0"]
    assert plan.sessions_ended_ns == []
    with pytest.raises(InvariantError, match="not in flight"):
        plan.on_finished(RequestKey("a", 0, 0, 0), 9)
    with pytest.raises(ConfigError, match="at least one session"):
        SerialReplay([])
