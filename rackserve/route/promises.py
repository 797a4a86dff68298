"""Prefixes that are being computed: where a burst of siblings finds the shared part before any rank announces it.

Some hundred attempts are active at once and most share a long prefix, so comparing with each would cost milliseconds; a tree
that counts attempts per run costs one look-up per run. Every promised chain ends at a run's end.
"""

from __future__ import annotations

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Attempt, Rank
from rackserve.base.keys import KEY_BYTES, Chain, count
from rackserve.runs.tree import RunTree, ancestry

Counts = dict[Rank, int]
"""Rank -> how many of its attempts will have computed all blocks of a run; at least 1."""


class Promises:
    """Chains of the attempts booked on prefill ranks."""

    __slots__ = ("_chains", "_tree")

    def __init__(self) -> None:
        self._tree: RunTree[Counts] = RunTree({}, lambda payload, at: dict(payload))
        self._chains: dict[Rank, dict[Attempt, Chain]] = {}

    def add(self, rank: Rank, attempt: Attempt, chain: Chain) -> None:
        """`attempt` will compute `chain` on `rank`. Raises InvariantError if it has promised there already."""
        chains = self._chains.setdefault(rank, {})
        if attempt in chains:
            raise InvariantError(f"{attempt} has already promised a chain on {rank}")
        chains[attempt] = chain
        run, depth = self._tree.descend(chain)
        if depth < run.end:
            run = self._tree.cut(run, depth)
        if depth < count(chain):
            run = self._tree.grow(run, chain[depth * KEY_BYTES :], {})
        for part in ancestry(run):
            part.payload[rank] = part.payload.get(rank, 0) + 1

    def remove(self, rank: Rank, attempt: Attempt) -> bool:
        """The promise is kept or broken; False if there is none (any more)."""
        chains = self._chains.get(rank, {})
        chain = chains.pop(attempt, None)
        if chain is None:
            return False
        if not chains:
            del self._chains[rank]
        run, _ = self._tree.descend(chain)
        for part in list(ancestry(run)):
            if part.payload[rank] > 1:
                part.payload[rank] -= 1
                continue
            del part.payload[rank]
            if not part.payload:
                self._tree.remove(part)
        return True

    def match(self, chain: Chain) -> dict[Rank, int]:
        """How many leading blocks of `chain` are coming on each rank; ranks with none are left out."""
        run, depth = self._tree.descend(chain)
        found: dict[Rank, int] = {}
        for part in ancestry(run):
            if len(part.payload) > len(found):
                for rank in part.payload:
                    found.setdefault(rank, min(part.end, depth))
        return found

    def is_empty(self) -> bool:
        """Whether nothing is promised."""
        return not self._chains

    def check(self) -> None:
        """Raise InvariantError unless every run's counts are those of the promised chains through it."""
        self._tree.check()
        expected: dict[bytes, Counts] = {}
        for rank, chains in self._chains.items():
            for chain in chains.values():
                for part in ancestry(self._tree.descend(chain)[0]):
                    counts = expected.setdefault(part.keys, {})
                    counts[rank] = counts.get(rank, 0) + 1
        if expected != {run.keys: run.payload for run in self._tree.walk()}:
            raise InvariantError("promised runs are not those of the promised chains")
