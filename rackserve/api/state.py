"""What /live, /ready and /health tell: set by the control process, read by the front end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _nothing() -> None:
    return None


@dataclass(slots=True)
class ServerState:
    """`live`: processes and loops turn; `ready`: can take work; `draining`: takes no new work and ends when idle.

    loading  the model is being loaded; not ready yet
    detail   asked on each look for whatever helps a person (ranks, ages); it must be cheap and JSON-encodable
    stall    asked on each look: what says where work stands still and for how long, or None. Work is still taken then
    """

    live: bool = True
    ready: bool = False
    draining: bool = False
    loading: bool = False
    detail: Callable[[], dict[str, object]] = dict
    stall: Callable[[], object | None] = _nothing

    @property
    def takes_work(self) -> bool:
        return self.live and self.ready and not self.draining

    def phase(self) -> str:
        """One word: dead, draining, loading, unavailable (a role has no rank left), stuck or ready."""
        if not self.live:
            return "dead"
        if self.draining:
            return "draining"
        if not self.ready:
            return "loading" if self.loading else "unavailable"
        return "ready" if self.stall() is None else "stuck"
