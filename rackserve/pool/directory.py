"""Which blocks the pool has and where, who is reading them, and who is writing which.

Readers get leases: leased blocks stay until release, death of the reader or the lease's deadline. Writers get grants: empty
slots that become visible with `commit`, and not before. A grant past its deadline keeps its slots in quarantine until the
writer says, or its death proves, that it writes there no more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Attempt, Rank
from rackserve.base.keys import Chain, count, key_at, prefix
from rackserve.base.messages import PoolFound, PoolGranted
from rackserve.base.ranges import MAX_SECONDS, require_range
from rackserve.base.units import NS_PER_S, Time
from rackserve.pool.segments import Segments, decode, decode_all
from rackserve.runs.accounts import NO_SLOT, HeldRun, TenantsConfig
from rackserve.runs.cache import Evicted, Removed, RunCache, Stored


class PoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time limit and eviction of the pool.

    lease_ns  a reader's or writer's hold on slots ends this long after it was given; their transfers must end well before
    eviction  a name in EVICTION_ORDERS
    """

    lease_ns: Time = 30 * NS_PER_S
    eviction: str = "lru"

    def __post_init__(self) -> None:
        require_range("pool", self, ("lease_ns",), 1, 10 * MAX_SECONDS * NS_PER_S)


@dataclass(slots=True)
class PoolCounters:
    """Totals since the start, in blocks; the last two in leases and grants."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    lost: int = 0
    refused_full: int = 0
    expired_leases: int = 0
    expired_grants: int = 0


@dataclass(slots=True)
class Lease:
    """A reader's hold on the blocks up to the end of `run`."""

    rank: Rank
    run: HeldRun
    deadline: Time


@dataclass(slots=True)
class Grant:
    """A writer's hold on empty slots for blocks [start, count(chain)) of `chain`; `parent` pins the blocks before them."""

    attempt: Attempt
    rank: Rank
    chain: Chain
    start: int
    slots: list[int]
    window_slot: int
    parent: HeldRun | None
    deadline: Time
    tenant: str

    @property
    def window_slots(self) -> list[int]:
        return [] if self.window_slot == NO_SLOT else [self.window_slot]


class Directory:
    """The pool's one source of truth. After any call that changed presence, `take_events` has what to tell the router.

    Events must be sent before the answer that came with them: a key is withdrawn before its slot is granted again.
    """

    __slots__ = ("_cache", "_config", "_events", "_grants", "_leases", "_number", "_writing", "blocks", "counters",
                 "late_grants", "windows")  # fmt: skip

    def __init__(self, config: PoolConfig, *, needs_window: bool, tenants: TenantsConfig | None = None) -> None:
        self.blocks = Segments()
        self.windows = Segments()
        self.counters = PoolCounters()
        self._config = config
        self._cache = RunCache(needs_window=needs_window, eviction=config.eviction, tenants=tenants)
        self._events: list[Stored | Removed] = []
        self._number = 0  # of the last lease or grant
        self._leases: OrderedDict[int, Lease] = OrderedDict()  # in order of their deadlines, as are the grants
        self._grants: OrderedDict[int, Grant] = OrderedDict()
        self.late_grants: dict[int, Grant] = {}  # past their deadline, neither committed nor cancelled: slots in quarantine
        self._writing: dict[bytes, int] = {}  # first key of each open grant -> grant

    # ------------------------------------------------------------ readers

    def lookup(self, attempt: Attempt, rank: Rank, chain: Chain, from_block: int, now: Time) -> PoolFound:
        """Lease what the pool has of `chain` beyond its first `from_block` blocks."""
        found = self._cache.match(chain)
        num_blocks = max(found - from_block, 0)
        self.counters.hits += num_blocks
        self.counters.misses += max(count(chain) - max(found, from_block), 0)
        if not num_blocks:
            return PoolFound(*attempt, lease=0, from_block=from_block, slots=())
        run = self._cache.pin(chain, found)
        self._number += 1
        self._leases[self._number] = Lease(rank, run, now + self._config.lease_ns)
        window = self._cache.window_slot(run)
        return PoolFound(
            *attempt,
            lease=self._number,
            from_block=from_block,
            slots=decode_all(self._cache.slots(run, from_block)),
            window_slot=None if window == NO_SLOT else decode(window),
        )

    def release(self, lease: int) -> bool:
        """The transfers that needed `lease` have ended; False if it has ended before."""
        ended = self._leases.pop(lease, None)
        if ended is None:
            return False
        self._unpin(ended.run)
        return True

    # ------------------------------------------------------------ writers

    def store(
        self, attempt: Attempt, rank: Rank, chain: Chain, from_block: int, with_window: bool, now: Time, tenant: str = ""
    ) -> PoolGranted:
        """Grant slots for the blocks of `chain` that the pool lacks, as many from the front as there is room for.

        Blocks of others than `tenant` give way only as far as those hold more than their share.
        The writer has blocks [from_block, count(chain)) and, if `with_window`, the resume state at the end. Nothing is
        granted (grant 0) if blocks before `from_block` are missing or another writer is at the same blocks.
        """
        total = count(chain)
        start = self._cache.present(chain)
        window = with_window and self._cache.needs_window and total > 0
        nothing = PoolGranted(*attempt, grant=0, from_block=start, slots=())
        if start < from_block or (start == total and not (window and self._cache.match(chain) < total)):
            return nothing
        if start < total and key_at(chain, start) in self._writing:
            return nothing
        parent = self._cache.pin(chain, start) if start else None  # before making room, which must not take it
        slots = self._room(total - start, rank, tenant)
        self.counters.refused_full += total - start - len(slots)
        end = start + len(slots)
        window_slot = self._window_room(rank, tenant) if window and end == total else NO_SLOT
        if not slots and window_slot == NO_SLOT:
            if parent is not None:
                self._unpin(parent)
            return nothing
        self._number += 1
        deadline = now + self._config.lease_ns
        written = prefix(chain, end)
        self._grants[self._number] = Grant(attempt, rank, written, start, slots, window_slot, parent, deadline, tenant)
        if slots:
            self._writing[key_at(chain, start)] = self._number
        return PoolGranted(
            *attempt,
            grant=self._number,
            from_block=start,
            slots=decode_all(slots),
            window_slot=None if window_slot == NO_SLOT else decode(window_slot),
        )

    def commit(self, grant: int) -> bool:
        """The slots of `grant` are written: publish them. False if nothing new came of it (unknown, late, trays lost)."""
        if grant in self.late_grants:
            self.cancel(grant)
            return False
        written = self._close(grant)
        if written is None:
            return False
        alive = self.blocks.num_alive(written.slots)
        chain = prefix(written.chain, written.start + alive)
        present = self._cache.present(chain)
        window = written.window_slot
        if alive < len(written.slots) or not self.windows.is_alive(window):
            window = NO_SLOT
        if present < written.start or (not alive and window == NO_SLOT):
            self._discard(written)
            return False
        surplus, left = self._cache.insert(chain, written.slots[:alive], written.start, window, written.tenant)
        self.blocks.free(surplus + written.slots[alive:])
        self.windows.free(written.window_slots if left == window else [])
        if present < count(chain):
            self.counters.stored += count(chain) - present
            self._events.append(Stored(chain, present))
        return present < count(chain) or left != window

    def cancel(self, grant: int) -> bool:
        """Nothing will be written to the slots of `grant` any more; False if it has ended before."""
        ended = self.late_grants.pop(grant, None) or self._close(grant)
        if ended is None:
            return False
        self._discard(ended)
        return True

    # ------------------------------------------------------------ time and failures

    def next_deadline(self) -> Time | None:
        """When to call `expire` next; None if nothing is held."""
        lease, grant = next(iter(self._leases.values()), None), next(iter(self._grants.values()), None)
        return min((hold.deadline for hold in (lease, grant) if hold is not None), default=None)

    def expire(self, now: Time) -> list[int]:
        """End what is past its deadline and return its numbers: leases, then grants (whose slots go to quarantine)."""
        leases = _past(self._leases, now)
        for number in leases:
            self.release(number)
        grants = _past(self._grants, now)
        for number in grants:
            late = self._close(number)
            if late is not None:
                self.blocks.quarantine(late.slots)
                self.windows.quarantine(late.window_slots)
                self.late_grants[number] = late
        self.counters.expired_leases += len(leases)
        self.counters.expired_grants += len(grants)
        return leases + grants

    def rank_down(self, rank: Rank) -> None:
        """`rank` reads and writes nothing any more: end its leases and grants, quarantined ones too."""
        for number in [number for number, lease in self._leases.items() if lease.rank == rank]:
            self.release(number)
        for number in [number for number, grant in (self._grants | self.late_grants).items() if grant.rank == rank]:
            self.cancel(number)

    def segment_joined(self, segment: int, num_slots: int, num_window_slots: int, rank: Rank | None) -> None:
        """An empty segment can be used. Raises InvariantError if its number was used before."""
        self.blocks.join(segment, num_slots, rank)
        self.windows.join(segment, num_window_slots, rank)

    def segment_lost(self, segment: int) -> bool:
        """The content of `segment` is gone, and with it every block behind one of its blocks. False if it was not there."""
        if not self.blocks.lose(segment):
            return False
        self.windows.lose(segment)
        before = self._cache.num_blocks
        self._take_back(self._cache.drop_slots(lambda slot: decode(slot)[0] == segment))
        self.counters.lost += before - self._cache.num_blocks
        return True

    # ------------------------------------------------------------ what others ask

    def take_events(self) -> list[Stored | Removed]:
        """What became present or absent since the last call, in order."""
        events, self._events = self._events, []
        return events

    def chains(self) -> list[Chain]:
        """Maximal chains present, for a snapshot. Take the events first: the snapshot includes them."""
        return self._cache.chains()

    def visible_slots(self) -> set[int]:
        """Encoded slots of the blocks readers may be sent to, and of lost ones that a lease still pins."""
        return set(self._cache.held_slots()[0])

    @property
    def num_blocks(self) -> int:
        """Blocks present."""
        return self._cache.num_blocks

    @property
    def num_held(self) -> int:
        """Open leases, open grants and late grants."""
        return len(self._leases) + len(self._grants) + len(self.late_grants)

    def check(self) -> None:
        """Raise InvariantError unless each slot has one owner and all pins are those of leases and grants. Cost: all slots."""
        self._cache.check()
        slots, windows = self._cache.held_slots()
        for grant in self._grants.values():
            slots += grant.slots
            windows += grant.window_slots
        self.blocks.check(slots, [slot for grant in self.late_grants.values() for slot in grant.slots])
        self.windows.check(windows, [slot for grant in self.late_grants.values() for slot in grant.window_slots])
        if not self._leases and not any(grant.parent for grant in self._grants.values()) and self._cache.num_pinned:
            raise InvariantError(f"{self._cache.num_pinned} blocks are pinned by nobody")
        if sorted(self._writing.values()) != [number for number, grant in self._grants.items() if grant.slots]:
            raise InvariantError("the keys being written are not those of the open grants")

    # ------------------------------------------------------------ inside

    def _room(self, num_slots: int, rank: Rank, tenant: str) -> list[int]:
        lacking = num_slots - self.blocks.num_free
        if lacking > 0:
            self._evict(self._cache.evict(lacking, tenant, self.blocks.total, reach=False))
        return self.blocks.allocate(num_slots, self.blocks.near(rank))

    def _window_room(self, rank: Rank, tenant: str) -> int:
        if not self.windows.num_free:
            self._evict(self._cache.evict_window(1, tenant, self.windows.total, reach=False))
        return next(iter(self.windows.allocate(1, self.windows.near(rank))), NO_SLOT)

    def _evict(self, evicted: Evicted) -> None:
        self.counters.evicted += len(evicted.slots)
        self._take_back(evicted)

    def _take_back(self, evicted: Evicted) -> None:
        self.blocks.free(evicted.slots)
        self.windows.free(evicted.window_slots)
        self._events += [Removed(chain, keep) for chain, keep in evicted.removed]

    def _close(self, grant: int) -> Grant | None:
        """End an open grant's hold on its keys and on the blocks before them; its slots are the caller's."""
        ended = self._grants.pop(grant, None)
        if ended is not None:
            if ended.slots:
                del self._writing[key_at(ended.chain, ended.start)]
            if ended.parent is not None:
                self._unpin(ended.parent)
        return ended

    def _discard(self, grant: Grant) -> None:
        self.blocks.free(grant.slots)
        self.windows.free(grant.window_slots)

    def _unpin(self, run: HeldRun) -> None:
        self._cache.unpin(run)
        slots, windows = self._cache.take_orphans()
        self.blocks.free(slots)
        self.windows.free(windows)


def _past(held: OrderedDict[int, Lease] | OrderedDict[int, Grant], now: Time) -> list[int]:
    """Numbers whose deadline has come, without looking at the others."""
    numbers = []
    for number, hold in held.items():
        if hold.deadline > now:
            break
        numbers.append(number)
    return numbers
