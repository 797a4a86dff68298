"""The laws of docs/invariants.md, checked on a simulated rack after every event, and once more when it has come to rest."""

from __future__ import annotations

from rackserve.base.errors import InvariantError
from rackserve.base.ids import FRONTEND, POOL_RANK, Rank
from rackserve.base.keys import Chain, count, key_at
from rackserve.base.messages import AttemptMessage, Message, Placed
from rackserve.base.transfer import Region
from rackserve.nodes.frontend import Frontend
from rackserve.nodes.prefill import PrefillNode
from rackserve.pool.segments import encode
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
        if key is not None and before.get(key[0], (0, 0, 0))[0] != key[1] and self._frontend.delivered() != before:
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


def check_every(rack: SimRack, num_events: int) -> None:
    """Check those laws after every so many events from now on: a check looks at every block of the rack, an event does not."""
    left = num_events

    def after_event() -> None:
        nonlocal left
        left -= 1
        if not left:
            left = num_events
            check_always(rack)

    rack.host.after_event = after_event


def check_transfers(rack: SimRack) -> None:
    """Blocks that a transfer reads or writes are its attempt's until it has ended, and a reservation stands as long as the
    prefill rank may push there (I2); pool slots are visible while they are fetched (I11), and not before they are written (I4).
    """
    workers = rack.workers()
    visible = rack.pool.directory.visible_slots() if rack.pool is not None else set()
    for name, node in workers.items():
        for transfer, sequence in node.worker.moves.under_way():
            what = f"{transfer.kind} {transfer.number} on {name}"
            for copy in transfer.copies:
                if copy.group != "full" or not rack.regions.alive(copy):
                    continue
                fetch = transfer.kind == "fetch"
                _require_held(sequence, copy.target_slots if fetch else copy.source_slots, what)
                if transfer.kind != "push":
                    slots = (
                        _pool_slots(copy.source, copy.source_slots) if fetch else _pool_slots(copy.target, copy.target_slots)
                    )
                    if (slots <= visible) if not fetch else not slots <= visible:
                        raise InvariantError(f"{what}: pool slots {sorted(slots)} are {'not ' * fetch}visible (I4, I11)")
        for sequence, reserved in node.reservations() if isinstance(node, PrefillNode) else ():
            peer = workers.get(reserved.rank.worker)
            if peer is not None and peer.worker.region(reserved.rank.dp_rank) == reserved.region:
                there = peer.worker.sequences.get(sequence.key)
                _require_held(there, reserved.slots, f"the reservation of {sequence.key} on {reserved.rank}")


def _pool_slots(region: Region, slots: tuple[int, ...]) -> set[int]:
    return {encode(int(region.removeprefix("segment/")), slot) for slot in slots}


def _require_held(sequence: Sequence | None, slots: tuple[int, ...], what: str) -> None:
    if sequence is None or sequence.lease is None or not set(slots) <= set(sequence.lease.blocks):
        raise InvariantError(f"{what}: its attempt does not hold blocks {slots} (I2)")


def check_at_rest(rack: SimRack) -> None:
    """Laws of a rack that has nothing left to do: all is given back (I2, I6) and the index tells the truth (I5)."""
    check_always(rack)
    if rack.frontend.num_live:
        raise InvariantError(f"{rack.frontend.num_live} requests never ended (I1)")
    if not rack.router.is_quiet:
        raise InvariantError("the router still has bookings or promises (I6)")
    for name, node in rack.workers().items():
        if not node.is_quiet or any(cache.num_leases for cache in node.worker.caches):
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
