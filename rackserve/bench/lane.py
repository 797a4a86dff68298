"""One live session tree of a closed-loop replay: which turn each of its conversations is at, and what that turn waits for."""

from __future__ import annotations

from rackserve.base.units import Time
from rackserve.bench.draw import start_share
from rackserve.bench.session import Session
from rackserve.bench.streams import Stream, streams_of


class Lane:
    """Streams of one play of `session`. Times in `due` are on the replay's shifted time line.

    live       streams that have not ended; next, due: the turn each waits to send, and when
    joins      stream -> streams its next turn still waits for
    held       streams whose next turn is kept back until warming up is over
    quota      further one-token requests this lane may send while warming up
    origin_ns  the point of the recording at which the replay of this lane begins
    """

    __slots__ = (
        "_children", "_joiners", "block_tokens", "due", "first", "held", "in_flight", "joins", "live", "next", "origin_ns",
        "play", "quota", "session", "shared", "streams", "tree",
    )  # fmt: skip

    def __init__(self, session: Session, play: int, quota: int) -> None:
        self.session = session.id
        self.tree = f"{session.id}/{play}"
        self.block_tokens = session.block_tokens
        self.shared = session.shared
        self.play = play
        self.quota = quota
        self.streams: tuple[Stream, ...] = streams_of(session)
        self.live = set(range(len(self.streams)))
        self.next = [0] * len(self.streams)
        self.first = [0] * len(self.streams)
        self.due: dict[int, Time] = {}
        self.joins: dict[int, set[int]] = {}
        self.held: set[int] = set()
        self.in_flight = 0
        self.origin_ns: Time = min(stream.starts_ns[0] for stream in self.streams)
        self._children: dict[tuple[int, int], list[int]] = {}
        self._joiners: dict[tuple[int, int], list[int]] = {}
        for number, stream in enumerate(self.streams):
            self._children.setdefault((stream.parent, stream.spawn_turn), []).append(number)
            if stream.join_turn >= 0:
                self._joiners.setdefault((stream.parent, stream.join_turn), []).append(number)

    def move_to_start(self, window: tuple[float, float], seed: int, lane: int) -> list[int]:
        """Begin at a drawn point of the recording instead of its start; the streams that had sent something before it.

        The point lies at a share within `window` of the time from the first sending to the last. Streams whose last turn was
        sent before it are over.
        """
        begin, end = self.origin_ns, max(stream.starts_ns[-1] for stream in self.streams)
        low, high = (begin + share * (end - begin) for share in window)
        self.origin_ns = round(low + (high - low) * start_share(seed, self.session, lane))
        self.first = [sum(start < self.origin_ns for start in stream.starts_ns) for stream in self.streams]
        self.live = {number for number, stream in enumerate(self.streams) if self.first[number] < len(stream.turns)}
        return [number for number in sorted(self.live) if self.first[number] > 0]

    def open_streams(self) -> list[int]:
        """Streams that are under way at the beginning: not over, and not to be spawned by a turn still to come."""
        opened = []
        for number, stream in enumerate(self.streams):
            after = self.first[stream.parent] if stream.parent >= 0 else 0
            if number in self.live and stream.spawn_turn < after:
                opened.append(number)
        return opened

    def spawned_by(self, number: int, turn: int) -> list[int]:
        """Live streams that begin when turn `turn` of stream `number` has ended."""
        return [child for child in self._children.get((number, turn), ()) if child in self.live]

    def open_joins(self, number: int, turn: int) -> set[int]:
        """Streams that turn `turn` of stream `number` must still wait for."""
        return {child for child in self._joiners.get((number, turn), ()) if child in self.live}

    def pause_ns(self, number: int, *, resumed: bool) -> Time:
        """Time from the beginning of measuring to the next turn of `number`.

        By the recording's clock; but for a lane that took a new session while warming up (`resumed` false), whose clock means
        nothing then, the pause before that turn.
        """
        stream, turn = self.streams[number], self.next[number]
        if resumed or (turn == 0 and stream.parent < 0):
            return max(0, stream.starts_ns[turn] - self.origin_ns)
        return stream.gaps_ns[turn]
