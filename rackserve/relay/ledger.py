"""A worker's own names of its blocks, translated: KV events in, presence events over our key chains out.

A worker names blocks by hashes of its own making and may drop one from the middle of a history. Here each block is filed under
its hash in a segment: consecutive blocks of one history. What counts as present is what a request could reuse, that is blocks
all of whose ancestors are there; the rest is remembered and comes back once the gap closes.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Rank
from rackserve.base.keys import KEY_BYTES, TOKEN_BYTES, CacheNamespace, Chain, extend_chain
from rackserve.base.messages import BlocksRemoved, BlocksStored, PresenceSnapshot
from rackserve.live.kv_events import GPU, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent
from rackserve.text.tokenizer import pack

Presence = BlocksStored | BlocksRemoved | PresenceSnapshot

ON_DEVICE, ELSEWHERE = 1, 2
"""Bits: where a block is. Either will do, for fetching it costs far less than computing it."""


def root_key(block_tokens: int, salt: str = "", adapter: str = "") -> bytes:
    """The key before the first block. The model is no part of it: a request only goes where its model is served."""
    return CacheNamespace(adapter, "", block_tokens, "relay", salt).root()


class _Segment:
    """Blocks [depth, depth + len(hashes)) of a history, of which the first `reach` can be reused. `at`: the block of `parent`
    they follow, or -1 for the start of the history.
    """

    __slots__ = ("at", "children", "depth", "hashes", "keys", "media", "parent", "reach")

    def __init__(self, parent: _Segment | None, at: int) -> None:
        self.parent = parent
        self.at = at
        self.depth: int = 0 if parent is None else parent.depth + at + 1
        self.keys = bytearray()
        self.hashes: list[BlockHash] = []
        self.media = bytearray()
        self.reach = 0
        self.children: list[_Segment] = []


class BlockLedger:
    """Blocks of one rank. `num_unplaced` counts blocks told of that could not be filed: their parent or tokens are unknown, or
    they are of another size.
    """

    __slots__ = ("_adapters", "_block_tokens", "_foreign_groups", "_holder", "_number", "_root", "_where", "num_unplaced")

    def __init__(self, holder: Rank, block_tokens: int, adapters: set[str]) -> None:
        """`adapters` gets the names of adapters that events speak of."""
        self._holder = holder
        self._block_tokens = block_tokens
        self._number = 0
        self._root = _Segment(None, -1)
        self._where: dict[BlockHash, tuple[_Segment, int]] = {}
        self._foreign_groups: set[int] = set()
        self._adapters = adapters
        self.num_unplaced = 0

    @property
    def num_blocks(self) -> int:
        """Blocks remembered, reusable or not."""
        return len(self._where)

    def apply(self, event: KvEvent) -> list[Presence]:
        """What `event` makes of the rank's presence."""
        if isinstance(event, BlockStored):
            return self._on_stored(event)
        if isinstance(event, BlockRemoved):
            return self._on_removed(event)
        assert isinstance(event, AllBlocksCleared)
        return self.reset()

    def reset(self) -> list[Presence]:
        """Nothing is known any more."""
        self._root = _Segment(None, -1)
        self._where.clear()
        self._number += 1
        return [PresenceSnapshot(self._holder, self._number, ())]

    # ------------------------------------------------------------ stored

    def _on_stored(self, event: BlockStored) -> list[Presence]:
        if not self._is_ours(event):
            return []
        if not event.token_ids:  # a second copy, such as in host memory, of blocks told of before
            known = [place for name in event.block_hashes if (place := self._where.get(name)) is not None]
            self.num_unplaced += len(event.block_hashes) - len(known)
            return self._mark(known, event.medium)
        parent = None if event.parent_block_hash is None else self._where.get(event.parent_block_hash)
        whole = len(event.token_ids) == len(event.block_hashes) * event.block_size
        if (parent is None and event.parent_block_hash is not None) or event.block_size != self._block_tokens or not whole:
            self.num_unplaced += len(event.block_hashes)
            return []
        try:
            keys = self._keys(event, parent)
        except (OverflowError, TypeError):  # no token ids
            self.num_unplaced += len(event.block_hashes)
            return []
        return self._mark(self._file(event.block_hashes, keys, parent), event.medium)

    def _is_ours(self, event: BlockStored) -> bool:
        """Layers that keep only a window tell nothing about how much of a prompt can be reused; full ones do."""
        kind, group = event.kv_cache_spec_kind, event.group_idx
        if kind is not None and any(word in kind for word in ("window", "mamba", "linear", "chunk", "cross")):
            if group is not None:
                self._foreign_groups.add(group)
            return False
        return group not in self._foreign_groups

    def _keys(self, event: BlockStored, parent: tuple[_Segment, int] | None) -> Chain:
        """Keys of the event's blocks. What their hashes depend on besides tokens goes into the first key it concerns."""
        adapter = event.lora_name or ""
        if adapter:
            self._adapters.add(adapter)
        extras = event.extra_keys or []
        special = [at for at, extra in enumerate(extras) if extra and at < len(event.block_hashes)]
        tokens = pack(event.token_ids)
        if parent is not None:
            before = _key(parent[0], parent[1])
        else:
            others = [extra for extra in extras[0] if extra != adapter] if special and special[0] == 0 and extras[0] else []
            salt = others[0] if len(others) == 1 and isinstance(others[0], str) else ""
            before = root_key(self._block_tokens, salt, adapter)
            if not others or salt:
                special = [at for at in special if at]
        chain, step = b"", self._block_tokens * TOKEN_BYTES
        marks = [0, *(at for at in special if at), len(event.block_hashes)]
        for start, end in pairwise(marks):
            if start in special and any(extra != adapter for extra in extras[start] or ()):
                before = blake2b(repr(extras[start]).encode(), key=before, digest_size=KEY_BYTES).digest()
            chain += extend_chain(b"", before, tokens[start * step : end * step], self._block_tokens)
            before = chain[-KEY_BYTES:]
        return chain

    def _file(self, names: list[BlockHash], keys: Chain, parent: tuple[_Segment, int] | None) -> list[tuple[_Segment, int]]:
        """Where each block is, new ones filed after their parents."""
        segment, at = parent or (self._root, -1)
        if self._where.keys().isdisjoint(names) and len(set(names)) == len(names):
            return self._file_new(names, keys, segment, at)
        places = []
        for number, name in enumerate(names):
            place = self._where.get(name)
            if place is None:
                (place,) = self._file_new([name], keys[number * KEY_BYTES : (number + 1) * KEY_BYTES], segment, at)
            segment, at = place
            places.append(place)
        return places

    def _file_new(self, names: list[BlockHash], keys: Chain, segment: _Segment, at: int) -> list[tuple[_Segment, int]]:
        """Where blocks are that were not filed yet: behind block `at` of `segment`, one after the other."""
        if not names:
            return []
        last = len(segment.hashes) - 1
        if segment is self._root or at != last or any(child.at == last for child in segment.children):
            grown = _Segment(segment, at)
            segment.children.append(grown)
            segment = grown
        first = len(segment.hashes)
        segment.keys += keys
        segment.hashes += names
        segment.media += bytes(len(names))
        places = [(segment, place) for place in range(first, first + len(names))]
        self._where.update(zip(names, places, strict=True))
        return places

    def _mark(self, places: list[tuple[_Segment, int]], medium: str | None) -> list[Presence]:
        bit = ON_DEVICE if medium in (None, GPU) else ELSEWHERE
        touched: dict[_Segment, None] = {}
        for segment, at in places:
            segment.media[at] |= bit
            touched[segment] = None
        out: list[Presence] = []
        for segment in touched:
            self._extend(segment, out)
        return out

    def _extend(self, segment: _Segment, out: list[Presence]) -> None:
        """Tell of what has become reusable in `segment` and below it."""
        parents = [segment]
        for part in parents:  # grows while it is walked
            above = part.parent
            if above is not None and part.at >= above.reach:
                continue
            start, gap = part.reach, part.media.find(0, part.reach)
            part.reach = gap if gap >= 0 else len(part.media)
            if part.reach > start:
                self._number += 1
                out.append(BlocksStored(self._holder, self._number, _chain(part, part.reach), part.depth + start))
                parents += [child for child in part.children if start <= child.at < part.reach]

    # ------------------------------------------------------------ removed

    def _on_removed(self, event: BlockRemoved) -> list[Presence]:
        if event.group_idx in self._foreign_groups:
            return []
        bit = ON_DEVICE if event.medium in (None, GPU) else ELSEWHERE
        cuts: dict[_Segment, int] = {}
        touched: dict[_Segment, None] = {}
        for name in event.block_hashes:
            place = self._where.get(name)
            if place is None:
                continue
            segment, at = place
            segment.media[at] &= ~bit
            if not segment.media[at]:
                touched[segment] = None
                if at < segment.reach:
                    cuts[segment] = min(at, cuts.get(segment, at))
        out: list[Presence] = []
        for segment, at in cuts.items():
            if at < segment.reach:  # else it went with a cut above it
                self._number += 1
                out.append(BlocksRemoved(self._holder, self._number, _chain(segment, at + 1), segment.depth + at))
                _shrink(segment, at)
        for segment in touched:
            self._trim(segment)
        return out

    def _trim(self, segment: _Segment) -> None:
        """Forget blocks that are gone and lead to none that is there."""
        while segment is not self._root:
            keep = max(len(segment.media.rstrip(b"\0")), *(child.at + 1 for child in segment.children), 0)
            for name in segment.hashes[keep:]:
                del self._where[name]
            del segment.hashes[keep:], segment.media[keep:], segment.keys[keep * KEY_BYTES :]
            above = segment.parent
            if segment.hashes or above is None or segment not in above.children:
                return
            above.children.remove(segment)
            segment = above

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        """Raise InvariantError unless places, reaches and depths agree."""
        seen, segments = 0, list(self._root.children)
        for segment in segments:
            segments += segment.children
            above, size = segment.parent, len(segment.hashes)
            seen += size
            opened = above is not None and segment.at < above.reach
            gap = segment.media.find(0)
            expected = (gap if gap >= 0 else size) if opened else 0
            if segment.reach != expected or len(segment.keys) != size * KEY_BYTES or not size:
                raise InvariantError(f"segment at {segment.depth}: reach {segment.reach}, expected {expected} of {size}")
            if any(self._where.get(name) != (segment, at) for at, name in enumerate(segment.hashes)):
                raise InvariantError(f"segment at {segment.depth}: a block is filed elsewhere")
            if not segment.media[-1] and all(child.at != size - 1 for child in segment.children):
                raise InvariantError(f"segment at {segment.depth} ends with a block that is gone")
        if seen != len(self._where):
            raise InvariantError(f"{seen} blocks in segments, {len(self._where)} filed")


def _key(segment: _Segment, at: int) -> bytes:
    return bytes(segment.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])


def _chain(segment: _Segment, num_blocks: int) -> Chain:
    """Keys from the start of the history to the first `num_blocks` of `segment`."""
    parts: list[bytes | bytearray] = []
    part: _Segment | None = segment
    while part is not None:
        parts.append(part.keys[: num_blocks * KEY_BYTES])
        num_blocks, part = part.at + 1, part.parent
    return b"".join(reversed(parts))


def _shrink(segment: _Segment, reach: int) -> None:
    """Of `segment` only the first `reach` blocks can be reused, and nothing that follows later ones."""
    segment.reach = reach
    below = [child for child in segment.children if child.at >= reach]
    for child in below:
        child.reach = 0
        below += child.children
