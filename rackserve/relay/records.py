"""What a rank that says nothing of its cache probably holds: everything sent there, the least recently used forgotten first."""

from __future__ import annotations

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Rank
from rackserve.base.keys import KEY_BYTES, Chain, count, prefix
from rackserve.base.messages import BlocksRemoved, BlocksStored
from rackserve.runs.eviction import LazyHeap
from rackserve.runs.tree import Run, RunTree, ancestry


class _Stamp:
    """When a run was last used: milliseconds, never less than its children's."""

    __slots__ = ("at",)

    def __init__(self, at: int) -> None:
        self.at = at


class PrefixRecords:
    """Chains believed to be on `holder`: at most `max_blocks` blocks, each used within the last `age_ms` milliseconds.

    Every method returns the presence events that follow from it. Times are milliseconds and never go back.
    """

    __slots__ = ("_age_ms", "_holder", "_leaves", "_max_blocks", "_number", "_tree", "num_blocks")

    def __init__(self, holder: Rank, *, max_blocks: int, age_ms: int) -> None:
        self._holder = holder
        self._max_blocks = max(1, max_blocks)
        self._age_ms = age_ms
        self._tree: RunTree[_Stamp] = RunTree(_Stamp(0), lambda stamp, at: _Stamp(stamp.at))
        self._leaves: LazyHeap[Run[_Stamp]] = LazyHeap(lambda run: (run.payload.at, 0))
        self._number = 0
        self.num_blocks = 0

    def note(self, chain: Chain, now: int) -> list[BlocksStored | BlocksRemoved]:
        """All of `chain` was computed or used there at `now`. Of one that is longer than the bound the beginning is kept."""
        chain = prefix(chain, self._max_blocks)
        out: list[BlocksStored | BlocksRemoved] = []
        run, depth = self._tree.descend(chain)
        total = count(chain)
        if depth < total:
            if depth and depth < run.end:
                run = self._tree.cut(run, depth)
            rest = chain[depth * KEY_BYTES :]
            if run.parent is not None and not run.children:
                run.keys += rest
            else:
                run = self._tree.grow(run, rest, _Stamp(now))
            self.num_blocks += total - depth
            self._number += 1
            out.append(BlocksStored(self._holder, self._number, chain, depth))
        for part in ancestry(run):
            part.payload.at = now
        if run.parent is not None and not run.children:
            self._leaves.add(run)
        while self.num_blocks > self._max_blocks:
            self._forget_oldest(self.num_blocks - self._max_blocks, out)
        return out

    def correct(self, chain: Chain, keep: int) -> list[BlocksStored | BlocksRemoved]:
        """Of `chain` only the first `keep` blocks were there after all, and so nothing that follows later ones."""
        run, depth = self._tree.descend(prefix(chain, keep + 1))
        if depth <= keep or keep >= count(chain):
            return []
        if keep > run.depth:
            head: Run[_Stamp] | None = self._tree.cut(run, keep)
        else:
            head = run.parent
        gone = [run]
        for part in gone:
            gone += part.children.values()
        for part in reversed(gone):
            self._leaves.discard(part)
            self.num_blocks -= part.num_blocks
            self._tree.remove(part)
        self._offer(head)
        self._number += 1
        return [BlocksRemoved(self._holder, self._number, prefix(chain, keep + 1), keep)]

    def expire(self, now: int) -> list[BlocksStored | BlocksRemoved]:
        """Forget what has not been used for too long."""
        out: list[BlocksStored | BlocksRemoved] = []
        while self._leaves_before(now - self._age_ms):
            self._forget_oldest(1 << 62, out)
        return out

    def clear(self) -> list[BlocksStored | BlocksRemoved]:
        """Forget everything."""
        out: list[BlocksStored | BlocksRemoved] = []
        while self.num_blocks:
            self._forget_oldest(1 << 62, out)
        return out

    def _leaves_before(self, limit: int) -> bool:
        oldest = self._leaves.pop(_is_leaf)
        if oldest is None:
            return False
        self._leaves.add(oldest)
        return oldest.payload.at < limit

    def _forget_oldest(self, most: int, out: list[BlocksStored | BlocksRemoved]) -> None:
        """Forget up to `most` blocks of the oldest leaf, from its tail."""
        run = self._leaves.pop(_is_leaf)
        if run is None:
            raise InvariantError(f"{self.num_blocks} blocks are recorded but no leaf is")
        chain, keep = self._tree.chain_of(run), max(run.end - most, run.depth)
        self.num_blocks -= run.end - keep
        if keep > run.depth:
            self._tree.shorten(run, keep)
            self._leaves.add(run)
        else:
            self._offer(self._tree.remove(run))
        self._number += 1
        out.append(BlocksRemoved(self._holder, self._number, chain, keep))

    def _offer(self, run: Run[_Stamp] | None) -> None:
        if run is not None and _is_leaf(run):
            self._leaves.add(run)

    def check(self) -> None:
        """Raise InvariantError unless counts, leaves and ages agree."""
        self._tree.check()
        if sum(run.num_blocks for run in self._tree.walk()) != self.num_blocks or self.num_blocks > self._max_blocks:
            raise InvariantError(f"{self.num_blocks} blocks counted, at most {self._max_blocks} allowed")
        for run in self._tree.walk():
            if not run.children and run not in self._leaves:
                raise InvariantError(f"run [{run.depth}, {run.end}) could never be forgotten")
            if run.parent is not None and run.parent.parent is not None and run.parent.payload.at < run.payload.at:
                raise InvariantError(f"run [{run.depth}, {run.end}) looks younger than its parent")


def _is_leaf(run: Run[_Stamp]) -> bool:
    return run.parent is not None and not run.children
