from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from rackserve.base.errors import InvariantError
from rackserve.base.messages import EngineFailed, StepFinished
from rackserve.base.step import GroupStep, Step, StepResult
from rackserve.digest_model import digest_layout
from rackserve.live.engine import ThreadEngine
from rackserve.live.host import LiveHost
from tests.live.processes import Listener, until


class GatedRunner:
    """Waits for a permit before each step; step with a retired sequence 13 fails."""

    layout = digest_layout(4)

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.threads: set[int] = set()

    def run(self, step: Step) -> StepResult:
        assert self.permits.acquire(timeout=10)
        self.threads.add(threading.get_ident())
        if 13 in step.retired:
            raise ValueError("bad luck")
        return StepResult(step.dp_rank, ())


def step(number: int, *retired: int) -> GroupStep:
    return GroupStep(number, (Step(0, (), retired),))


def trial(test: Callable[[ThreadEngine, GatedRunner, Listener], Awaitable[None]]) -> None:
    async def run() -> None:
        host, node, runner = LiveHost(asyncio.get_running_loop(), pytest.fail), Listener(), GatedRunner()
        host.add("prefill0", node)
        engine = ThreadEngine(host, "prefill0", 1, lambda step: (runner.run(step.steps[0]),))
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
