from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from rackserve.assemble import RackConfig
from rackserve.base.errors import ResourceError
from rackserve.base.messages import Cancel
from rackserve.digest_model import digest_layout
from rackserve.live.host import LiveHost
from rackserve.live.rank_spec import BEAT_CHANNEL, READY_CHANNEL, Beat, RankSpec
from rackserve.live.regions import RegionOwner, RegionShape
from rackserve.live.runner import RunnerSpec
from rackserve.live.step_times import StepTimes
from rackserve.live.transport import CONTROL, Wire
from tests.live.processes import SMALL, TINY_RANK, Listener, new_meeting, until


class Parent:
    """A control process without supervision: starts one tiny rank and keeps what it says on the channels."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.api = Listener()
        self.beats: list[Beat] = []
        self.ready = False
        meeting = new_meeting()
        host = LiveHost(loop, pytest.fail)
        host.add("api", self.api)
        self.owner = RegionOwner()
        region = self.owner.create("arena/prefill0.0#1", RegionShape.of(digest_layout(4), 4, 0))
        config = RackConfig(topology=SMALL)
        self.spec = RankSpec("prefill0", "prefill", 1, meeting, (region,), digest_layout(4), RunnerSpec(block_tokens=4), config)
        self.wire = Wire(loop, host, meeting, CONTROL, 1, self.spec.workers, self.api.record_drop)
        self.wire.listen(READY_CHANNEL, self._on_ready)
        self.wire.listen(
            BEAT_CHANNEL, lambda process, incarnation, data: self.beats.append(msgspec.msgpack.decode(data, type=Beat))
        )

    def _on_ready(self, process: str, incarnation: int, payload: bytes) -> None:
        self.ready = True
        self.wire.peer_up(process, incarnation)

    def start(self) -> subprocess.Popen[bytes]:
        rank = subprocess.Popen(TINY_RANK, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert rank.stdin is not None
        rank.stdin.write(msgspec.json.encode(self.spec) + b"\n")
        rank.stdin.flush()
        return rank

    def close(self) -> None:
        self.wire.close()
        self.owner.close()


def trial(test: Callable[[Parent, subprocess.Popen[bytes]], Awaitable[None]]) -> None:
    async def run() -> None:
        parent = Parent()
        with parent.start() as rank:
            try:
                await until(lambda: parent.ready)
                await test(parent, rank)
            finally:
                rank.kill()
                parent.close()

    asyncio.run(run())


def test_a_rank_beats_and_tells_how_its_engine_gets_on() -> None:
    async def test(parent: Parent, rank: subprocess.Popen[bytes]) -> None:
        await until(lambda: parent.beats)
        assert parent.beats[0] == Beat(0, 0, times=(StepTimes(),))
        parent.wire.send("api", "prefill0", Cancel("compute"))
        await until(lambda: parent.beats[-1].step_started_ns > 0)

    trial(test)


def test_a_rank_ends_at_once_when_its_standard_input_ends_even_if_it_computes() -> None:
    async def test(parent: Parent, rank: subprocess.Popen[bytes]) -> None:
        parent.wire.send("api", "prefill0", Cancel("compute"))
        await until(lambda: parent.api.texts == ["prefill0: computing"])
        assert rank.stdin is not None
        rank.stdin.close()
        await until(lambda: rank.poll() is not None, 2.0)
        assert rank.returncode == 0

    trial(test)


def test_a_rank_ignores_ctrl_c_and_ends_when_asked_to() -> None:
    async def test(parent: Parent, rank: subprocess.Popen[bytes]) -> None:
        rank.send_signal(signal.SIGINT)
        parent.wire.send("api", "prefill0", Cancel("hello"))
        await until(lambda: parent.api.texts == ["prefill0: hello"])
        rank.send_signal(signal.SIGTERM)
        await until(lambda: rank.poll() is not None, 2.0)
        assert rank.returncode == 0

    trial(test)


def test_what_a_rank_said_before_it_was_asked_to_end_arrives() -> None:
    async def test(parent: Parent, rank: subprocess.Popen[bytes]) -> None:
        parent.wire.send("api", "prefill0", Cancel("goodbye"))
        await until(lambda: rank.poll() is not None, 2.0)
        await until(lambda: len(parent.api.texts) == 500)
        assert parent.api.texts == [f"prefill0: {number}" for number in range(500)]

    trial(test)


def test_a_rank_without_its_memory_says_so_in_one_line() -> None:
    async def run() -> None:
        parent = Parent()
        parent.owner.close()
        with parent.start() as rank:
            assert rank.stderr is not None
            text = await asyncio.to_thread(rank.stderr.read)
            assert rank.wait() == ResourceError.exit_code
        assert text.decode().startswith("ResourceError: region arena/prefill0.0#1 is gone")
        assert text.count(b"\n") == 1
        parent.close()

    asyncio.run(run())


def test_importing_the_program_needs_no_torch() -> None:
    code = "import sys, rackserve.live.engine_main; sys.exit('torch' in sys.modules)"
    assert subprocess.run((sys.executable, "-c", code), check=False).returncode == 0


def test_a_rank_s_process_makes_no_text_of_tokens() -> None:
    """Models cannot name the text side (see the floors); what runs around them reads a tokenizer for a constraint alone."""
    look = (
        "import sys, rackserve.live.engine_main; print([m for m in sys.modules if 'rackserve.text' in m or 'tokenizers' in m])"
    )
    assert subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True).stdout == "[]\n"
