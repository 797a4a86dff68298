"""Makes recorded sessions small or fast enough for the rack at hand, and says what had to be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.rng import Stream
from rackserve.base.units import NS_PER_S, Time
from rackserve.bench.session import MAX_TIME_S, Session, Subagent, TraceRequest, requests_of
from rackserve.bench.streams import streams_of


class ScaledTrace(msgspec.Struct, frozen=True):
    """Scaled sessions and what the limits took away, in requests of the original."""

    sessions: tuple[Session, ...]
    num_requests: int
    num_cut_by_context: int
    num_cut_by_turns: int
    num_sessions_cut: int

    def describe(self) -> str:
        """One line for the head of a run's output."""
        whole = f"{len(self.sessions)} sessions, {self.num_requests} requests"
        if not self.num_sessions_cut:
            return whole
        cut = [f"{self.num_cut_by_context} requests from where the context no longer fits"] if self.num_cut_by_context else []
        cut += [f"{self.num_cut_by_turns} requests beyond the turn limit"] if self.num_cut_by_turns else []
        some = "1 session ends" if self.num_sessions_cut == 1 else f"{self.num_sessions_cut} sessions end"
        return f"{whole}; {some} early, leaving out {' and '.join(cut)}"

    @property
    def num_streams(self) -> int:
        """Conversations of all sessions, subagents' included."""
        return sum(len(streams_of(session)) for session in self.sessions)

    def changed(self, change: Callable[[Session], Session]) -> ScaledTrace:
        """The same with every session changed by something that keeps its requests."""
        return msgspec.structs.replace(self, sessions=tuple(change(session) for session in self.sessions))

    def shuffled(self, seed: int) -> ScaledTrace:
        """The sessions in an order that depends on the seed: who meets whom in the caches is what differs between seeds."""
        stream, left = Stream("order", seed), list(self.sessions)
        order = [left.pop(stream.below(len(left))) for _ in range(len(left))]
        return msgspec.structs.replace(self, sessions=tuple(order))


class _Scaler:
    __slots__ = ("by_context", "by_turns", "max_context", "max_turns", "scale", "time_scale")

    def __init__(self, scale: int, time_scale: float, max_context: int, max_turns: int) -> None:
        self.scale = scale
        self.time_scale = time_scale
        self.max_context = max_context
        self.max_turns = max_turns
        self.by_context = 0
        self.by_turns = 0

    def time(self, ns: Time) -> Time:
        scaled = ns / self.time_scale
        if scaled > MAX_TIME_S * NS_PER_S:
            raise ConfigError(
                f"a time scale of {self.time_scale} makes a pause longer than {MAX_TIME_S:g} s; give a larger one"
            )
        return round(scaled)

    def request(self, request: TraceRequest, block_tokens: int) -> TraceRequest:
        spare = max(0, request.input_tokens - request.num_blocks * block_tokens)
        tokens = request.num_blocks * (block_tokens // self.scale) + spare // self.scale
        outputs = max(1, request.output_tokens // self.scale)
        at_ns, api_ns = self.time(request.at_ns), self.time(request.api_ns)
        return TraceRequest(at_ns, api_ns, max(1, tokens), outputs, request.hash_ids, request.model)

    def entries(self, entries: tuple[TraceRequest | Subagent, ...], block_tokens: int) -> tuple[TraceRequest | Subagent, ...]:
        kept: list[TraceRequest | Subagent] = []
        turns = 0
        for number, entry in enumerate(entries):
            if isinstance(entry, Subagent):
                inner = self.entries(entry.entries, block_tokens)
                if inner:
                    at_ns = self.time(entry.at_ns)
                    whole = sum(1 for _ in requests_of(inner)) == sum(1 for _ in requests_of(entry.entries))
                    end_ns = self.time(entry.end_ns) if whole else at_ns + max(part.end_ns for part in inner)
                    kept.append(Subagent(entry.id, at_ns, end_ns, inner))
                continue
            rest = sum(1 for _ in requests_of(entries[number:]))
            if self.max_turns and turns >= self.max_turns:
                self.by_turns += rest
                break
            request = self.request(entry, block_tokens)
            if self.max_context and request.input_tokens + request.output_tokens > self.max_context:
                self.by_context += rest
                break
            turns += 1
            kept.append(request)
        return tuple(kept)


def scale_sessions(
    sessions: Iterable[Session],
    *,
    scale: int = 1,
    time_scale: float = 1.0,
    max_context: int = 0,
    max_turns: int = 0,
) -> ScaledTrace:
    """Divide tokens by `scale` and times by `time_scale`; 0 means no limit.

    `scale` must divide the trace's block size, so a block of 64 tokens becomes exactly 64 / scale and shared prefixes stay
    shared. Outputs are divided rounding down, at least 1; so is what a prompt holds beyond its last full block.
    `max_context` bounds prompt + output tokens after scaling: the first request that does not fit ends its conversation (a
    session with its later subagents, or a subagent), because what follows would build on it. `max_turns` bounds the turns of
    each conversation.
    """
    if scale < 1 or not 0 < time_scale < inf:
        raise ConfigError(f"scale must be at least 1 and time_scale above 0 and finite, got {scale} and {time_scale}")
    scaler = _Scaler(scale, time_scale, max_context, max_turns)
    made: list[Session] = []
    num_cut = 0
    for session in sessions:
        if session.block_tokens % scale:
            raise ConfigError(f"scale must divide the trace's block size {session.block_tokens}, got {scale}; try 1, 2, 4, 8")
        before = scaler.by_context + scaler.by_turns
        entries = scaler.entries(session.entries, session.block_tokens)
        num_cut += scaler.by_context + scaler.by_turns > before
        if entries:
            start_ns = scaler.time(session.start_ns)
            made.append(Session(session.id, session.block_tokens // scale, entries, session.shared, start_ns))
    num_requests = sum(session.num_requests for session in made)
    return ScaledTrace(tuple(made), num_requests, scaler.by_context, scaler.by_turns, num_cut)
