from __future__ import annotations

import asyncio
import os
import signal
from array import array
from collections.abc import Awaitable, Callable

import pytest

from rackserve.assemble import RackConfig
from rackserve.base.errors import ConfigError
from rackserve.base.events import RankChanged, RequestEnded, StepDone
from rackserve.base.ids import FRONTEND
from rackserve.base.keys import CacheNamespace, extend_chain
from rackserve.base.messages import Message, Output, Submit
from rackserve.base.request import Request
from rackserve.base.topology import Topology
from rackserve.digest_model import cold_output
from rackserve.live.rack import LiveRack
from rackserve.live.recorder import Recorded
from rackserve.live.runner import RunnerSpec
from tests.live.processes import has_ended, open_memfds, until

BLOCK_TOKENS = 4
CONFIG = RackConfig(
    topology=Topology(
        prefill_workers=2,
        decode_workers=1,
        prefill_blocks=64,
        decode_blocks=64,
        segment_blocks=64,
        rank_windows=32,
        segment_windows=32,
    )
)


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


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + index * index) % 64 for index in range(length)]


def trial(test: Callable[[LiveRack, list[Recorded]], Awaitable[None]], *, window: bool = False) -> None:
    recorded: list[Recorded] = []

    async def run() -> None:
        async with LiveRack(CONFIG, RunnerSpec(block_tokens=BLOCK_TOKENS, window=window), sinks=[recorded.append]) as rack:
            pids = list(rack.pids.values())
            await test(rack, recorded)
            pids += rack.pids.values()
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


def test_groups_of_ranks_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"topology\.decode_ranks is 2.*simulate"):
        LiveRack(RackConfig(topology=Topology(decode_ranks=2)), RunnerSpec())


def test_a_layout_the_topology_cannot_serve_is_refused_before_anything_starts() -> None:
    async def run() -> None:
        topology = Topology(prefill_workers=1, decode_workers=1, rank_windows=0)
        async with LiveRack(RackConfig(topology=topology), RunnerSpec(window=True)):
            pytest.fail("it started")

    with pytest.raises(ConfigError, match="rank_windows"):
        asyncio.run(run())
