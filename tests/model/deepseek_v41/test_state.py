from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import InvariantError
from rackserve.model.deepseek_v41.layout import index_row_bytes, main_row_bytes, window_row_bytes
from rackserve.model.deepseek_v41.state import Proposal, SequenceState
from tests.model.deepseek_v41.golden import BLOCK_TOKENS, CONFIG, LAYOUT, noise, open_arena, poisoned

W, HISTORY = CONFIG.sliding_window, CONFIG.engram_max_ngram_size - 1
LAYERS, STAGES = CONFIG.num_hidden_layers, CONFIG.num_nextn_predict_layers
ROW = window_row_bytes(CONFIG)


def places() -> Iterator[tuple[str, int, int, int]]:
    """(kind, source, first byte in a block, row bytes) of each group, as the layout orders them."""
    at = 0
    groups = iter(group for group in LAYOUT.groups if group.kind == "full")
    for source in CONFIG.kv_source_layer_ids:
        for kind, size in (("main", main_row_bytes(CONFIG)), ("index", index_row_bytes(CONFIG))):
            group = next(groups)
            assert group.name == f"{kind}.{source}"
            yield kind, source, at, size
            at += group.bytes_per_slot
    assert at == LAYOUT.block_bytes


@pytest.mark.parametrize(("kind", "source", "begin", "size"), list(places()))
def test_a_row_lies_where_the_layout_says(kind: str, source: int, begin: int, size: int) -> None:
    memory = poisoned(4, 1)
    arena, blocks = open_arena(memory, 4), torch.tensor([2, 0])
    each = BLOCK_TOKENS // CONFIG.compress_ratios[source]
    packed = torch.arange(5 * size, dtype=torch.int64).remainder(251).to(torch.uint8).view(5, size)
    arena.write(kind, source, blocks, each - 2, packed)
    for number in range(5):
        block, row = int(blocks[(each - 2 + number) // each]), (each - 2 + number) % each
        at = block * LAYOUT.block_bytes + begin + row * size
        assert bytes(memory[at : at + size]) == bytes(packed[number].tolist())
    assert memory.count(0xFF) == len(memory) - 5 * size
    assert torch.equal(arena.read(kind, source, blocks, torch.tensor([[each, each - 2]]))[0], packed[[2, 0]])


def test_slots_lie_behind_the_blocks_and_no_others_can_be_named() -> None:
    memory = poisoned(2, 3)
    arena = open_arena(memory, 2)
    arena.slot(1)[:] = 7
    begin = 2 * LAYOUT.block_bytes + LAYOUT.window_bytes
    assert set(memory[begin : begin + LAYOUT.window_bytes]) == {7} and memory.count(7) == LAYOUT.window_bytes
    for number in (-1, 3):
        with pytest.raises(InvariantError, match=f"window slot {number} of 3"):
            arena.slot(number)
    with pytest.raises(InvariantError, match="2 blocks need"):
        open_arena(bytearray(2 * LAYOUT.block_bytes - 1), 2)


def propose(start: int, count: int, seed: int, *, drafts: bool = True) -> Proposal:
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randint(256, (LAYERS + STAGES, count, ROW), generator=generator, dtype=torch.uint8)
    pending = noise(count, 1, 2, CONFIG.head_dim, seed=seed).transpose(0, 1)
    tokens = [100 + seed + number for number in range(count)]
    proposal = Proposal(start, windows[:LAYERS], pending, noise(count, 3), tokens)
    if drafts:
        proposal.drafts = windows[LAYERS:]
    return proposal


class Naive:
    """Everything of every position that stands."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []
        self.pending: list[torch.Tensor] = []
        self.tokens: list[int] = []

    def commit(self, proposal: Proposal, upto: int) -> None:
        for at in range(len(self.rows) - proposal.start, upto - proposal.start):
            self.rows.append(torch.cat((proposal.windows[:, at], proposal.drafts[:, at])))
            self.pending.append(proposal.pending[:, at])
            self.tokens.append(proposal.tokens[at])

    def agrees(self, state: SequenceState) -> bool:
        length = len(self.rows)
        near = torch.arange(length - W, length)
        for layer in range(LAYERS + STAGES):
            packed, there = state.before(layer, near)
            if there.tolist() != [position >= 0 for position in near.tolist()]:
                return False
            wanted = [self.rows[position][layer] for position in near.tolist() if position >= 0]
            if wanted and not torch.equal(packed[there], torch.stack(wanted)):
                return False
        pending = not length or torch.equal(state.open, self.pending[-1])
        return state.length == length and pending and state.history == self.tokens[-HISTORY:]


@settings(derandomize=True, max_examples=25, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40), st.booleans()), min_size=1, max_size=8))
def test_what_stands_is_kept_and_what_does_not_leaves_no_trace(steps: list[tuple[int, int, bool]]) -> None:
    state, naive = SequenceState(CONFIG), Naive()
    state.begin(0, [])
    slot = torch.full((LAYOUT.window_bytes,), 0xFF, dtype=torch.uint8)
    for seed, (count, stands, moved) in enumerate(steps):
        proposal = propose(state.length, count, seed)
        upto = proposal.start + min(stands, count)
        state.commit(proposal, (proposal.start + upto) // 2)  # may be taken in two steps
        state.commit(proposal, upto)
        naive.commit(proposal, upto)
        assert naive.agrees(state)
        if moved:
            state.store(slot)
            other = SequenceState(CONFIG)
            other.restore(slot, state.length, state.history)
            state = other
            assert naive.agrees(state)


def test_a_sequence_that_begins_late_has_no_rows_before() -> None:
    state = SequenceState(CONFIG)
    state.begin(40, [1, 2, 3])
    state.commit(propose(40, 3, 0), 43)
    _, there = state.before(2, torch.arange(30, 43))
    assert there.tolist() == [False] * 10 + [True] * 3
    assert state.history == [100, 101, 102] and state.length == 43


def test_windows_of_the_speculative_head_are_kept_if_nothing_was_learned() -> None:
    state = SequenceState(CONFIG)
    state.begin(0, [])
    state.commit(propose(0, 4, 0), 4)
    before = state.windows[LAYERS:].clone()
    state.commit(propose(4, 2, 1, drafts=False), 6)
    assert torch.equal(state.windows[LAYERS:], before)


def test_a_slot_holds_windows_and_open_groups_and_is_full() -> None:
    state = SequenceState(CONFIG)
    assert state.windows.numel() + state.open.numel() * 4 == LAYOUT.window_bytes
