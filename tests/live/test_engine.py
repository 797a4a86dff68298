from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from rackserve.assemble import RackConfig, build_worker
from rackserve.base.errors import InvariantError
from rackserve.base.ids import Rank
from rackserve.base.keys import CacheNamespace, extend_chain
from rackserve.base.messages import EngineFailed, HandOver, Reserve, StepFinished, TokensEmitted
from rackserve.base.request import Placement, Request
from rackserve.base.step import GroupStep, ItemResult, Step, StepResult
from rackserve.digest_model import digest_layout
from rackserve.live.engine import ThreadEngine
from rackserve.live.host import LiveHost
from rackserve.live.step_times import StepTimes
from rackserve.nodes.ports import Ports
from rackserve.sched.scheduler import SchedulerConfig
from tests.live.processes import SMALL, Listener, until
from tests.nodes.clock import Notes


class GatedRunner:
    """Waits for a permit before each step; step with a retired sequence 13 fails."""

    layout = digest_layout(4)

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.threads: set[int] = set()
        self.kernel_ns = [0]

    def run(self, step: GroupStep) -> tuple[StepResult, ...]:
        (part,) = step.steps
        assert self.permits.acquire(timeout=10)
        self.threads.add(threading.get_ident())
        if 13 in part.retired:
            raise ValueError("bad luck")
        self.kernel_ns[0] += 1
        return (StepResult(part.dp_rank, ()),)


def step(number: int, *retired: int) -> GroupStep:
    return GroupStep(number, (Step(0, (), retired),))


def trial(test: Callable[[ThreadEngine, GatedRunner, Listener], Awaitable[None]]) -> None:
    async def run() -> None:
        host, node, runner = LiveHost(asyncio.get_running_loop(), pytest.fail), Listener(), GatedRunner()
        host.add("prefill0", node)
        engine = ThreadEngine(host, "prefill0", 1, runner)
        try:
            await test(engine, runner, node)
        finally:
            runner.permits.release(10)
            engine.close()

    asyncio.run(run())


def test_two_steps_may_be_in_flight_and_a_third_is_a_bug() -> None:
    async def test(engine: ThreadEngine, runner: GatedRunner, node: Listener) -> None:
        engine.start(step(1))
        engine.start(step(2))
        with pytest.raises(InvariantError, match="step 3"):
            engine.start(step(3))
        runner.permits.release()
        await until(lambda: node.messages)
        engine.start(step(4))
        runner.permits.release(2)
        await until(lambda: len(node.messages) == 3)
        assert [message.number for message in node.messages if isinstance(message, StepFinished)] == [1, 2, 4]
        assert engine.steps_done == 3

    trial(test)


def test_steps_run_on_one_thread_which_is_not_the_loops() -> None:
    async def test(engine: ThreadEngine, runner: GatedRunner, node: Listener) -> None:
        runner.permits.release(3)
        for number in range(3):
            engine.start(step(number))
            await until(lambda count=number + 1: len(node.messages) == count)
        assert len(runner.threads) == 1 and threading.get_ident() not in runner.threads

    trial(test)


def test_a_failed_step_ends_in_a_message_and_the_next_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(engine: ThreadEngine, runner: GatedRunner, node: Listener) -> None:
        runner.permits.release(2)
        engine.start(step(1, 13))
        engine.start(step(2))
        await until(lambda: len(node.messages) == 2)
        assert node.messages[0] == EngineFailed(1, "ValueError: bad luck")
        assert isinstance(node.messages[1], StepFinished)

    trial(test)
    assert "bad luck" in capsys.readouterr().err


def test_a_running_step_shows_since_when() -> None:
    async def test(engine: ThreadEngine, runner: GatedRunner, node: Listener) -> None:
        assert engine.step_started_ns == 0
        engine.start(step(1))
        await until(lambda: engine.step_started_ns > 0)
        runner.permits.release()
        await until(lambda: node.messages)
        assert engine.step_started_ns == 0
        (end,) = node.messages
        assert isinstance(end, StepFinished) and end.duration_ns > 0

    trial(test)


def test_a_step_must_have_a_part_for_each_rank() -> None:
    async def test(engine: ThreadEngine, runner: GatedRunner, node: Listener) -> None:
        with pytest.raises(InvariantError, match="2 parts for a group of 1"):
            engine.start(GroupStep(1, (Step(0, ()), Step(1, ()))))

    trial(test)


def test_what_of_a_step_is_not_kernels_is_planning_and_only_what_has_requests_waits() -> None:
    async def test(engine: ThreadEngine, runner: GatedRunner, node: Listener) -> None:
        requests: list[str] = []
        engine.has_requests = lambda: bool(requests)
        assert engine.times() == (StepTimes(),)
        engine.start(step(1))
        runner.permits.release()
        await until(lambda: node.messages)
        (end,) = node.messages
        assert isinstance(end, StepFinished)
        engine.look()
        (first,) = engine.times()
        assert first.kernel == 1 and first.plan >= end.duration_ns - 1
        (later,) = engine.times()
        assert later.wait == first.wait  # nobody waits for it
        requests.append("a")
        engine.look()
        (begun,) = engine.times()
        (longer,) = engine.times()
        assert longer.wait > begun.wait >= first.wait
        engine.start(step(2))
        (running,), (still,) = engine.times(), engine.times()
        assert still.wait == running.wait >= longer.wait
        runner.permits.release()
        await until(lambda: len(node.messages) == 2)
        (second,) = engine.times()
        assert second.kernel == 2 and second.wait > still.wait  # the time to the plan of the next step

    trial(test)


class DrawingRunner(GatedRunner):
    """Draws token 7 for every item, at a permit a step."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0

    def run(self, step: GroupStep) -> tuple[StepResult, ...]:
        self.begun += 1
        super().run(step)
        return tuple(
            StepResult(part.dp_rank, tuple(ItemResult(item.sequence, (7,)) for item in part.items)) for part in step.steps
        )


def test_the_next_decode_step_is_planned_while_one_is_computed() -> None:
    async def run() -> None:
        host, runner, notes = LiveHost(asyncio.get_running_loop(), pytest.fail), DrawingRunner(), Notes()
        engine, planned = ThreadEngine(host, "decode0", 1, runner), list[int]()

        class Noting:
            def start(self, step: GroupStep) -> None:
                planned.append(step.number)
                engine.start(step)

            def interrupt(self) -> None:
                raise AssertionError("steps of one pass are not interrupted")

        config = RackConfig(topology=SMALL, scheduler=SchedulerConfig(max_steps_in_flight=2))
        layout, ports = digest_layout(4), Ports(notes, notes, notes, notes, Noting())
        node = build_worker(config, "decode0", "decode", layout, ports, 1)
        host.add("decode0", node)
        engine.has_requests = node.worker.has_requests
        try:
            root = CacheNamespace("digest", "0", 4, layout.fingerprint()).root()
            request = Request("a", "a", bytes(16), extend_chain(b"", root, bytes(16), 4), 4, max_tokens=5, root=root)
            host.post("decode0", Reserve(Placement("a", 1, Rank("prefill0"), Rank("decode0"), 0, 0), request))
            host.post("decode0", HandOver("a", 1, (7,), 0))
            first = None
            for done in range(3):
                await until(lambda begun=done + 1: runner.begun == begun)
                assert len(planned) == done + 2, "the step after the running one is there already"
                assert sum(isinstance(message, TokensEmitted) for _, message in notes.sent) == done
                first = first if first is not None else planned[0]
                assert planned == list(range(first, first + done + 2))
                runner.permits.release()
                await until(lambda sent=done + 1: sum(isinstance(m, TokensEmitted) for _, m in notes.sent) == sent)
            (times,) = engine.times()
            assert times.kernel == 3 and times.plan > 0
        finally:
            runner.permits.release(10)
            engine.close()

    asyncio.run(run())
