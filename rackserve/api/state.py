"""What /health tells: set by the control process, read by the front end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class ServerState:
    """`live`: processes and loops turn; `ready`: can take work; `draining`: takes no new work and ends when idle.

    `detail` is asked on each look for whatever helps a person (ranks, ages); it must be cheap and JSON-encodable.
    """

    live: bool = True
    ready: bool = False
    draining: bool = False
    detail: Callable[[], dict[str, object]] = dict

    @property
    def takes_work(self) -> bool:
        return self.live and self.ready and not self.draining
