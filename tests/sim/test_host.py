"""Virtual time: order, lives, and a digest that is a function of the inputs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.events import Event, MessageDropped
from rackserve.base.ids import NodeId
from rackserve.base.messages import Cancel, Message, Timeout
from rackserve.base.units import Time
from rackserve.sim.host import SimClock, SimHost, SimRecorder, SimTransport


class Log:
    """A node that notes what it is handed, and when."""

    def __init__(self, host: SimHost) -> None:
        self.host = host
        self.got: list[tuple[Time, Message]] = []

    def handle(self, message: Message) -> None:
        self.got.append((self.host.now, message))


def two_nodes(latency: Time = 0) -> tuple[SimHost, Log, Log]:
    host = SimHost(lambda source, target: latency)
    a, b = Log(host), Log(host)
    host.add("a", a)
    host.add("b", b)
    return host, a, b


def test_messages_arrive_after_the_latency_and_timers_when_they_are_due() -> None:
    host, a, b = two_nodes(5)
    SimTransport(host, "a").send("b", Cancel("x"))
    SimClock(host, "a").call_at(3, Timeout("t", ""))
    host.run()
    assert (a.got, b.got) == ([(3, Timeout("t", ""))], [(5, Cancel("x"))])
    assert SimClock(host, "a").now() == 5
    assert host.num_events == 2


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=20))
def test_messages_of_a_pair_keep_their_order_whatever_the_delays(plan: list[tuple[int, int]]) -> None:
    host, _, b = two_nodes(1)
    host.filter = lambda source, target, message: [plan[int(message.request)][1]]  # type: ignore[attr-defined]
    when = 0
    for number, (gap, _) in enumerate(plan):
        when += gap
        host.call(when, lambda number=number: host.send("a", "b", Cancel(str(number))))  # type: ignore[misc]
    host.run()
    assert [message for _, message in b.got] == [Cancel(str(number)) for number in range(len(plan))]
    assert [now for now, _ in b.got] == sorted(now for now, _ in b.got)


def test_a_lost_message_is_recorded_and_a_doubled_one_comes_twice() -> None:
    host, _, b = two_nodes()
    seen: list[tuple[Time, NodeId, Event]] = []
    host.sinks.append(lambda now, node, event: seen.append((now, node, event)))
    host.filter = lambda source, target, message: [] if message == Cancel("lost") else [0, 4]
    host.send("a", "b", Cancel("lost"))
    host.send("a", "b", Cancel("twice"))
    host.run()
    assert [message for _, message in b.got] == [Cancel("twice")] * 2
    assert seen == [(0, "a", MessageDropped("b", "Cancel", "lost"))]


def test_what_was_meant_for_an_earlier_life_never_arrives() -> None:
    host, _, b = two_nodes(5)
    host.send("a", "b", Cancel("old"))
    SimClock(host, "b").call_at(9, Timeout("old", ""))
    host.remove("b")
    again = Log(host)
    host.add("b", again)
    host.send("a", "b", Cancel("new"))
    host.run()
    assert b.got == []
    assert [message for _, message in again.got] == [Cancel("new")]


def test_events_at_one_instant_run_in_the_order_they_were_asked_for() -> None:
    host, a, _ = two_nodes()
    for number in range(5):
        host.post("a", 7, Cancel(str(number)))
    host.post("a", 3, Cancel("first"))
    host.run()
    assert [message for _, message in a.got] == [Cancel("first"), *(Cancel(str(number)) for number in range(5))]


def test_a_run_stops_at_a_time_a_number_of_events_or_a_condition() -> None:
    host, a, _ = two_nodes()
    for when in range(10):
        host.post("a", when * 10, Cancel(str(when)))
    host.run(until=25)
    assert (len(a.got), host.now) == (3, 25)
    host.run(max_events=2)
    assert len(a.got) == 5
    host.run(done=lambda: len(a.got) == 7)
    assert len(a.got) == 7
    assert not host.is_idle
    host.run()
    assert host.is_idle


def test_nothing_is_delivered_in_the_past() -> None:
    host, a, _ = two_nodes()
    host.call(10, lambda: host.post("a", 3, Cancel("late")))
    host.run()
    assert a.got == [(10, Cancel("late"))]


def test_the_digest_depends_on_what_was_handled_when_and_by_whom() -> None:
    def digest(node: NodeId, when: Time, request: str) -> str:
        host, _, _ = two_nodes()
        host.post(node, when, Cancel(request))
        host.run()
        return host.digest()

    base = digest("a", 1, "x")
    assert base == digest("a", 1, "x")
    assert len({base, digest("b", 1, "x"), digest("a", 2, "x"), digest("a", 1, "y")}) == 4


def test_the_laws_are_looked_at_after_every_event() -> None:
    host, _, _ = two_nodes()
    looks = [0]

    def look() -> None:
        looks[0] += 1

    host.after_event = look
    for when in range(4):
        host.post("a", when, Cancel("x"))
    host.run()
    assert looks == [4]


def test_a_record_carries_time_and_node() -> None:
    host, _, _ = two_nodes()
    seen: list[tuple[Time, NodeId, Event]] = []
    host.sinks.append(lambda now, node, event: seen.append((now, node, event)))
    event = MessageDropped("b", "Cancel", "test")
    host.call(4, lambda: SimRecorder(host, "a").record(event))
    host.run()
    assert seen == [(4, "a", event)]
