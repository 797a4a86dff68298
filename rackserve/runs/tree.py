"""A compressed radix tree over block-key chains.

Because a key names all blocks before it, edges can be compared by binary search and a step down costs one dictionary look-up
per run, not per block. A 142 k-token session of 43 turns is some 43 runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rackserve.base.errors import InvariantError
from rackserve.base.keys import KEY_BYTES, Chain, common_blocks, key_at

P = TypeVar("P")


class Run(Generic[P]):
    """Consecutive blocks [depth, end) that share one history. `payload` belongs to the tree's user."""

    __slots__ = ("children", "depth", "keys", "parent", "payload")

    def __init__(self, keys: Chain, depth: int, parent: Run[P] | None, payload: P) -> None:
        self.keys = keys
        self.depth = depth
        self.parent = parent
        self.payload = payload
        self.children: dict[bytes, Run[P]] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def end(self) -> int:
        return self.depth + len(self.keys) // KEY_BYTES


class RunTree(Generic[P]):
    """Runs under one root; `split(payload, at)` shrinks a payload to blocks [at:) and returns the payload of blocks [:at)."""

    __slots__ = ("_split", "num_runs", "root")

    def __init__(self, root_payload: P, split: Callable[[P, int], P]) -> None:
        self.root: Run[P] = Run(b"", 0, None, root_payload)
        self.num_runs = 0
        self._split = split

    def descend(self, chain: Chain) -> tuple[Run[P], int]:
        """The deepest run that `chain` touches and how many of its blocks are present (inside that run or at its end)."""
        run, at, total = self.root, 0, len(chain)  # in bytes: every placement and step comes through here
        while at < total:
            child = run.children.get(chain[at : at + KEY_BYTES])
            if child is None:
                break
            run = child
            end = at + len(child.keys)
            if chain[end - KEY_BYTES : end] != child.keys[-KEY_BYTES:]:
                depth = at // KEY_BYTES
                return run, depth + common_blocks(chain, depth, child.keys, 0)
            at = end  # the last key names all before it: the whole run matches
        return run, at // KEY_BYTES

    def cut(self, run: Run[P], depth: int) -> Run[P]:
        """Make a run end at `depth` (run.depth < depth <= run.end) and return it.

        The object `run` stays the deeper part, so references to it keep meaning "everything up to its end".
        """
        if depth == run.end:
            return run
        if not run.depth < depth < run.end or run.parent is None:
            raise InvariantError(f"cannot cut run [{run.depth}, {run.end}) at {depth}")
        at = depth - run.depth
        parent = run.parent
        head = Run(run.keys[: at * KEY_BYTES], run.depth, parent, self._split(run.payload, at))
        parent.children[key_at(head.keys, 0)] = head
        run.keys = run.keys[at * KEY_BYTES :]
        run.depth = depth
        run.parent = head
        head.children[key_at(run.keys, 0)] = run
        self.num_runs += 1
        return head

    def grow(self, parent: Run[P], keys: Chain, payload: P) -> Run[P]:
        """A new child run of `parent` (which must end where `keys` begin)."""
        child = Run(keys, parent.end, parent, payload)
        first = key_at(keys, 0)
        if not keys or first in parent.children:
            raise InvariantError(f"run at depth {parent.end} already has this child")
        parent.children[first] = child
        self.num_runs += 1
        return child

    def remove(self, run: Run[P]) -> Run[P]:
        """Take a leaf out and return its parent."""
        if run.parent is None or run.children:
            raise InvariantError("only a leaf below the root can be removed")
        del run.parent.children[key_at(run.keys, 0)]
        self.num_runs -= 1
        return run.parent

    def shorten(self, run: Run[P], depth: int) -> None:
        """Drop the blocks of a leaf from `depth` on (run.depth < depth); the caller has already trimmed the payload."""
        if run.children or not run.depth < depth <= run.end:
            raise InvariantError(f"cannot shorten run [{run.depth}, {run.end}) to {depth}")
        run.keys = run.keys[: (depth - run.depth) * KEY_BYTES]

    def chain_of(self, run: Run[P]) -> Chain:
        """All keys from the root to the end of `run`."""
        return b"".join(part.keys for part in reversed(list(ancestry(run))))

    def walk(self) -> Iterator[Run[P]]:
        """Every run below the root, parents before children, in insertion order of siblings."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            run = stack.pop()
            yield run
            stack.extend(reversed(run.children.values()))

    def check(self) -> None:
        """Raise InvariantError unless the tree is well formed."""
        seen = 0
        for run in self.walk():
            seen += 1
            parent = run.parent
            if parent is None or run.num_blocks < 1 or run.depth != parent.end:
                raise InvariantError(f"malformed run [{run.depth}, {run.end})")
            if parent.children.get(key_at(run.keys, 0)) is not run:
                raise InvariantError("a run is not filed under its first key")
        if seen != self.num_runs:
            raise InvariantError(f"{seen} runs in the tree, {self.num_runs} counted")


def ancestry(run: Run[P]) -> Iterator[Run[P]]:
    """`run` and its ancestors, deepest first, without the root."""
    while run.parent is not None:
        yield run
        run = run.parent
