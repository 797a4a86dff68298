"""An engine that takes modelled time. With runners it computes real outputs (the digest model); without, tokens are made up.

A step of many forward passes is one event: where each pass ends is a sum over modelled durations, found as it is needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import floor
from typing import Protocol

from rackserve.base.costs import StepCost
from rackserve.base.errors import InvariantError
from rackserve.base.ids import NodeId
from rackserve.base.messages import EngineFailed, StepFinished
from rackserve.base.step import UNNAMED_TOKEN, GroupStep, ItemResult, Step, StepResult
from rackserve.base.units import Time
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.sim.host import SimHost

StepTime = Callable[[Step], Time]
"""Modelled duration of one forward pass of one rank, in nanoseconds.

It must not fall when the step has more sequences, tokens or context: ranks of a group that another exceeds are not asked.
"""


class GroupTime:
    """Modelled duration of one forward pass of a whole group at once, in nanoseconds: its ranks may share work."""

    __slots__ = ("group_ns",)

    def __init__(self, group_ns: Callable[[GroupStep], Time]) -> None:
        self.group_ns = group_ns


PassTime = StepTime | GroupTime
"""How long a pass takes: by rank, of which the slowest counts, or by group."""


class LinearTime:
    """A `StepTime` by a linear cost. It gives the durations of many passes at once."""

    __slots__ = ("cost",)

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost

    def __call__(self, step: Step) -> Time:
        return self.cost.duration_ns(step.num_tokens, step.attended, step.num_sequences, step.context_tokens)


class Runner(Protocol):
    """Computes a rank's step over its arena."""

    def run(self, step: Step) -> StepResult: ...


class TimedRunner:
    """Makes up output: every pass draws the same number of tokens for all sequences that generate, `mean_tokens` on average.

    Pass n (from 1) draws floor(n * mean) - floor((n - 1) * mean) tokens, or as many as there are drafts and one.
    """

    def __init__(self, mean_tokens: float = 1.0) -> None:
        self._mean = mean_tokens
        self._passes = 0

    def drawn_by(self, ahead: int) -> int:
        """Tokens that so many passes from now draw together."""
        if self._mean == 1.0:
            return ahead
        return floor((self._passes + ahead) * self._mean) - floor(self._passes * self._mean)

    def drawn_before(self, ahead: int, num_passes: int) -> Sequence[int]:
        """`drawn_by` for `ahead` and the numbers after it, as many as `num_passes`."""
        if self._mean == 1.0:
            return range(ahead, ahead + num_passes)
        mean, before = self._mean, floor(self._passes * self._mean)
        return [floor(at * mean) - before for at in range(self._passes + ahead, self._passes + ahead + num_passes)]

    def run(self, step: Step, num_passes: int = 1) -> StepResult:
        drawn = self.drawn_by(num_passes)
        self._passes += num_passes
        if not step.items:
            return StepResult(step.dp_rank, (), num_passes, drawn)
        items = []
        for item in step.items:
            count = min(drawn, item.num_draft + 1) if num_passes == 1 else drawn
            tokens = (UNNAMED_TOKEN,) * count if item.sample else ()
            items.append(ItemResult(item.sequence, tokens, num_verified=item.num_draft if item.sample else 0))
        return StepResult(step.dp_rank, tuple(items), num_passes, drawn)


FIRST_PASSES = 128
"""So many passes of a step are looked ahead at first, then twice as many each time: most are interrupted before their end."""


class _Course:
    """The passes of a step of many: when each ends, found as far ahead as was needed.

    ends    times at which the passes end, in order
    final   the number of passes after which the step ends, 0 while that is open
    """

    __slots__ = ("_parts", "_pass_time", "_runner", "begun", "ends", "final", "step")

    def __init__(self, step: GroupStep, begun: Time, runner: TimedRunner, pass_time: PassTime) -> None:
        self.step = step
        self.ends: list[Time] = []
        self.final = 0
        self.begun = begun
        self._runner = runner
        self._pass_time = pass_time
        self._parts = _slowest(step)

    @property
    def is_known(self) -> bool:
        """Whether the last pass has been found."""
        return self._runner.drawn_by(len(self.ends)) >= self.step.tokens

    def look_ahead(self, num_passes: int, slowdown: float) -> None:
        """Find the ends of so many passes more, or of all."""
        done = len(self.ends)
        drawn = self._runner.drawn_before(done, num_passes)
        drawn = drawn[: bisect_left(drawn, self.step.tokens)]
        if isinstance(self._pass_time, GroupTime):
            durations = [self._pass_time.group_ns(_after(self.step, tokens)) for tokens in drawn]
        else:
            durations = self._durations(self._pass_time, self._parts[0], drawn)
            for part in self._parts[1:]:
                durations = list(map(max, durations, self._durations(self._pass_time, part, drawn)))
        if slowdown != 1.0:
            durations = [round(duration * slowdown) for duration in durations]
        ends = accumulate(durations, initial=self.ends[-1] if done else self.begun)
        next(ends)
        self.ends += ends

    def _durations(self, step_time: StepTime, part: Step, drawn: Sequence[int]) -> list[Time]:
        """Of passes of a part, each after so many tokens have been drawn."""
        sequences, context = part.num_sequences, part.context_tokens
        if isinstance(drawn, range):
            contexts: Sequence[int] = range(context + sequences * drawn.start, context + sequences * drawn.stop, sequences)
        else:
            contexts = [context + sequences * tokens for tokens in drawn]
        if isinstance(step_time, LinearTime):
            return step_time.cost.decode_ns(sequences, contexts)
        return [step_time(_moved(part, context)) for context in contexts]


def _moved(part: Step, context: int) -> Step:
    """A later pass of a part: the same sequences, with other positions before theirs."""
    return Step(part.dp_rank, (), (), part.num_sequences, context, part.carried_drafts)


def _after(step: GroupStep, drawn: int) -> GroupStep:
    """The pass of a step for which each sequence has drawn so many tokens."""
    parts = [_moved(part, part.context_tokens + part.num_sequences * drawn) for part in step.steps]
    return GroupStep(step.number, tuple(parts))


def _slowest(step: GroupStep) -> list[Step]:
    """The parts of a step that no other part exceeds in sequences and context, as it stays through all passes."""
    sizes = [(part.num_sequences, part.context_tokens, -at) for at, part in enumerate(step.steps)]
    most = -1
    slowest = []
    for _, context, at in sorted(sizes, reverse=True):
        if context > most:
            most = context
            slowest.append(step.steps[-at])
    return slowest


class SimEngine:
    """Engine port of one worker: steps run one after another, at most two are in flight."""

    def __init__(
        self, host: SimHost, name: NodeId, runners: Sequence[Runner], pass_time: PassTime, limits: SchedulerConfig
    ) -> None:
        self._host = host
        self._name = name
        self._life = host.life(name) + 1  # the engine is made just before its node is added
        self._runners = runners
        self._pass_time = pass_time
        self._limits = limits
        self._queue: deque[GroupStep] = deque()
        self._course: _Course | None = None
        self.slowdown = 1.0
        self.fail_next: str | None = None

    def start(self, step: GroupStep) -> None:
        self._queue.append(step)
        self._check(step)
        if len(self._queue) == 1:
            self._begin()

    def interrupt(self) -> None:
        """The running step ends with the pass that runs now, or with the one that ends now."""
        course = self._course
        if course is not None:
            self._end_course(course, bisect_left(course.ends, self._host.now) + 1)

    def _check(self, step: GroupStep) -> None:
        """Law I7: budgets hold, each sequence is in a step once, no position is in two steps in flight."""
        if len(self._queue) > self._limits.max_steps_in_flight:
            raise InvariantError(f"{self._name}: {len(self._queue)} steps in flight (I7)")
        ends: dict[tuple[int, int], int] = {}
        for flying in self._queue:
            for part in flying.steps:
                if not part.items and part.carried <= self._limits.max_sequences:
                    continue
                tokens = part.num_tokens + sum([item.num_draft for item in part.items])
                if tokens > self._limits.max_batched_tokens:
                    raise InvariantError(f"{self._name}: a step of {tokens} tokens (I7)")
                if len({item.sequence for item in part.items}) < len(part.items):
                    raise InvariantError(f"{self._name}: a sequence is twice in one step (I7)")
                for item in part.items:
                    if item.start < ends.get((part.dp_rank, item.sequence), 0):
                        raise InvariantError(f"{self._name}: position {item.start} is in two steps in flight (I7)")
                    ends[part.dp_rank, item.sequence] = item.start + item.num_tokens

    def _begin(self) -> None:
        step = self._queue[0]
        runner = self._runners[0]
        if step.tokens > 1:
            if not isinstance(runner, TimedRunner):
                raise InvariantError(f"{self._name}: only made-up output can be drawn in many passes")
            self._course = _Course(step, self._host.now, runner, self._pass_time)
            self._go_on(self._course)
            return
        duration = self._one_pass_ns(step)
        self._host.call(self._host.now + duration, lambda: self._finish(step, duration, 1))

    def _one_pass_ns(self, step: GroupStep) -> Time:
        pass_time = self._pass_time
        if isinstance(pass_time, GroupTime):
            return round(pass_time.group_ns(step) * self.slowdown)
        return round(max([pass_time(part) for part in step.steps]) * self.slowdown)

    def _go_on(self, course: _Course) -> None:
        """Look further ahead, and come back where that ends if nobody has interrupted before."""
        if course.final or self._host.life(self._name) != self._life:
            return
        course.look_ahead(max(FIRST_PASSES, len(course.ends)), self.slowdown)
        if course.is_known:
            self._end_course(course, len(course.ends))
        else:
            self._host.call(course.ends[-1], lambda: self._go_on(course))

    def _end_course(self, course: _Course, num_passes: int) -> None:
        if course.final == num_passes:
            return
        course.final = num_passes
        end = course.ends[num_passes - 1]

        def finish() -> None:
            if course.final == num_passes:  # else it was interrupted, and has ended before
                self._course = None
                self._finish(course.step, end - course.begun, num_passes)

        self._host.call(end, finish)

    def _finish(self, step: GroupStep, duration: Time, num_passes: int) -> None:
        if self._host.life(self._name) != self._life:
            return  # the worker died while the step ran: nothing is written
        if self.fail_next is not None:
            for lost in self._queue:
                self._host.post(self._name, self._host.now, EngineFailed(lost.number, self.fail_next))
            self._queue.clear()
            self.fail_next = None
            return
        self._queue.popleft()
        results = tuple([_run(runner, part, num_passes) for runner, part in zip(self._runners, step.steps, strict=True)])
        self._host.post(self._name, self._host.now, StepFinished(step.number, results, duration))
        if self._queue:
            self._begin()


def _run(runner: Runner, step: Step, num_passes: int) -> StepResult:
    return runner.run(step, num_passes) if isinstance(runner, TimedRunner) else runner.run(step)
