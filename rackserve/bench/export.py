"""What a run sent, as a trace: the sessions it replayed, at the times and with the pauses that came about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rackserve.base.units import Time
from rackserve.bench.records import RequestRecord
from rackserve.bench.session import Session, Subagent, TraceRequest

Times = dict[tuple[int, int], tuple[Time, Time]]
"""(stream, turn) -> (sent, ended)."""


def sent_sessions(sessions: Iterable[Session], records: Sequence[RequestRecord]) -> list[Session]:
    """The plays of `sessions` that `records` tell of, by their first sending; what was not sent is not in them.

    Replayed on a simulated rack like the one that served them, at their recorded times or with as many at once as then, they
    come out the same. Warm-up requests are left out, so that holds for runs from the start of sessions. A repeated play gets a
    name of its own.
    """
    known = {session.id: session for session in sessions}
    order = {name: number for number, name in enumerate(known)}
    plays: dict[tuple[str, int], Times] = {}
    for record in records:
        if not record.warmup:
            session, *numbers = record.id.rsplit("/", 3)
            number, stream, turn = map(int, numbers)
            plays.setdefault((session, number), {})[stream, turn] = record.sent_ns, record.ended_ns
    begun = {name: min(sent for sent, _ in times.values()) for name, times in plays.items()}
    first = min(begun.values(), default=0)
    made = []
    for (name, play), start in sorted(begun.items(), key=lambda item: (item[1], item[0][1], order[item[0][0]])):
        entries = _moved(_Writer(plays[name, play]).write(known[name].entries), start)
        changes = {"id": f"{name}+{play}" if play else name, "entries": entries, "start_ns": start - first}
        made.append(msgspec.structs.replace(known[name], **changes))
    return made


class _Writer:
    """Writes entries of one play with the times of the run. Streams are numbered as `streams_of` numbers them."""

    __slots__ = ("_next", "_times")

    def __init__(self, times: Times) -> None:
        self._times = times
        self._next = 0

    def write(self, entries: Sequence[TraceRequest | Subagent]) -> list[TraceRequest | Subagent]:
        """What was sent of `entries`, on the clock of the run; inside an agent, on that agent's."""
        number, turn = self._next, 0
        self._next += any(isinstance(entry, TraceRequest) for entry in entries)
        kept: list[TraceRequest | Subagent] = []
        for entry in entries:
            if isinstance(entry, TraceRequest):
                if (number, turn) in self._times:
                    sent, ended = self._times[number, turn]
                    kept.append(msgspec.structs.replace(entry, at_ns=sent, api_ns=ended - sent))
                turn += 1
            elif inner := self.write(entry.entries):
                start, end = min(part.at_ns for part in inner), max(part.end_ns for part in inner)
                kept.append(Subagent(entry.id, start, end, _moved(inner, start)))
        return kept


def _moved(entries: Sequence[TraceRequest | Subagent], zero: Time) -> tuple[TraceRequest | Subagent, ...]:
    """`entries` on a clock that starts at `zero`."""
    return tuple(
        msgspec.structs.replace(entry, at_ns=entry.at_ns - zero)
        if isinstance(entry, TraceRequest)
        else msgspec.structs.replace(entry, at_ns=entry.at_ns - zero, end_ns=entry.end_ns - zero)
        for entry in entries
    )
