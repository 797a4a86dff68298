"""Batches in their order: whatever is lost, the index ends as the worker's cache is (or knows that it knows nothing)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.ids import Rank
from rackserve.live.kv_events import KvEvent, encode_batch
from rackserve.relay.feed import EventFeed
from rackserve.relay.ledger import BlockLedger
from rackserve.route.index import PrefixIndex
from tests.relay.stub import BlockCache
from tests.relay.test_ledger import BLOCK, chain_of

RANKS = [Rank("w", 0), Rank("w", 1)]


class Rig:
    """A worker's cache whose events are numbered and kept, and a feed that hears some of them."""

    def __init__(self, max_blocks: int = 6) -> None:
        self.index = PrefixIndex(max_runs=1000)
        ledgers = {rank.dp_rank: BlockLedger(rank, BLOCK, set()) for rank in RANKS}
        self.feed = EventFeed(self.index, ledgers, 0)
        self.kept: list[bytes] = []
        self.ts = 0.0
        self.max_blocks = max_blocks
        self.begin()

    def begin(self) -> None:
        """The worker starts anew: its cache is empty and its numbers begin at 0."""
        self.kept = []
        self.cache = BlockCache(BLOCK, self.max_blocks, self._tell)

    def _tell(self, events: list[KvEvent]) -> None:
        self.ts += 1
        self.kept.append(encode_batch(self.ts, events))

    def hear(self, number: int, *, replay: bool = True) -> None:
        """Batch `number` arrives; what is missing before it is replayed."""
        if self.feed.take(number, self.kept[number]):
            return
        if replay:
            for at in range(self.feed.wanted, len(self.kept)):
                self.feed.accept(at, self.kept[at])
        self.feed.accept(number, self.kept[number])

    def agrees(self, prompts: list[list[int]]) -> bool:
        held = {tuple(prompt): self.index.match(chain_of(tuple(prompt))).get(RANKS[0], 0) for prompt in prompts}
        there = {}
        for prompt in prompts:
            own = self.cache.hashes(prompt)
            there[tuple(prompt)] = next((at for at, name in enumerate(own) if name not in self.cache.blocks), len(own))
        return held == there


PROMPTS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9, 9, 9], [7, 7, 7, 7], [1, 2, 8, 8], [5, 5, 5, 5, 5, 5, 5, 5]]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PROMPTS), st.sampled_from(["hear", "hear", "lose", "restart"])), max_size=12))
def test_with_replay_every_batch_heard_makes_index_and_cache_equal(steps: list[tuple[list[int], str]]) -> None:
    rig = Rig()
    for prompt, fate in steps:
        if fate == "restart":
            rig.begin()
        before = len(rig.kept)
        rig.cache.use(prompt)
        if fate != "lose" and len(rig.kept) > before:
            rig.hear(len(rig.kept) - 1)
            assert rig.agrees(PROMPTS)


def test_without_replay_a_gap_makes_all_before_it_void() -> None:
    rig = Rig(max_blocks=100)
    for prompt in PROMPTS[:3]:
        rig.cache.use(prompt)
    rig.hear(0)
    assert rig.index.match(chain_of(tuple(PROMPTS[0])))
    rig.hear(2, replay=False)
    assert not rig.index.match(chain_of(tuple(PROMPTS[0])))
    assert rig.index.match(chain_of(tuple(PROMPTS[2]))) == {RANKS[0]: 2}
    assert rig.feed.num_gaps == 1


def test_a_batch_heard_twice_counts_once() -> None:
    rig = Rig()
    for prompt in PROMPTS:
        rig.cache.use(prompt)
    for number in (0, 1, 1, 0, 2, 3, 4, 2):
        rig.hear(number)
    assert rig.agrees(PROMPTS)
    assert rig.feed.num_restarts == 0


def test_a_restarted_worker_has_nothing_of_before() -> None:
    rig = Rig(max_blocks=100)
    for prompt in PROMPTS:
        rig.cache.use(prompt)
    rig.hear(4)
    rig.begin()
    rig.cache.use(PROMPTS[2])
    rig.hear(0)
    assert rig.agrees(PROMPTS)
    assert rig.feed.num_restarts == 1


def test_a_batch_that_cannot_be_read_makes_all_before_it_void() -> None:
    rig = Rig(max_blocks=100)
    rig.cache.use(PROMPTS[0])
    rig.hear(0)
    assert rig.feed.take(1, b"\xc1")
    assert not rig.index.match(chain_of(tuple(PROMPTS[0])))
    assert rig.feed.num_unread == 1


def test_a_batch_goes_to_the_rank_it_names() -> None:
    rig = Rig(max_blocks=100)
    rig.cache.use(PROMPTS[0])
    rig.kept[0] = encode_batch(1.0, [], 1)
    other = Rig(max_blocks=100)
    cache = BlockCache(BLOCK, 100, lambda events: other.kept.append(encode_batch(2.0, events, 1)))
    cache.use(PROMPTS[0])
    other.hear(0)
    assert other.index.match(chain_of(tuple(PROMPTS[0]))) == {RANKS[1]: 3}
    other.feed.restart()
    assert other.index.num_runs == 0
