from __future__ import annotations

from itertools import count as counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.runs.accounts import HeldRun
from rackserve.runs.cache import Evicted, RunCache
from tests.runs.chains import Words, leaves, prefixes

WORD = st.text("ab", min_size=1, max_size=7)
LAWS = settings(derandomize=True, max_examples=200, deadline=None)


class PerBlock:
    """Naive model: every block a dictionary entry with its own age, every handle the list of blocks it reads."""

    def __init__(self) -> None:
        self.slot: dict[str, int] = {}
        self.age: dict[str, int] = {}
        self.handles: list[dict[str, int]] = []
        self.now = 0

    def present(self, word: str) -> int:
        return sum(name in self.slot for name in prefixes(word))

    def touch(self, word: str) -> None:
        self.now += 1
        self.age.update((name, self.now) for name in prefixes(word) if name in self.slot)

    def touch_handle(self, index: int) -> None:
        self.now += 1
        self.age.update((name, self.now) for name, slot in self.handles[index].items() if self.slot.get(name) == slot)

    def pinned(self) -> set[str]:
        return {name for handle in self.handles for name, slot in handle.items() if self.slot.get(name) == slot}

    def evict(self, num_blocks: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < num_blocks and (free := leaves(set(self.slot)) - self.pinned()):
            freed.append(self.slot.pop(min(free, key=lambda name: self.age[name])))
        return freed

    def drop(self, gone: set[int]) -> list[int]:
        """Slots to free now; the blocks of handles stay with them."""
        pinned = self.pinned()
        lost = [name for name in self.slot if any(self.slot[part] in gone for part in prefixes(name))]
        slots = {name: self.slot.pop(name) for name in lost}
        return [slot for name, slot in slots.items() if name not in pinned and slot not in gone]

    def unpin(self, index: int) -> list[int]:
        """Slots that nobody owns any more."""
        ended = self.handles.pop(index)
        kept = set(self.slot.values()) | {slot for handle in self.handles for slot in handle.values()}
        return [slot for slot in ended.values() if slot not in kept]


class Pair:
    """The cache and its model, driven by the same operations."""

    def __init__(self) -> None:
        self.words, self.cache, self.model = Words(), RunCache(), PerBlock()
        self.runs: list[HeldRun] = []
        self.fresh = counter()
        self.gone: set[int] = set()
        self.replayed: set[str] = set()

    def insert(self, word: str, start: int) -> None:
        start = min(start, self.model.present(word))
        slots = [next(self.fresh) for _ in word[start:]]
        surplus, window = self.cache.insert(self.words.chain(word), list(slots), start)
        known = self.model.present(word)
        assert (surplus, window) == (slots[: known - start], -1)
        whole = known < len(word) or self.covered(word) == known
        self.model.slot.update(zip(prefixes(word)[known:], slots[known - start :], strict=True))
        self.model.touch(word if whole else word[: self.covered(word)])
        self.replayed |= set(prefixes(word))

    def covered(self, word: str) -> int:
        """Blocks of `word` in runs that lie wholly within it: a use of a part of a run does not make all of it younger."""
        run, depth = self.cache._tree.descend(self.words.chain(word))
        return depth if depth == run.end else run.depth

    def match(self, word: str) -> None:
        self.model.touch(word[: self.covered(word)])
        assert self.cache.match(self.words.chain(word)) == self.model.present(word)

    def pin(self, word: str) -> None:
        if word := word[: self.model.present(word)]:
            run = self.cache.pin(self.words.chain(word), len(word))
            self.model.touch(word)
            self.model.handles.append({name: self.model.slot[name] for name in prefixes(word)})
            self.runs.append(run)

    def unpin(self, index: int) -> None:
        if self.runs:
            index %= len(self.runs)
            self.model.touch_handle(index)
            self.cache.unpin(self.runs.pop(index))
            orphans, windows = self.cache.take_orphans()
            assert (sorted(orphans), windows) == (sorted(set(self.model.unpin(index)) - self.gone), [])

    def apply(self, out: Evicted, expected: list[int]) -> None:
        assert (sorted(out.slots), out.window_slots) == (sorted(expected), [])
        for keys, keep in out.removed:
            self.replayed = self.words.remove(self.replayed, keys, keep)

    def run(self, op: str, word: str, number: int) -> None:
        if op == "insert":
            self.insert(word, number)
        elif op in ("match", "pin"):
            getattr(self, op)(word)
        elif op == "unpin":
            self.unpin(number)
        elif op == "evict":
            self.apply(self.cache.evict(number), self.model.evict(number))
        else:
            lost = {slot for slot in self.model.slot.values() if slot % 5 == number}
            self.gone |= lost
            self.apply(self.cache.drop_slots(lost.__contains__), self.model.drop(lost))
        self.compare()

    def compare(self) -> None:
        self.cache.check()
        model, present = self.model, set(self.model.slot)
        assert (self.cache.num_blocks, self.cache.num_pinned) == (len(present), len(model.pinned()))
        assert {self.words.word(keys) for keys in self.cache.chains()} == leaves(present)
        assert self.replayed == present  # events lead to the content
        for run, handle in zip(self.runs, model.handles, strict=True):
            assert self.cache.slots(run) == list(handle.values())
            assert self.cache.slots(run, 2) == list(handle.values())[2:]


OPS = st.tuples(st.sampled_from(["insert", "insert", "match", "pin", "pin", "unpin", "evict", "drop"]), WORD, st.integers(0, 5))


@LAWS
@given(st.lists(OPS, min_size=8, max_size=40))
def test_runs_behave_like_single_blocks(ops: list[tuple[str, str, int]]) -> None:
    pair = Pair()
    for op in ops:
        pair.run(*op)


WINDOW_OPS = st.tuples(
    st.sampled_from(["insert", "insert", "snapshot", "match", "pin", "unpin", "evict", "evict_window"]), WORD, st.integers(0, 4)
)


@LAWS
@given(st.lists(WINDOW_OPS, min_size=8, max_size=40))
def test_a_prefix_is_of_use_up_to_its_last_resume_state(ops: list[tuple[str, str, int]]) -> None:
    """Naive model: blocks and resume states as two dictionaries; evictions are checked by law, then applied as announced."""
    words, cache, fresh = Words(), RunCache(needs_window=True), counter()
    blocks: dict[str, int] = {}
    states: dict[str, int] = {}
    handles: list[tuple[str, HeldRun]] = []
    for op, word, number in ops:
        keys = words.chain(word)
        have = sum(name in blocks for name in prefixes(word))
        if op in ("insert", "snapshot"):
            slots, state = [next(fresh) for _ in word[have:]], next(fresh) if op == "snapshot" else -1
            surplus = cache.insert(keys, slots, have, state)
            assert surplus == ([], state if word in states else -1)
            blocks.update(zip(prefixes(word)[have:], slots, strict=True))
            if state >= 0:
                states.setdefault(word, state)
        elif op == "match":
            assert cache.match(keys) == max((len(name) for name in prefixes(word)[:have] if name in states), default=0)
        elif op == "pin" and have:
            handles.append((word[:have], cache.pin(keys, have)))
        elif op == "unpin" and handles:
            cache.unpin(handles.pop(number % len(handles))[1])
        elif op in ("evict", "evict_window"):
            out = cache.evict(number) if op == "evict" else cache.evict_window(number)
            left = set(blocks)
            for removed, keep in out.removed:
                left = words.remove(left, removed, keep)
            pinned = {name for held, _ in handles for name in prefixes(held)}
            assert pinned & set(blocks) <= left
            assert sorted(out.slots) == sorted(blocks[name] for name in set(blocks) - left)
            free = {name for name, slot in states.items() if slot in out.window_slots}
            assert len(free) == len(out.window_slots) and not free & {held for held, _ in handles}
            assert {name for name in states if name not in left} <= free
            if op == "evict":
                assert len(out.slots) >= number or left == pinned & set(blocks)
            else:
                assert len(out.window_slots) >= number or set(states) - free <= {held for held, _ in handles}
            blocks = {name: slot for name, slot in blocks.items() if name in left}
            states = {name: slot for name, slot in states.items() if name not in free}
        cache.check()
        assert (cache.num_blocks, cache.num_window_slots) == (len(blocks), len(states))
        assert [cache.window_slot(run) for _, run in handles] == [states.get(held, -1) for held, _ in handles]


def test_evicting_takes_tails_first_and_shortens_rather_than_drops() -> None:
    words, cache = Words(), RunCache()
    cache.insert(words.chain("abcdef"), [0, 1, 2, 3, 4, 5], 0)
    assert cache.evict(2) == Evicted([4, 5], [], [(words.chain("abcdef"), 4)])
    assert cache.present(words.chain("abcdef")) == 4


def test_a_trunk_outlives_its_leaves_which_go_in_order_of_last_use() -> None:
    words, cache = Words(), RunCache()
    cache.insert(words.chain("tt"), [0, 1], 0)
    for number, leaf in enumerate("12345"):
        cache.insert(words.chain("tt" + leaf), [10 + number], 2)
    cache.match(words.chain("tt1"))
    assert [cache.evict(1).slots for _ in range(7)] == [[11], [12], [13], [14], [10], [1], [0]]


def test_blocks_behind_a_missing_head_cannot_exist() -> None:
    words, cache = Words(), RunCache()
    with pytest.raises(InvariantError):
        cache.insert(words.chain("abc"), [1, 2], 1)
    cache.insert(words.chain("abc"), [0, 1, 2], 0)
    cache.drop_slots({0}.__contains__)
    assert cache.match(words.chain("abc")) == 0 and cache.num_blocks == 0


def test_a_growing_session_stays_one_run_unless_somebody_reads_its_end() -> None:
    words, cache = Words(), RunCache()
    for end in range(1, 9):
        cache.insert(words.chain("abcdefgh"[:end]), [end], end - 1)
    assert cache._tree.num_runs == 1
    handle = cache.pin(words.chain("abcdefgh"), 8)
    cache.insert(words.chain("abcdefghi"), [9], 8)
    assert cache._tree.num_runs == 2 and cache.slots(handle) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_lfu_keeps_what_was_pinned_often() -> None:
    words, cache = Words(), RunCache(eviction="lfu")
    for number, word in enumerate(["a", "b"]):
        cache.insert(words.chain(word), [number], 0)
    cache.unpin(cache.pin(words.chain("a"), 1))
    cache.match(words.chain("b"))
    assert cache.evict(1).slots == [1]


def test_a_split_keeps_the_uses_of_both_parts() -> None:
    words, cache = Words(), RunCache(eviction="lfu")
    cache.insert(words.chain("abcd"), [0, 1, 2, 3], 0)
    cache.unpin(cache.pin(words.chain("abcd"), 4))
    cache.insert(words.chain("abx"), [4], 2)
    cache.check()
    assert [cache.evict(1).slots for _ in range(2)] == [[4], [3]]


def test_storing_what_is_present_makes_only_that_part_younger() -> None:
    words, cache = Words(), RunCache()
    cache.insert(words.chain("abcd"), [0, 1, 2, 3], 0)
    cache.insert(words.chain("xy"), [4, 5], 0)
    assert cache.insert(words.chain("ab"), [8, 9], 0) == ([8, 9], -1)
    assert cache.evict(2).slots == [2, 3]


def test_a_matched_resume_state_outlives_one_that_was_not() -> None:
    words, cache = Words(), RunCache(needs_window=True)
    for number, word in enumerate("xyz"):
        cache.insert(words.chain(word), [number], 0, 70 + number)
    cache.match(words.chain("x"))
    assert [cache.evict_window(1).window_slots for _ in range(3)] == [[71], [72], [70]]


def test_a_branch_is_evicted_down_to_the_last_resume_state_above_it() -> None:
    words, cache = Words(), RunCache(needs_window=True)
    cache.insert(words.chain("ab"), [0, 1], 0, 70)
    cache.insert(words.chain("abcd"), [2, 3], 2)
    cache.insert(words.chain("abcx"), [4], 3, 71)
    assert cache.evict(1) == Evicted([3], [], [(words.chain("abcd"), 3)])
    assert cache.evict(1) == Evicted([4, 2], [71], [(words.chain("abcx"), 2)])
    assert cache.match(words.chain("abcx")) == 2


def test_the_resume_state_used_longest_ago_goes_first_and_inner_blocks_stay() -> None:
    words, cache = Words(), RunCache(needs_window=True)
    cache.insert(words.chain("ab"), [0, 1], 0, 70)
    cache.insert(words.chain("abcd"), [2, 3], 2, 71)
    cache.insert(words.chain("x"), [4], 0, 72)
    assert cache.evict_window(1) == Evicted([], [70], [])
    assert cache.evict_window(1) == Evicted([2, 3, 0, 1], [71], [(words.chain("abcd"), 0)])
    assert cache.match(words.chain("x")) == 1


def test_slots_lost_under_a_pin_come_back_only_after_it() -> None:
    words, cache = Words(), RunCache(needs_window=True)
    cache.insert(words.chain("abc"), [0, 1, 2], 0, 9)
    handle = cache.pin(words.chain("abc"), 3)
    assert cache.drop_slots({1}.__contains__) == Evicted([], [], [(words.chain("abc"), 1)])
    assert (cache.slots(handle), cache.window_slot(handle)) == ([0, 1, 2], 9)
    assert cache.take_orphans() == ([], []) and cache.held_slots() == ([2, 0], [9])
    cache.unpin(handle)
    assert cache.take_orphans() == ([2], [9]) and cache.take_orphans() == ([], [])
    cache.check()


def test_a_state_lost_above_a_pin_is_not_given_out_while_the_pin_lasts() -> None:
    words, cache = Words(), RunCache(needs_window=True)
    cache.insert(words.chain("ab"), [0, 1], 0, 8)
    cache.insert(words.chain("abc"), [2], 2, 9)
    upper, lower = cache.pin(words.chain("ab"), 2), cache.pin(words.chain("abc"), 3)
    cache.drop_slots({0}.__contains__)
    cache.unpin(upper)
    assert cache.evict_window(1) == Evicted([], [], []) and cache.take_orphans() == ([], [])
    cache.unpin(lower)
    assert cache.take_orphans() == ([2, 1], [9, 8])


def test_a_lost_resume_state_only_shortens_the_match() -> None:
    words, cache = Words(), RunCache(needs_window=True)
    cache.insert(words.chain("a"), [0], 0, 8)
    cache.insert(words.chain("abc"), [1, 2], 1, 9)
    assert cache.drop_slots({9}.__contains__) == Evicted([], [], [])
    assert cache.match(words.chain("abc")) == 1 and cache.present(words.chain("abc")) == 3
    cache.check()


def test_misuse_is_refused() -> None:
    words, cache = Words(), RunCache()
    cache.insert(words.chain("ab"), [0, 1], 0)
    with pytest.raises(InvariantError, match="2 are present"):
        cache.pin(words.chain("abc"), 3)
    with pytest.raises(InvariantError):
        cache.pin(words.chain("abc"), 0)
    with pytest.raises(InvariantError):
        cache.insert(words.chain("abc"), [1, 2], 2)
    with pytest.raises(InvariantError, match="without boundaries"):
        cache.insert(words.chain("ab"), [], 2, 5)
    handle = cache.pin(words.chain("ab"), 2)
    cache.unpin(handle)
    with pytest.raises(InvariantError, match="unpinned more often"):
        cache.unpin(handle)
    with pytest.raises(ConfigError, match="lru, lfu"):
        RunCache(eviction="random")


@pytest.mark.parametrize("damage", ["slots", "pins", "age", "count", "twice", "unfiled"])
def test_check_finds_damage(damage: str) -> None:
    words, cache = Words(), RunCache()
    cache.insert(words.chain("abc"), [0, 1, 2], 0)
    cache.insert(words.chain("abx"), [3], 2)
    leaf = next(run for run in cache._tree.walk() if not run.children)
    if damage == "slots":
        leaf.payload.slots.append(9)
    elif damage == "pins":
        leaf.payload.pins += 1
    elif damage == "age":
        leaf.payload.tick += 100
    elif damage == "count":
        cache.num_pinned += 1
    elif damage == "twice":
        leaf.payload.slots[0] = 0
    else:
        leaf.payload.account.leaves.discard(leaf)
    with pytest.raises(InvariantError):
        cache.check()
