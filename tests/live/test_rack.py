from __future__ import annotations

import asyncio
import os
import signal
from array import array
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from rackserve.assemble import RackConfig
from rackserve.base.errors import ConfigError
from rackserve.base.events import RankChanged, RequestEnded, StepDone
from rackserve.base.ids import FRONTEND, Rank
from rackserve.base.keys import CacheNamespace, extend_chain
from rackserve.base.messages import Message, Output, Submit
from rackserve.base.request import Request
from rackserve.base.topology import Topology
from rackserve.digest_model import cold_output
from rackserve.live.rack import LiveRack
from rackserve.live.rank_spec import RankStatus
from rackserve.live.recorder import Recorded
from rackserve.live.runner import RunnerSpec
from tests.live.processes import has_ended, open_memfds, until

BLOCK_TOKENS = 4
TOPOLOGY = Topology(
    prefill_workers=2,
    decode_workers=1,
    prefill_blocks=64,
    decode_blocks=64,
    segment_blocks=64,
    rank_windows=32,
    segment_windows=32,
)
CONFIG = RackConfig(topology=TOPOLOGY)


class Client:
    """Node `api`: asks for outputs and collects them."""

    def __init__(self, rack: LiveRack) -> None:
        self._rack = rack
        self._outputs: dict[str, list[Output]] = {}
        rack.add_node("api", self)

    def handle(self, message: Message) -> None:
        assert isinstance(message, Output)
        self._outputs[message.request].append(message)

    async def ask(self, name: str, tokens: list[int], max_tokens: int = 8) -> list[int]:
        """The output tokens of a request; fails if it ends in an error."""
        data = array("i", tokens).tobytes()
        root = CacheNamespace("digest", "0", BLOCK_TOKENS, self._rack.layout.fingerprint()).root()
        chain = extend_chain(b"", root, data, BLOCK_TOKENS)
        outputs = self._outputs.setdefault(name, [])
        request = Request(name, "session", data, chain, len(tokens), max_tokens, ignore_eos=True, root=root)
        self._rack.transport_for("api").send(FRONTEND, Submit(request, "api"))
        await until(lambda: outputs and (outputs[-1].finish or outputs[-1].error))
        assert outputs[-1].error is None, outputs[-1].detail
        return [token for output in outputs for token in output.tokens]


def devices(rack: LiveRack) -> list[int]:
    return [pid for status in rack.status() for pid in status.devices]


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + index * index) % 64 for index in range(length)]


def trial(
    test: Callable[[LiveRack, list[Recorded]], Awaitable[None]], *, window: bool = False, topology: Topology = TOPOLOGY
) -> None:
    recorded: list[Recorded] = []

    async def run() -> None:
        config, runner = RackConfig(topology=topology), RunnerSpec(block_tokens=BLOCK_TOKENS, window=window)
        async with LiveRack(config, runner, sinks=[recorded.append]) as rack:
            pids = devices(rack)
            assert len(pids) == topology.num_devices
            await test(rack, recorded)
            pids += devices(rack)
        assert len(pids) >= 3 and all(has_ended(pid) for pid in pids)
        assert open_memfds() == []

    asyncio.run(run())


@pytest.mark.parametrize("window", [False, True])
def test_outputs_equal_those_of_a_cold_server_also_when_a_rank_is_killed_meanwhile(window: bool) -> None:
    async def test(rack: LiveRack, recorded: list[Recorded]) -> None:
        client = Client(rack)
        prompts = {f"r{number}": prompt(number // 3, 20 + 5 * (number % 3)) for number in range(12)}

        async def check(name: str) -> None:
            tokens = prompts[name]
            assert await client.ask(name, tokens) == cold_output(array("i", tokens).tobytes(), 8, window=window)

        await asyncio.gather(*(check(f"r{number}") for number in range(6)))
        os.kill(rack.pids["prefill0"], signal.SIGKILL)
        await asyncio.gather(*(check(f"r{number}") for number in range(6, 12)))
        await until(lambda: rack.status()[0].state == "up")
        ended = [item.event for item in recorded if isinstance(item.event, RequestEnded)]
        assert sorted(event.request for event in ended) == sorted(prompts)
        await until(lambda: {item.node for item in recorded if isinstance(item.event, StepDone)} >= {"decode0", "prefill1"})
        assert rack.dropped.keys() <= {"the process is not up", "sent by prefill0, which is down"}

    trial(test, window=window)


WIDE: list[tuple[dict[str, int], str, int]] = [
    ({"prefill_ranks": 2}, "prefill0", 1),
    ({"prefill_ranks": 2}, "prefill0", 0),
    ({"decode_ranks": 2}, "decode0", 1),
    ({"decode_ranks": 2, "prefill_tp": 2}, "prefill0", 1),
    ({"decode_ranks": 2, "decode_tp": 2}, "decode0", 3),
    ({"prefill_tp": 2, "decode_ranks": 2}, "decode0", 0),
]
"""What is widened, and the device (of a worker) that is killed."""


@pytest.mark.parametrize(("widths", "worker", "device"), WIDE)
def test_groups_answer_like_a_cold_server_and_come_back_whole_when_a_device_is_killed(
    widths: dict[str, int], worker: str, device: int
) -> None:
    topology = msgspec.structs.replace(TOPOLOGY, prefill_workers=1, **widths)

    async def test(rack: LiveRack, recorded: list[Recorded]) -> None:
        client = Client(rack)
        prompts = {f"r{number}": prompt(number // 2, 20 + 5 * (number % 3)) for number in range(12)}

        async def check(name: str) -> None:
            tokens = prompts[name]
            assert await client.ask(name, tokens) == cold_output(array("i", tokens).tobytes(), 8, window=True)

        def status() -> RankStatus:
            return next(status for status in rack.status() if status.worker == worker)

        def is_back() -> bool:
            return status().state == "up" and status().incarnation == 2

        await asyncio.gather(*(check(f"r{number}") for number in range(6)))
        before = status().devices
        os.kill(before[device], signal.SIGKILL)
        await asyncio.gather(*(check(f"r{number}") for number in range(6, 12)))
        await until(is_back)
        assert len(status().devices) == len(before) and not set(status().devices) & set(before)
        await until(lambda: all(map(has_ended, before)))
        changes = [(item.event.rank, item.event.state) for item in recorded if isinstance(item.event, RankChanged)]
        for dp_rank in range(topology.group_size(status().role)):
            states = [state for rank, state in changes if rank == Rank(worker, dp_rank)]
            assert states == ["starting", "up", "down", "starting", "up"]
        await asyncio.gather(*(check(f"r{number}") for number in range(6)))

    trial(test, window=True, topology=topology)


def test_an_idle_rack_drains_at_once() -> None:
    async def test(rack: LiveRack, recorded: list[Recorded]) -> None:
        assert await rack.drain(5.0)
        assert [status.state for status in rack.status()] == ["up"] * 3

    trial(test)


def test_an_error_in_a_control_node_ends_the_rack_with_that_error_and_no_process_is_left() -> None:
    pids: list[int] = []

    class Broken:
        def handle(self, message: Message) -> None:
            raise RuntimeError("broken node")

    async def run() -> None:
        async with LiveRack(CONFIG, RunnerSpec(block_tokens=BLOCK_TOKENS)) as rack:
            pids.extend(rack.pids.values())
            rack.add_node("api", Broken())
            rack.transport_for("api").send("api", Output("r", 0, ()))
            await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="broken node"):
        asyncio.run(run())
    assert len(pids) == 3 and all(has_ended(pid) for pid in pids)


def test_a_rack_that_is_cancelled_leaves_nothing_behind() -> None:
    pids: list[int] = []
    recorded: list[Recorded] = []

    async def run() -> None:
        async with LiveRack(CONFIG, RunnerSpec(block_tokens=BLOCK_TOKENS), sinks=[recorded.append]) as rack:
            pids.extend(rack.pids.values())
            await asyncio.Event().wait()

    async def cancel() -> None:
        task = asyncio.ensure_future(run())
        await until(lambda: pids)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # an impatient second Ctrl-C
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert all(has_ended(pid) for pid in pids)
    assert [item.event.state for item in recorded if isinstance(item.event, RankChanged)].count("stopped") == 3


def test_a_layout_the_topology_cannot_serve_is_refused_before_anything_starts() -> None:
    async def run() -> None:
        topology = Topology(prefill_workers=1, decode_workers=1, rank_windows=0)
        async with LiveRack(RackConfig(topology=topology), RunnerSpec(window=True)):
            pytest.fail("it started")

    with pytest.raises(ConfigError, match="rank_windows"):
        asyncio.run(run())
