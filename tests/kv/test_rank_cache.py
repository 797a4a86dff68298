from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Rank
from rackserve.base.keys import CacheNamespace, count, extend_chain, prefix
from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.kv.rank_cache import Lease, RankCache
from rackserve.runs.cache import Removed, Stored
from tests.runs.chains import Words, leaves, prefixes

RANK = Rank("prefill0", 1)
FULL = KvLayout(4, (KvGroup("kv", "full", 64),))
HYBRID = KvLayout(4, (KvGroup("kv", "full", 64), KvGroup("swa", "window", 32)))
TOTAL = 12


class Sequence:
    def __init__(self, word: str, lease: Lease, written: int) -> None:
        self.word, self.lease, self.written = word, lease, written


class Pair:
    """A rank cache and its naive model: a dictionary of committed blocks, and a memory that remembers what each slot holds."""

    def __init__(self, layout: KvLayout) -> None:
        self.words = Words()
        self.cache = RankCache(RANK, layout, TOTAL, 3 if layout.has_window else 0)
        self.cached: dict[str, int] = {}
        self.memory: dict[int, str] = {}
        self.sequences: list[Sequence] = []
        self.replayed: set[str] = set()

    def owned(self) -> int:
        """Slots in the tables of sequences that the prefix cache does not hold."""
        return len({slot for sequence in self.sequences for slot in sequence.lease.blocks} - set(self.cached.values()))

    def pinned(self) -> set[str]:
        return {name for sequence in self.sequences for name in prefixes(sequence.word[: sequence.lease.committed])}

    def usable(self) -> int:
        return TOTAL - self.owned() - len(self.pinned())

    def acquire(self, word: str, number: int) -> None:
        """A prompt of these blocks, of which the last `number` at least are to be computed."""
        keys, limit = self.words.chain(word), max(len(word) - number, 0)
        matched = self.cache.match(keys, limit)
        assert matched <= sum(name in self.cached for name in prefixes(word)[:limit])
        pinned = self.pinned() | set(prefixes(word)[:matched])
        fits = len(word) - matched <= TOTAL - self.owned() - len(pinned)
        lease = self.cache.acquire(keys, matched, len(word) - matched)
        assert (lease is not None) == fits
        self.drain()
        if lease is not None:
            assert len(lease.blocks) == len(word)
            assert lease.blocks[:matched] == [self.cached[name] for name in prefixes(word)[:matched]]
            self.sequences.append(Sequence(word, lease, matched))

    def write(self, index: int, number: int) -> None:
        """A step computes up to `number` blocks of a sequence; their keys are not announced yet."""
        sequence = self.sequences[index]
        upto = min(sequence.written + number, len(sequence.word))
        for at in range(sequence.written, upto):
            self.memory[sequence.lease.blocks[at]] = sequence.word[: at + 1]
        sequence.written = upto

    def commit(self, index: int) -> None:
        sequence = self.sequences[index]
        self.cache.commit(sequence.lease, self.words.chain(sequence.word), sequence.written)
        for at, name in enumerate(prefixes(sequence.word[: sequence.written])):
            self.cached.setdefault(name, sequence.lease.blocks[at])
        self.drain()

    def grow(self, index: int, letters: str) -> None:
        sequence, fits = self.sequences[index], len(letters) <= self.usable()
        before = list(sequence.lease.blocks)
        assert self.cache.grow(sequence.lease, len(letters)) == fits
        self.drain()
        assert sequence.lease.blocks[: len(before)] == before
        assert len(sequence.lease.blocks) == len(before) + len(letters) * fits
        sequence.word += letters * fits

    def drain(self) -> None:
        for event in self.cache.take_events():
            if isinstance(event, Stored):
                word = self.words.word(event.chain)
                assert event.start == 0 or word[: event.start] in self.replayed  # the parent was announced before
                fresh = set(prefixes(word)[event.start :])
                assert not fresh & self.replayed
                assert all(self.memory[self.cached[name]] == name for name in fresh)
                self.replayed |= fresh
            else:
                left = self.words.remove(self.replayed, event.chain, event.keep)
                assert left < self.replayed and not (self.replayed - left) & self.pinned()
                self.cached = {name: slot for name, slot in self.cached.items() if name in left}
                self.replayed = left

    def run(self, op: str, word: str, number: int) -> None:
        if op == "acquire":
            self.acquire(word, number)
        elif self.sequences:
            index = number % len(self.sequences)
            if op == "grow":
                self.grow(index, word[:2])
            elif op == "release":
                self.cache.release(self.sequences.pop(index).lease)
            else:
                self.write(index, 1 + number // 2)
                if op == "commit":
                    self.commit(index)
        self.compare()

    def compare(self) -> None:
        cache = self.cache
        cache.check()
        assert self.replayed == set(self.cached)
        assert {self.words.word(keys) for keys in cache.chains()} == leaves(set(self.cached))
        assert (cache.num_cached, cache.num_in_use, cache.usable) == (len(self.cached), self.owned(), self.usable())
        assert cache.num_free + cache.num_cached + cache.num_in_use == cache.num_blocks == TOTAL
        for sequence in self.sequences:  # what a step in flight reads is what was written for it
            table = sequence.lease.blocks[: sequence.written]
            assert [self.memory[slot] for slot in table] == prefixes(sequence.word[: sequence.written])


WORD = st.text("ab", min_size=1, max_size=6)
OPS = st.tuples(
    st.sampled_from(["acquire", "acquire", "write", "commit", "commit", "grow", "release"]), WORD, st.integers(0, 4)
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(OPS, min_size=8, max_size=40))
def test_leases_keep_every_law_after_every_operation(ops: list[tuple[str, str, int]]) -> None:
    pair = Pair(FULL)
    for op in ops:
        pair.run(*op)
    for sequence in pair.sequences:
        pair.cache.release(sequence.lease)
    assert (pair.cache.num_in_use, pair.cache.usable) == (0, TOTAL)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.tuples(WORD, st.booleans(), st.booleans()), min_size=4, max_size=25))
def test_with_a_window_group_the_match_ends_at_a_stored_state(turns: list[tuple[str, bool, bool]]) -> None:
    """Naive model: boundaries whose state was stored and whose window slot still holds it, over blocks still cached."""
    pair, state = Pair(HYBRID), dict[int, str]()
    for word, store, abort in turns:
        keys = pair.words.chain(word)
        matched = pair.cache.match(keys, len(word) - 1)
        lease = pair.cache.acquire(keys, matched, len(word) - matched)
        pair.drain()
        assert lease is not None
        if matched:
            assert state[lease.restore] == word[:matched]
        sequence = Sequence(word, lease, matched)
        pair.sequences.append(sequence)
        pair.write(0, len(word))
        window = pair.cache.allocate_window(lease) if store else None
        pair.drain()
        assert (window is not None) == store
        if window is not None:
            state[window] = word
        if not abort:
            pair.commit(0)
            if window is not None:
                pair.cache.commit_window(lease, len(word), window)
        pair.compare()
        pair.cache.release(pair.sequences.pop().lease)
        pair.compare()


def tokens(num_tokens: int) -> bytes:
    return b"".join((7 * at).to_bytes(4, "little") for at in range(num_tokens))


def serve(cache: RankCache, num_tokens: int) -> int:
    """Prefill a prompt as the scheduler does; returns its cached tokens."""
    root = CacheNamespace("m", "r", 4, FULL.fingerprint()).root()
    chain = extend_chain(b"", root, tokens(num_tokens), 4)
    matched = cache.match(chain, (num_tokens - 1) // 4)
    lease = cache.acquire(chain, matched, -(-num_tokens // 4) - matched)
    assert lease is not None
    cache.commit(lease, chain, count(chain))
    cache.release(lease)
    cache.check()
    return 4 * matched


@pytest.mark.parametrize(("num_tokens", "cached"), [(4, 0), (8, 4), (9, 8)])
def test_a_wholly_cached_prompt_still_computes_its_last_token(num_tokens: int, cached: int) -> None:
    cache = RankCache(RANK, FULL, 8)
    assert [serve(cache, num_tokens) for _ in range(3)] == [0, cached, cached]
    assert serve(cache, num_tokens + 5) == num_tokens // 4 * 4
    assert cache.num_in_use == 0


def new_lease(cache: RankCache, words: Words, word: str) -> Lease:
    keys = words.chain(word)
    matched = cache.match(keys, len(word) - 1)
    lease = cache.acquire(keys, matched, len(word) - matched)
    assert lease is not None
    return lease


def compute(cache: RankCache, words: Words, word: str) -> Lease:
    lease = new_lease(cache, words, word)
    cache.commit(lease, words.chain(word), len(word))
    return lease


def test_a_trunk_shared_by_five_leaves_is_evicted_last() -> None:
    cache, words = RankCache(RANK, FULL, 7), Words()
    for leaf in "12345":
        cache.release(compute(cache, words, "tt" + leaf))
    cache.take_events()
    cache.release(new_lease(cache, words, "xyzuvwq"))
    kept = [(words.word(event.chain), event.keep) for event in cache.take_events() if isinstance(event, Removed)]
    assert kept == [("tt1", 2), ("tt2", 2), ("tt3", 2), ("tt4", 2), ("tt5", 2), ("tt", 0)]


def test_a_prefix_whose_resume_state_was_recycled_is_not_used() -> None:
    cache, words = RankCache(RANK, HYBRID, 40, 1), Words()

    def turn(word: str) -> int:
        lease = new_lease(cache, words, word)
        cache.commit(lease, words.chain(word), len(word))
        window = cache.allocate_window(lease)
        assert window is not None
        cache.commit_window(lease, len(word), window)
        cache.release(lease)
        cache.check()
        return lease.matched

    assert turn("abcdefghij") == 0
    assert turn("abcdefghijk") == 10  # takes the only window slot: the blocks are all there, the state at 10 is not
    branch = words.chain("abcdefghijz")
    assert (cache.present(branch), cache.match(branch)) == (10, 0)
    assert turn("xyz") == 0
    assert turn("abcdefghijk") == 0


def test_a_resume_state_is_kept_until_the_first_commit_after_it_was_matched() -> None:
    cache, words = RankCache(RANK, HYBRID, 20, 1), Words()
    first = compute(cache, words, "ab")
    window = cache.allocate_window(first)
    assert window is not None
    cache.commit_window(first, 2, window)
    cache.release(first)
    reader, other = new_lease(cache, words, "abc"), new_lease(cache, words, "x")
    assert reader.restore == window and cache.allocate_window(other) is None
    cache.commit(reader, words.chain("abc"), 3)
    assert cache.allocate_window(other) == window


def test_a_second_resume_state_for_one_boundary_is_given_back() -> None:
    cache, words = RankCache(RANK, HYBRID, 20, 2), Words()
    leases = [compute(cache, words, "ab"), compute(cache, words, "ab")]
    for lease in leases:
        window = cache.allocate_window(lease)
        assert window is not None
        cache.commit_window(lease, 2, window)
        cache.check()
    assert cache.allocate_window(leases[0]) is not None


def test_two_sequences_that_compute_the_same_blocks_keep_their_own_until_release() -> None:
    cache, words = RankCache(RANK, FULL, 8), Words()
    first, second = new_lease(cache, words, "abc"), new_lease(cache, words, "abc")
    cache.commit(first, words.chain("abc"), 3)
    table = list(second.blocks)
    cache.commit(second, words.chain("abc"), 3)
    assert second.blocks == table and not set(table) & set(first.blocks)
    assert [event for event in cache.take_events() if isinstance(event, Stored)] == [Stored(words.chain("abc"), 0)]
    cache.release(first)
    assert cache.num_in_use == 3
    cache.release(second)
    assert (cache.num_in_use, cache.num_cached) == (0, 3)


def test_an_aborted_sequence_leaves_nothing_but_what_it_committed() -> None:
    cache, words = RankCache(RANK, FULL, 8), Words()
    lease = new_lease(cache, words, "abcdef")
    cache.commit(lease, words.chain("abcdef"), 2)
    assert cache.grow(lease, 2) and not cache.grow(lease, 1)
    cache.release(lease)
    assert (cache.num_free, cache.num_cached, cache.usable) == (6, 2, 8)
    assert cache.take_events() == [Stored(words.chain("ab"), 0)]


def test_a_key_is_withdrawn_before_its_block_is_announced_as_another() -> None:
    cache, words = RankCache(RANK, FULL, 2), Words()
    cache.release(compute(cache, words, "ab"))
    compute(cache, words, "xy")
    ab, xy = words.chain("ab"), words.chain("xy")
    assert cache.take_events() == [Stored(ab, 0), Removed(ab, 0), Stored(xy, 0)]
    assert cache.take_events() == []


def test_a_refused_acquire_evicts_and_pins_nothing() -> None:
    cache, words = RankCache(RANK, FULL, 5), Words()
    cache.release(compute(cache, words, "abc"))
    running = new_lease(cache, words, "q")
    cache.take_events()
    for word, matched in [("abcxx", 3), ("xyzvw", 0)]:
        assert cache.acquire(words.chain(word), matched, len(word) - matched) is None
        assert not cache.grow(running, 5)
        assert (cache.usable, cache.num_cached, cache.take_events()) == (4, 3, [])


def test_committing_no_more_than_before_changes_nothing() -> None:
    cache, words = RankCache(RANK, FULL, 4), Words()
    lease = compute(cache, words, "abc")
    cache.take_events()
    for num_blocks in (3, 1, 0):
        cache.commit(lease, words.chain("abc"), num_blocks)
    assert (lease.committed, lease.chain, cache.take_events()) == (3, words.chain("abc"), [])


def test_misuse_is_refused() -> None:
    cache, words = RankCache(RANK, HYBRID, 8, 2), Words()
    lease = new_lease(cache, words, "abc")
    keys = words.chain("abcd")
    with pytest.raises(InvariantError, match="cannot commit"):
        cache.commit(lease, keys, 4)
    with pytest.raises(InvariantError, match="cannot commit"):
        cache.commit(lease, prefix(keys, 1), 2)
    cache.commit(lease, keys, 2)
    with pytest.raises(InvariantError, match=r"keys of a lease on prefill0\.1 have changed"):
        cache.commit(lease, words.chain("xbc"), 3)
    window = cache.allocate_window(lease)
    assert window is not None
    for num_blocks, slot in [(3, window), (0, window), (2, window + 1)]:
        with pytest.raises(InvariantError, match="cannot be stored"):
            cache.commit_window(lease, num_blocks, slot)
    with pytest.raises(InvariantError, match="are present"):
        cache.acquire(words.chain("q"), 1, 1)
    cache.release(lease)
    for use in (cache.release, lambda ended: cache.grow(ended, 1), lambda ended: cache.commit(ended, keys, 3)):
        with pytest.raises(InvariantError, match="after its release"):
            use(lease)
    cache.check()


def test_the_state_at_the_end_of_what_a_lease_has_committed_stays_put_under_it() -> None:
    cache = RankCache(RANK, HYBRID, 8, 1)
    first = cache.acquire(b"", 0, 2)
    assert first is not None and cache.state_slot(first) == -1
    window = cache.allocate_window(first)
    assert window is not None
    cache.commit(first, Words().chain("ab"), 2)
    assert cache.state_slot(first) == -1  # blocks, but no state yet
    cache.commit_window(first, 2, window)
    assert cache.state_slot(first) == window
    assert cache.allocate_window(first) is None  # it is not taken away while the lease lives
    cache.release(first)
    reader = cache.acquire(Words().chain("ab"), 2, 0)
    assert reader is not None and cache.state_slot(reader) == window


def test_where_state_is_computed_again_blocks_alone_are_a_hit() -> None:
    layout = msgspec.structs.replace(HYBRID, replay_tokens=4)
    cache = RankCache(RANK, layout, 8, 2)
    lease = cache.acquire(b"", 0, 3)
    assert lease is not None and cache.allocate_window(lease) is not None
    cache.commit(lease, Words().chain("abc"), 3)
    cache.release(lease)
    cache.check()
    assert cache.match(Words().chain("abcd")) == 3


def test_a_window_slot_given_back_unused_serves_another_and_is_not_given_back_twice() -> None:
    cache = RankCache(RANK, HYBRID, TOTAL, 1)
    first, second = cache.acquire(b"", 0, 1), cache.acquire(b"", 0, 1)
    assert first is not None and second is not None
    slot = cache.allocate_window(first)
    assert slot is not None and cache.allocate_window(second) is None
    cache.free_window(first, slot)
    assert cache.allocate_window(second) == slot
    with pytest.raises(InvariantError, match="does not belong"):
        cache.free_window(first, slot)
    cache.check()
