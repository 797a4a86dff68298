"""Whose blocks a cache holds, and who gives some up for whom: each tenant's share of a cache is out of reach of the others.

A tenant may fill whatever nobody else wants. When room is needed, it comes from those who hold more than their share, the least
recently used first; who holds no more than that is not touched for another's sake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from rackserve.base.errors import InvariantError
from rackserve.base.ranges import require_range
from rackserve.runs.eviction import EvictionOrder, LazyHeap
from rackserve.runs.tree import Run

NO_SLOT = -1
MAX_TURNOVERS = 1e6


class TenantsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tenants divide the KV pool and every rank's cache.

    guaranteed  part of each cache that is divided equally among the tenants that use it; 0: none, whose blocks go first
                depends on their age alone
    turnovers   a tenant that used nothing while a cache was filled this many times over has no share of it any more
    """

    guaranteed: float = 1.0
    turnovers: float = 8.0

    def __post_init__(self) -> None:
        require_range("tenants", self, ("guaranteed",), 0, 1)
        require_range("tenants", self, ("turnovers",), 0, MAX_TURNOVERS)


@dataclass(slots=True, eq=False)
class Holding:
    """Payload of a run. Ticks are logical; a parent's tick and uses are never below its child's.

    slots        one per block
    account      whose they are
    window_slot  holds the resume state at exactly the run's end, or -1
    pins         handles on this run or below it: its blocks stay
    held         handles on exactly this run: its resume state stays
    """

    slots: list[int]
    account: Account
    window_slot: int = NO_SLOT
    pins: int = 0
    held: int = 0
    tick: int = 0
    uses: int = 0
    window_tick: int = 0


HeldRun = Run[Holding]


def split(holding: Holding, at: int) -> Holding:
    """Shrink `holding` to its blocks from `at` on; what is returned has those before."""
    head = Holding(holding.slots[:at], holding.account, pins=holding.pins, tick=holding.tick, uses=holding.uses)
    del holding.slots[:at]
    return head


def is_free_leaf(run: HeldRun) -> bool:
    """Whether the blocks of `run` could be given up now."""
    return run.parent is not None and not run.children and run.payload.pins == 0


def is_free_snapshot(run: HeldRun) -> bool:
    """Whether the resume state at the end of `run` could."""
    return run.payload.window_slot >= 0 and run.payload.held == 0


class Account:
    """One tenant's part of a cache.

    num_blocks, num_pinned, num_states  blocks present, those of them under a pin, and resume states
    leaves, snapshots                   runs whose blocks or state could be given up, the first to go first
    used_at                             blocks ever put into the cache when this tenant last used it
    """

    __slots__ = ("leaves", "num_blocks", "num_pinned", "num_states", "snapshots", "tenant", "used_at")

    def __init__(self, tenant: str, order: EvictionOrder, used_at: int) -> None:
        self.tenant = tenant
        self.num_blocks = self.num_pinned = self.num_states = 0
        self.used_at = used_at
        self.leaves: LazyHeap[HeldRun] = LazyHeap(lambda run: order(run.payload.tick, run.payload.uses))
        self.snapshots: LazyHeap[HeldRun] = LazyHeap(lambda run: (run.payload.window_tick, 0))


class Accounts:
    """The tenants that hold something in one cache. `num_stored`: blocks ever put into it."""

    __slots__ = ("_accounts", "_config", "_order", "num_stored")

    def __init__(self, order: EvictionOrder, config: TenantsConfig) -> None:
        self._order = order
        self._config = config
        self._accounts: dict[str, Account] = {}
        self.num_stored = 0

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def open(self, tenant: str) -> Account:
        """The account of `tenant`, empty if it holds nothing. One for all if nothing is guaranteed to anybody."""
        name = tenant if self._config.guaranteed else ""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(name, self._order, self.num_stored)
        return account

    def close(self, account: Account) -> None:
        """It holds nothing any more."""
        self._accounts.pop(account.tenant, None)

    def alone(self, tenant: str) -> Account | None:
        """The account of `tenant`, if nobody else holds anything; else None."""
        if len(self._accounts) > 1:
            return None
        return self._accounts.get(tenant if self._config.guaranteed else "")

    def share(self, tenant: str, capacity: int) -> int:
        """Blocks of a cache of `capacity` that each tenant is sure of while `tenant` uses it too."""
        using = {account.tenant for account in self if self._is_using(account, capacity)} | {tenant}
        return int(self._config.guaranteed * capacity) // len(using)

    def reach(self, tenant: str, capacity: int) -> int:
        """Blocks that could be given up for `tenant` without touching the share of another."""
        only = self.alone(tenant)
        if only is not None:
            return only.num_blocks - only.num_pinned
        share, total = self.share(tenant, capacity), 0
        for account in self:
            free = account.num_blocks - account.num_pinned
            if account.tenant != tenant and self._is_using(account, capacity):
                free = min(free, max(account.num_blocks - share, 0))
            total += free
        return total

    def next_leaf(self, tenant: str, capacity: int, *, reach: bool) -> tuple[HeldRun | None, int]:
        """The run that gives up blocks for `tenant` next, taken off its account's list, and how many at most.

        First those who hold more than their share, then `tenant` itself; others only if `reach`.
        """
        only = self.alone(tenant)
        if only is not None:
            run = only.leaves.pop(is_free_leaf)
            return (None, 0) if run is None else (run, run.num_blocks)
        share = self.share(tenant, capacity)

        def surplus(account: Account) -> int:
            return account.num_blocks - (share if self._is_using(account, capacity) else 0)

        over = [account for account in self if surplus(account) > 0]
        giver = self._giver(over, tenant, lambda account: account.leaves, is_free_leaf, reach=reach)
        run = None if giver is None else giver.leaves.pop(is_free_leaf)
        if giver is None or run is None:
            return None, 0
        return run, surplus(giver) if giver in over and giver.tenant != tenant else run.num_blocks

    def next_snapshot(self, tenant: str, capacity: int, *, reach: bool) -> HeldRun | None:
        """The same for resume states, of which the cache has room for `capacity`."""
        only = self.alone(tenant)
        if only is not None:
            return only.snapshots.pop(is_free_snapshot)
        share = self.share(tenant, capacity)
        over = [a for a in self if a.num_states > (share if self._is_using(a, capacity) else 0)]
        giver = self._giver(over, tenant, lambda account: account.snapshots, is_free_snapshot, reach=reach)
        return None if giver is None else giver.snapshots.pop(is_free_snapshot)

    def _giver(
        self,
        over: list[Account],
        tenant: str,
        heap: Callable[[Account], LazyHeap[HeldRun]],
        fit: Callable[[HeldRun], bool],
        *,
        reach: bool,
    ) -> Account | None:
        """Who gives up next for `tenant`: one of those `over` their share, else itself, else with `reach` anybody."""
        own = [account for account in self if account.tenant == tenant]
        turns = (over, own, list(self) if reach else [])
        return next((first for accounts in turns if (first := _first(accounts, heap, fit)) is not None), None)

    def _is_using(self, account: Account, capacity: int) -> bool:
        return self.num_stored - account.used_at <= self._config.turnovers * capacity

    def check(self, found: dict[Account, tuple[int, ...]]) -> None:
        """Raise InvariantError unless each account counts the blocks, pinned blocks and resume states that were found."""
        counted = {a: (a.num_blocks, a.num_pinned, a.num_states) for a in self if a.num_blocks}
        if counted != found:
            raise InvariantError(f"accounts of {[account.tenant for account in self]} do not count what is there")


def _first(
    accounts: list[Account], heap: Callable[[Account], LazyHeap[HeldRun]], fit: Callable[[HeldRun], bool]
) -> Account | None:
    """The account whose first run goes before those of the others."""
    places = [(place, at) for at, account in enumerate(accounts) if (place := heap(account).first_place(fit)) is not None]
    return accounts[min(places)[1]] if places else None
