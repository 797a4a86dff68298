from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.api.answer import Delta, Ending
from rackserve.api.dialects.items import Item, ItemList, call_id, items_of
from rackserve.text.dsml_parser import ArgumentsDelta, CallFinished, CallStarted, ContentDelta, OutputDelta, ReasoningDelta

STOP = Ending("stop", 1, 0, 1, 1)
PARTS: list[OutputDelta] = [
    ReasoningDelta("I "), ReasoningDelta("think"), ContentDelta("So"), ContentDelta(": "), CallStarted(0, "f"),
    ArgumentsDelta(0, "{"), ArgumentsDelta(0, "}"), CallFinished(0), CallStarted(1, "g"), ArgumentsDelta(1, "{}"),
    CallFinished(1),
]  # fmt: skip


def test_neighbours_of_a_kind_are_one_item_and_a_call_is_one() -> None:
    assert items_of([Delta(0, tuple(PARTS), (), STOP)]) == [
        Item("reasoning", "I think", whole=True),
        Item("text", "So: ", whole=True),
        Item("call", "{}", "f", True),
        Item("call", "{}", "g", True),
    ]


@given(st.lists(st.integers(0, len(PARTS)), max_size=6), st.integers(0, len(PARTS)), st.sampled_from(["stop", "length"]))
@settings(derandomize=True, max_examples=300, deadline=None)
def test_items_do_not_depend_on_how_parts_come_and_every_item_ends_once(cuts: list[int], end: int, finish: str) -> None:
    places = sorted({0, end, *(cut for cut in cuts if cut < end)})
    ending = Ending(finish, 1, 0, 1, 1)
    deltas = [Delta(0, tuple(PARTS[a:b])) for a, b in pairwise(places)]
    items, begun, ended, grown = ItemList(), [], [], {}
    for delta in [*deltas, Delta(0, (), (), ending)]:
        for change in items.feed(delta):
            if change.begins:
                begun.append(change.index)
                assert change.item.text == ""
            grown[change.index] = grown.get(change.index, "") + change.text
            if change.ends:
                ended.append(change.index)
    whole = items_of([Delta(0, tuple(PARTS[:end]), (), ending)])
    assert items.items == whole
    assert begun == list(range(len(whole))) and sorted(ended) == begun
    assert [grown[index] for index in begun] == [item.text for item in whole]


def test_what_is_cut_off_ends_but_is_not_whole() -> None:
    assert [item.whole for item in items_of([Delta(0, tuple(PARTS[:6]), (), Ending("length", 1, 0, 1, 1))])] == [
        True,
        True,
        False,
    ]
    assert not items_of([Delta(0, (ContentDelta("a"),), (), Ending("length", 1, 0, 1, 1))])[0].whole


def test_calls_of_all_answers_have_ids_of_their_own() -> None:
    ids = {call_id(answer, number) for answer in ("resp_a", "resp_b", "chatcmpl-c0", "chatcmpl-c1") for number in (0, 1)}
    assert len(ids) == 8 and all(name.startswith("call_") for name in ids)
