"""The likeliest token of a row, as kernels find it, beside numpy's argmax: by itself, and of a decoder's rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.kernels.cpu import packing
from rackserve.kernels.cpu.decoder import Decoder, Packed, Rows
from rackserve.kernels.cpu.library import Floats
from tests.kernels.cpu.test_decoder import BLOCK, BLOCK_BYTES, HIDDEN, SMALL, TOKENS
from tests.kernels.cpu.variants import ALL, bf16, load, q8_0

VOCAB = 1_104  # 69 tiles: no equal parts for members, and a last part of some outputs
ROWS = 150  # more than are computed at once
FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 3e38, -3e38])
ODD = st.sampled_from([np.nan, np.inf, -np.inf])


@ALL
@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data())
def test_the_likeliest_of_a_row_in_parts_is_the_first_that_numpy_finds(name: str, data: st.DataObject) -> None:
    tiles = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    values = data.draw(st.lists(st.one_of(FEW, ODD) if data.draw(st.booleans()) else FEW, min_size=1, max_size=9))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    row = np.full(16 * sum(tiles), data.draw(st.sampled_from([-3e38, -np.inf, -2.0])), np.float32)
    row[rng.integers(0, len(row), len(values))] = values
    token, logit = load(name).pick(np.split(row, 16 * np.cumsum(tiles)[:-1]))
    assert token == row.argmax()
    assert np.float32(logit).tobytes() == row[token].tobytes() or np.isnan([logit, row[token]]).all()


def head(kind: str, odd: tuple[float, ...]) -> Packed:
    """Rows that come up several times, so that most of the likeliest are tied; `odd` are numbers of some rows."""
    rng = np.random.default_rng(1)
    chosen = rng.integers(0, 200, VOCAB)
    if kind == "q8_0":
        return Packed(packing.pack_q8_0(q8_0(rng, 200, HIDDEN)[0][chosen]), packing.Q8)
    values = bf16(rng, 200, HIDDEN)[1][chosen].copy()
    values[rng.permutation(VOCAB)[: len(odd)], 3] = odd
    return Packed(packing.pack_bf16((values.view(np.uint32) >> 16).astype(np.uint16)), packing.BF16)


@ALL
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "odd"), [("q8_0", ()), ("bf16", ()), ("bf16", (np.inf,)), ("bf16", (-np.inf, np.nan, np.inf, np.nan))]
)
def test_picks_are_the_argmax_of_logits_and_only_what_is_read_is_written(
    name: str, threads: int, kind: str, odd: tuple[float, ...]
) -> None:
    weights = replace(SMALL.weights, vocab=VOCAB, head=head(kind, odd))
    arena = memoryview(np.zeros(BLOCK_BYTES * (ROWS // BLOCK + 1), np.uint8))
    decoder = Decoder(load(name), weights, arena, wide=2, block_tokens=BLOCK, max_rows=ROWS, threads=threads)
    decoder.forward(TOKENS[:ROWS].tolist(), [Rows(range(ROWS // BLOCK + 1), 0, ROWS)])
    rng, everything = np.random.default_rng(2), decoder.logits(range(ROWS))
    for count, read in [(1, 0), (1, 1), (5, 2), (13, 13), (31, 0), (ROWS, 0), (ROWS, 7), (ROWS, 129)]:
        rows = rng.permutation(ROWS)[:count].tolist()
        written = np.full((read + 1, VOCAB), 5.5, np.float32)
        tokens, peaks = decoder.pick(rows, written[:read])
        assert written[:read].tobytes() == everything[rows[:read]].tobytes() and (written[read] == 5.5).all()
        same(tokens, peaks, everything[rows])


def same(tokens: object, peaks: object, logits: Floats) -> None:
    wanted = logits.argmax(-1)
    assert np.array_equal(tokens, wanted)
    assert np.array_equal(np.float32(peaks), logits[range(len(logits)), wanted], equal_nan=True)


@ALL
def test_a_decoder_with_room_for_few_rows_picks_for_more_than_it_computed(name: str) -> None:
    weights = replace(SMALL.weights, vocab=VOCAB, head=head("q8_0", ()))
    decoder = Decoder(load(name), weights, memoryview(bytearray(BLOCK_BYTES)), wide=2, block_tokens=BLOCK, max_rows=2)
    decoder.forward([7, 9], [Rows([0], 0, 2)])
    rows = [0, 1, 1, 0, 1]
    same(*decoder.pick(rows), decoder.logits(rows))
    assert decoder.pick([]) == ((), ())
