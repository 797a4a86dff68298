"""The three health answers: /live, /ready and /health."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.types import Scope

from rackserve.api.call import Caller
from rackserve.api.state import ServerState

PATHS = ("/live", "/ready", "/health")


class Health:
    """/live: 200 while the process and its event loop turn, which answering proves. /ready: 200 if work is taken and moves.

    /health: the same as /ready, with all that is known if `details` may be told: to whoever holds a key, or all where there is
    none. Whoever restarts servers asks /live; whoever sends them work, /ready.
    """

    def __init__(self, state: ServerState, num_open: Callable[[], int] = lambda: 0) -> None:
        self._state = state
        self._num_open = num_open

    def answer(self, path: str, *, details: bool) -> tuple[int, bytes, dict[str, str]] | None:
        """Status, JSON and headers for one of `PATHS`; None for others."""
        state = self._state
        if path == "/live":
            return _reply(state.live, {"live": state.live})
        if path not in PATHS:
            return None
        phase = state.phase()
        told: dict[str, object] = {"live": state.live, "ready": phase == "ready", "phase": phase}
        if phase == "stuck" and details:
            told["stuck"] = state.stall()
        if path == "/health" and details:
            told |= {"draining": state.draining, "open_requests": self._num_open(), **state.detail()}
        return _reply(phase == "ready", told)


def knows(scope: Scope) -> bool:
    """Whether details may be told: the guard knows who asks, or lets everyone in; without a guard, nobody is kept out."""
    caller: Caller = scope.get("caller") or Caller(admin=True)
    return caller.admin or bool(caller.key)


def _reply(good: bool, body: dict[str, object]) -> tuple[int, bytes, dict[str, str]]:
    return 200 if good else 503, msgspec.json.encode(body), {"cache-control": "no-store"}
