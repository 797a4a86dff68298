"""The laws of docs/invariants.md, checked on a simulated rack after every event, and once more when it has come to rest."""

from __future__ import annotations

from rackserve.base.errors import InvariantError
from rackserve.base.ids import FRONTEND, POOL_RANK, Rank
from rackserve.base.keys import Chain, count, key_at
from rackserve.base.messages import AttemptMessage, Message, Placed
from rackserve.nodes.frontend import Frontend
from rackserve.sched.sequence import Sequence
from rackserve.sim.rack import SimRack


class FrontendWatch:
    """Stands before the frontend and checks that a message of an attempt that is over touches nothing (I10)."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    def handle(self, message: Message) -> None:
        key = message.placement.key if isinstance(message, Placed) else None
        key = message.key if isinstance(message, AttemptMessage) else key
        before = self._frontend.delivered()
        self._frontend.handle(message)
        if key is not None and before.get(key[0], (0, 0))[0] != key[1] and self._frontend.delivered() != before:
            raise InvariantError(f"{type(message).__name__} of attempt {key}, which is over, was not ignored (I10)")


def watch(rack: SimRack) -> None:
    """Check every message to the frontend from now on (I10)."""
    rack.host.nodes[FRONTEND] = FrontendWatch(rack.frontend)


def check_always(rack: SimRack) -> None:
    """Laws that hold after every event: conservation, bookings, budgets, steps, transfers (I2, I4, I6, I7, I8)."""
    rack.router.check()
    if rack.pool is not None:
        rack.pool.check()
    for node in rack.workers().values():
        node.check()
    check_transfers(rack)


def check_transfers(rack: SimRack) -> None:
    """Blocks that a transfer reads or writes belong to its attempt, on both sides, until it has ended (I2)."""
    workers = rack.workers()
    for name, node in workers.items():
        for transfer, sequence in node.worker.moves.under_way():
            for copy in transfer.copies:
                if copy.group != "full" or not rack.regions.alive(copy):
                    continue
                ours = copy.target_slots if transfer.kind == "fetch" else copy.source_slots
                _require_held(sequence, ours, f"{transfer.kind} {transfer.number} on {name}")
                peer = workers.get(sequence.placement.decode.worker)
                if transfer.kind == "push" and peer is not None:
                    there = peer.worker.sequences.get(sequence.key)
                    _require_held(there, copy.target_slots, f"push {transfer.number} from {name}")


def _require_held(sequence: Sequence | None, slots: tuple[int, ...], what: str) -> None:
    if sequence is None or sequence.lease is None or not set(slots) <= set(sequence.lease.blocks):
        raise InvariantError(f"{what} touches blocks that its attempt does not hold (I2)")


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
