"""A naive model of the pool: what each slot's memory really holds, block by block."""

from __future__ import annotations

from array import array

from rackserve.base.ids import Attempt, Rank
from rackserve.base.keys import Chain, extend_chain
from rackserve.base.messages import PoolFound, PoolGranted
from rackserve.pool.directory import Directory, PoolConfig
from rackserve.runs.cache import Removed, Stored

Path = tuple[int, ...]
Slot = tuple[int, int]
CONFIG = PoolConfig(lease_ns=100)
RANKS = (Rank("prefill0"), Rank("prefill1"))
A, B = RANKS
R: Attempt = ("r", 1)


def chain_of(path: Path) -> Chain:
    return extend_chain(b"", b"r" * 16, array("i", path).tobytes(), 1)


def directory(*segments: int, needs_window: bool = False, windows: int = 2) -> Directory:
    made = Directory(CONFIG, needs_window=needs_window)
    for number, slots in enumerate(segments):
        made.segment_joined(number, slots, windows if needs_window else 0, RANKS[number % 2])
    return made


class NaivePool:
    """Memory of all slots, what is published where, and who reads or may write what."""

    def __init__(self, needs_window: bool) -> None:
        self.pool = directory(4, 4, needs_window=needs_window)
        self.segments, self.now = 2, 0
        self.alive = {0, 1}
        self.paths: dict[Chain, Path] = {}
        self.memory: dict[tuple[str, Slot], Path] = {}
        self.present: dict[Path, Slot] = {}
        self.readers: dict[int, tuple[Rank, int, list[tuple[tuple[str, Slot], Path]]]] = {}
        self.writers: dict[int, tuple[Rank, int, list[tuple[tuple[str, Slot], Path]]]] = {}
        self.open: set[int] = set()  # writers before their deadline

    def chain(self, path: Path) -> Chain:
        for length in range(1, len(path) + 1):
            self.paths[chain_of(path[:length])] = path[:length]
        return chain_of(path)

    def longest(self, path: Path) -> int:
        return max((n for n in range(len(path) + 1) if all(path[:m] in self.present for m in range(1, n + 1))), default=0)

    @staticmethod
    def claims(path: Path, answer: PoolFound | PoolGranted) -> list[tuple[tuple[str, Slot], Path]]:
        end = answer.from_block + len(answer.slots)
        claims = [(("block", slot), path[: answer.from_block + at + 1]) for at, slot in enumerate(answer.slots)]
        return claims + ([(("window", answer.window_slot), path[:end])] if answer.window_slot else [])

    def lookup(self, rank: Rank, path: Path, from_block: int) -> None:
        found = self.pool.lookup(R, rank, self.chain(path), from_block, self.now)
        length = found.from_block + len(found.slots)
        if self.pool._cache.needs_window:
            assert length <= max(self.longest(path), from_block) and (found.window_slot is not None) == bool(found.lease)
        else:
            assert length == max(self.longest(path), from_block)
        if found.lease:
            self.readers[found.lease] = (rank, self.now + 100, self.claims(path, found))

    def store(self, rank: Rank, path: Path, from_block: int, with_window: bool) -> None:
        start, free = self.longest(path), self.pool.blocks.num_free
        writing = {claims[0][1] for number in self.open if (claims := self.writers[number][2]) and claims[0][0][0] == "block"}
        held = bool(self.readers or self.open)
        granted = self.pool.store(R, rank, self.chain(path), from_block, with_window, self.now)
        room = min(len(path) - start, free + len(self.present) - start)
        if start < from_block or (start < len(path) and path[: start + 1] in writing):
            assert granted.grant == 0
            return
        assert len(granted.slots) <= room and (held or self.pool.num_held > 1 or len(granted.slots) == room)
        if granted.grant:
            assert granted.from_block == start
            self.writers[granted.grant] = (rank, self.now + 100, self.claims(path, granted))
            self.open.add(granted.grant)

    def write(self, grant: int) -> None:
        """A writer may write from grant to commit or cancel, also when it is late."""
        self.memory |= {where: path for where, path in self.writers[grant][2] if where[1][0] in self.alive}

    def commit(self, grant: int) -> None:
        self.write(grant)
        published = self.pool.commit(grant)
        _, _, claims = self.writers.pop(grant)
        assert not published or grant in self.open
        self.open.discard(grant)
        blocks = {path: slot for (kind, slot), path in claims if kind == "block"}
        for event in self.pool.take_events():
            assert isinstance(event, Stored)
            path = self.paths[event.chain]
            self.present |= {path[:n]: blocks[path[:n]] for n in range(event.start + 1, len(path) + 1)}

    def end(self, rank: Rank | None) -> None:
        """What is over for a dead rank, or (None) by the deadlines."""
        over = [n for n, (who, until, _) in self.readers.items() if (who == rank if rank else until <= self.now)]
        for number in over:
            del self.readers[number]
        if rank:
            self.writers = {n: writer for n, writer in self.writers.items() if writer[0] != rank}
            self.pool.rank_down(rank)
            self.open &= set(self.writers)
        else:
            late = [n for n in sorted(self.open) if self.writers[n][1] <= self.now]
            self.open -= set(late)
            assert self.pool.expire(self.now) == sorted(over) + late

    def check(self) -> None:
        for event in self.pool.take_events():
            assert isinstance(event, Removed)
            path = self.paths[event.chain]
            doomed = path[: event.keep + 1]
            gone = {p for p in self.present if p[: len(doomed)] == doomed and len(p) > event.keep}
            assert gone
            for p in gone:
                del self.present[p]
        self.pool.check()
        maximal = [chain_of(p) for p in self.present if not any(q[:-1] == p for q in self.present)]
        assert sorted(self.pool.chains()) == sorted(maximal)
        assert self.pool.num_blocks == len(self.present)
        for path, slot in self.present.items():
            assert self.memory["block", slot] == path
        for _, _, claims in self.readers.values():
            for where, path in claims:
                assert where[1][0] not in self.alive or self.memory[where] == path
        deadlines = [self.readers[n][1] for n in self.readers] + [self.writers[n][1] for n in self.open]
        assert self.pool.next_deadline() == min(deadlines, default=None)
