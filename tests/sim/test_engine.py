"""The modelled engine: steps one after another, each with one end."""

from __future__ import annotations

import pytest

from rackserve.base.errors import InvariantError
from rackserve.base.messages import EngineFailed, Message, StepFinished
from rackserve.base.step import GroupStep, Step, StepItem
from rackserve.base.units import Time
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.sim.engine import SimEngine, TimedRunner
from rackserve.sim.host import SimHost


class Log:
    def __init__(self, host: SimHost) -> None:
        self.host = host
        self.got: list[tuple[Time, Message]] = []

    def handle(self, message: Message) -> None:
        self.got.append((self.host.now, message))


def engine(ranks: int = 1, max_batched_tokens: int = 8) -> tuple[SimHost, Log, SimEngine]:
    host = SimHost()
    made = SimEngine(
        host, "w", [TimedRunner() for _ in range(ranks)], lambda step: 10 * step.num_tokens,
        SchedulerConfig(max_batched_tokens=max_batched_tokens),
    )  # fmt: skip
    log = Log(host)
    host.add("w", log)
    return host, log, made


def item(sequence: int, start: int, num_tokens: int, *, num_draft: int = 0) -> StepItem:
    return StepItem(sequence, start, num_tokens, b"", (), True, num_draft=num_draft)


def test_steps_run_one_after_another_and_end_with_the_slowest_rank() -> None:
    host, log, made = engine(ranks=2)
    made.start(GroupStep(1, (Step(0, (item(1, 0, 2),)), Step(1, (item(2, 0, 5),)))))
    made.start(GroupStep(2, (Step(0, (item(1, 2, 1),)), Step(1, ()))))
    host.run()
    assert [(now, message.number, message.duration_ns) for now, message in log.got if isinstance(message, StepFinished)] == [
        (50, 1, 50), (60, 2, 10),
    ]  # fmt: skip


def test_a_failed_step_takes_the_step_built_on_it_along() -> None:
    host, log, made = engine()
    made.start(GroupStep(1, (Step(0, (item(1, 0, 2),)),)))
    made.start(GroupStep(2, (Step(0, (item(1, 2, 1),)),)))
    made.fail_next = "boom"
    host.run()
    assert [message for _, message in log.got] == [EngineFailed(1, "boom"), EngineFailed(2, "boom")]
    made.start(GroupStep(3, (Step(0, (item(2, 0, 1),)),)))
    host.run()
    assert isinstance(log.got[-1][1], StepFinished)


def test_a_dead_worker_finishes_nothing() -> None:
    host, log, made = engine()
    made.start(GroupStep(1, (Step(0, (item(1, 0, 2),)),)))
    host.remove("w")
    host.add("w", log)
    host.run()
    assert log.got == []


def test_a_slow_engine_takes_longer() -> None:
    host, log, made = engine()
    made.slowdown = 3.0
    made.start(GroupStep(1, (Step(0, (item(1, 0, 2),)),)))
    host.run()
    assert log.got[0][0] == 60


@pytest.mark.parametrize(
    ("steps", "law"),
    [
        ([[item(1, 0, 9)]], "a step of 9 tokens"),
        ([[item(1, 0, 6, num_draft=3)]], "a step of 9 tokens"),
        ([[item(1, 0, 2), item(1, 2, 2)]], "twice in one step"),
        ([[item(1, 0, 4)], [item(1, 3, 1)]], "in two steps in flight"),
        ([[item(1, 0, 1)], [item(2, 0, 1)], [item(3, 0, 1)]], "3 steps in flight"),
    ],
)
def test_a_step_that_breaks_the_law_is_not_started(steps: list[list[StepItem]], law: str) -> None:
    _, _, made = engine()
    with pytest.raises(InvariantError, match=law):
        for number, items in enumerate(steps, 1):
            made.start(GroupStep(number, (Step(0, tuple(items)),)))


def test_made_up_output_has_one_token_and_the_accepted_drafts() -> None:
    runner = TimedRunner(lambda sequence, start, num_draft: min(num_draft, 2))
    result = runner.run(Step(0, (item(1, 0, 1, num_draft=3), item(2, 0, 1), StepItem(3, 0, 1, b"", (), False))))
    assert [len(done.tokens) for done in result.items] == [3, 1, 0]
    assert [done.num_verified for done in result.items] == [3, 0, 0]
