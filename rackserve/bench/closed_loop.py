"""The closed-loop replay of agent sessions as a state machine: it is told the time and what ended, and says what is due.

Rules
- `concurrency` session trees ("lanes") live at once; subagents run inside their lane, so more requests may be in flight.
- A turn is due its recorded pause after the END of the previous response; recorded text, not the live answer, forms its
  prompt, so a failed turn ends like any other and the session goes on.
- A turn that followed a subagent's end in the recording waits for that subagent.
- While a tree has nothing in flight, its timers are moved forward together so that none lies further off than
  `IdleCaps.tree_ns`; likewise all timers of all trees for `IdleCaps.system_ns` when nothing at all is in flight.
- When a tree has drained, its lane takes the next session: in order, once each, or round and round with a new play number
  (`recycle`), which changes the prompts so that repeats do not hit.
- With a start window the first lanes begin at a drawn point of their session, and caches are warmed with one-token requests:
  for each conversation under way the last turn before that point; then `warmup_requests` further turns of each lane, without
  pauses. Then the clocks of all lanes start together, each turn as far from its point as in the recording, less what the
  soonest of them all would have waited. A warm-up request of a root conversation that fails ends the run.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.units import Time
from rackserve.bench.lane import Lane
from rackserve.bench.plan import IdleCaps, RequestKey, Send
from rackserve.bench.session import Session


class Replay:
    """The plan of a closed-loop run over `sessions`. `start_window` = (low, high), shares of a session's length."""

    def __init__(
        self,
        sessions: Sequence[Session],
        concurrency: int,
        *,
        caps: IdleCaps | None = None,
        recycle: bool = False,
        start_window: tuple[float, float] | None = None,
        warmup_requests: int = 0,
        seed: int = 42,
    ) -> None:
        if not sessions or concurrency < 1:
            raise ConfigError(f"a replay needs sessions and concurrency of at least 1, got {len(sessions)} and {concurrency}")
        if len({session.id for session in sessions}) < len(sessions):
            raise ConfigError(
                "two sessions of the trace have the same id; ids must differ, or their requests would share caches"
            )
        if warmup_requests < 0 or (warmup_requests and start_window is None):
            raise ConfigError(f"warmup_requests = {warmup_requests} must be at least 0, and needs a start window")
        self._sessions = sessions
        self._concurrency = concurrency
        self._caps = caps or IdleCaps()
        self._recycle = recycle
        self._window = start_window
        self._quota = warmup_requests
        self._seed = seed
        self._lanes: dict[str, Lane] = {}
        self._taken = 0
        self._heap: list[tuple[Time, int, str, int]] = []
        self._order = 0
        self._skipped: Time = 0  # a timer at line time x is due at x - _skipped: moving all timers is one addition
        self._in_flight: set[RequestKey] = set()
        self._primers: set[RequestKey] = set()
        self._first_trees: set[str] = set()
        self._stopped = False
        self.measured_from_ns: Time | None = None
        self.steady_end_ns: Time | None = None
        self.sessions_ended_ns: list[Time] = []
        self.aborted = ""
        self.num_finished = 0
        self.num_failed = 0

    @property
    def done(self) -> bool:
        """Nothing is in flight and nothing will be due any more."""
        return not self._in_flight and (self._stopped or not self._lanes)

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    @property
    def next_due(self) -> Time | None:
        """When the next request is due if nothing ends before."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] - self._skipped if self._heap else None

    def start(self, now: Time) -> None:
        """Fill the lanes."""
        opened = [lane for _ in range(self._concurrency) if (lane := self._open_lane(self._quota)) is not None]
        if len(opened) < self._concurrency:
            self.steady_end_ns = now
        if self._window is not None:
            self._first_trees = {lane.tree for lane in opened}
            for number, lane in enumerate(opened):
                self._prime(lane, lane.move_to_start(self._window, self._seed, number), now)
        if not self._primers:
            self._warm_further(now)

    def stop(self, now: Time) -> None:
        """Let nothing more become due; what is in flight may still end. The steady window ends now at the latest."""
        self._stopped = True
        if self.steady_end_ns is None:
            self.steady_end_ns = now
        self._heap.clear()

    def take_due(self, now: Time) -> list[Send]:
        """The requests due by `now`, earliest first. They count as in flight from here on."""
        sends: list[Send] = []
        while (due := self.next_due) is not None and due <= now:
            _, _, tree, number = heapq.heappop(self._heap)
            lane = self._lanes[tree]
            del lane.due[number]
            stream, turn = lane.streams[number], lane.next[number]
            key = RequestKey(lane.session, lane.play, number, turn)
            request, warmup = stream.turns[turn], self.measured_from_ns is None
            if warmup:
                request = msgspec.structs.replace(request, output_tokens=1)
            last = key not in self._primers and turn + 1 == len(stream.turns)
            lane.in_flight += 1
            self._in_flight.add(key)
            sends.append(Send(key, due, request, lane.block_tokens, last, warmup, lane.shared))
        return sends

    def on_finished(self, key: RequestKey, now: Time) -> None:
        """The response to `key` ended well at `now`."""
        self.num_finished += 1
        self._end(key, now)

    def on_failed(self, key: RequestKey, now: Time) -> None:
        """The request `key` failed at `now`; its session goes on."""
        self.num_failed += 1
        if self.measured_from_ns is None and key.stream == 0 and not self._stopped:
            self.aborted = f"the warm-up request {key} failed"
            self.stop(now)
        self._end(key, now)

    def _end(self, key: RequestKey, now: Time) -> None:
        if key not in self._in_flight:
            raise InvariantError(f"request {key} ended but is not in flight")
        self._in_flight.discard(key)
        lane = self._lanes[key.tree]
        lane.in_flight -= 1
        if key in self._primers:
            self._primers.discard(key)
            if not self._primers:
                self._warm_further(now)
            return
        number, turn = key.stream, key.turn
        for child in lane.spawned_by(number, turn):
            self._plan_turn(lane, child, lane.first[child], now + lane.streams[child].gaps_ns[lane.first[child]], now)
        stream = lane.streams[number]
        if turn + 1 < len(stream.turns):
            self._plan_turn(lane, number, turn + 1, now + stream.gaps_ns[turn + 1], now)
        else:
            self._end_stream(lane, number, now)
        if not lane.live:
            self._close_lane(lane, now)
        else:
            self._cap_tree(lane, now)
        if self.measured_from_ns is None:
            self._measure_once_warm(now)
        self._cap_system(now)

    def _end_stream(self, lane: Lane, number: int, now: Time) -> None:
        lane.live.discard(number)
        parent = lane.streams[number].parent
        waiting = lane.joins.get(parent)
        if waiting is not None:
            waiting.discard(number)
            if not waiting:
                del lane.joins[parent]
                lane.due[parent] = max(lane.due[parent], now + self._skipped)
                self._push(lane, parent)

    def _plan_turn(self, lane: Lane, number: int, turn: int, due: Time, now: Time) -> None:
        lane.next[number] = turn
        lane.due[number] = (due if self.measured_from_ns is not None else now) + self._skipped
        joins = lane.open_joins(number, turn)
        if joins:
            lane.joins[number] = joins
        else:
            self._push(lane, number)

    def _push(self, lane: Lane, number: int) -> None:
        """Set the timer of a turn that waits for nothing else; while warming up, as long as the lane has some quota left."""
        if self._stopped:
            return
        if self.measured_from_ns is None:
            if not lane.quota:
                lane.held.add(number)
                return
            lane.quota -= 1
        self._set_timer(lane, number)

    def _set_timer(self, lane: Lane, number: int) -> None:
        self._order += 1
        heapq.heappush(self._heap, (lane.due[number], self._order, lane.tree, number))

    def _is_current(self, entry: tuple[Time, int, str, int]) -> bool:
        at, _, tree, number = entry
        lane = self._lanes.get(tree)
        return lane is not None and lane.due.get(number) == at and number not in lane.joins

    def _cap_tree(self, lane: Lane, now: Time) -> None:
        """Called when something of the tree ended or began: with nothing in flight, its idle time starts at `now`."""
        if lane.in_flight or not lane.due or self.measured_from_ns is None or self._stopped:
            return
        soonest = min(due for number, due in lane.due.items() if number not in lane.joins)
        excess = soonest - self._skipped - now - self._caps.tree_ns
        if excess > 0:
            for number in lane.due:
                lane.due[number] -= excess
                if number not in lane.joins:
                    self._set_timer(lane, number)

    def _cap_system(self, now: Time) -> None:
        if not self._in_flight and (due := self.next_due) is not None:
            self._skipped += max(0, due - now - self._caps.system_ns)

    def _open_lane(self, quota: int) -> Lane | None:
        if self._stopped or (self._taken >= len(self._sessions) and not self._recycle):
            return None
        play, index = divmod(self._taken, len(self._sessions))
        self._taken += 1
        lane = Lane(self._sessions[index], play, quota)
        self._lanes[lane.tree] = lane
        return lane

    def _close_lane(self, lane: Lane, now: Time) -> None:
        del self._lanes[lane.tree]
        if self.measured_from_ns is not None and not self._stopped:
            self.sessions_ended_ns.append(now)
        follower = self._open_lane(lane.quota)
        if follower is not None:
            self._open_streams(follower, now)
        elif self.steady_end_ns is None:
            self.steady_end_ns = now

    def _open_streams(self, lane: Lane, now: Time) -> None:
        for number in lane.open_streams():
            turn = lane.first[number]
            self._plan_turn(lane, number, turn, now + lane.streams[number].starts_ns[turn] - lane.origin_ns, now)

    def _prime(self, lane: Lane, streams: list[int], now: Time) -> None:
        """Send the last turn before the starting point of each conversation under way there."""
        for number in streams:
            turn = lane.first[number] - 1
            self._primers.add(RequestKey(lane.session, lane.play, number, turn))
            lane.next[number] = turn
            lane.due[number] = now + self._skipped
            self._set_timer(lane, number)

    def _warm_further(self, now: Time) -> None:
        """All primers have ended: send further turns as far as the quotas go, if there are any."""
        if self._stopped:
            return
        for lane in list(self._lanes.values()):
            self._open_streams(lane, now)
        self._measure_once_warm(now)

    def _measure_once_warm(self, now: Time) -> None:
        """Start the clocks of all lanes if nothing is left to warm up."""
        if self._stopped or self._in_flight or self.next_due is not None:
            return
        self.measured_from_ns = now
        lanes = list(self._lanes.values())
        pauses = {
            (lane.tree, number): lane.pause_ns(number, resumed=self._window is None or lane.tree in self._first_trees)
            for lane in lanes
            for number in lane.due
        }
        soonest = min(
            (pauses[lane.tree, number] for lane in lanes for number in lane.due if number not in lane.joins), default=0
        )
        for lane in lanes:
            lane.held.clear()
            for number in lane.due:
                lane.due[number] = now + self._skipped + max(0, pauses[lane.tree, number] - soonest)
                if number not in lane.joins:
                    self._set_timer(lane, number)
            self._cap_tree(lane, now)
        self._cap_system(now)
