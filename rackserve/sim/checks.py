"""The laws of docs/invariants.md, checked on a simulated rack after every event, and once more when it has come to rest."""

from __future__ import annotations

from rackserve.base.errors import InvariantError
from rackserve.base.ids import POOL_RANK, Rank
from rackserve.base.keys import Chain, count, key_at
from rackserve.sim.rack import SimRack


def check_always(rack: SimRack) -> None:
    """Laws that hold after every event: conservation, bookings, budgets, steps (I2, I6, I7, I8)."""
    rack.router.check()
    if rack.pool is not None:
        rack.pool.check()
    for node in rack.workers().values():
        node.check()


def check_at_rest(rack: SimRack) -> None:
    """Laws of a rack that has nothing left to do: all is given back (I2, I6) and the index tells the truth (I5)."""
    check_always(rack)
    if rack.frontend.num_live:
        raise InvariantError(f"{rack.frontend.num_live} requests never ended (I1)")
    if not rack.router.is_quiet:
        raise InvariantError("the router still has bookings or promises (I6)")
    for name, node in rack.workers().items():
        if not node.is_quiet:
            raise InvariantError(f"{name} still holds something for an attempt (I2)")
    if rack.pool is not None and rack.pool.directory.num_held:
        raise InvariantError(f"the pool still holds {rack.pool.directory.num_held} leases or grants (I11)")
    check_index(rack)


def check_index(rack: SimRack) -> None:
    """For each holder whose last event has reached the router: the index lists what the holder has, no more and no less."""
    truth: dict[Rank, tuple[int, list[Chain]]] = {}
    for node in rack.workers().values():
        for announcer, cache in zip(node.worker.announcers, node.worker.caches, strict=True):
            truth[announcer.holder] = (announcer.number, cache.chains())
    if rack.pool is not None:
        truth[POOL_RANK] = (rack.pool.announcer.number, rack.pool.directory.chains())
    for holder, (number, chains) in truth.items():
        if rack.router.index.heard(holder) != number:
            continue  # events were lost after the last one that arrived: the next event will show the gap
        claimed = blocks_of(rack.router.index.holding(holder))
        if claimed != blocks_of(chains):
            raise InvariantError(f"the index claims {len(claimed)} blocks for {holder}, it has {len(blocks_of(chains))} (I5)")


def blocks_of(chains: list[Chain]) -> set[bytes]:
    """Every key in a set of chains."""
    return {key_at(chain, index) for chain in chains for index in range(count(chain))}
