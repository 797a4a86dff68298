"""The modelled engine: steps one after another, each with one end."""

from __future__ import annotations

import pytest

from rackserve.base.errors import InvariantError
from rackserve.base.messages import EngineFailed, Message, StepFinished
from rackserve.base.step import GroupStep, Step, StepItem, StepResult
from rackserve.base.units import Time
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.sim.engine import GroupTime, SimEngine, TimedRunner
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
    runner = TimedRunner(2.5)
    step = Step(0, (item(1, 0, 1, num_draft=3), item(2, 0, 1), StepItem(3, 0, 1, b"", (), False)))
    results = [runner.run(step) for _ in range(4)]
    assert [[len(done.tokens) for done in result.items] for result in results] == [[2, 1, 0], [3, 1, 0]] * 2
    assert [done.num_verified for done in results[0].items] == [3, 0, 0]


def test_many_passes_draw_what_so_many_steps_draw() -> None:
    single, many = TimedRunner(2.3), TimedRunner(2.3)
    step = Step(0, (item(1, 0, 1, num_draft=3),), (), 4, 100)
    drawn = [single.run(step).drawn for _ in range(17)]
    first, second = many.run(step, 5), many.run(step, 12)
    assert (first.drawn, second.drawn) == (sum(drawn[:5]), sum(drawn[5:]))
    assert (first.num_passes, len(first.items[0].tokens)) == (5, first.drawn)


def carried(num_sequences: int, context: int, dp_rank: int = 0) -> Step:
    return Step(dp_rank, (), (), num_sequences, context)


def passes_of(*parts: Step, tokens: int) -> list[Time]:
    """When each of so many passes ends, step by step, at the price of `priced`."""
    now, ends = 0, []
    for number in range(tokens):
        grown = [part.carried_context + number * part.carried for part in parts]
        now += max(7 * part.carried + context for part, context in zip(parts, grown, strict=True))
        ends.append(now)
    return ends


def priced(*parts: Step) -> tuple[SimHost, Log, SimEngine]:
    host = SimHost()
    made = SimEngine(
        host, "w", [TimedRunner() for _ in parts], lambda step: 7 * step.num_sequences + step.context_tokens,
        SchedulerConfig(max_steps_in_flight=1),
    )  # fmt: skip
    log = Log(host)
    host.add("w", log)
    return host, log, made


PARTS = (carried(2, 50), carried(1, 60, 1), carried(2, 40, 2))


def ended(log: Log) -> list[tuple[Time, int, Time]]:
    return [
        (now, message.results[0].num_passes, message.duration_ns)
        for now, message in log.got
        if isinstance(message, StepFinished)
    ]


def test_a_step_of_many_passes_ends_when_so_many_steps_would() -> None:
    host, log, made = priced(*PARTS)
    ends = passes_of(*PARTS, tokens=40)
    made.start(GroupStep(1, PARTS, 40))
    host.run()
    assert ended(log) == [(ends[-1], 40, ends[-1])]


@pytest.mark.parametrize("late", [0, 1, 30])
@pytest.mark.parametrize("number", [0, 3, 7, 8, 30])
def test_an_interruption_ends_a_step_with_the_pass_that_runs_then(number: int, late: Time) -> None:
    host, log, made = priced(*PARTS)
    ends = passes_of(*PARTS, tokens=60)
    made.start(GroupStep(1, PARTS, 50))
    when = ends[number] - 30 + late  # at 30 it ends just then
    host.call(when, made.interrupt)
    host.call(when, made.interrupt)
    host.run()
    assert ended(log) == [(ends[number], number + 1, ends[number])]
    made.interrupt()
    begun = host.now
    made.start(GroupStep(2, (carried(1, 3), carried(0, 0, 1), carried(0, 0, 2)), 2))
    host.run()
    assert ended(log)[1:] == [(begun + 10 + 11, 2, 21)]


def test_a_worker_that_dies_ends_no_step_of_many_passes() -> None:
    host, log, made = priced(*PARTS)
    made.start(GroupStep(1, PARTS, 100))
    host.call(passes_of(*PARTS, tokens=20)[-1], lambda: host.remove("w"))
    host.run()
    assert log.got == []


def test_only_made_up_output_is_drawn_in_many_passes() -> None:
    class Real:
        def run(self, step: Step) -> StepResult:
            return StepResult(step.dp_rank, ())

    made = SimEngine(SimHost(), "w", [Real()], lambda step: 1, SchedulerConfig(max_steps_in_flight=1))
    with pytest.raises(InvariantError, match="made-up"):
        made.start(GroupStep(1, (carried(1, 3),), 2))


def test_a_group_can_be_priced_as_a_whole_in_one_pass_and_in_many() -> None:
    def group_ns(step: GroupStep) -> Time:
        """The ranks share what their sequences cost, and the slowest reads the most context."""
        return 7 * sum(part.num_sequences for part in step.steps) + max(part.context_tokens for part in step.steps)

    host = SimHost()
    limits = SchedulerConfig(max_steps_in_flight=1)
    made = SimEngine(host, "w", [TimedRunner() for _ in PARTS], GroupTime(group_ns), limits)
    log = Log(host)
    host.add("w", log)
    made.start(GroupStep(1, PARTS))
    host.run()
    made.start(GroupStep(2, PARTS, 30))
    host.run()
    many = sum(35 + max(50 + 2 * drawn, 60 + drawn) for drawn in range(30))
    assert ended(log) == [(35 + 60, 1, 95), (95 + many, 30, many)]
