from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rackserve.model.deepseek_v41.compressor import Compressor
from rackserve.model.deepseek_v41.linear import Linear, choose_products
from rackserve.model.deepseek_v41.rotation import Rotation, frequencies
from rackserve.model.deepseek_v41.rounding import pack_fp4, pack_fp4_fine, unpack_fp4, unpack_fp4_fine
from rackserve.model.deepseek_v41.spans import Span
from rackserve.model.deepseek_v41.state import Arena, SequenceState
from rackserve.model.deepseek_v41.streams import rms_norm
from tests.model.deepseek_v41.golden import CONFIG, noise, open_arena, poisoned, weights

FREQS = frequencies(CONFIG, compressed=True)
PAIRED, SINGLE = CONFIG.kv_source_layer_ids
SAFE = Linear(choose_products(CONFIG, weights()), round_inputs=False)
LENGTH = 71  # three blocks, the last group open

both = pytest.mark.parametrize("source", [PAIRED, SINGLE])


class Sequence:
    """One sequence over an arena of its own, fed with inputs instead of tokens."""

    def __init__(self, source: int, blocks: tuple[int, ...] = (3, 0, 2)) -> None:
        self.memory = poisoned(4, 0)
        self.source, self.ratio = source, CONFIG.compress_ratios[source]
        self.arena: Arena = open_arena(self.memory, 4)
        self.compressor = Compressor(CONFIG, weights(), source, SAFE, FREQS)
        self.state = SequenceState(CONFIG)
        self.state.begin(0, [])
        self.state.blocks = list(blocks)

    def feed(self, x: Tensor, replayed: int = 0) -> None:
        span = Span(self.state, self.state.length, len(x), 0, replayed)
        pending = self.compressor.compress(x, [span], self.arena)
        if pending is not None:
            self.state.open[self.compressor.gated] = pending[-1]
        self.state.length += len(x)

    def rows(self, kind: str) -> Tensor:
        return self.arena.read(
            kind, self.source, torch.tensor(self.state.blocks), torch.arange(self.state.length // self.ratio)
        )


def whole(source: int, x: Tensor) -> Sequence:
    sequence = Sequence(source)
    sequence.feed(x)
    return sequence


@both
def test_rows_and_keys_are_made_of_whole_groups(source: int) -> None:
    x, name, ratio = noise(9, CONFIG.hidden_size), f"layers.{source}.attn", CONFIG.compress_ratios[source]
    sequence = whole(source, x)
    kv = x @ weights().matrix(f"{name}.compressor.wkv").right()
    if ratio == 2:
        gates = x @ weights().matrix(f"{name}.compressor.wgate").right()
        pairs = [(kv[2 * j : 2 * j + 2] * gates[2 * j : 2 * j + 2].softmax(0)).sum(0) for j in range(4)]
        kv = torch.stack(pairs)
    latent = rms_norm(kv, weights().vector(f"{name}.compressor.norm"), CONFIG.rms_norm_eps)
    rotation = Rotation(FREQS, torch.arange(len(latent)) * ratio)  # a group stands where its first token does
    main = unpack_fp4_fine(pack_fp4_fine(rotation.apply(latent)), CONFIG.head_dim)
    assert torch.allclose(unpack_fp4_fine(sequence.rows("main"), CONFIG.head_dim), main, atol=1e-4)
    keys = rms_norm(latent @ weights().matrix(f"{name}.indexer.wk").right(), weights().vector(f"{name}.indexer.k_norm"), 1e-20)
    want = unpack_fp4(pack_fp4(rotation.apply(keys)), CONFIG.index_head_dim)
    assert torch.allclose(unpack_fp4(sequence.rows("index"), CONFIG.index_head_dim), want, atol=1e-4)


@both
@settings(derandomize=True, max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=12))
def test_chunks_write_the_same_bytes_and_no_others(source: int, sizes: list[int]) -> None:
    x = noise(LENGTH, CONFIG.hidden_size)
    want, sequence = whole(source, x), Sequence(source)
    for part in x.split(_cover(sizes)):
        sequence.feed(part)
    assert sequence.memory == want.memory
    assert torch.equal(sequence.state.open, want.state.open)


def _cover(sizes: list[int]) -> list[int]:
    """`sizes`, shortened or lengthened to LENGTH."""
    found: list[int] = []
    for size in [*sizes, LENGTH]:
        found.append(min(size, LENGTH - sum(found)))
    return [size for size in found if size]


@both
@pytest.mark.parametrize(("start", "replayed"), [(32, 16), (33, 16), (32, 17), (47, 16)])
def test_replayed_positions_are_not_written_again(source: int, start: int, replayed: int) -> None:
    x = noise(LENGTH, CONFIG.hidden_size)
    want, sequence = whole(source, x), Sequence(source)
    memoryview(sequence.memory)[:] = want.memory
    ratio, known = sequence.ratio, start + replayed
    for kind in ("main", "index"):  # rows that a replay should compute are gone, those before it hold what nobody computed
        rows = torch.arange(known // ratio, LENGTH // ratio)
        view = sequence.arena.read(kind, source, torch.tensor([3, 0, 2]), rows)
        sequence.arena.write(kind, source, torch.tensor([3, 0, 2]), int(rows[0]), torch.full_like(view, 0xFF))
        held = sequence.arena.read(kind, source, torch.tensor([3, 0, 2]), torch.arange(known // ratio))
        sequence.arena.write(kind, source, torch.tensor([3, 0, 2]), 0, held ^ 1)
    sequence.state.begin(start, [])
    sequence.feed(x[start:], replayed)
    for kind in ("main", "index"):
        assert torch.equal(sequence.rows(kind)[: known // ratio], want.rows(kind)[: known // ratio] ^ 1)
        assert torch.equal(sequence.rows(kind)[known // ratio :], want.rows(kind)[known // ratio :])


@both
def test_sequences_of_one_pass_do_not_mix(source: int) -> None:
    x, y = noise(20, CONFIG.hidden_size), noise(7, CONFIG.hidden_size, seed=1)
    want = [whole(source, x).rows("main"), whole(source, y).rows("main")]
    sequence = Sequence(source, (0,))
    other = SequenceState(CONFIG)
    other.begin(0, [])
    other.blocks = [2]
    spans = [Span(sequence.state, 0, 20, 0), Span(other, 0, 7, 20)]
    sequence.compressor.compress(torch.cat((x, y)), spans, sequence.arena)
    for span, rows in zip(spans, want, strict=True):
        got = sequence.arena.read("main", source, span.blocks, torch.arange(span.count // sequence.ratio))
        assert torch.equal(got, rows)


@both
def test_a_pass_without_rows_or_groups_writes_nothing(source: int) -> None:
    sequence = Sequence(source)
    sequence.compressor.compress(noise(0, CONFIG.hidden_size), [], sequence.arena)
    if sequence.ratio == 2:
        sequence.feed(noise(1, CONFIG.hidden_size))
    assert set(sequence.memory) == {0xFF}
