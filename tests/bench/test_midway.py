from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.units import Time, to_ns
from rackserve.bench.closed_loop import Replay
from rackserve.bench.midway import Midway
from rackserve.bench.plan import Plan, RequestKey, Send
from rackserve.bench.session import Session, Subagent
from tests.bench.toys import drive, request, session

ANSWER_S = 2.0


def answer_ns(send: Send) -> Time:
    return to_ns(ANSWER_S)


def long_sessions(count: int) -> list[Session]:
    """Each has 40 turns with pauses of 3 s and more, and a subagent."""
    made = []
    for number in range(count):
        pause = 3 + number
        sub = Subagent("x", to_ns(5), to_ns(9), (request(0, 1, (7,)), request(2, 1, (7, 8))))
        turns = [request(turn * (pause + 1), 1, range(1, turn + 2)) for turn in range(40)]
        made.append(session(f"s{number}", turns[0], sub, *turns[1:]))
    return made


def replay(count: int = 3, concurrency: int = 2) -> Replay:
    return Replay(long_sessions(count), concurrency, recycle=True)


@given(st.integers(0, 60), st.integers(0, 1))
@settings(derandomize=True, max_examples=30, deadline=None)
def test_from_joining_on_requests_come_when_they_would_have_without_it(elapsed_s: int, warmup: int) -> None:
    """The naive model: the same plan against answers of the same length all the time."""

    def plan() -> Replay:
        return Replay(long_sessions(3), 2, recycle=True, start_window=(0.1, 0.3), warmup_requests=warmup)

    whole = plan()
    expected = drive(whole, lambda send: ANSWER_S, until_s=120)
    assert whole.measured_from_ns is not None
    joined = whole.measured_from_ns / 1e9 + elapsed_s
    midway = Midway(plan(), to_ns(elapsed_s), answer_ns)
    sent = drive(midway, lambda send: ANSWER_S, until_s=60)
    assert midway.measured_from_ns is not None
    again = {name for name, (start, end) in expected.items() if start <= joined < end}
    for name, (start, _) in sent.items():
        at = start - midway.measured_from_ns / 1e9
        if name in again:
            assert at == pytest.approx(0)
        elif at >= 0 and not again:  # what is sent again shifts what follows it
            assert expected[name][0] == pytest.approx(joined + at, abs=1e-6)


def primers(plan: Plan, now: Time = 0) -> list[Send]:
    plan.start(now)
    return plan.take_due(now)


def test_each_conversation_is_primed_with_its_last_prompt_the_oldest_first() -> None:
    plan = Midway(replay(), to_ns(19), answer_ns)
    sends = primers(plan)
    assert [str(send.key) for send in sends] == ["s0/0/1/1", "s1/0/1/1", "s1/0/0/2", "s0/0/0/3"]
    assert all(send.warmup and send.request.output_tokens == 1 for send in sends)
    assert plan.measured_from_ns is None
    assert plan.next_due is None
    for send in sends:
        plan.on_finished(send.key, to_ns(5))
    assert plan.measured_from_ns == to_ns(5)


def test_conversations_that_were_over_for_longer_than_any_pause_are_not_primed() -> None:
    plan = Midway(Replay(long_sessions(1), 1, recycle=True), to_ns(10 + 300 + 2), answer_ns)
    assert [send.key.tree for send in primers(plan)] == ["s0/0", "s0/1", "s0/1"]
    plan = Midway(Replay(long_sessions(1), 1, recycle=True), to_ns(9 + 300), answer_ns)
    assert [send.key.tree for send in primers(plan)] == ["s0/0", "s0/0", "s0/1", "s0/1"]


def test_only_so_many_are_primed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rackserve.bench.midway.AT_ONCE", 3)
    plan = Midway(replay(), to_ns(19), answer_ns)
    sends = primers(plan)
    assert len(sends) == 3 and plan.next_due is None and plan.take_due(0) == []
    plan.on_finished(sends[1].key, 7)
    assert plan.next_due == 7
    (last,) = plan.take_due(7)
    assert str(last.key) == "s0/0/0/3"
    for send in (sends[0], sends[2], last):
        assert plan.measured_from_ns is None
        plan.on_finished(send.key, 9)
    assert plan.measured_from_ns == 9


def test_what_was_in_flight_is_sent_again_at_once_and_in_full() -> None:
    plan = Midway(replay(), to_ns(1), answer_ns)
    plan.start(to_ns(7))
    assert plan.next_due == plan.measured_from_ns == to_ns(7)
    sends = plan.take_due(to_ns(7))
    assert [str(send.key) for send in sends] == ["s0/0/0/0", "s1/0/0/0"]
    assert all(not send.warmup and send.due_ns == to_ns(7) and send.request.output_tokens == 4 for send in sends)


def test_sessions_that_ended_before_joining_are_not_counted() -> None:
    short = [session(f"s{number}", request(0, 1), request(2, 1)) for number in range(50)]
    plan = Midway(Replay(short, 1), to_ns(12), answer_ns)
    drive(plan, lambda send: ANSWER_S, until_s=30)
    assert plan.measured_from_ns is not None
    assert plan.sessions_ended_ns
    assert min(plan.sessions_ended_ns) > plan.measured_from_ns
    assert plan.steady_end_ns is not None


def test_a_root_prompt_that_fails_ends_the_run_and_another_does_not() -> None:
    plan = Midway(replay(), to_ns(19), answer_ns)
    first, *others = primers(plan)
    plan.on_failed(first.key, 5)
    assert not plan.aborted
    second = others.pop()
    plan.on_failed(second.key, 5)
    assert f"{second.key} failed" in plan.aborted
    for send in others:
        plan.on_failed(send.key, 6)
    assert plan.done
    assert plan.measured_from_ns is None


def test_a_plan_without_sessions_left_is_over_at_once() -> None:
    plan = Midway(Replay([session("a", request(0, 1))], 1), to_ns(400), answer_ns)
    plan.start(0)
    assert plan.done
    assert plan.take_due(0) == []


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        Midway(replay(), -1, answer_ns)
    plan = Midway(replay(), to_ns(20), answer_ns)
    primers(plan)
    with pytest.raises(InvariantError, match="not in flight"):
        plan.on_finished(RequestKey("nobody", 0, 0, 0), 1)
