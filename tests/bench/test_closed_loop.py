from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.units import to_ns
from rackserve.bench.closed_loop import Replay
from rackserve.bench.plan import IdleCaps, RequestKey, Send
from rackserve.bench.session import Session, Subagent, TraceRequest
from tests.bench.toys import drive, request, session

NO_CAPS = IdleCaps(to_ns(1e6), to_ns(1e6))


def one(send: Send) -> float:
    return 1.0


def test_a_pause_counts_from_the_end_of_the_previous_response() -> None:
    plan = Replay([session("a", request(0, 2), request(10, 2), request(13, 2))], 1, caps=NO_CAPS)
    assert drive(plan, lambda send: 5.0) == {"a/0/0/0": (0, 5), "a/0/0/1": (13, 18), "a/0/0/2": (19, 24)}


def test_concurrency_counts_trees_and_the_next_session_starts_when_one_has_drained() -> None:
    sub = Subagent("x", to_ns(1), to_ns(90), (request(0, 1), request(4, 1)))
    sessions = [session("a", request(0, 1), sub), session("b", request(0, 1)), session("c", request(0, 1))]
    plan = Replay(sessions, 2, caps=NO_CAPS)
    times = drive(plan, one)
    assert times["b/0/0/0"] == (0, 1)
    assert times["c/0/0/0"] == (1, 2)
    assert times["a/0/1/1"] == (5, 6), "a background subagent keeps its lane until it has ended"
    assert plan.steady_end_ns == to_ns(2), "the first lane that finds no session ends the steady window"
    assert (plan.num_finished, plan.num_failed, plan.done) == (5, 0, True)
    assert plan.sessions_ended_ns == [to_ns(1), to_ns(2), to_ns(6)]


@pytest.mark.parametrize(("answer_s", "turn_at"), [(1.0, 30.0), (20.0, 64.0)])
def test_a_turn_waits_for_its_pause_and_for_the_subagents_it_joins(answer_s: float, turn_at: float) -> None:
    sub = Subagent("x", to_ns(4), to_ns(20), (request(0, 1), request(3, 1)))
    times = drive(Replay([session("a", request(0, 1), sub, request(30, 1))], 1, caps=NO_CAPS), lambda send: answer_s)
    # pause 29 s after the first answer; the subagent starts 3 s after it and needs two answers with 2 s between them
    assert times["a/0/0/1"][0] == max(answer_s + 29, answer_s + 3 + 2 * answer_s + 2)
    assert answer_s == 1.0 or times["a/0/0/1"][0] == turn_at + 1


def test_all_timers_of_an_idle_tree_move_forward_together() -> None:
    sub = Subagent("x", to_ns(501), to_ns(9999), (request(0, 1),))
    caps = IdleCaps(to_ns(300), to_ns(1e6))
    times = drive(Replay([session("a", request(0, 1), sub, request(601, 1))], 1, caps=caps), one)
    assert times["a/0/1/0"][0] == 1 + 300, "the first timer of the idle tree fires after the cap"
    assert times["a/0/0/1"][0] == 1 + 400, "the other keeps its distance to it"


def test_a_busy_tree_is_not_idle() -> None:
    sub = Subagent("x", to_ns(1), to_ns(9999), (request(0, 1),))
    caps = IdleCaps(to_ns(300), to_ns(1e6))
    times = drive(
        Replay([session("a", request(0, 1), sub, request(601, 1))], 1, caps=caps), lambda send: 250 if send.key.stream else 1
    )
    assert times["a/0/0/1"][0] == 251 + 300, "idle time starts when the tree's last request ends"


def test_all_timers_move_when_the_whole_system_is_idle() -> None:
    sessions = [session("a", request(0, 1), request(101, 1)), session("b", request(0, 1), request(121, 1))]
    times = drive(Replay(sessions, 2, caps=IdleCaps(to_ns(300), to_ns(10))), one)
    assert times["a/0/0/1"] == (11, 12)
    assert times["b/0/0/1"] == (22, 23), "20 s after a's turn was due, again cut to 10 s of idle time"


def test_recycling_goes_round_with_a_new_play_number_until_stopped() -> None:
    sessions = [session("a", request(0, 1)), session("b", request(0, 1)), session("c", request(0, 1), request(2, 1))]
    plan = Replay(sessions, 2, caps=NO_CAPS, recycle=True)
    times = drive(plan, one, until_s=6)
    assert sorted(times, key=lambda key: (times[key], key)) == [
        "a/0/0/0", "b/0/0/0", "a/1/0/0", "c/0/0/0", "b/1/0/0", "c/0/0/1", "c/1/0/0", "a/2/0/0", "b/2/0/0", "c/1/0/1"
    ]  # fmt: skip
    assert plan.done
    assert plan.steady_end_ns == to_ns(6), "all lanes were live up to the stop"


def test_a_failed_turn_ends_like_any_other() -> None:
    sub = Subagent("x", to_ns(1), to_ns(5), (request(0, 1),))
    sessions = [session("a", request(0, 1), sub, request(6, 1))]
    plan = Replay(sessions, 1, caps=NO_CAPS)
    failing = drive(plan, one, fails=lambda key: True)
    assert failing == drive(Replay(sessions, 1, caps=NO_CAPS), one)
    assert (plan.num_finished, plan.num_failed) == (0, 3)


def test_an_end_that_was_not_in_flight_is_a_bug() -> None:
    plan = Replay([session("a", request(0, 1), request(5, 1))], 1)
    plan.start(0)
    [send] = plan.take_due(0)
    plan.on_finished(send.key, 1)
    with pytest.raises(InvariantError, match="a/0/0/0 ended but is not in flight"):
        plan.on_finished(send.key, 2)


def test_senseless_replays_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Replay([], 1)
    with pytest.raises(ConfigError, match="at least 1"):
        Replay([session("a", request(0))], 0)
    for wrong in (-1, 1):
        with pytest.raises(ConfigError, match=r"warmup_requests = -?1 must be at least 0, and needs a start window"):
            Replay([session("a", request(0))], 1, warmup_requests=wrong)
    with pytest.raises(ConfigError, match="same id"):
        Replay([session("a", request(0)), session("a", request(0))], 1)


def test_a_start_window_warms_what_is_under_way_and_then_goes_on_from_there() -> None:
    sub = Subagent("x", to_ns(30), to_ns(85), (request(0, 1), request(50, 1)))  # turns at 30 and 80
    gone = Subagent("y", to_ns(20), to_ns(24), (request(0, 1),))
    late = Subagent("z", to_ns(52), to_ns(54), (request(0, 1),))
    entries = (request(0, 10), gone, sub, late, request(60, 10), request(90, 10))
    plan = Replay([session("a", *entries)], 1, caps=NO_CAPS, start_window=(0.5, 0.5))  # at 45 of 90 s
    sends: list[Send] = []

    def answer(send: Send) -> float:
        sends.append(send)
        return 2.0 if send.warmup else 1.0

    times = drive(plan, answer)
    warm = {str(send.key): send.request.output_tokens for send in sends if send.warmup}
    assert warm == {"a/0/0/0": 1, "a/0/2/0": 1}, "the last turn before the point of each conversation under way, one token"
    assert times["a/0/3/0"][0] == 2, "the soonest of all waits for nothing: the clock starts when the warm-ups have ended"
    assert times["a/0/0/1"][0] == 2 + (60 - 52)
    assert times["a/0/2/1"][0] == 2 + (80 - 52)
    assert times["a/0/0/2"][0] == max(11 + 20, 31), "joins the subagent that had ended before it"
    assert plan.measured_from_ns == to_ns(2)
    assert "a/0/1/0" not in times


def test_the_starting_point_depends_on_the_seed_and_lies_in_the_window() -> None:
    sessions = [session(str(n), *(request(at, 1) for at in range(0, 100, 10))) for n in range(8)]

    def first_turns(seed: int) -> list[int]:
        plan = Replay(sessions, 8, caps=NO_CAPS, start_window=(0.25, 0.75), seed=seed)
        plan.start(0)
        return [send.key.turn for send in plan.take_due(0)]

    assert first_turns(1) == first_turns(1) != first_turns(2)
    assert all(2 <= turn <= 6 for turn in first_turns(1))


def test_further_warm_up_requests_go_on_without_pauses_up_to_the_quota_of_each_lane() -> None:
    long = session("a", *(request(at, 1) for at in range(0, 1_000, 100)))  # starts at 450: turns 5 to 9 are left
    short = session("b", *(request(at, 1) for at in (0, 10, 20)))  # starts at 10: turns 1 and 2 are left
    plan = Replay(
        [long, short, session("c", request(0, 1), request(50, 1))], 2, caps=NO_CAPS, start_window=(0.5, 0.5), warmup_requests=3
    )
    sends: list[Send] = []

    def answer(send: Send) -> float:
        sends.append(send)
        return 1.0

    times = drive(plan, answer)
    warm = [str(send.key) for send in sends if send.warmup]
    assert sorted(warm[:2]) == ["a/0/0/4", "b/0/0/0"], "first the last turns before the starting points"
    assert sorted(warm[2:]) == ["a/0/0/5", "a/0/0/6", "a/0/0/7", "b/0/0/1", "b/0/0/2", "c/0/0/0"]
    assert times["a/0/0/5"] == (1, 2) and times["a/0/0/7"] == (3, 4), "without pauses"
    assert times["c/0/0/0"] == (3, 4), "a lane that drains while warming up takes the next session"
    assert plan.measured_from_ns == to_ns(4)
    assert {send.request.output_tokens for send in sends if send.warmup} == {1}
    assert times["c/0/0/1"][0] == 4, "its pause of 49 s is the shortest, so it goes first"
    assert times["a/0/0/8"][0] == 4 + (800 - 450) - 49, "the others keep the recording's clock"


def test_a_failed_warm_up_of_a_root_ends_the_run_and_one_of_a_subagent_does_not() -> None:
    sub = Subagent("x", to_ns(10), to_ns(90), (request(0, 1), request(70, 1)))
    sessions = [session("a", request(0, 1), sub, request(100, 1))]
    plan = Replay(sessions, 1, caps=NO_CAPS, start_window=(0.5, 0.5))
    assert set(drive(plan, one, fails=lambda key: key.stream == 0)) == {"a/0/0/0", "a/0/1/0"}
    assert plan.aborted == "the warm-up request a/0/0/0 failed"
    assert plan.measured_from_ns is None
    plan = Replay(sessions, 1, caps=NO_CAPS, start_window=(0.5, 0.5))
    times = drive(plan, one, fails=lambda key: key.stream == 1)
    assert (plan.aborted, len(times)) == ("", 4)


@st.composite
def trees(draw: st.DrawFn) -> list[Session]:
    def turns(count: int) -> list[TraceRequest | Subagent]:
        at, made = 0, []
        for _ in range(count):
            at += draw(st.integers(0, 40))
            made.append(request(at, draw(st.integers(0, 5))))
        return list(made)

    made: list[Session] = []
    for number in range(draw(st.integers(1, 4))):
        entries = turns(draw(st.integers(1, 4)))
        for _ in range(draw(st.integers(0, 3))):
            place = draw(st.integers(0, len(entries)))
            at = max((e.end_ns for e in entries[:place]), default=0)
            inner = turns(draw(st.integers(1, 3)))
            entries.insert(place, Subagent("x", at, at + to_ns(draw(st.integers(0, 60))), tuple(inner)))
        made.append(session(f"s{number}", *entries))
    return made


@settings(derandomize=True, max_examples=120, deadline=None)
@given(trees(), st.integers(1, 3), st.booleans(), st.integers(0, 9))
def test_every_request_is_sent_once_whatever_the_shape_and_never_more_trees_than_allowed(
    sessions: list[Session], concurrency: int, window: bool, salt: int
) -> None:
    plan = Replay(sessions, concurrency, start_window=(0.2, 0.9) if window else None)
    live: set[str] = set()

    def answer(send: Send) -> float:
        assert plan.num_lanes <= concurrency
        live.add(send.key.tree)
        return float((send.key.turn * 7 + send.key.stream * 3 + salt) % 6)

    times = drive(plan, answer, fails=lambda key: plan.measured_from_ns is not None and (key.turn + salt) % 5 == 0)
    total = sum(s.num_requests for s in sessions)
    assert live == {f"{s.id}/0" for s in sessions}
    assert len(times) == plan.num_finished + plan.num_failed
    assert len(times) <= total if window else len(times) == total
    for key, (sent, _) in times.items():
        name, play, stream, turn = key.split("/")
        before = times.get(str(RequestKey(name, int(play), int(stream), int(turn) - 1)))
        assert before is None or sent >= before[1], "a turn never starts before the one before it has ended"
