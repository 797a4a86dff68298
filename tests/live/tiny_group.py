"""A leader without a node: opens the group that the first line of standard input describes, computes two steps, prints
results and times.

The argument says what device 1 does: "fine", or "stall", "fail" or "freeze" in the second step, or "unopened"; "leader_fails"
is for device 0. Followers are started with the same argument.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.step import GroupStep, ItemResult, Step, StepResult
from rackserve.live import group
from rackserve.live.rank_spec import RankSpec

IDLE_S = 2.0
"""Between the steps, if all devices are fine."""


class TinyRunner:
    """Answers with its process id, of which it takes as many nanoseconds; misbehaves in step 2, which retires a sequence."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.kernel_ns = 0

    def run(self, step: Step) -> StepResult:
        if step.retired and self._what == "stall":
            threading.Event().wait()
        if step.retired and self._what == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if step.retired and self._what == "fail":
            raise RuntimeError("told to fail")
        self.kernel_ns += os.getpid()
        return StepResult(step.dp_rank, (ItemResult(os.getpid(), ()),))


def main() -> None:
    what, follows = sys.argv[1], "follow" in sys.argv

    def open_part(spec: RankSpec, device: int, rendezvous: str) -> TinyRunner:
        if what == "unopened" and device == 1:
            raise ConfigError("no such model")
        if device == 1:
            return TinyRunner(what)
        return TinyRunner("fail" if what == "leader_fails" and device == 0 else "fine")

    group.open_part = open_part  # type: ignore[assignment]
    if follows:
        group.main()
    group.FOLLOWER_COMMAND = (sys.executable, "-m", "tests.live.tiny_group", what, "follow")
    spec = msgspec.json.decode(sys.stdin.readline(), type=RankSpec)
    whole = group.Group(spec)
    print(*whole.pids, flush=True)
    for number, retired in ((1, ()), (2, (7,))):
        results = whole.run(GroupStep(number, tuple(Step(rank, (), retired) for rank in range(spec.num_ranks))))
        print(*(result.items[0].sequence for result in results), flush=True)
        if what == "fine" and number == 1:
            threading.Event().wait(IDLE_S)
    print(*whole.kernel_ns, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
