"""How many sequences of each rank wait for their first step and how many have had one, kept as they come and go."""

from __future__ import annotations

from collections.abc import Iterable

from rackserve.base.errors import InvariantError
from rackserve.base.events import QueueChanged
from rackserve.base.ids import Rank
from rackserve.ports import Recorder
from rackserve.sched.sequence import Sequence

QUEUED, RUNNING = 0, 1


class QueueCounts:
    """The counts of one worker's ranks, and what was recorded of them last."""

    def __init__(self, ranks: list[Rank], recorder: Recorder) -> None:
        self._ranks = ranks
        self._recorder = recorder
        self._counts = [[0, 0] for _ in ranks]
        self._recorded = [[0, 0] for _ in ranks]
        self._where: dict[int, tuple[int, int]] = {}  # sequence number -> (dp_rank, QUEUED or RUNNING)
        self._changed: set[int] = set()

    def __len__(self) -> int:
        """All that are counted."""
        return len(self._where)

    def put(self, number: int, dp_rank: int, which: int) -> None:
        """Sequence `number` is counted as `which` from now on."""
        self.take(number)
        self._where[number] = (dp_rank, which)
        self._counts[dp_rank][which] += 1
        self._changed.add(dp_rank)

    def take(self, number: int) -> None:
        """It is not counted any more."""
        where = self._where.pop(number, None)
        if where is not None:
            self._counts[where[0]][where[1]] -= 1
            self._changed.add(where[0])

    def record(self) -> None:
        """Record the counts of ranks where they differ from what was recorded last."""
        for dp_rank in sorted(self._changed) if self._changed else ():
            if self._counts[dp_rank] != self._recorded[dp_rank]:
                self._recorded[dp_rank] = list(self._counts[dp_rank])
                self._recorder.record(QueueChanged(self._ranks[dp_rank], *self._counts[dp_rank]))
        self._changed.clear()

    def check(self, sequences: Iterable[tuple[int, Sequence]]) -> None:
        """Raise InvariantError unless the counts are those of these (dp_rank, sequence)."""
        counts = [[0, 0] for _ in self._ranks]
        for dp_rank, sequence in sequences:
            if not sequence.ended and sequence.state != "pushing":
                counts[dp_rank][RUNNING if sequence.sent_blocks else QUEUED] += 1
        if counts != self._counts:
            raise InvariantError(f"{self._ranks[0].worker} counts {self._counts} sequences queued and running; it has {counts}")
