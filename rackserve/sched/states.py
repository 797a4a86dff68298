"""Where resume states are left: at boundaries of the prompt that are wanted, at its end, and at boundaries of the output."""

from __future__ import annotations

from rackserve.base.step import StepItem
from rackserve.sched.sequence import Sequence


def chunk(sequence: Sequence, start: int, num_tokens: int, block_tokens: int) -> int:
    """Shorten a chunk of a prompt so that it ends at the first boundary at which resume state is stored."""
    if sequence.boundary_slot < 0 or start >= sequence.request.num_tokens:
        return num_tokens
    stops = [*sequence.branches, sequence.request.num_tokens // block_tokens]
    ahead = [stop * block_tokens - start for stop in stops if stop * block_tokens > start]
    return min([num_tokens, *ahead])


def snapshot(sequence: Sequence, start: int, end: int, num_draft: int, block_tokens: int) -> tuple[int, int]:
    """Window slot for the resume state of an item over [start, end), and the position before which that state lies.

    In a prompt it is the item's end, if that is the prompt's or a boundary where state is wanted; in the output the next
    boundary, if the item may reach it. (-1, -1): none.
    """
    prompt, size = sequence.request.num_tokens, block_tokens
    if start >= prompt:
        blocks = (end + num_draft) // size
        slot, at = sequence.state_slot(blocks), blocks * size
        return (slot, at) if slot >= 0 and at > start else (-1, -1)
    slot = -1
    if end % size == 0 and sequence.boundary_slot >= 0:
        slot = sequence.boundary_slot if end // size == prompt // size else sequence.branches.get(end // size, -1)
    if slot < 0 and end == prompt:
        slot = sequence.end_slot
    return (slot, end) if slot >= 0 else (-1, -1)


def note_state(sequence: Sequence, item: StepItem, block_tokens: int) -> None:
    """Remember the resume state that a finished item has left, if it got that far."""
    blocks, rest = divmod(item.snapshot_at, block_tokens)
    if item.snapshot < 0 or rest or item.snapshot_at > sequence.computed:
        return
    if item.start >= sequence.request.num_tokens:
        sequence.boundary = blocks
    elif sequence.boundary_slot >= 0:
        if sequence.branches.pop(blocks, None) is not None:
            sequence.branched.append(blocks)
        sequence.stored.append((blocks, item.snapshot))
