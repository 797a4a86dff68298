"""The KV blocks of one rank: sequences take leases on them, finished work stays for the next sequence to find.

A slot is owned by the arena (free), the prefix cache, or one lease. Committing a block moves it from lease to cache, where the
lease keeps it pinned; a block whose key is cached already stays the lease's own until release, because steps in flight read it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Rank
from rackserve.base.keys import Chain, count, key_at, prefix
from rackserve.base.kv_layout import KvLayout
from rackserve.kv.arena import Arena
from rackserve.runs.accounts import NO_SLOT, HeldRun, TenantsConfig
from rackserve.runs.cache import Evicted, Removed, RunCache, Stored


@dataclass(slots=True, eq=False)
class Lease:
    """What one sequence holds on a rank. `RankCache` alone changes it.

    blocks      block table: slot of each logical block, cached ones first
    matched     how many of them were found in the prefix cache at the start
    restore     window slot with the resume state at `matched`, or -1; stays put until the first commit
    committed   leading blocks that the prefix cache holds under `chain`
    tenant      whose they are
    """

    blocks: list[int]
    matched: int = 0
    restore: int = NO_SLOT
    committed: int = 0
    chain: Chain = b""
    tenant: str = ""
    _run: HeldRun | None = None
    _private: list[int] = field(default_factory=list)  # blocks somebody else committed first
    _windows: list[int] = field(default_factory=list)  # allocated, not committed

    def owned(self) -> list[int]:
        """Slots that belong to this lease and not to the prefix cache."""
        return self.blocks[self.committed :] + self._private


class RankCache:
    """Arena and prefix cache of one rank. Nothing in it waits: what does not fit now is refused, with nothing changed."""

    __slots__ = ("_arena", "_cache", "_events", "_leases", "_leases_of", "_windows", "layout", "rank")

    def __init__(
        self,
        rank: Rank,
        layout: KvLayout,
        num_blocks: int,
        num_window_slots: int = 0,
        tenants: TenantsConfig | None = None,
    ) -> None:
        self.rank = rank
        self.layout = layout
        self._arena = Arena(num_blocks)
        self._windows = Arena(num_window_slots)
        self._cache = RunCache(needs_window=layout.stores_state, tenants=tenants)
        self._events: list[Stored | Removed] = []
        self._leases: dict[Lease, None] = {}
        self._leases_of: Counter[str] = Counter()  # by tenant

    # ------------------------------------------------------------ counts, in blocks

    @property
    def num_blocks(self) -> int:
        return self._arena.total

    @property
    def num_free(self) -> int:
        return self._arena.num_free

    @property
    def num_cached(self) -> int:
        """Blocks the prefix cache holds, pinned or not."""
        return self._cache.num_blocks

    @property
    def num_in_use(self) -> int:
        """Blocks that belong to leases."""
        return self._arena.total - self._arena.num_free - self._cache.num_blocks

    @property
    def num_leases(self) -> int:
        """Sequences, and offers to the pool, that hold blocks."""
        return len(self._leases)

    @property
    def usable(self) -> int:
        """Blocks that could be had now: free ones and cached ones nobody has pinned."""
        return self._arena.num_free + self._cache.num_blocks - self._cache.num_pinned

    # ------------------------------------------------------------ look up

    def match(self, chain: Chain, limit: int | None = None) -> int:
        """How many leading blocks of `chain`, at most `limit`, need not be computed (a resume state is there if needed).

        A prompt needs its last token computed, so its limit is (prompt_tokens - 1) // block_tokens. The limit goes in here
        because the largest answer below it need not be `limit` itself.
        """
        return self._cache.match(chain if limit is None else prefix(chain, limit))

    def present(self, chain: Chain, limit: int | None = None) -> int:
        """Like `match`, but where the resume state comes from elsewhere. Does not count as use."""
        return self._cache.present(chain if limit is None else prefix(chain, limit))

    # ------------------------------------------------------------ leases

    def acquire(self, chain: Chain, matched: int, num_new: int, tenant: str = "") -> Lease | None:
        """Pin the first `matched` blocks of `chain`, add `num_new` blocks to compute; None if they cannot be had.

        A tenant that has a lease already gets no other tenant's share of the cache for the next one: it waits for its own.
        Raises InvariantError if fewer than `matched` blocks are present.
        """
        run = self._cache.pin(chain, matched) if matched else None
        spare = num_new <= self._arena.num_free or not self._leases_of[tenant]
        fits = spare or num_new <= self._arena.num_free + self._cache.reach(tenant, self._arena.total)
        fresh = self._allocate(num_new, tenant) if fits else None
        if fresh is None:
            if run is not None:
                self._cache.unpin(run)
            return None
        lease = Lease(fresh, tenant=tenant)
        if run is not None:
            lease = Lease(
                self._cache.slots(run) + fresh, matched, run.payload.window_slot, matched, prefix(chain, matched), tenant, run
            )
        self._leases[lease] = None
        self._leases_of[tenant] += 1
        return lease

    def grow(self, lease: Lease, num_new: int) -> bool:
        """`num_new` more blocks at the end of the lease's table; False, with nothing changed, if they cannot be had."""
        self._require_live(lease)
        fresh = self._allocate(num_new, lease.tenant)
        if fresh is None:
            return False
        lease.blocks += fresh
        return True

    def commit(self, lease: Lease, chain: Chain, num_blocks: int) -> None:
        """The first `num_blocks` blocks of the lease are computed, and `chain` (at least that long) names them.

        Blocks nobody had committed yet are announced. Raises InvariantError if `chain` disagrees with what the lease has
        committed before, or the lease has fewer blocks.
        """
        self._require_live(lease)
        done = lease.committed
        if num_blocks <= done:
            return
        if num_blocks > min(len(lease.blocks), count(chain)):
            raise InvariantError(f"cannot commit {num_blocks} of {len(lease.blocks)} blocks under {count(chain)} keys")
        if done and key_at(chain, done - 1) != key_at(lease.chain, done - 1):
            raise InvariantError(f"the first {done} keys of a lease on {self.rank} have changed")
        if lease._run is not None:
            self._cache.unpin(lease._run)  # before the insert, so that a run only this lease is on can grow in place
        lease.chain = prefix(chain, num_blocks)
        surplus, _ = self._cache.insert(lease.chain, lease.blocks[done:num_blocks], done, tenant=lease.tenant)
        lease._private += surplus
        lease.committed = num_blocks
        start = done + len(surplus)
        if start < num_blocks:
            self._events.append(Stored(lease.chain, start))
        lease._run = self._cache.pin(lease.chain, num_blocks)

    def allocate_window(self, lease: Lease) -> int | None:
        """A slot to store a resume state of this lease in, or None if each is needed by somebody."""
        self._require_live(lease)
        if not self._windows.num_free:
            self._give_up(self._cache.evict_window(1, lease.tenant, self._windows.total))
        slots = self._windows.allocate(1)
        if slots is None:
            return None
        lease._windows += slots
        return slots[0]

    def free_window(self, lease: Lease, window_slot: int) -> None:
        """Give back a slot of `allocate_window` that nothing will be stored in."""
        self._require_live(lease)
        if window_slot not in lease._windows:
            raise InvariantError(f"window slot {window_slot} on {self.rank} does not belong to this lease")
        lease._windows.remove(window_slot)
        self._windows.free([window_slot])

    def commit_window(self, lease: Lease, num_blocks: int, window_slot: int) -> None:
        """`window_slot` (of `allocate_window`) now holds the resume state after the first `num_blocks`, committed, blocks."""
        self._require_live(lease)
        if not 0 < num_blocks <= lease.committed or window_slot not in lease._windows:
            raise InvariantError(f"window slot {window_slot} cannot be stored at {num_blocks} of {lease.committed} blocks")
        lease._windows.remove(window_slot)
        _, surplus = self._cache.insert(prefix(lease.chain, num_blocks), [], num_blocks, window_slot)
        if surplus >= 0:
            self._windows.free([surplus])

    def state_slot(self, lease: Lease) -> int:
        """The slot with the resume state at the end of the lease's committed blocks, or -1; stays put until the next commit."""
        return NO_SLOT if lease._run is None else self._cache.window_slot(lease._run)

    def release(self, lease: Lease) -> None:
        """End the lease: its own blocks are free, its cached ones unpinned. Only after the last step or transfer on it.

        Raises InvariantError if it ended before.
        """
        self._require_live(lease)
        del self._leases[lease]
        self._leases_of[lease.tenant] -= 1
        if not self._leases_of[lease.tenant]:
            del self._leases_of[lease.tenant]
        if lease._run is not None:
            self._cache.unpin(lease._run)
        self._arena.free(lease.owned())
        self._windows.free(lease._windows)

    # ------------------------------------------------------------ presence

    @property
    def has_events(self) -> bool:
        """Whether `take_events` has any."""
        return bool(self._events)

    def take_events(self) -> list[Stored | Removed]:
        """What became present or absent since the last call, in order: applied in turn they lead to `chains()`."""
        events, self._events = self._events, []
        return events

    def chains(self) -> list[Chain]:
        """Everything in the prefix cache, as maximal chains; events not taken yet are already contained."""
        return self._cache.chains()

    def check(self) -> None:
        """Raise InvariantError unless every slot is free, cached or of exactly one lease."""
        self._cache.check()
        blocks, windows = self._cache.held_slots()
        self._arena.check([*blocks, *(slot for lease in self._leases for slot in lease.owned())])
        self._windows.check([*windows, *(slot for lease in self._leases for slot in lease._windows)])
        if self._leases_of != Counter(lease.tenant for lease in self._leases):
            raise InvariantError(f"leases on {self.rank} are counted as {dict(self._leases_of)}")

    # ------------------------------------------------------------ inside

    def _require_live(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise InvariantError(f"a lease on {self.rank} was used after its release")

    def _allocate(self, num_blocks: int, tenant: str) -> list[int] | None:
        if num_blocks > self.usable:
            return None
        if num_blocks > self._arena.num_free:
            self._give_up(self._cache.evict(num_blocks - self._arena.num_free, tenant, self._arena.total))
        return self._arena.allocate(num_blocks)

    def _give_up(self, evicted: Evicted) -> None:
        """Withdraw first, then free: no slot is reused while its key is announced."""
        self._events.extend(Removed(chain, keep) for chain, keep in evicted.removed)
        self._arena.free(evicted.slots)
        self._windows.free(evicted.window_slots)
