from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import msgspec
import pytest

from rackserve.base.events import MessageDropped, RankChanged, StepDone
from rackserve.base.ids import Rank
from rackserve.live import recorder as recorder_module
from rackserve.live.host import LiveHost
from rackserve.live.recorder import EVENTS_CHANNEL, BatchRecorder, FanOut, JsonlFile, NodeRecorder, Recorded
from rackserve.live.transport import CONTROL, Wire
from tests.live.processes import Listener, new_meeting, until


def step_done(number: int) -> StepDone:
    return StepDone(Rank("prefill0"), number, 1, 2, 3, 1, 1, 1000)


class Setup:
    """A control process and a rank process with their wires, both in this process."""

    def __init__(self) -> None:
        loop, meeting = asyncio.get_running_loop(), new_meeting()
        self.seen: list[Recorded] = []
        self.fan_out = FanOut([self.seen.append])
        host = LiveHost(loop, pytest.fail)
        self.control = Wire(loop, host, meeting, CONTROL, 1, ("prefill0",), Listener().record_drop)
        self.control.listen(EVENTS_CHANNEL, self.fan_out.take_batch)
        self.rank = Wire(loop, host, meeting, "prefill0", 1, ("prefill0",), Listener().record_drop)
        self.recorder = BatchRecorder(loop, self.rank, "prefill0")

    def numbers(self) -> list[int]:
        return [recorded.event.number for recorded in self.seen if isinstance(recorded.event, StepDone)]

    def close(self) -> None:
        self.rank.close()
        self.control.close()


def test_events_of_a_rank_arrive_in_order_with_their_time_and_node() -> None:
    async def trial() -> None:
        setup = Setup()
        setup.rank.peer_up(CONTROL, 1)
        start = time.monotonic_ns()
        for number in range(450):
            setup.recorder.record(step_done(number))
        end = time.monotonic_ns()
        await until(lambda: len(setup.seen) == 450)
        assert setup.numbers() == list(range(450))
        times = [recorded.t for recorded in setup.seen]
        assert times == sorted(times) and start <= times[0] and times[-1] <= end
        assert {recorded.node for recorded in setup.seen} == {"prefill0"}
        setup.close()

    asyncio.run(trial())


def test_events_wait_when_the_wire_is_down_and_a_loss_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def trial() -> None:
        monkeypatch.setattr(recorder_module, "BUFFER_LIMIT", 10)
        setup = Setup()
        for number in range(14):
            setup.recorder.record(step_done(number))
        setup.recorder.flush()  # nobody to send to: kept
        setup.rank.peer_up(CONTROL, 1)
        setup.recorder.flush()
        await until(lambda: len(setup.seen) == 11)
        assert setup.numbers() == list(range(10))
        assert setup.seen[0].event == MessageDropped("prefill0", "Event", "4 events: the recorder was full")
        setup.recorder.record(step_done(99))
        setup.recorder.flush()
        await until(lambda: len(setup.seen) == 12)
        setup.close()

    asyncio.run(trial())


def test_each_sink_gets_each_event_of_the_control_process() -> None:
    one: list[Recorded] = []
    two: list[Recorded] = []
    NodeRecorder(FanOut([one.append, two.append]), "router").record(step_done(1))
    assert one == two
    assert (one[0].node, one[0].event) == ("router", step_done(1))


def test_a_line_of_the_event_file_has_time_node_and_the_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = JsonlFile(path)
    event = RankChanged(Rank("decode0"), "up", 2)
    file(Recorded(5, "supervisor", event))
    file(Recorded(6, "prefill0", step_done(3)))
    file.close()
    first, second = path.read_text().splitlines()
    assert first.startswith('{"t":5,"node":"supervisor","type":"RankChanged"')
    assert msgspec.json.decode(first, type=RankChanged) == event
    assert json.loads(second)["number"] == 3


def test_the_event_file_is_on_disk_after_some_lines_without_being_closed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = JsonlFile(path)
    for number in range(recorder_module.FLUSH_LINES):
        file(Recorded(number, "prefill0", step_done(number)))
    assert len(path.read_text().splitlines()) == recorder_module.FLUSH_LINES
    file.close()


def test_a_full_disk_ends_the_file_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    sink = JsonlFile(Path("/dev/full"))
    event = Recorded(1, "router", MessageDropped("router", "Place", "x" * 5_000))
    for _ in range(10):
        sink(event)
    sink.close()
    assert [record.message for record in caplog.records] == [
        "/dev/full: No space left on device; no more events are written there"
    ]
