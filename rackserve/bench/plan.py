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
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

import msgspec

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.rng import draw_unit
from rackserve.base.units import NS_PER_S, Time
from rackserve.bench.session import Session, TraceRequest
from rackserve.bench.streams import Stream, streams_of


class RequestKey(msgspec.Struct, frozen=True):
    """Turn `turn` of stream `stream` of the `play`-th replay of a session."""

    session: str
    play: int
    stream: int
    turn: int

    def __str__(self) -> str:
        return f"{self.session}/{self.play}/{self.stream}/{self.turn}"

    @property
    def tree(self) -> str:
        """The name of one play of a session: what a server sees as the session."""
        return f"{self.session}/{self.play}"


class Send(msgspec.Struct, frozen=True):
    """Send this request now; it was due at `due_ns`. `last` says that its stream ends with it.

    `warmup`: it only fills caches (one output token) and is left out of the metrics.
    """

    key: RequestKey
    due_ns: Time
    request: TraceRequest
    block_tokens: int
    last: bool
    warmup: bool = False


class IdleCaps(msgspec.Struct, frozen=True):
    """The longest idle time of a session tree and of the whole system, in real time of the run."""

    tree_ns: Time = 300 * NS_PER_S
    system_ns: Time = 10 * NS_PER_S

    def scaled(self, time_scale: float) -> IdleCaps:
        """The caps for a trace whose times were divided by `time_scale`."""
        return IdleCaps(round(self.tree_ns / time_scale), round(self.system_ns / time_scale))


class Plan(Protocol):
    """What a driver needs. After `start` and after each end it sends what `take_due` gives and comes back at `next_due`."""

    @property
    def done(self) -> bool: ...

    @property
    def next_due(self) -> Time | None: ...

    @property
    def steady_end_ns(self) -> Time | None: ...

    def start(self, now: Time) -> None: ...

    def take_due(self, now: Time) -> list[Send]: ...

    def on_finished(self, key: RequestKey, now: Time) -> None: ...

    def on_failed(self, key: RequestKey, now: Time) -> None: ...

    def stop(self, now: Time) -> None: ...


class _Lane:
    """One live session tree. Times in `due` are on the replay's shifted time line."""

    __slots__ = ("block_tokens", "due", "first", "in_flight", "joins", "live", "next", "play", "session", "streams", "zero_ns")

    def __init__(self, session: Session, play: int) -> None:
        self.session = session.id
        self.block_tokens = session.block_tokens
        self.play = play
        self.streams: tuple[Stream, ...] = streams_of(session)
        self.live = set(range(len(self.streams)))
        self.next = [0] * len(self.streams)
        self.due: dict[int, Time] = {}
        self.joins: dict[int, set[int]] = {}
        self.in_flight = 0
        self.first = [0] * len(self.streams)
        self.zero_ns: Time = 0

    def open_joins(self, number: int, turn: int) -> set[int]:
        """Streams that turn `turn` of stream `number` must still wait for."""
        return {n for n in self.live if self.streams[n].parent == number and self.streams[n].join_turn == turn}


class Replay:
    """The plan of a closed-loop run over `sessions`.

    `start_window` = (low, high): the first lanes start at a drawn share of their session's length. For every conversation
    that is under way there, the last turn before that point is sent first as a one-token warm-up; the clock of the replay
    starts when all of those have ended.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        concurrency: int,
        *,
        caps: IdleCaps | None = None,
        recycle: bool = False,
        start_window: tuple[float, float] | None = None,
        seed: int = 42,
    ) -> None:
        if not sessions or concurrency < 1:
            raise ConfigError(f"a replay needs sessions and concurrency of at least 1, got {len(sessions)} and {concurrency}")
        if len({session.id for session in sessions}) < len(sessions):
            raise ConfigError(
                "two sessions of the trace have the same id; ids must differ, or their requests would share caches"
            )
        self._sessions = sessions
        self._concurrency = concurrency
        self._caps = caps or IdleCaps()
        self._recycle = recycle
        self._window = start_window
        self._seed = seed
        self._lanes: dict[str, _Lane] = {}
        self._taken = 0
        self._heap: list[tuple[Time, int, str, int]] = []
        self._order = 0
        self._skipped: Time = 0  # a timer at line time x is due at x - _skipped: moving all timers is one addition
        self._in_flight: set[RequestKey] = set()
        self._primers: set[RequestKey] = set()
        self._primed_lanes: list[_Lane] = []
        self._stopped = False
        self.steady_end_ns: Time | None = None
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
        opened = [lane for _ in range(self._concurrency) if (lane := self._open_lane()) is not None]
        if self._window is not None:
            for lane in opened:
                self._prime(lane, now)
            self._primed_lanes = opened
        if not self._primers:
            self._begin(opened, now)
        if len(opened) < self._concurrency:
            self.steady_end_ns = now

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
            request, warmup = stream.turns[turn], key in self._primers
            if warmup:
                request = msgspec.structs.replace(request, output_tokens=1)
            last = not warmup and turn + 1 == len(stream.turns)
            lane.in_flight += 1
            self._in_flight.add(key)
            sends.append(Send(key, due, request, lane.block_tokens, last, warmup))
        return sends

    def on_finished(self, key: RequestKey, now: Time) -> None:
        """The response to `key` ended well at `now`."""
        self.num_finished += 1
        self._end(key, now)

    def on_failed(self, key: RequestKey, now: Time) -> None:
        """The request `key` failed at `now`; its session goes on."""
        self.num_failed += 1
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
                self._begin(self._primed_lanes, now)
            return
        number, turn = key.stream, key.turn
        for child, stream in enumerate(lane.streams):
            if stream.parent == number and stream.spawn_turn == turn and child in lane.live:
                self._plan_turn(lane, child, 0, now + stream.gaps_ns[0])
        stream = lane.streams[number]
        if turn + 1 < len(stream.turns):
            self._plan_turn(lane, number, turn + 1, now + stream.gaps_ns[turn + 1])
        else:
            self._end_stream(lane, number, now)
        if not lane.live:
            self._close_lane(lane, now)
        else:
            self._cap_tree(lane, now)
        self._cap_system(now)

    def _end_stream(self, lane: _Lane, number: int, now: Time) -> None:
        lane.live.discard(number)
        parent = lane.streams[number].parent
        waiting = lane.joins.get(parent)
        if waiting is not None:
            waiting.discard(number)
            if not waiting:
                del lane.joins[parent]
                lane.due[parent] = max(lane.due[parent], now + self._skipped)
                self._push(lane, parent)

    def _plan_turn(self, lane: _Lane, number: int, turn: int, due: Time) -> None:
        lane.next[number] = turn
        lane.due[number] = due + self._skipped
        joins = lane.open_joins(number, turn)
        if joins:
            lane.joins[number] = joins
        else:
            self._push(lane, number)

    def _push(self, lane: _Lane, number: int) -> None:
        if not self._stopped:
            self._order += 1
            heapq.heappush(self._heap, (lane.due[number], self._order, f"{lane.session}/{lane.play}", number))

    def _is_current(self, entry: tuple[Time, int, str, int]) -> bool:
        at, _, tree, number = entry
        lane = self._lanes.get(tree)
        return lane is not None and lane.due.get(number) == at and number not in lane.joins

    def _cap_tree(self, lane: _Lane, now: Time) -> None:
        """Called when something of the tree ended or began: with nothing in flight, its idle time starts at `now`."""
        if lane.in_flight or not lane.due:
            return
        soonest = min(due for number, due in lane.due.items() if number not in lane.joins)
        excess = soonest - self._skipped - now - self._caps.tree_ns
        if excess > 0:
            for number in lane.due:
                lane.due[number] -= excess
                if number not in lane.joins:
                    self._push(lane, number)

    def _cap_system(self, now: Time) -> None:
        if not self._in_flight and (due := self.next_due) is not None:
            self._skipped += max(0, due - now - self._caps.system_ns)

    def _open_lane(self) -> _Lane | None:
        if self._stopped or (self._taken >= len(self._sessions) and not self._recycle):
            return None
        play, index = divmod(self._taken, len(self._sessions))
        self._taken += 1
        lane = _Lane(self._sessions[index], play)
        self._lanes[f"{lane.session}/{play}"] = lane
        return lane

    def _close_lane(self, lane: _Lane, now: Time) -> None:
        del self._lanes[f"{lane.session}/{lane.play}"]
        follower = self._open_lane()
        if follower is not None:
            self._begin([follower], now)
        elif self.steady_end_ns is None:
            self.steady_end_ns = now

    def _begin(self, lanes: list[_Lane], now: Time) -> None:
        """Start the clocks of `lanes` at `now`."""
        for lane in lanes:
            for number, stream in enumerate(lane.streams):
                first, parent = lane.first[number], stream.parent
                if number not in lane.live or stream.spawn_turn >= (lane.first[parent] if parent >= 0 else 0):
                    continue  # over before the starting point, or spawned by a turn still to come
                self._plan_turn(lane, number, first, now + stream.starts_ns[first] - lane.zero_ns)
            self._cap_tree(lane, now)
        self._cap_system(now)

    def _prime(self, lane: _Lane, now: Time) -> None:
        """Move the start of `lane` to a drawn point and send the warm-up requests of what is under way there."""
        assert self._window is not None
        low, high = self._window
        length = max(stream.starts_ns[-1] + stream.turns[-1].api_ns for stream in lane.streams)
        share = low + (high - low) * draw_unit("start", self._seed, lane.session, lane.play)
        zero_ns = round(length * share)
        first = [sum(start < zero_ns for start in stream.starts_ns) for stream in lane.streams]
        live = {number for number, stream in enumerate(lane.streams) if first[number] < len(stream.turns)}
        if not live:
            return  # nothing follows that point: play the session from its start
        lane.zero_ns, lane.first, lane.live = zero_ns, first, live
        for number in sorted(live):
            if first[number] > 0:
                turn = first[number] - 1
                self._primers.add(RequestKey(lane.session, lane.play, number, turn))
                lane.next[number] = turn
                lane.due[number] = now + self._skipped
                self._push(lane, number)
