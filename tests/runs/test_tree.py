from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import InvariantError
from rackserve.base.keys import KEY_BYTES, prefix
from rackserve.runs.tree import Run, RunTree, ancestry
from tests.runs.chains import Words, leaves, prefixes

Payload = list[str]


def new_tree() -> RunTree[Payload]:
    def split(payload: Payload, at: int) -> Payload:
        head = payload[:at]
        del payload[:at]
        return head

    return RunTree([], split)


def add(tree: RunTree[Payload], words: Words, word: str) -> Run[Payload]:
    keys = words.chain(word)
    run, depth = tree.descend(keys)
    if depth:
        run = tree.cut(run, depth)
    return run if depth == len(word) else tree.grow(run, keys[depth * KEY_BYTES :], prefixes(word)[depth:])


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.text("ab", min_size=1, max_size=8)), max_size=25))
def test_the_tree_holds_what_a_set_of_blocks_holds(ops: list[tuple[bool, str]]) -> None:
    """Naive model: the set of words present. An op adds a word, or removes the end of the longest part of it that is a leaf."""
    tree, words, present = new_tree(), Words(), set[str]()
    for adding, word in ops:
        if adding:
            add(tree, words, word)
            present |= set(prefixes(word))
        else:
            run, depth = tree.descend(words.chain(word))
            if depth and not run.children and depth < run.end:
                del run.payload[depth - run.depth :]
                present = {name for name in present if not (name.startswith(word[:depth]) and len(name) > depth)}
                tree.shorten(run, depth)
            elif depth and not run.children:
                present -= set(run.payload)
                tree.remove(run)
        tree.check()
        assert {name for run in tree.walk() for name in run.payload} == present
        assert {words.word(tree.chain_of(run)) for run in tree.walk() if not run.children} == leaves(present)
        for probe in [word, word + "a", "ab", "ba"]:
            assert tree.descend(words.chain(probe))[1] == sum(name in present for name in prefixes(probe))


def test_a_cut_leaves_the_object_as_the_deeper_part() -> None:
    tree, words = new_tree(), Words()
    run = add(tree, words, "abcd")
    head = tree.cut(run, 1)
    assert (head.payload, run.payload) == (["a"], ["ab", "abc", "abcd"])
    assert [part.end for part in ancestry(run)] == [4, 1]
    assert tree.cut(run, 4) is run and tree.num_runs == 2


def test_what_would_break_the_tree_is_refused() -> None:
    tree, words = new_tree(), Words()
    run = add(tree, words, "abcd")
    tree.cut(run, 2)
    with pytest.raises(InvariantError):
        tree.cut(run, 1)
    with pytest.raises(InvariantError):
        tree.remove(next(iter(tree.walk())))
    with pytest.raises(InvariantError):
        tree.grow(tree.root, prefix(words.chain("ab"), 1), ["a"])
    with pytest.raises(InvariantError):
        tree.shorten(run, 2)
    with pytest.raises(InvariantError):
        tree.grow(run, b"", [])


@pytest.mark.parametrize("damage", ["depth", "count", "key"])
def test_check_finds_a_damaged_tree(damage: str) -> None:
    tree, words = new_tree(), Words()
    run = add(tree, words, "abcd")
    if damage == "depth":
        run.depth = 1
    elif damage == "count":
        tree.num_runs += 1
    else:
        run.keys = run.keys[KEY_BYTES:]
    with pytest.raises(InvariantError):
        tree.check()
