"""A replay that a simulated rack joins while it is under way, so that the time before need not be simulated.

A published run is measured for an hour, in which contexts grow; a simulated rack takes minutes to show what it does at any
moment of that hour. Until the moment of joining every request of the plan takes as long as it is told, without a rack. Then the
rack is sent the last prompt of each conversation, the one that was answered first before the others, so that its caches hold
what they would; and from there on the plan goes on with the rack's own times. Conversations that were over `KEPT_NS` before
are left out: no live one pauses for longer, so that theirs is what caches part with first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import msgspec

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.units import Time
from rackserve.bench.plan import IdleCaps, Plan, RequestKey, Send

KEPT_NS: Time = IdleCaps().tree_ns

AT_ONCE = 1_000
"""Prompts that fill caches are in flight at once at most, so that they end about in their order."""


class Midway:
    """`plan` from `elapsed_ns` after its measuring began; before, a request takes `answer_ns(send)`.

    What was in flight at that moment is sent again at once. A last prompt of a root conversation that fails ends the run.
    """

    def __init__(self, plan: Plan, elapsed_ns: Time, answer_ns: Callable[[Send], Time]) -> None:
        if elapsed_ns < 0:
            raise ConfigError(f"elapsed_ns must be at least 0, got {elapsed_ns}")
        self._plan = plan
        self._elapsed = elapsed_ns
        self._answer = answer_ns
        self._joined: Time = 0  # on the plan's clock
        self._offset: Time = 0  # the rack's clock less the plan's
        self._fresh: list[Send] = []  # to be sent at `_since` on the rack's clock: primers, then what was in flight
        self._since: Time = 0
        self._again: list[Send] = []
        self._primers: set[RequestKey] = set()  # in flight
        self._stopped = False
        self.measured_from_ns: Time | None = None
        self.aborted = ""

    @property
    def done(self) -> bool:
        return self._plan.done if self.measured_from_ns is not None else self._stopped and not self._primers

    @property
    def next_due(self) -> Time | None:
        if self._fresh and len(self._primers) < AT_ONCE:
            return self._since
        due = self._plan.next_due if self.measured_from_ns is not None else None
        return None if due is None else due + self._offset

    @property
    def steady_end_ns(self) -> Time | None:
        end = self._plan.steady_end_ns
        return None if end is None else max(end, self._joined) + self._offset

    @property
    def sessions_ended_ns(self) -> Sequence[Time]:
        """Those that ended after joining."""
        return [at + self._offset for at in self._plan.sessions_ended_ns if at > self._joined]

    def start(self, now: Time) -> None:
        """Run ahead to the moment of joining, then prime."""
        last = self._run_ahead()
        kept = (ended for ended in last.values() if not ended[1].last or ended[0] + KEPT_NS >= self._joined)
        primers = sorted(kept, key=lambda ended: ended[0])
        self._since = now
        self._fresh = [
            msgspec.structs.replace(
                send, due_ns=now, request=msgspec.structs.replace(send.request, output_tokens=1), warmup=True
            )
            for _, send in primers
        ]
        if not self._fresh:
            self._join(now)

    def take_due(self, now: Time) -> list[Send]:
        if self.measured_from_ns is None:
            room = AT_ONCE - len(self._primers)
            taken, self._fresh = self._fresh[:room], self._fresh[room:]
            self._primers.update(send.key for send in taken)
            return taken
        taken, self._fresh = self._fresh, []
        due = self._plan.take_due(now - self._offset)
        return taken + [msgspec.structs.replace(send, due_ns=send.due_ns + self._offset) for send in due]

    def on_finished(self, key: RequestKey, now: Time) -> None:
        if self.measured_from_ns is not None:
            self._plan.on_finished(key, now - self._offset)
        else:
            self._primed(key, now)

    def on_failed(self, key: RequestKey, now: Time) -> None:
        if self.measured_from_ns is not None:
            self._plan.on_failed(key, now - self._offset)
            return
        if key.stream == 0 and not self._stopped:
            self.aborted = f"the last prompt {key} failed"
            self.stop(now)
        self._primed(key, now)

    def stop(self, now: Time) -> None:
        self._stopped = True
        self._fresh.clear()
        self._plan.stop(now - self._offset)

    def _primed(self, key: RequestKey, now: Time) -> None:
        if key not in self._primers:
            raise InvariantError(f"request {key} ended but is not in flight")
        self._primers.discard(key)
        self._since = now
        if not self._primers and not self._fresh and not self._stopped:
            self._join(now)

    def _join(self, now: Time) -> None:
        self.measured_from_ns, self._offset, self._since = now, now - self._joined, now
        self._fresh = [msgspec.structs.replace(send, due_ns=now) for send in self._again]
        self._again.clear()

    def _run_ahead(self) -> dict[tuple[str, int], tuple[Time, Send]]:
        """Go on without a rack until the moment of joining; when each conversation's last request ended, and which."""
        plan = self._plan
        last: dict[tuple[str, int], tuple[Time, Send]] = {}
        flying: list[tuple[Time, int, Send]] = []
        now, count = 0, 0
        plan.start(now)
        while True:
            due = plan.next_due
            moment = min((at for at in (due, flying[0][0] if flying else None) if at is not None), default=None)
            begun = plan.measured_from_ns
            if moment is None or (begun is not None and moment > begun + self._elapsed):
                break
            now = moment
            if flying and flying[0][0] <= now:
                _, _, send = heapq.heappop(flying)
                last[send.key.tree, send.key.stream] = now, send
                plan.on_finished(send.key, now)
                continue
            for send in plan.take_due(now):
                count += 1
                heapq.heappush(flying, (now + max(1, self._answer(send)), count, send))
        self._joined = (now if begun is None else begun) + self._elapsed
        self._again = [send for _, _, send in sorted(flying)]
        return last
