"""Records of what was sent: bounded, prefix-closed, the least recently used forgotten first."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.ids import Rank
from rackserve.base.keys import Chain, count, extend_chain, key_at, prefix
from rackserve.relay.records import PrefixRecords
from rackserve.route.index import PrefixIndex
from rackserve.text.tokenizer import pack

RANK = Rank("w", 0)
AGE = 100


def chain(text: str) -> Chain:
    return extend_chain(b"", b"root" * 4, pack(map(ord, text)), 1)


class Rig:
    def __init__(self, max_blocks: int) -> None:
        self.records = PrefixRecords(RANK, max_blocks=max_blocks, age_ms=AGE)
        self.index = PrefixIndex(max_runs=1000)

    def tell(self, events: list) -> None:  # type: ignore[type-arg]
        for event in events:
            assert self.index.apply(event)
        self.records.check()
        self.index.check()

    def held(self, text: str) -> int:
        return self.index.match(chain(text)).get(RANK, 0)


class Model:
    """Key by key, each with the time of its last use; the deepest of the oldest goes first."""

    def __init__(self, max_blocks: int) -> None:
        self.used: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self.max_blocks = max_blocks

    def note(self, keys: Chain, now: int) -> None:
        for at in range(min(count(keys), self.max_blocks)):
            self.used[key_at(keys, at)] = (now, -at)

    def forgotten(self, now: int) -> None:
        for key in [key for key, (used, _) in self.used.items() if used < now - AGE]:
            del self.used[key]

    def correct(self, keys: Chain, keep: int, all_keys: list[Chain]) -> None:
        gone = {key_at(other, at) for other in all_keys for at in range(keep, count(other))
                if count(other) > keep and prefix(other, keep + 1) == prefix(keys, keep + 1)}  # fmt: skip
        for key in gone:
            self.used.pop(key, None)


TEXTS = ["abcdef", "abcxyz", "abcd", "qrs", "qrstuvw", "z"]
STEPS = st.tuples(st.sampled_from(["note", "note", "correct", "expire"]), st.sampled_from(TEXTS), st.integers(0, 5))


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=15))
def test_records_equal_a_walk_over_keys(steps: list[tuple[str, str, int]]) -> None:
    rig, model, now = Rig(1000), Model(1000), 0
    noted: list[Chain] = []
    for kind, text, number in steps:
        now += 10 * number + 1
        if kind == "note":
            noted.append(chain(text))
            rig.tell(list(rig.records.note(chain(text), now)))
            model.note(chain(text), now)
        elif kind == "correct":
            rig.tell(list(rig.records.correct(chain(text), number)))
            model.correct(chain(text), number, noted)
        else:
            rig.tell(list(rig.records.expire(now)))
            model.forgotten(now)
        if kind != "note":
            # a run is as young as its youngest use, so records may outlive the walk's, never the other way round
            for other in TEXTS:
                keys = chain(other)
                walked = next((at for at in range(count(keys)) if key_at(keys, at) not in model.used), count(keys))
                assert rig.held(other) >= walked
        assert rig.records.num_blocks >= len(model.used)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(TEXTS), max_size=20), st.integers(1, 9))
def test_no_more_is_recorded_than_fits_and_the_last_prompt_is_there(texts: list[str], most: int) -> None:
    rig = Rig(most)
    for now, text in enumerate(texts):
        rig.tell(list(rig.records.note(chain(text), now)))
        assert rig.records.num_blocks <= most
        assert rig.held(text) == min(most, len(text))


def test_the_least_recently_used_goes_first_and_from_its_tail() -> None:
    rig = Rig(8)
    for now, text in enumerate(("abcd", "qrs", "abcd")):
        rig.tell(list(rig.records.note(chain(text), now)))
    rig.tell(list(rig.records.note(chain("zz"), 9)))
    assert (rig.held("abcd"), rig.held("qrs"), rig.held("zz")) == (4, 2, 2)


def test_a_correction_takes_everything_that_follows() -> None:
    rig = Rig(100)
    for text in ("abcdef", "abcxyz", "qrs"):
        rig.tell(list(rig.records.note(chain(text), 1)))
    rig.tell(list(rig.records.correct(chain("abcdef"), 2)))
    assert (rig.held("abcdef"), rig.held("abcxyz"), rig.held("qrs")) == (2, 2, 3)


def test_cleared_records_hold_nothing() -> None:
    rig = Rig(100)
    for text in TEXTS:
        rig.tell(list(rig.records.note(chain(text), 1)))
    rig.tell(list(rig.records.clear()))
    assert rig.records.num_blocks == rig.index.num_runs == 0
