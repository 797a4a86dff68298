from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from rackserve.base.errors import ConfigError, FileFormatError, ResourceError
from rackserve.base.events import RankChanged
from rackserve.base.ids import Rank
from rackserve.base.messages import Drain, Drained, Message, RankDown, RankUp, SegmentJoined, SegmentLost
from rackserve.base.topology import Topology
from rackserve.digest_model import digest_layout
from rackserve.live import regions
from rackserve.live import supervisor as supervisor_module
from rackserve.live.rank_spec import BEAT_PERIOD_S
from rackserve.live.supervisor import SupervisorConfig
from tests.e2e.rig import left_behind, shared_memory
from tests.live.processes import SMALL, TinyRack, has_ended, open_memfds, tiny_rack, until

P, D = Rank("prefill0"), Rank("decode0")


def trial(
    test: Callable[[TinyRack], Awaitable[None]], config: SupervisorConfig | None = None, topology: Topology = SMALL
) -> None:
    async def run() -> None:
        async with tiny_rack(topology, config) as rack:
            pids = [status.pid for status in rack.supervisor.status()]
            await test(rack)
            pids += [status.pid for status in rack.supervisor.status() if status.pid]
        assert all(has_ended(pid) for pid in pids)
        assert open_memfds() == []

    asyncio.run(run())


def supervision(rack: TinyRack, node: str) -> list[Message]:
    kinds = RankUp | RankDown | SegmentLost | SegmentJoined
    return [message for message in rack.nodes[node].messages if isinstance(message, kinds)]


def test_everyone_hears_of_every_rank_and_the_pool_of_every_segment() -> None:
    async def test(rack: TinyRack) -> None:
        ups: list[Message] = [RankUp(P, "prefill", 1), RankUp(D, "decode", 1)]
        await until(lambda: len(rack.nodes["api"].texts) == 2 and len(supervision(rack, "pool")) == 4)
        assert supervision(rack, "router") == ups and not supervision(rack, "frontend")
        assert [m for m in supervision(rack, "pool") if isinstance(m, RankUp)] == ups
        joined: list[Message] = [SegmentJoined(0, 4, 0, P), SegmentJoined(1, 4, 0, D)]
        assert [m for m in supervision(rack, "pool") if isinstance(m, SegmentJoined)] == joined
        assert sorted(rack.nodes["api"].texts) == ["decode0: RankUp prefill0 1", "prefill0: RankUp decode0 1"]

    trial(test)


def test_a_killed_rank_is_announced_down_and_comes_back_as_a_new_incarnation_with_new_memory() -> None:
    async def test(rack: TinyRack) -> None:
        first = rack.pid("prefill0")
        await until(lambda: len(supervision(rack, "pool")) == 4)
        os.kill(first, signal.SIGKILL)
        start = time.monotonic()
        await until(lambda: RankDown(P, 1) in supervision(rack, "router"))
        assert time.monotonic() - start < 1.0
        assert has_ended(first)
        assert {file.name for file in rack.regions.table()} == {"arena/decode0.0#1", "segment/1"}
        await until(lambda: len(supervision(rack, "pool")) == 8)
        assert supervision(rack, "router")[2:] == [RankDown(P, 1), RankUp(P, "prefill", 2)]
        assert supervision(rack, "pool")[4:] == [
            RankDown(P, 1),
            SegmentLost(0),
            RankUp(P, "prefill", 2),
            SegmentJoined(2, 4, 0, P),
        ]
        assert {file.name for file in rack.regions.table()} == {
            "arena/decode0.0#1",
            "arena/prefill0.0#2",
            "segment/1",
            "segment/2",
        }
        rack.tell("prefill0", "hello")
        await until(lambda: {"prefill0: hello", "decode0: RankUp prefill0 2"} <= set(rack.nodes["api"].texts))
        texts = rack.nodes["api"].texts
        assert [text for text in texts if text.startswith("decode0")][1:] == [
            "decode0: RankDown prefill0 1",
            "decode0: RankUp prefill0 2",
        ]
        assert texts.index("prefill0: RankUp decode0 1", 2) < texts.index("prefill0: hello")

    trial(test)


def test_ranks_talk_to_each_other_and_reach_each_others_memory_also_after_a_restart() -> None:
    async def test(rack: TinyRack) -> None:
        texts = rack.nodes["api"].messages
        rack.tell("decode0", "pass prefill0 over here")
        await until(lambda: "prefill0: over here" in rack.nodes["api"].texts)
        rack.tell("decode0", "push")
        await until(lambda: "decode0: TransferFinished" in rack.nodes["api"].texts)
        os.kill(rack.pid("prefill0"), signal.SIGKILL)
        await until(lambda: "decode0: RankDown prefill0 1" in rack.nodes["api"].texts)
        texts.clear()
        rack.tell("decode0", "push")
        await until(lambda: "decode0: TransferFailed" in rack.nodes["api"].texts)
        await until(lambda: "decode0: RankUp prefill0 2" in rack.nodes["api"].texts)
        rack.tell("decode0", "push")
        rack.tell("decode0", "pass prefill0 over there")
        await until(lambda: "decode0: TransferFinished" in rack.nodes["api"].texts)
        await until(lambda: "prefill0: over there" in rack.nodes["api"].texts)

    trial(test)


def test_a_rank_whose_handler_raises_says_why_and_is_restarted(capfd: pytest.CaptureFixture[str]) -> None:
    async def test(rack: TinyRack) -> None:
        rack.tell("decode0", "crash")
        await until(lambda: RankUp(D, "decode", 2) in supervision(rack, "router"))

    trial(test)
    error = capfd.readouterr().err
    assert "[decode0] RuntimeError: told to crash" in error and "Traceback" in error


def test_a_frozen_rank_is_killed_and_a_busy_one_is_left_alone() -> None:
    async def test(rack: TinyRack) -> None:
        rack.tell("prefill0", "compute")
        rack.tell("decode0", "freeze")
        await until(lambda: RankUp(D, "decode", 2) in supervision(rack, "router"))
        status = rack.supervisor.status()[0]
        assert (status.state, status.incarnation) == ("up", 1)
        await until(lambda: rack.supervisor.status()[0].step_age > 1.0)
        assert rack.supervisor.status()[0].beat_age < 1.0

    trial(test, SupervisorConfig(heartbeat=1.5))


def test_a_rank_that_never_ends_a_step_is_killed() -> None:
    async def test(rack: TinyRack) -> None:
        rack.tell("prefill0", "compute")
        await until(lambda: RankUp(P, "prefill", 2) in supervision(rack, "router"))
        assert rack.state("decode0") == "up"

    trial(test, SupervisorConfig(step=0.3))


def test_a_rank_that_ends_too_often_stays_down() -> None:
    async def test(rack: TinyRack) -> None:
        os.kill(rack.pid("prefill0"), signal.SIGKILL)
        await until(lambda: rack.supervisor.status()[0].incarnation == 2 and rack.state("prefill0") == "up")
        os.kill(rack.pid("prefill0"), signal.SIGKILL)
        await until(lambda: rack.state("prefill0") == "failed")
        assert rack.supervisor.status()[0].restarts == 1
        assert rack.state("decode0") == "up"
        states = [event.state for event in rack.nodes["api"].events if isinstance(event, RankChanged) and event.rank == P]
        assert states == ["starting", "up", "down", "starting", "up", "down", "failed"]

    trial(test, SupervisorConfig(max_restarts=1))


def test_a_rank_that_does_not_start_shows_its_last_words() -> None:
    async def run() -> None:
        command = (sys.executable, "-S", "-c", "import sys; print('no weights here', file=sys.stderr); sys.exit(3)")
        async with tiny_rack(command=command, start=False) as rack:
            with pytest.raises(FileFormatError, match=r"(?s)rank (prefill|decode)0 ended with exit code 3 .*no weights here"):
                await rack.supervisor.start(0)

    asyncio.run(run())


def test_a_rank_that_is_not_ready_in_time_is_ended_and_the_setting_named() -> None:
    async def run() -> None:
        command = (sys.executable, "-S", "-c", "import sys; sys.stdin.read()")
        async with tiny_rack(config=SupervisorConfig(ready=0.05), command=command, start=False) as rack:
            with pytest.raises(ResourceError, match=r"not ready after 0\.05 s \(setting supervisor\.ready\)"):
                await rack.supervisor.start(0)

    asyncio.run(run())


def test_too_much_memory_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "available_bytes", lambda proc, cgroups: 100)

    async def run() -> None:
        async with tiny_rack(start=False) as rack:
            with pytest.raises(ResourceError, match=r"topology\.segment_blocks"):
                await rack.supervisor.start(0)
            assert [status.pid for status in rack.supervisor.status()] == [0, 0]

    asyncio.run(run())


def test_the_arenas_of_all_ranks_of_a_group_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology(prefill_workers=1, decode_workers=1, prefill_ranks=3, prefill_blocks=8, decode_blocks=4, pool=False)
    needed = (3 * 8 + 4) * digest_layout(4).block_bytes
    monkeypatch.setattr(regions, "available_bytes", lambda proc, cgroups: needed - 1)

    async def run() -> None:
        async with tiny_rack(topology, start=False) as rack:
            with pytest.raises(ResourceError, match="KV needs"):
                await rack.supervisor.start(0)
            monkeypatch.setattr(regions, "available_bytes", lambda proc, cgroups: needed)
            await rack.supervisor.start(0)

    asyncio.run(run())


def test_without_a_pool_there_are_no_segments() -> None:
    async def test(rack: TinyRack) -> None:
        await until(lambda: len(supervision(rack, "router")) == 2)
        assert {file.name for file in rack.regions.table()} == {"arena/prefill0.0#1", "arena/decode0.0#1"}
        assert not [m for m in rack.nodes["pool"].messages if isinstance(m, SegmentJoined)]

    trial(test, topology=Topology(prefill_workers=1, decode_workers=1, prefill_blocks=4, decode_blocks=4, pool=False))


def test_the_ranks_of_a_group_come_and_go_together_each_with_its_own_memory_and_one_segment() -> None:
    ranks = [Rank("decode0", dp_rank) for dp_rank in range(3)]
    arenas = {f"arena/decode0.{dp_rank}" for dp_rank in range(3)}

    async def test(rack: TinyRack) -> None:
        await until(lambda: len(supervision(rack, "pool")) == 6)
        ups: list[Message] = [RankUp(P, "prefill", 1), *(RankUp(rank, "decode", 1) for rank in ranks)]
        assert supervision(rack, "router") == ups
        assert SegmentJoined(1, 4, 0, D) in supervision(rack, "pool")
        assert {file.name for file in rack.regions.table()} == {
            "arena/prefill0.0#1", "segment/0", "segment/1", *(f"{arena}#1" for arena in arenas)
        }  # fmt: skip
        await until(lambda: rack.nodes["api"].texts.count("prefill0: RankUp decode0 1") == 3)
        leader, *followers = rack.supervisor.status()[1].devices
        assert leader == rack.pid("decode0") and len(followers) == 2
        os.kill(followers[1], signal.SIGKILL)
        await until(lambda: len(supervision(rack, "router")) == 10)
        assert supervision(rack, "router")[4:] == [
            *(RankDown(rank, 1) for rank in ranks),
            *(RankUp(rank, "decode", 2) for rank in ranks),
        ]
        assert {file.name for file in rack.regions.table() if file.name.startswith("arena/decode")} == {
            f"{arena}#2" for arena in arenas
        }
        assert all(has_ended(pid) for pid in (leader, *followers))

    trial(test, topology=msgspec.structs.replace(SMALL, decode_ranks=3))


def test_draining_waits_for_the_frontend_but_not_for_ever() -> None:
    async def test(rack: TinyRack) -> None:
        assert not await rack.supervisor.drain(0.01)
        assert rack.nodes["frontend"].messages[-1] == Drain("supervisor")
        draining = asyncio.ensure_future(rack.supervisor.drain(10.0))
        rack.wire.send("frontend", "supervisor", Drained())
        assert await draining

    trial(test)


def test_a_rank_that_ignores_the_polite_request_is_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rack: TinyRack) -> None:
        monkeypatch.setattr(supervisor_module, "KILL_AFTER_S", 0.1)
        os.kill(rack.pid("prefill0"), signal.SIGSTOP)
        start = time.monotonic()
        await rack.supervisor.stop()
        assert time.monotonic() - start < 2.0
        assert [status.state for status in rack.supervisor.status()] == ["stopped", "stopped"]

    trial(test)


@pytest.mark.parametrize("argument", ["", "freeze"])
def test_no_rank_outlives_a_control_process_that_is_killed(argument: str) -> None:
    before = shared_memory()
    command = (sys.executable, "-m", "tests.live.tiny_control", argument)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as control:
        assert control.stdout is not None
        pids = [int(pid) for pid in control.stdout.readline().split()]
        assert len(pids) == 2 and not any(has_ended(pid) for pid in pids)
        mine = [str(pid) for pid in (control.pid, *pids)]
        control.kill()
        control.wait()
    end = time.monotonic() + 2.0
    while not all(has_ended(pid) for pid in pids):
        assert time.monotonic() < end, "a rank outlived its control process"
    assert not left_behind(before, mine)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ready", 0), ("step", math.nan), ("backoff", math.inf), ("ready", 1e300), ("max_restarts", -1),
        ("max_restarts", 10**6), ("heartbeat", 2.9 * BEAT_PERIOD_S), ("heartbeat", math.inf),
    ],
)  # fmt: skip
def test_settings_are_checked_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"supervisor\.{name} must be at"):
        SupervisorConfig(**{name: value})
