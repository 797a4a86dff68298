"""Carried sequences against a naive model: everyone counts on their own."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from rackserve.sched.carried import Carried, can_be_carried, room_of, settle
from rackserve.sched.sequence import Sequence, new_sequence
from tests.sched.desk import BLOCK, Desk, sequence_of


class Naive:
    """Each member with its own counters: [sequence, position of its next token, drawn, room]."""

    def __init__(self) -> None:
        self.members: dict[int, list[int]] = {}

    def add(self, sequence: Sequence, room: int) -> None:
        self.members[sequence.number] = [sequence.scheduled, 0, room]

    def advance(self, drawn: int) -> dict[int, int]:
        for member in self.members.values():
            member[0] += drawn
            member[1] += drawn
        due = {number: member[1] for number, member in self.members.items() if member[1] >= member[2]}
        for number in due:
            del self.members[number]
        return due


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "advance", "remove"]), st.integers(0, 9), st.integers(1, 6)), max_size=40))
def test_sums_say_what_counting_one_by_one_says(plan: list[tuple[str, int, int]]) -> None:
    carried, naive = Carried(), Naive()
    sequences = {number: sequence_of(number, 4 + number) for number in range(10)}
    for what, number, amount in plan:
        if what == "add" and number not in naive.members:
            sequences[number].scheduled = 5 * number
            carried.add(sequences[number], amount)
            naive.add(sequences[number], amount)
        elif what == "advance" and naive.members:
            assert {s.number: drawn for s, drawn in carried.advance(amount)} == naive.advance(amount)
        elif what == "remove" and number in naive.members:
            assert carried.remove(number) == naive.members.pop(number)[1]
        assert len(carried) == len(naive.members)
        assert [s.number for s in carried.sequences()] == list(naive.members)
        assert all((sequence in carried) == (number in naive.members) for number, sequence in sequences.items())
        assert carried.context_tokens == sum(member[0] for member in naive.members.values())
        if naive.members:
            assert carried.room == min(room - drawn for _, drawn, room in naive.members.values())


def test_only_sequences_that_generate_without_token_ids_are_carried() -> None:
    named = sequence_of(1, 8)
    request = structs.replace(named.request, tokens=b"")
    nameless = new_sequence(2, request, named.placement, "queued", 4)
    assert not can_be_carried(nameless)  # still a prompt
    for sequence in (named, nameless):
        sequence.outputs.append(1)
    assert can_be_carried(nameless)
    assert not can_be_carried(named)
    assert not can_be_carried(new_sequence(3, structs.replace(request, logprobs=0), named.placement, "queued", 4))
    nameless.evict_me = True
    assert not can_be_carried(nameless)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.integers(1, 20), st.integers(2, 30), st.integers(0, 3), st.integers(1, 12))
def test_a_sequence_has_room_until_it_ends_or_a_step_might_touch_a_block_it_lacks(
    num_tokens: int, max_tokens: int, num_draft: int, spare: int
) -> None:
    desk = Desk()
    sequence = sequence_of(1, num_tokens, max_tokens)
    desk.add(sequence, num_tokens + spare)
    sequence.outputs.append(7)
    capacity = len(sequence.block_table) * BLOCK
    left, start, drawn = max_tokens - 1, num_tokens, 0
    while drawn < left and start + drawn + min(num_draft + 1, left - drawn) <= capacity:
        drawn += 1
    assert max(0, room_of(sequence, start, num_draft, BLOCK)) == drawn


def test_drafts_beyond_the_end_do_not_count() -> None:
    sequence = sequence_of(1, 8, 5)
    sequence.outputs.append(7)
    sequence.state = "running"
    sequence.scheduled = sequence.computed = 8
    settle(sequence, 6)
    assert (len(sequence.outputs), sequence.computed, sequence.finish, sequence.state) == (5, 12, "length", "running")
