from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.bench.id_chain import IdChain
from tests.bench.toys import ids


def test_a_list_and_its_packed_form_are_the_same() -> None:
    chain = IdChain(4)
    assert chain.listed([1, 2, 3], 12) == ids(1, 2, 3)
    assert chain.packed(2, [(7, 2), (4, 1)], 20) == ids(1, 2, 7, 8, 4)


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.lists(st.lists(st.sampled_from("ab"), max_size=6), max_size=8))
def test_packing_and_reading_gives_the_same_lists(paths: list[list[str]]) -> None:
    names: dict[str, int] = {}
    lists = [ids(*(names.setdefault("".join(path[: n + 1]), len(names)) for n in range(len(path)))) for path in paths]
    writer, reader = IdChain(4), IdChain(4)
    for number, path in zip(lists, paths, strict=True):
        kept, runs = writer.pack(number)
        assert reader.packed(kept, runs, 4 * len(path)) == number


def test_one_id_has_one_history() -> None:
    chain = IdChain(4)
    chain.listed([1, 2, 3], 12)
    chain.listed([5], 4)
    chain.listed([1, 2, 3, 4], 16)
    with pytest.raises(ValueError, match="hash id 3 follows two different blocks"):
        chain.listed([1, 3], 8)


def test_a_part_block_has_no_id_and_too_many_or_few_are_refused() -> None:
    chain = IdChain(4)
    assert chain.listed([1, 2], 6) == ids(1)
    assert chain.listed([1], 7) == ids(1)
    for tokens in (4, 12, 16):
        with pytest.raises(ValueError, match="2 hash ids of 4 tokens do not match"):
            chain.listed([1, 2], tokens)


def test_what_cannot_be_kept_or_is_too_long_is_refused() -> None:
    chain = IdChain(4)
    with pytest.raises(ValueError, match="1 ids cannot be kept of the 0 before"):
        chain.packed(1, [], 4)
    for length in (-1, 10**12):
        with pytest.raises(ValueError, match=f"a run of {length} ids"):
            chain.packed(0, [(0, length)], 4)
    with pytest.raises(ValueError, match="31 bits"):
        chain.packed(0, [(2**31, 1)], 4)
    with pytest.raises(ValueError, match="at least 1"):
        IdChain(0)
