"""Who is who: nodes, ranks, requests."""

from __future__ import annotations

import msgspec

NodeId = str
"""Address of a node on its host's transport, such as `router` or `prefill0`."""

FRONTEND: NodeId = "frontend"
ROUTER: NodeId = "router"
POOL: NodeId = "pool"
SUPERVISOR: NodeId = "supervisor"

Attempt = tuple[str, int]
"""(request id, attempt number): the name under which work is booked, reserved and dropped."""


class Rank(msgspec.Struct, frozen=True, order=True):
    """One data-parallel rank of one worker: the unit of placement.

    `worker` is also the node id of the process that plans for the rank. The rack's KV pool appears as `POOL_RANK`.
    """

    worker: NodeId
    dp_rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker}.{self.dp_rank}"


POOL_RANK = Rank(POOL, 0)
