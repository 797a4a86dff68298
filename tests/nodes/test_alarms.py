"""Alarms against a plain dictionary of what is set."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.messages import Timeout
from rackserve.nodes.alarms import Alarms
from tests.nodes.clock import Notes

OPS = st.one_of(
    st.tuples(st.just("set"), st.integers(1, 20), st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 1)),
    st.tuples(st.just("clear"), st.just(0), st.just(""), st.sampled_from("xy"), st.integers(0, 1)),
    st.tuples(st.just("advance"), st.integers(1, 8), st.just(""), st.just(""), st.just(0)),
)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(OPS, max_size=40))
def test_each_alarm_that_is_not_cleared_rings_once_when_it_is_due(ops: list[tuple[str, int, str, str, int]]) -> None:
    notes, rung = Notes(), []
    alarms = Alarms(notes, lambda timeout: rung.append((timeout.kind, timeout.key, timeout.attempt)))
    model: dict[tuple[str, str, int], int] = {}
    for name, number, kind, key, attempt in ops:
        if name == "set":
            model[kind, key, attempt] = notes.time + number
            alarms.set(notes.time + number, Timeout(kind, key, attempt))
        elif name == "clear":
            model = {entry: when for entry, when in model.items() if entry[1:] != (key, attempt)}
            alarms.clear(key, attempt)
        else:
            for time in range(notes.time + 1, notes.time + number + 1):
                for _ in notes.advance(time):
                    alarms.wake()
            due = {entry: when for entry, when in model.items() if when <= notes.time}
            assert sorted(rung) == sorted(due)
            assert [due[entry] for entry in rung] == sorted(due.values())
            model = {entry: when for entry, when in model.items() if entry not in due}
            rung.clear()
        assert len(alarms) == len(model)
        assert len({when for when, _ in notes.timers}) == len(notes.timers)


def test_cleared_alarms_leave_no_trace_behind() -> None:
    notes = Notes()
    alarms = Alarms(notes, lambda timeout: None)
    for number in range(10_000):
        alarms.set(1_000_000 + number, Timeout("long", str(number)))
        alarms.clear(str(number))
    assert len(alarms._heap) < 100
    assert len(notes.timers) == 1


def test_an_alarm_may_be_set_again_while_it_rings() -> None:
    notes, rung = Notes(), []

    def ring(timeout: Timeout) -> None:
        rung.append(notes.time)
        if len(rung) < 3:
            alarms.set(notes.time + 5, timeout)

    alarms = Alarms(notes, ring)
    alarms.set(5, Timeout("k", "x"))
    for time in range(1, 30):
        for _ in notes.advance(time):
            alarms.wake()
    assert rung == [5, 10, 15]
