"""The structures that work on runs of blocks, beside dictionaries that walk every block, on sessions of 50 turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from hashlib import shake_128
from time import process_time_ns

from measure import CPU_TIME, Figure, Options, Result, at_most, figure, interleave, main, ns_per_call, rate

from rackserve.base.ids import POOL_RANK, Attempt, Rank
from rackserve.base.keys import KEY_BYTES, Chain, common_blocks, count, key_at, prefix
from rackserve.base.messages import BlocksStored
from rackserve.pool.directory import Directory, PoolConfig
from rackserve.route.index import PrefixIndex
from rackserve.route.load import LoadBook
from rackserve.route.promises import Promises

TURNS = 50
TURN_BLOCKS = 44
BRANCH_BLOCKS = 4
"""Blocks of an answer that the next prompt does not repeat: they stay behind as a branch, which splits the run."""
NUM_RANKS = 8


class Sessions:
    """`num` sessions as chains: turn t is the first (t + 1) * TURN_BLOCKS keys; each turn leaves a branch."""

    def __init__(self, num: int, seed: int) -> None:
        size = TURNS * TURN_BLOCKS * KEY_BYTES
        self.whole = [shake_128(f"{seed}/{number}".encode()).digest(size) for number in range(num)]
        self.turns: list[list[Chain]] = []
        for number, chain in enumerate(self.whole):
            branches = shake_128(f"{seed}/{number}/branches".encode()).digest(TURNS * BRANCH_BLOCKS * KEY_BYTES)
            step = BRANCH_BLOCKS * KEY_BYTES
            self.turns.append(
                [prefix(chain, (t + 1) * TURN_BLOCKS) + branches[t * step : (t + 1) * step] for t in range(TURNS)]
            )

    def events(self) -> Iterable[BlocksStored]:
        """Every turn of every session, announced by its session's rank and by the pool."""
        numbers: dict[Rank, int] = {}
        for turn in range(TURNS):
            for session, turns in enumerate(self.turns):
                for holder in (Rank(f"prefill{session % NUM_RANKS}"), POOL_RANK):
                    numbers[holder] = numbers.get(holder, 0) + 1
                    yield BlocksStored(holder, numbers[holder], turns[turn], turn * TURN_BLOCKS)


class BlockIndex:
    """Presence block by block: the plain thing to do."""

    def __init__(self) -> None:
        self._holders: dict[bytes, set[Rank]] = {}

    def apply(self, event: BlocksStored) -> None:
        for index in range(event.start, count(event.chain)):
            self._holders.setdefault(key_at(event.chain, index), set()).add(event.holder)

    def match(self, chain: Chain) -> dict[Rank, int]:
        found: dict[Rank, int] = {}
        for index in range(count(chain)):
            holders = self._holders.get(key_at(chain, index))
            if not holders:
                break
            for holder in holders:
                if found.get(holder, 0) == index:
                    found[holder] = index + 1
        return found


class BlockPool:
    """Slots and readers block by block."""

    def __init__(self) -> None:
        self._slots: dict[bytes, int] = {}
        self._readers: dict[int, int] = {}

    def store(self, chain: Chain) -> None:
        for index in range(count(chain)):
            self._slots.setdefault(key_at(chain, index), len(self._slots))

    def lookup(self, chain: Chain) -> list[int]:
        slots = []
        for index in range(count(chain)):
            slot = self._slots.get(key_at(chain, index))
            if slot is None:
                break
            self._readers[slot] = self._readers.get(slot, 0) + 1
            slots.append(slot)
        return slots

    def release(self, slots: list[int]) -> None:
        for slot in slots:
            self._readers[slot] -= 1


def run(options: Options) -> Result:
    sessions = Sessions(3 if options.quick else 24, options.seed)
    notes = (
        f"{len(sessions.whole)} sessions of {TURNS} turns x {TURN_BLOCKS} blocks; every turn leaves a branch of "
        f"{BRANCH_BLOCKS} blocks. Ratios are times: below 1 the runs are faster than the walk.",
    )
    figures = [*_index(sessions, options), *_promises(sessions, options), *_book(options), *_pool(sessions, options)]
    claims = tuple(
        at_most(f"{part.what} takes no longer than {part.to}", part.ratios, 1)
        for part in figures
        if "blocks/s" not in part.unit
    )
    question = "Does work per run instead of per block make long prefixes cheap to find?"
    return Result("index", question, CPU_TIME, claims, tuple(figures), notes)


def _index(sessions: Sessions, options: Options) -> list[Figure]:
    events = list(sessions.events())
    new_blocks = sum(count(event.chain) - event.start for event in events)
    runs, blocks = PrefixIndex(max_runs=1_000_000), BlockIndex()
    for event in events:
        runs.apply(event)
        blocks.apply(event)

    def feed(make: Callable[[], PrefixIndex | BlockIndex]) -> float:
        index = make()
        start = process_time_ns()
        for event in events:
            index.apply(event)
        return process_time_ns() - start

    def match(index: PrefixIndex | BlockIndex) -> float:
        return ns_per_call(lambda: [index.match(chain) for chain in sessions.whole], 1)

    assert all(runs.match(chain) == blocks.match(chain) for chain in sessions.whole), "the two indexes disagree"
    ns = interleave(
        {
            "feed runs": partial(feed, lambda: PrefixIndex(max_runs=1_000_000)),
            "feed blocks": partial(feed, BlockIndex),
            "match runs": partial(match, runs),
            "match blocks": partial(match, blocks),
        },
        options.rounds,
    )
    matched = sum(map(count, sessions.whole))
    walk, fed = ns["match blocks"], ns["feed blocks"]
    return [
        rate(
            "PrefixIndex.match", "matches/s", ns["match runs"], len(sessions.whole), "a walk over a dictionary of blocks", walk
        ),
        rate("PrefixIndex.match", "M blocks/s", ns["match runs"], matched / 1e6, "a walk over a dictionary of blocks", walk),
        rate("PrefixIndex.apply", "events/s", ns["feed runs"], len(events), "a dictionary of blocks", fed),
        rate("PrefixIndex.apply", "M new blocks/s", ns["feed runs"], new_blocks / 1e6, "a dictionary of blocks", fed),
    ]


def _promises(sessions: Sessions, options: Options) -> list[Figure]:
    active = [turns[-1 - number % 20] for number, turns in enumerate(sessions.turns * 5)]
    promises = Promises()
    for number, chain in enumerate(active):
        promises.add(Rank(f"prefill{number % NUM_RANKS}"), (f"r{number}", 1), chain)
    probe = sessions.turns[0][-1]
    rank, attempt = Rank("prefill0"), ("new", 1)

    def with_tree() -> None:
        promises.match(probe)
        promises.add(rank, attempt, probe)
        promises.remove(rank, attempt)

    def with_each() -> None:
        for chain in active:
            common_blocks(chain, 0, probe, 0)

    calls = 20 if options.quick else 300
    ns = interleave(
        {"tree": partial(ns_per_call, with_tree, calls), "each": partial(ns_per_call, with_each, calls)}, options.rounds
    )
    what = f"Promises: match, add and remove beside {len(active)} active attempts"
    return [figure(what, "µs", ns["tree"], "a comparison with each active chain", ns["each"], 1e-3)]


def _book(options: Options) -> list[Figure]:
    book, rank = LoadBook(), Rank("prefill0")
    plain: dict[Attempt, int] = {}
    for number in range(100):
        book.book(rank, (f"r{number}", 1), number)
    attempt = ("new", 1)

    def with_book() -> None:
        book.book(rank, attempt, 1000)
        book.progress(rank, attempt, 400)
        book.release(rank, attempt)

    def with_dictionary() -> None:
        plain[attempt] = 1000
        plain[attempt] -= 400
        del plain[attempt]

    calls = 100 if options.quick else 5000
    variants = {"book": partial(ns_per_call, with_book, calls), "plain": partial(ns_per_call, with_dictionary, calls)}
    ns = interleave(variants, options.rounds)
    return [figure("LoadBook: book, progress and release", "µs", ns["book"], "a dictionary without checks", ns["plain"], 1e-3)]


def _pool(sessions: Sessions, options: Options) -> list[Figure]:
    rank = Rank("prefill0")
    num_slots = 2 * sum(len(turns) * (TURN_BLOCKS + BRANCH_BLOCKS) for turns in sessions.turns)

    def make() -> Directory:
        directory = Directory(PoolConfig(), needs_window=False)
        for segment in range(4):
            directory.segment_joined(segment, num_slots // 4, 0, None)
        return directory

    def store(directory: Directory, chain: Chain, number: int) -> None:
        directory.commit(directory.store((f"r{number}", 1), rank, chain, 0, False, 0).grant)
        directory.take_events()

    def fill_runs() -> float:
        directory = make()
        start = process_time_ns()
        for turn in range(TURNS):
            for turns in sessions.turns:
                store(directory, turns[turn], turn)
        return process_time_ns() - start

    def fill_blocks() -> float:
        pool = BlockPool()
        start = process_time_ns()
        for turn in range(TURNS):
            for turns in sessions.turns:
                pool.store(turns[turn])
        return process_time_ns() - start

    directory, pool = make(), BlockPool()
    for number, turns in enumerate(sessions.turns):
        for chain in turns:
            store(directory, chain, number)
            pool.store(chain)

    def look_up_runs() -> None:
        for chain in sessions.whole:
            directory.release(directory.lookup(("r", 1), rank, chain, 0, 0).lease)

    def look_up_blocks() -> None:
        for chain in sessions.whole:
            pool.release(pool.lookup(chain))

    ns = interleave(
        {
            "store runs": fill_runs,
            "store blocks": fill_blocks,
            "look up runs": partial(ns_per_call, look_up_runs, 1),
            "look up blocks": partial(ns_per_call, look_up_blocks, 1),
        },
        options.rounds,
    )
    stores = TURNS * len(sessions.turns)
    walk = "a walk over dictionaries of slots and readers"
    return [
        rate("Directory: lookup and release of a whole session", "lookups/s", ns["look up runs"], len(sessions.whole), walk,
             ns["look up blocks"]),
        rate("Directory: store and commit of one more turn", "stores/s", ns["store runs"], stores, walk, ns["store blocks"]),
    ]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
