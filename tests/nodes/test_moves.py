"""A transfer ends once and holds its sequence's blocks until then."""

from __future__ import annotations

import pytest

from rackserve.base.events import TransferDone
from rackserve.base.ids import Rank
from rackserve.base.messages import TransferFailed, TransferFinished
from rackserve.base.request import Placement, Request
from rackserve.base.transfer import Copy
from rackserve.digest_model import digest_layout
from rackserve.nodes.alarms import Alarms
from rackserve.nodes.moves import Moves, pool_copies
from rackserve.sched.sequence import Sequence, new_sequence
from tests.nodes.clock import Notes

RANK = Rank("prefill0")


def setting() -> tuple[Notes, Moves, Sequence, list[bool]]:
    notes = Notes()
    moves = Moves(notes, digest_layout(4, window=True), Alarms(notes, lambda t: moves.cancel(int(t.key))), 100, notes.ports(),
                  lambda sequence: RANK)  # fmt: skip
    request = Request("r", "s", b"", b"", 8, 4)
    sequence = new_sequence(1, request, Placement("r", 1, RANK, Rank("decode0"), 0, 8), "queued", 1)
    return notes, moves, sequence, []


@pytest.mark.parametrize(("message", "finished"), [(TransferFinished(1), True), (TransferFailed(1, "cancelled"), False)])
def test_a_transfer_ends_once_however_often_its_end_is_told(message: TransferFinished | TransferFailed, finished: bool) -> None:
    notes, moves, sequence, ends = setting()
    copies = [Copy("a", "b", "full", (1, 2), (3, 4)), Copy("a", "b", "window", (0,), (1,))]
    assert moves.start("push", sequence, copies, ends.append) == 1
    assert (sequence.holds, moves.count(sequence, "push"), len(moves)) == (1, 1, 1)
    assert moves.end(message) is sequence
    assert moves.end(message) is None
    assert (sequence.holds, len(moves), ends) == (0, 0, [finished])
    (event,) = [event for event in notes.events if isinstance(event, TransferDone)]
    assert (event.num_slots, event.num_bytes, event.outcome) == (3, 2 * 32 + 16, "finished" if finished else "failed")


def test_only_transfers_of_the_kind_and_sequence_are_cancelled() -> None:
    notes, moves, sequence, ends = setting()
    copy = [Copy("a", "b", "full", (1,), (3,))]
    moves.start("push", sequence, copy, ends.append)
    moves.start("spill", sequence, copy, ends.append)
    moves.cancel_all(sequence, "push")
    assert notes.cancelled == [1]
    assert len(moves) == 2  # they end when the store says so
    moves.cancel(99)
    assert notes.cancelled == [1]


def test_copies_between_arena_and_pool_are_grouped_by_segment() -> None:
    copies = pool_copies("arena", [5, 6, 7], ((0, 9), (1, 8), (0, 7)), "full", to_pool=True)
    assert copies == [
        Copy("arena", "segment/0", "full", (5, 7), (9, 7)),
        Copy("arena", "segment/1", "full", (6,), (8,)),
    ]
    assert pool_copies("arena", [5], ((2, 3),), "window", to_pool=False) == [Copy("segment/2", "arena", "window", (3,), (5,))]
