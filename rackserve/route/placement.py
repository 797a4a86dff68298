"""Placement policies by name, and the router's configuration.

A policy sees the candidates of one attempt and names one. What it remembers between calls (a cursor, a session map) lives in
the policy object; clocks and chance play no part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.ids import Rank
from rackserve.base.ranges import MAX_COUNT, require_range
from rackserve.route.cost import Candidate


class PlacementPolicy(Protocol):
    """Chooses where an attempt's prompt is computed."""

    def place(self, session: str, candidates: Sequence[Candidate]) -> Candidate:
        """One of `candidates`, which is not empty and in rank order. An empty `session` is no session."""
        ...


class Rotation:
    """Takes turns among ranks that are equally good. It remembers a rank, not a position, so that ranks may come and go."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: Rank | None = None

    def choose(self, tied: Sequence[Candidate]) -> Candidate:
        """The first of `tied` (in rank order) after the rank chosen last, else the first."""
        last = self._last
        later = (candidate for candidate in tied if last is not None and candidate.rank > last)
        chosen = next(later, tied[0])
        self._last = chosen.rank
        return chosen


class RoundRobin:
    """Each rank in turn, whatever it holds or has to do."""

    __slots__ = ("_rotation",)

    def __init__(self) -> None:
        self._rotation = Rotation()

    def place(self, session: str, candidates: Sequence[Candidate]) -> Candidate:
        return self._rotation.choose(candidates)


class LeastLoad:
    """Fewest queued tokens, then fewest queued attempts, then in turn; blind to caches."""

    __slots__ = ("_rotation",)

    def __init__(self) -> None:
        self._rotation = Rotation()

    def place(self, session: str, candidates: Sequence[Candidate]) -> Candidate:
        least = min((candidate.queued_tokens, candidate.num_queued) for candidate in candidates)
        return self._rotation.choose([c for c in candidates if (c.queued_tokens, c.num_queued) == least])


class LeastUncachedWork:
    """Least cost (see `route.cost`), then fewest queued tokens, then in turn, so that one rank does not get all idle ties."""

    __slots__ = ("_rotation",)

    def __init__(self) -> None:
        self._rotation = Rotation()

    def place(self, session: str, candidates: Sequence[Candidate]) -> Candidate:
        costs = [(candidate.cost, candidate.queued_tokens) for candidate in candidates]
        least = min(costs)
        return self._rotation.choose([candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == least])


class SessionAffinity:
    """A session stays where it was first placed: on the rank with the fewest sessions then.

    It moves, for good, only when that rank is no candidate (lost, or full). At most `max_sessions` are remembered; the one
    unseen for longest is forgotten first. Requests without a session are spread in turn.
    """

    __slots__ = ("_homes", "_max_sessions", "_num_sessions", "_rotation")

    def __init__(self, max_sessions: int = 100_000) -> None:
        self._max_sessions = max_sessions
        self._homes: OrderedDict[str, Rank] = OrderedDict()
        self._num_sessions: dict[Rank, int] = {}
        self._rotation = Rotation()

    def place(self, session: str, candidates: Sequence[Candidate]) -> Candidate:
        if not session:
            return self._rotation.choose(candidates)
        home = self._homes.get(session)
        chosen = next((candidate for candidate in candidates if candidate.rank == home), None)
        if chosen is None:
            if home is not None:
                self._forget(session)
            fewest = min(self._num_sessions.get(candidate.rank, 0) for candidate in candidates)
            chosen = self._rotation.choose([c for c in candidates if self._num_sessions.get(c.rank, 0) == fewest])
            self._homes[session] = chosen.rank
            self._num_sessions[chosen.rank] = fewest + 1
            if len(self._homes) > self._max_sessions:
                self._forget(next(iter(self._homes)))
        self._homes.move_to_end(session)
        return chosen

    def _forget(self, session: str) -> None:
        rank = self._homes.pop(session)
        self._num_sessions[rank] -= 1
        if not self._num_sessions[rank]:
            del self._num_sessions[rank]


POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "least_uncached_work": LeastUncachedWork,
    "session_affinity": SessionAffinity,
    "least_load": LeastLoad,
    "round_robin": RoundRobin,
}
"""Placement policies by the name used in `router.policy`."""


MAX_FETCH_COST = 10**9
"""From here on a fetch never pays, whatever it is compared with."""


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How requests are placed.

    policy                        a name in POLICIES
    fetch_cost                    time to fetch a token from the pool over time to compute it; None: what `rates` say
    max_queued_requests_per_rank  attempts that may be booked on a prefill rank; 0 = no limit
    max_queued_tokens_per_rank    tokens of work that may be booked on a prefill rank; 0 = no limit
    max_index_runs                runs of keys the prefix index remembers over all holders
    """

    policy: str = "least_uncached_work"
    fetch_cost: float | None = None
    max_queued_requests_per_rank: int = 0
    max_queued_tokens_per_rank: int = 0
    max_index_runs: int = 200_000

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"router.policy {self.policy!r} is unknown; choose one of {', '.join(POLICIES)}")
        if self.fetch_cost is not None:
            require_range("router", self, ("fetch_cost",), 0, MAX_FETCH_COST)
        require_range("router", self, ("max_queued_requests_per_rank", "max_queued_tokens_per_rank"), 0, MAX_COUNT)
        require_range("router", self, ("max_index_runs",), 1, MAX_COUNT)


class DecodeCandidate(msgspec.Struct, frozen=True):
    """A decode rank: context tokens it has room for and has booked, and tokens of the prompt it holds already."""

    rank: Rank
    capacity_tokens: int
    booked_tokens: int
    cached_tokens: int = 0


def place_decode(context_tokens: int, candidates: Sequence[DecodeCandidate]) -> DecodeCandidate | None:
    """The rank with the least context after taking this one, of those with room for `context_tokens`; None if there is none.

    Tokens the rank has cached are neither pushed nor stored again, so they count as context saved. Ties go to the first in
    rank order: once it is booked it is no longer tied.
    """
    fitting = [c for c in candidates if c.booked_tokens + context_tokens - c.cached_tokens <= c.capacity_tokens]
    return min(fitting, key=lambda c: (c.booked_tokens - c.cached_tokens, c.rank), default=None)
