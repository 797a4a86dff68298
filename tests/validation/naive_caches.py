"""Caches of agent sessions once more, a block at a time, without the package's replayer, caches, pool, index or policies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from rackserve.bench.session import Session, TraceRequest
from rackserve.bench.streams import streams_of
from tests.bench.reference import replay

Block = tuple[str, int]


class Lru:
    """Blocks in the order in which they will go: least recently used prompts first, each from its tail."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.blocks: OrderedDict[Block, None] = OrderedDict()

    def held(self, prompt: list[Block]) -> int:
        return next((at for at, block in enumerate(prompt) if block not in self.blocks), len(prompt))

    def take(self, prompt: list[Block], most: int) -> int:
        prompt = prompt[: self.room]
        hit = min(self.held(prompt), most)
        for block in reversed(prompt):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.room:
            self.blocks.popitem(last=False)
        return hit


class Turns:
    """Among equals the one after the one chosen last."""

    def __init__(self) -> None:
        self.last = -1

    def choose(self, equals: list[int]) -> int:
        self.last = min((rank for rank in equals if rank > self.last), default=equals[0])
        return self.last


class Naive:
    """One arrangement of `ranks` caches of `room` blocks."""

    def __init__(self, name: str, ranks: int, room: int, block: int, tokens_per_s: float) -> None:
        self.name, self.block, self.tokens_per_s = name, block, tokens_per_s
        self.caches = [Lru(room * ranks)] if name == "pool" else [Lru(room) for _ in range(ranks)]
        self.jobs: list[list[tuple[float, int]]] = [[] for _ in range(ranks)]  # (when it is done, tokens)
        self.homes: dict[str, int] = {}
        self.turns = Turns()
        self.hits, self.work = 0, [0] * ranks

    def serve(self, tree: str, prompt: list[Block], tokens: int, now: float, measured: bool) -> None:
        ranks, most = range(len(self.jobs)), (tokens - 1) // self.block
        self.jobs = [[job for job in jobs if job[0] > now] for jobs in self.jobs]
        if self.name == "pool":
            cached = self.caches[0].take(prompt, most) * self.block
            rank = self.least([(self.queued(rank), 0) for rank in ranks])
        else:
            rank = self.place(tree, [tokens - min(cache.held(prompt) * self.block, tokens - 1) for cache in self.caches])
            own = tokens - min(self.caches[rank].held(prompt) * self.block, tokens - 1)
            cached = self.caches[rank].take(prompt, most) * self.block
        own = tokens - cached if self.name == "pool" else own
        begin = max([now, *(done for done, _ in self.jobs[rank])])
        self.jobs[rank].append((begin + own / self.tokens_per_s * 1e9, own))
        if measured:
            self.hits += cached
            self.work[rank] += tokens - cached

    def queued(self, rank: int) -> int:
        return sum(tokens for _, tokens in self.jobs[rank])

    def least(self, costs: Sequence[tuple[int, int]]) -> int:
        return self.turns.choose([rank for rank, cost in enumerate(costs) if cost == min(costs)])

    def place(self, tree: str, own: list[int]) -> int:
        if self.name == "sticky hash":
            return int.from_bytes(blake2b(tree.encode(), digest_size=8).digest(), "little") % len(own)
        if self.name == "round robin":
            return self.turns.choose(list(range(len(own))))
        if self.name == "session affinity":
            if tree not in self.homes:
                homes = list(self.homes.values())
                self.homes[tree] = self.least([(homes.count(rank), 0) for rank in range(len(own))])
            return self.homes[tree]
        weigh = self.name == "least uncached work"
        return self.least([(own[rank] + weigh * self.queued(rank), weigh * self.queued(rank)) for rank in range(len(own))])


def naive_row(
    sessions: Sequence[Session], names: Sequence[str], *, lanes: int, ranks: int, room: int, block: int, warm_s: float,
    measured_s: float, tokens_per_s: float, window: tuple[float, float], seed: int,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Arrangement -> (hit rate, busiest rank over mean)."""
    made = [Naive(name, ranks, room, block, tokens_per_s) for name in names]
    turns: dict[tuple[str, int, int], TraceRequest] = {}
    for session in sessions:
        for number, stream in enumerate(streams_of(session)):
            turns |= {(session.id, number, turn): request for turn, request in enumerate(stream.turns)}

    def answer(tree: str, number: int, turn: int) -> int:
        return max(1, turns[tree.rsplit("/", 1)[0], number, turn].api_ns)

    primed = replay(sessions, lanes, answer, tree_cap=300 * 10**9, system_cap=10**10, until=1, recycle=True, window=window,
                    seed=seed)  # fmt: skip
    begin = max((ended for _, ended, warmup in primed.values() if warmup), default=0)
    until = begin + round((warm_s + measured_s) * 1e9)
    log = replay(sessions, lanes, answer, tree_cap=300 * 10**9, system_cap=10**10, until=until, recycle=True, window=window,
                 seed=seed)  # fmt: skip
    total = 0
    for name, (sent, _, warmup) in log.items():
        tree, talk, at = name.rsplit("/", 2)
        request = turns[tree.rsplit("/", 1)[0], int(talk), int(at)]
        prompt = [(tree, block) for block in memoryview(request.hash_ids).cast("i")]
        measured = not warmup and sent >= begin + warm_s * 1e9
        total += measured * request.input_tokens
        for each in made:
            each.serve(tree, prompt, request.input_tokens, sent, measured)
    return {each.name: (each.hits / total, max(each.work) * ranks / sum(each.work)) for each in made}
