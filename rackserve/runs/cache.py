"""A store of blocks as runs: which slot holds which block, who reads it, and what to give up first.

Shared by a rank's prefix cache and the pool's directory. It owns the slots inserted into it until it hands them back.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add

import msgspec

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.keys import KEY_BYTES, Chain, count, key_at, prefix
from rackserve.runs.accounts import (
    NO_SLOT,
    Account,
    Accounts,
    HeldRun,
    Holding,
    TenantsConfig,
    is_free_leaf,
    is_free_snapshot,
    split,
)
from rackserve.runs.eviction import EVICTION_ORDERS
from rackserve.runs.tree import RunTree, ancestry


class Stored(msgspec.Struct, frozen=True):
    """All blocks of `chain` are present now; those from `start` on are new."""

    chain: Chain
    start: int


class Removed(msgspec.Struct, frozen=True):
    """Of the blocks along `chain` only the first `keep` are left, and none beyond `chain`."""

    chain: Chain
    keep: int


class Evicted(msgspec.Struct, frozen=True):
    """What an eviction gives back to its caller, and the withdrawals to announce, as (chain of the run before, keep)."""

    slots: list[int]
    window_slots: list[int]
    removed: list[tuple[Chain, int]]


class RunCache:
    """Blocks present, by key chain. With `needs_window`, a prefix is of use only where a resume state is stored.

    A run that `pin` returned is a handle: valid until `unpin`, even if its blocks are lost meanwhile. `tenant` is whose blocks
    are put in, or for whom others are given up; chains of two tenants share no key.
    """

    __slots__ = ("_accounts", "_detached", "_orphans", "_tick", "_tree", "needs_window", "num_blocks", "num_pinned",
                 "num_window_slots")  # fmt: skip

    def __init__(self, *, needs_window: bool = False, eviction: str = "lru", tenants: TenantsConfig | None = None) -> None:
        """Raises ConfigError if `eviction` is not a name in EVICTION_ORDERS."""
        if eviction not in EVICTION_ORDERS:
            raise ConfigError(f"eviction: unknown order {eviction!r}; choose from {', '.join(EVICTION_ORDERS)}")
        self._accounts = Accounts(EVICTION_ORDERS[eviction], tenants or TenantsConfig())
        self.needs_window = needs_window
        self.num_blocks = 0
        self.num_pinned = 0  # blocks under a pin; all others can be evicted
        self.num_window_slots = 0
        self._tick = 0
        self._tree: RunTree[Holding] = RunTree(Holding([], Account("", EVICTION_ORDERS[eviction], 0)), split)
        self._detached: dict[HeldRun, tuple[list[int], list[int]]] = {}  # pinned but lost: what survives of it
        self._orphans: tuple[list[int], list[int]] = ([], [])

    # ------------------------------------------------------------ look up

    def present(self, chain: Chain) -> int:
        """How many leading blocks of `chain` are held, whether or not computation could resume there. Touches nothing."""
        return self._tree.descend(chain)[1]

    def match(self, chain: Chain) -> int:
        """How many leading blocks of `chain` are of use: all present, or with `needs_window` up to the last resume state.

        Touches the runs that lie wholly within the answer. A caller that must leave tokens to compute passes a shorter
        chain: shortening the answer could miss a boundary.
        """
        run, depth = self._tree.descend(chain)
        parent = run.parent
        if depth < run.end and parent is not None:
            run = parent
        if self.needs_window:
            while run.parent is not None and run.payload.window_slot < 0:
                run = run.parent
            depth = run.end
        self._touch(run)
        run.payload.window_tick = self._tick
        return depth

    def slots(self, run: HeldRun, first: int = 0) -> list[int]:
        """Slots of blocks [first, run.end) along the path to `run`."""
        parts: list[list[int]] = []
        while run.parent is not None and run.depth + len(run.payload.slots) > first:
            parts.append(run.payload.slots[first - run.depth :] if run.depth < first else run.payload.slots)
            run = run.parent
        slots: list[int] = []
        for piece in reversed(parts):
            slots += piece
        return slots

    def window_slot(self, run: HeldRun) -> int:
        """The slot of the resume state at the end of `run`, or -1."""
        return run.payload.window_slot

    def chains(self) -> list[Chain]:
        """Every maximal chain present."""
        return [self._tree.chain_of(run) for run in self._tree.walk() if not run.children]

    def held_slots(self) -> tuple[list[int], list[int]]:
        """All slots and window slots in this cache's care, also lost ones that wait for an unpin or `take_orphans`."""
        slots, windows = list(self._orphans[0]), list(self._orphans[1])
        for survivors, window in self._detached.values():
            slots += survivors
            windows += window
        for run in self._tree.walk():
            slots += run.payload.slots
            windows += [run.payload.window_slot] if run.payload.window_slot >= 0 else []
        return slots, windows

    # ------------------------------------------------------------ pins

    def pin(self, chain: Chain, num_blocks: int) -> HeldRun:
        """Keep the first `num_blocks` >= 1 blocks of `chain`, and a resume state at their end, until `unpin`.

        The run ends there as long as it is pinned. Raises InvariantError if a block is absent.
        """
        run, depth = self._tree.descend(prefix(chain, num_blocks))
        if depth != num_blocks or num_blocks < 1:
            raise InvariantError(f"cannot pin {num_blocks} blocks: {depth} are present")
        run = self._tree.cut(run, num_blocks)
        self._touch(run)
        run.payload.held += 1
        for part in ancestry(run):
            part.payload.uses += 1
            part.payload.pins += 1
            if part.payload.pins == 1:
                self._count_pinned(part, part.num_blocks)
        return run

    def unpin(self, run: HeldRun) -> None:
        """Give a handle back; raises InvariantError if it was not pinned."""
        if run.payload.held < 1:
            raise InvariantError(f"run [{run.depth}, {run.end}) is unpinned more often than it was pinned")
        run.payload.held -= 1
        self._touch(run)
        for part in ancestry(run):
            part.payload.pins -= 1
            if part in self._detached:
                self._orphan_unless_pinned(part)
            elif part.payload.pins == 0:
                self._count_pinned(part, -part.num_blocks)
                self._offer(part)
        if is_free_snapshot(run) and run not in self._detached:
            run.payload.account.snapshots.add(run)

    # ------------------------------------------------------------ insert

    def insert(
        self, chain: Chain, slots: list[int], start: int, window_slot: int = NO_SLOT, tenant: str = ""
    ) -> tuple[list[int], int]:
        """Hold blocks [start, count(chain)) of `chain` in `slots` and, if given, the resume state at the chain's end.

        Returns the slots the caller keeps because their blocks were present already, and the window slot or -1 likewise.
        Raises InvariantError if a block before `start` is absent or the number of slots does not fit.
        """
        total = count(chain)
        run, depth = self._tree.descend(chain)
        if depth < start or len(slots) != total - start:
            raise InvariantError(f"cannot insert {len(slots)} slots at [{start}, {total}): {depth} blocks are present")
        if window_slot >= 0 and not (self.needs_window and total):
            raise InvariantError("a resume state was stored in a cache without boundaries")
        surplus, fresh = slots[: depth - start], slots[depth - start :]
        if fresh:
            account = run.payload.account if depth else self._accounts.open(tenant)
            run = self._append(self._tree.cut(run, depth) if depth else run, chain[depth * KEY_BYTES :], fresh, account)
        elif window_slot >= 0:
            run = self._tree.cut(run, total)
        elif depth < run.end and run.parent is not None:
            run = run.parent  # only a part of the run was asked for: leave its age alone
        self._touch(run)
        self._offer(run)
        if window_slot >= 0 and run.payload.window_slot < 0:
            run.payload.window_slot = window_slot
            run.payload.window_tick = self._tick
            self.num_window_slots += 1
            run.payload.account.num_states += 1
            window_slot = NO_SLOT
            run.payload.account.snapshots.add(run)
        return surplus, window_slot

    def _append(self, run: HeldRun, keys: Chain, slots: list[int], account: Account) -> HeldRun:
        """Blocks after the end of `run`: in place if nobody needs that end, so that a growing session stays one run."""
        self.num_blocks += len(slots)
        account.num_blocks += len(slots)
        self._accounts.num_stored += len(slots)
        if not is_free_leaf(run) or run.payload.window_slot >= 0:
            return self._tree.grow(run, keys, Holding(slots, account))
        run.keys += keys
        run.payload.slots += slots
        return run

    # ------------------------------------------------------------ give up

    def evict(self, num_blocks: int, tenant: str = "", capacity: int = 0, *, reach: bool = True) -> Evicted:
        """Free at least `num_blocks` unpinned blocks, or all there are; leaves only, in eviction order, each from its tail.

        With `needs_window` a leaf goes whole, with runs above it that lead to no other boundary: the rest is of no use.
        `capacity`: blocks there is room for. Without `reach` other tenants' shares of it are spared, with it they come last.
        """
        out = Evicted([], [], [])
        while len(out.slots) < num_blocks:
            run, most = self._accounts.next_leaf(tenant, capacity, reach=reach)
            if run is None:
                break
            self._trim(run, min(num_blocks - len(out.slots), most), out)
        return out

    def evict_window(self, num_slots: int, tenant: str = "", capacity: int = 0, *, reach: bool = True) -> Evicted:
        """Free at least `num_slots` resume states no handle is on, or all there are, the least recently matched first.

        Below an inner run only the state goes; an unpinned leaf goes with its blocks, which nothing could use any more.
        """
        out = Evicted([], [], [])
        while len(out.window_slots) < num_slots:
            run = self._accounts.next_snapshot(tenant, capacity, reach=reach)
            if run is None:
                break
            if is_free_leaf(run):
                self._trim(run, run.num_blocks, out)
            else:
                self._take_snapshot(run, out.window_slots)
        return out

    def reach(self, tenant: str, capacity: int) -> int:
        """Unpinned blocks that could be given up for `tenant` without touching another's share of `capacity` blocks."""
        return self._accounts.reach(tenant, capacity)

    def drop_slots(self, gone: Callable[[int], bool]) -> Evicted:
        """Slots (of both kinds) for which `gone` is true lost their content: cut each run at its first lost block.

        Everything below the cut leaves the tree. Surviving slots of unpinned runs are returned, those of pinned ones, which
        may be under transfer, come out of `take_orphans` after the last unpin. Lost slots are returned by neither.
        """
        out = Evicted([], [], [])
        for run in list(self._tree.walk()):
            if run.parent is None or run.parent.children.get(key_at(run.keys, 0)) is not run:
                continue  # went with a run above it
            if run.payload.window_slot >= 0 and gone(run.payload.window_slot):
                self._take_snapshot(run, [])
            lost = next((at for at, slot in enumerate(run.payload.slots) if gone(slot)), None)
            if lost is not None:
                out.removed.append((self._tree.chain_of(run), run.depth + lost))
                above = self._tree.cut(run, run.depth + lost) if lost else run.parent
                self._detach(run, gone, out)
                if above is not None:
                    self._offer(above)
        return out

    def take_orphans(self) -> tuple[list[int], list[int]]:
        """Slots and window slots that were lost from the tree while pinned and are free now; the caller owns them."""
        taken, self._orphans = self._orphans, ([], [])
        return taken

    # ------------------------------------------------------------ inside

    def _touch(self, run: HeldRun) -> None:
        self._tick = tick = self._tick + 1
        run.payload.account.used_at = self._accounts.num_stored
        while run.parent is not None:
            run.payload.tick = tick
            run = run.parent

    def _offer(self, run: HeldRun) -> None:
        """File `run` for eviction if it can be evicted."""
        if is_free_leaf(run):
            run.payload.account.leaves.add(run)

    def _count_pinned(self, run: HeldRun, num_blocks: int) -> None:
        self.num_pinned += num_blocks
        run.payload.account.num_pinned += num_blocks

    def _take_snapshot(self, run: HeldRun, into: list[int]) -> None:
        if run.payload.window_slot >= 0:
            into.append(run.payload.window_slot)
            run.payload.window_slot = NO_SLOT
            self._forget_state(run)

    def _unlink(self, run: HeldRun) -> HeldRun:
        """Take a leaf out of the tree and the books; its payload stays as it is. Returns its parent."""
        account = run.payload.account
        account.leaves.discard(run)
        account.snapshots.discard(run)
        self.num_blocks -= run.num_blocks
        account.num_blocks -= run.num_blocks
        self._count_pinned(run, -run.num_blocks if run.payload.pins else 0)
        if not account.num_blocks:
            self._accounts.close(account)
        return self._tree.remove(run)

    def _forget_state(self, run: HeldRun) -> None:
        self.num_window_slots -= 1
        run.payload.account.num_states -= 1
        run.payload.account.snapshots.discard(run)

    def _trim(self, run: HeldRun, wanted: int, out: Evicted) -> None:
        """Free the last `wanted` blocks of an unpinned leaf, or all of it (see `evict`)."""
        chain = self._tree.chain_of(run)
        keep = run.end - wanted
        if keep > run.depth and not self.needs_window:
            slots = run.payload.slots
            out.slots.extend(slots[keep - run.depth :])
            del slots[keep - run.depth :]
            self._tree.shorten(run, keep)
            self.num_blocks -= wanted
            run.payload.account.num_blocks -= wanted
            run.payload.account.leaves.add(run)
        else:
            keep = self._remove_upward(run, out)
        out.removed.append((chain, keep))

    def _remove_upward(self, run: HeldRun, out: Evicted) -> int:
        """Remove a leaf and what only led to it; returns the number of blocks left along its chain."""
        while True:
            self._take_snapshot(run, out.window_slots)
            out.slots.extend(run.payload.slots)
            parent = self._unlink(run)
            if not is_free_leaf(parent) or parent.payload.window_slot >= 0 or not self.needs_window:
                self._offer(parent)
                return run.depth
            run = parent

    def _detach(self, top: HeldRun, gone: Callable[[int], bool], out: Evicted) -> None:
        """Take `top` and all below it out of the tree, keeping what pinned runs need in `_detached`."""
        runs = [top]
        for run in runs:
            runs.extend(run.children.values())
        for run in reversed(runs):
            holding = run.payload
            survivors = [slot for slot in holding.slots if not gone(slot)]
            windows = [slot for slot in (holding.window_slot,) if slot >= 0 and not gone(slot)]
            if holding.window_slot >= 0:
                self._forget_state(run)
            self._unlink(run)
            if holding.pins:
                self._detached[run] = (survivors, windows)
            else:
                out.slots.extend(survivors)
                out.window_slots.extend(windows)

    def _orphan_unless_pinned(self, run: HeldRun) -> None:
        if run.payload.pins == 0:
            slots, windows = self._detached.pop(run)
            run.payload.window_slot = NO_SLOT
            self._orphans[0].extend(slots)
            self._orphans[1].extend(windows)

    def check(self) -> None:
        """Raise InvariantError unless counts, pins, ages and ownership of slots agree. Cost: all blocks held."""
        self._tree.check()
        blocks = pinned = snapshots = 0
        found: dict[Account, tuple[int, ...]] = {}
        below: dict[HeldRun, int] = {}
        runs = [*self._tree.walk(), *self._detached]
        for run in runs:
            if run.parent is not None:
                below[run.parent] = below.get(run.parent, 0) + run.payload.pins
        for run in self._tree.walk():
            holding, parent = run.payload, run.parent
            blocks += run.num_blocks
            pinned += run.num_blocks if holding.pins else 0
            snapshots += holding.window_slot >= 0
            account = holding.account
            each = (run.num_blocks, run.num_blocks * (holding.pins > 0), holding.window_slot >= 0)
            found[account] = tuple(map(add, found.get(account, (0, 0, 0)), each))
            if len(holding.slots) != run.num_blocks:
                raise InvariantError(f"run [{run.depth}, {run.end}) has {len(holding.slots)} slots")
            if holding.held < 0 or holding.pins != holding.held + below.get(run, 0):
                raise InvariantError(f"run [{run.depth}, {run.end}): {holding.pins} pins, {holding.held} handles")
            if parent is not None and parent.parent is not None:
                above = parent.payload
                if above.tick < holding.tick or above.uses < holding.uses or above.account is not account:
                    raise InvariantError(f"run [{run.depth}, {run.end}) looks younger than its parent, or another's")
            if (is_free_leaf(run) and run not in account.leaves) or (is_free_snapshot(run) and run not in account.snapshots):
                raise InvariantError(f"run [{run.depth}, {run.end}) could never be evicted")
        if (blocks, pinned, snapshots) != (self.num_blocks, self.num_pinned, self.num_window_slots):
            raise InvariantError(f"counted {blocks}, {pinned}, {snapshots} blocks, pinned blocks and resume states")
        self._accounts.check(found)
        for slots in self.held_slots():
            if len(set(slots)) != len(slots):
                raise InvariantError("one slot holds two blocks")
