"""Promised prefixes against a naive comparison with every active attempt."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Attempt, Rank
from rackserve.base.keys import Chain, common_blocks, extend_chain
from rackserve.route.promises import Promises

RANKS = (Rank("prefill0"), Rank("prefill0", 1), Rank("prefill1"))


def chain_of(path: tuple[int, ...]) -> Chain:
    return extend_chain(b"", b"r" * 16, array("i", path).tobytes(), 1)


PATHS = st.lists(st.integers(0, 1), max_size=7).map(tuple)
ACTIONS = st.tuples(
    st.sampled_from(["add", "add", "add", "remove", "remove"]),
    st.sampled_from(RANKS),
    st.tuples(st.sampled_from("abc"), st.just(1)),
    PATHS,
)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=40), st.lists(PATHS, min_size=1, max_size=3))
def test_what_is_coming_is_the_longest_prefix_any_attempt_there_promised(
    actions: list[tuple[str, Rank, Attempt, tuple[int, ...]]], probes: list[tuple[int, ...]]
) -> None:
    promises = Promises()
    naive: dict[tuple[Rank, Attempt], Chain] = {}
    for kind, rank, attempt, path in actions:
        if kind == "add" and (rank, attempt) not in naive:
            promises.add(rank, attempt, chain_of(path))
            naive[rank, attempt] = chain_of(path)
        elif kind == "remove":
            assert promises.remove(rank, attempt) == (naive.pop((rank, attempt), None) is not None)
        promises.check()
        assert promises.is_empty() == (not naive)
        for probe in map(chain_of, probes):
            expected: dict[Rank, int] = {}
            for (holder, _), chain in naive.items():
                expected[holder] = max(expected.get(holder, 0), common_blocks(probe, 0, chain, 0))
            assert promises.match(probe) == {holder: blocks for holder, blocks in expected.items() if blocks}


def test_one_attempt_promises_once_per_rank() -> None:
    promises = Promises()
    promises.add(RANKS[0], ("a", 1), chain_of((1, 2)))
    with pytest.raises(InvariantError, match="already promised"):
        promises.add(RANKS[0], ("a", 1), chain_of((1, 2)))


def test_the_prefix_shared_by_siblings_stays_until_the_last_one_ends() -> None:
    promises = Promises()
    promises.add(RANKS[0], ("a", 1), chain_of((1, 2, 3)))
    promises.add(RANKS[0], ("b", 1), chain_of((1, 2, 4)))
    promises.remove(RANKS[0], ("a", 1))
    assert promises.match(chain_of((1, 2, 3))) == {RANKS[0]: 2}
    promises.remove(RANKS[0], ("b", 1))
    assert promises.match(chain_of((1, 2, 3))) == {} and promises.is_empty()
