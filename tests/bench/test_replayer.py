from __future__ import annotations

import heapq

from rackserve.base.ids import FRONTEND
from rackserve.base.keys import CacheNamespace
from rackserve.base.messages import Cancel, Message, Output, Submit
from rackserve.base.request import Usage
from rackserve.base.units import to_ns
from rackserve.bench.closed_loop import Replay
from rackserve.bench.ideal import IdealCache
from rackserve.bench.metrics import summarize
from rackserve.bench.plan import IdleCaps, Plan
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.records import RunInfo
from rackserve.bench.replayer import Replayer
from rackserve.bench.serial import SerialReplay
from rackserve.bench.session import Session
from tests.bench.toys import request, session

SPACE = CacheNamespace("m", "r", 8, "l")


class ToyHost:
    """Clock, transport and a frontend that answers each request with two chunks, 1 s and 2 s after it came."""

    def __init__(self, plan: Plan, refuse: str = "", hold: str = "") -> None:
        self.time = 0
        self.heap: list[tuple[int, int, Message]] = []
        self.sent: list[Message] = []
        self.refuse, self.hold = refuse, hold
        self.replayer = Replayer("client", plan, RequestMaker(SPACE), IdealCache(8), self, self)

    def now(self) -> int:
        return self.time

    def call_at(self, when: int, message: Message) -> None:
        heapq.heappush(self.heap, (max(when, self.time), len(self.sent) * 100 + len(self.heap), message))

    def send(self, to: str, message: Message) -> None:
        assert to == FRONTEND
        self.sent.append(message)
        if not isinstance(message, Submit) or message.request.id == self.hold:
            return
        made, half = message.request, message.request.max_tokens // 2
        assert message.reply_to == "client"
        if made.id == self.refuse:
            self.call_at(self.time + to_ns(1), Output(made.id, 0, (), error="overloaded", detail="full"))
            return
        self.call_at(self.time + to_ns(1), Output(made.id, 0, (7,) * half))
        usage = Usage(made.num_tokens, 8 if "/1" in made.id[-2:] else 0, made.max_tokens)
        self.call_at(
            self.time + to_ns(2), Output(made.id, half, (7,) * (made.max_tokens - half), "length", usage=usage, attempts=2)
        )

    def run(self) -> None:
        self.replayer.start()
        while self.heap:
            self.time, _, message = heapq.heappop(self.heap)
            self.replayer.handle(message)


def sessions() -> list[Session]:
    return [
        session("a", request(0, 1, (1, 2)), request(6, 1, (1, 2, 3, 4), outputs=6)),
        session("b", request(3, 1, (1, 2, 3))),
    ]


def test_the_node_sends_what_the_plan_says_and_records_what_came_back() -> None:
    host = ToyHost(Replay(sessions(), 2))
    host.run()
    assert host.replayer.done
    records = {record.id: record for record in host.replayer.records}
    second = records["a/0/0/1"]
    assert (second.due_ns, second.sent_ns) == (to_ns(2 + 5), to_ns(7)), "5 s after the END of the first answer"
    assert (second.first_ns, second.last_ns, second.ended_ns) == (to_ns(8), to_ns(9), to_ns(9))
    assert (second.prompt_tokens, second.cached_tokens, second.output_tokens, second.received_tokens) == (16, 8, 6, 6)
    assert (second.ideal_cached_tokens, second.trace_blocks, second.trace_block_hits, second.attempts) == (8, 4, 2, 2)
    assert records["b/0/0/0"].sent_ns == 0, "a session begins with its first request, whenever that was recorded"
    summary = summarize(RunInfo("x", "simulated", 2, 1), host.replayer.records)
    assert (summary.num_done, summary.valid, summary.hit_rate, summary.ideal_hit_rate) == (3, True, 8 / 36, 8 / 36)


def test_output_length_is_forced_and_end_of_sequence_ignored() -> None:
    host = ToyHost(SerialReplay(sessions()))
    host.run()
    submits = [message.request for message in host.sent if isinstance(message, Submit)]
    assert [(made.id, made.max_tokens, made.ignore_eos) for made in submits] == [
        ("a/0/0/0", 4, True), ("a/0/0/1", 6, True), ("b/0/0/0", 4, True)
    ]  # fmt: skip


def test_an_error_is_a_record_and_the_session_goes_on() -> None:
    host = ToyHost(Replay(sessions(), 1, caps=IdleCaps()), refuse="a/0/0/0")
    host.run()
    first, *others = sorted(host.replayer.records, key=lambda record: record.id)
    assert (first.error, first.detail, first.first_ns) == ("overloaded", "full", -1)
    assert [record.error for record in others] == ["", ""]
    assert host.replayer.done


def test_stopping_cancels_what_is_in_flight_and_counts_it_as_unfinished() -> None:
    host = ToyHost(Replay(sessions(), 2), hold="a/0/0/0")
    host.run()
    assert not host.replayer.done
    host.replayer.stop()
    assert host.replayer.done
    assert host.sent[-1] == Cancel("a/0/0/0")
    assert {record.id: record.error for record in host.replayer.records} == {"b/0/0/0": "", "a/0/0/0": "unfinished"}
    host.replayer.handle(Output("a/0/0/0", 0, (1,), "cancelled"))
    assert len(host.replayer.records) == 2, "a late answer is nobody's"
