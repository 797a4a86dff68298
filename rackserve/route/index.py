"""Who holds how long a prefix of a key chain: one tree for all holders, fed by numbered presence events.

A run's payload says how many of its blocks each holder has. A holder found in a run has all of that run's ancestors, so a
match walks up from the deepest run touched and takes each holder where it first appears: work per run, never per block.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Rank
from rackserve.base.keys import KEY_BYTES, Chain, count, prefix
from rackserve.base.messages import BlocksRemoved, BlocksStored, PresenceSnapshot
from rackserve.runs.tree import Run, RunTree, ancestry

Holders = dict[Rank, int]
"""Holder -> how many of a run's blocks it has, from the front; at least 1."""


@dataclass(slots=True)
class Feed:
    """What was heard from one holder: the highest event number, and whether events are missing before it."""

    number: int = 0
    stale: bool = False


class PrefixIndex:
    """Presence of all holders, bounded to `max_runs` runs: above it the least recently used leaves are forgotten."""

    __slots__ = ("_feeds", "_leaves", "_max_runs", "_tree")

    def __init__(self, *, max_runs: int) -> None:
        if max_runs < 1:
            raise InvariantError(f"max_runs must be at least 1, got {max_runs}")
        self._max_runs = max_runs
        self._tree: RunTree[Holders] = RunTree({}, _split)
        self._leaves: OrderedDict[Run[Holders], None] = OrderedDict()  # least recently used first
        self._feeds: dict[Rank, Feed] = {}

    @property
    def num_runs(self) -> int:
        return self._tree.num_runs

    def holders(self) -> list[Rank]:
        """Everyone heard from and not dropped, sorted."""
        return sorted(self._feeds)

    def heard(self, holder: Rank) -> int:
        """The number of the last event of `holder` that was taken in without a gap; -1 while events are missing, and nothing
        is claimed for it until a snapshot comes.
        """
        feed = self._feeds.get(holder, Feed())
        return -1 if feed.stale else feed.number

    def apply(self, event: BlocksStored | BlocksRemoved | PresenceSnapshot) -> bool:
        """Take one event in; False means events of this holder are missing and a snapshot is wanted.

        Numbers begin at 1. A number seen before is ignored, but 1 always opens a new life of the holder: were it only a
        duplicate, the next event would show as a gap and be answered by a snapshot. While a holder is stale each of its
        events returns False, so a lost request for a snapshot is made again.
        """
        holder, number = event.holder, event.number
        feed = self._feeds.setdefault(holder, Feed())
        if isinstance(event, PresenceSnapshot):
            return self._restore(event, feed)
        if number == 1 and feed.number > 0:
            self._forget(holder)
            feed.number, feed.stale = 0, False
        if feed.stale or number > feed.number + 1:
            if not feed.stale:
                self._forget(holder)
            feed.number, feed.stale = max(feed.number, number), True
            return False
        if number <= feed.number:
            return True
        feed.number = number
        if isinstance(event, BlocksStored):
            self._add(holder, event.chain)
        else:
            self._withdraw(holder, event.chain, event.keep)
        return True

    def drop(self, holder: Rank) -> None:
        """`holder` is gone or starts anew: forget all of it; its numbers begin at 1 again."""
        self._forget(holder)
        self._feeds.pop(holder, None)

    def match(self, chain: Chain) -> dict[Rank, int]:
        """How many leading blocks of `chain` each holder has; holders of none are left out."""
        run, depth = self._tree.descend(chain)
        if run in self._leaves:
            self._leaves.move_to_end(run)
        found: dict[Rank, int] = {}
        for part in ancestry(run):
            if len(part.payload) == len(found):
                continue  # holders below are holders here, so an equal number means nobody new
            for holder, num_blocks in part.payload.items():
                if holder not in found:
                    found[holder] = min(part.depth + num_blocks, depth)
        return found

    def holding(self, holder: Rank) -> list[Chain]:
        """The maximal chains `holder` has."""
        chains = []
        for run in self._tree.walk():
            num_blocks = run.payload.get(holder, 0)
            if num_blocks and not any(holder in child.payload for child in run.children.values()):
                chains.append(prefix(self._tree.chain_of(run), run.depth + num_blocks))
        return chains

    def check(self) -> None:
        """Raise InvariantError unless presence is prefix-closed, nothing unheld is kept and the bound holds."""
        self._tree.check()
        leaves = 0
        for run in self._tree.walk():
            leaves += not run.children
            if max(run.payload.values(), default=0) != run.num_blocks or min(run.payload.values()) < 1:
                raise InvariantError(f"run [{run.depth}, {run.end}) is kept beyond what its holders have")
            if (run in self._leaves) == bool(run.children):
                raise InvariantError(f"run [{run.depth}, {run.end}) is wrongly filed as a leaf or not")
            for child in run.children.values():
                if any(run.payload.get(holder) != run.num_blocks for holder in child.payload):
                    raise InvariantError(f"a holder in the run at {child.depth} lacks blocks before it")
        if leaves != len(self._leaves) or self.num_runs > self._max_runs:
            raise InvariantError(f"{leaves} leaves, {len(self._leaves)} filed; {self.num_runs} runs of {self._max_runs}")

    def _restore(self, snapshot: PresenceSnapshot, feed: Feed) -> bool:
        if snapshot.number < feed.number:
            return not feed.stale  # older than what we know: useless, and while stale a newer one is still wanted
        feed.number, feed.stale = snapshot.number, False
        self._forget(snapshot.holder)
        for chain in snapshot.chains:
            self._add(snapshot.holder, chain)
        return True

    def _add(self, holder: Rank, chain: Chain) -> None:
        """`holder` has all of `chain`. The whole path is marked, so a part forgotten for room comes back by itself."""
        total = count(chain)
        run, depth = self._tree.descend(chain)
        if depth < total:
            rest = chain[depth * KEY_BYTES :]
            if run.parent is not None and depth == run.end and not run.children:
                run.keys += rest  # a growing session stays one run
            else:
                if depth < run.end:
                    run = self._tree.cut(run, depth)
                self._leaves.pop(run, None)
                run = self._tree.grow(run, rest, {})
        if run.parent is None:
            return
        run.payload[holder] = max(run.payload.get(holder, 0), total - run.depth)
        for part in ancestry(run.parent):
            if part.payload.get(holder) == part.num_blocks:
                break  # presence is prefix-closed: all above are marked
            part.payload[holder] = part.num_blocks
        if not run.children:
            self._leaves[run] = None
            self._leaves.move_to_end(run)
        while self.num_runs > self._max_runs:
            self._remove(next(iter(self._leaves)))

    def _withdraw(self, holder: Rank, chain: Chain, keep: int) -> None:
        """Of the blocks along `chain`, `holder` has only the first `keep`, and none beyond `chain`."""
        if keep >= count(chain):
            run, depth = self._tree.descend(chain)
            known = depth == count(chain)
        else:
            run, depth = self._tree.descend(prefix(chain, keep + 1))
            known = depth == keep + 1
        if not known:
            return  # forgotten for room earlier
        kept = min(keep, count(chain)) - run.depth
        self._strip(holder, [child for child in run.children.values() if holder in child.payload])
        if run.payload.get(holder, 0) > kept:
            if kept > 0:
                run.payload[holder] = kept
            else:
                run.payload.pop(holder)
        self._tidy(run)

    def _forget(self, holder: Rank) -> None:
        self._strip(holder, [run for run in self._tree.root.children.values() if holder in run.payload])

    def _strip(self, holder: Rank, tops: list[Run[Holders]]) -> None:
        """Take `holder` out of the runs `tops` and all below them."""
        runs = list(tops)
        for run in runs:  # grows while it is walked: parents before children
            runs.extend(child for child in run.children.values() if holder in child.payload)
        for run in reversed(runs):
            del run.payload[holder]
            self._tidy(run)

    def _tidy(self, run: Run[Holders]) -> None:
        """Shrink a leaf to what its longest holder has; remove it, and then its parent likewise, if nobody has any of it."""
        while run.parent is not None and not run.children:
            longest = max(run.payload.values(), default=0)
            if longest:
                if longest < run.num_blocks:
                    self._tree.shorten(run, run.depth + longest)
                return
            run = self._remove(run)

    def _remove(self, run: Run[Holders]) -> Run[Holders]:
        """Take out a leaf; a parent left childless becomes a leaf, the most recently used one. Return the parent."""
        parent = self._tree.remove(run)
        self._leaves.pop(run, None)
        if parent.parent is not None and not parent.children:
            self._leaves[parent] = None
        return parent


def _split(payload: Holders, at: int) -> Holders:
    head = {holder: min(num_blocks, at) for holder, num_blocks in payload.items()}
    for holder, num_blocks in list(payload.items()):
        if num_blocks > at:
            payload[holder] = num_blocks - at
        else:
            del payload[holder]
    return head
