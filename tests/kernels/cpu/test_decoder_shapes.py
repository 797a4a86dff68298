"""A Llama decoder of any shape is that of float64, in ragged batches and at the ends of blocks, and stays in its own memory."""

from __future__ import annotations

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.kernels.cpu.decoders import Drawn, Running, Shape, reference
from tests.kernels.cpu.variants import ALL, KINDS, load

LENGTHS = st.sampled_from([1, 2, 3, 11, 12, 13, 15, 16, 17, 31, 47, 48, 49, 63, 64, 65, 66, 95, 97, 127, 128, 129])
CHUNKS = st.lists(LENGTHS, min_size=1, max_size=3)
HEADS = st.sampled_from([(1, 1, 32), (2, 3, 32), (1, 16, 32), (3, 1, 96), (2, 4, 64), (1, 5, 160), (1, 2, 256), (1, 7, 128)])
"""KV heads, query heads to each, numbers of each."""

LIMITS = {"bf16": 2e-5, "q4_1": 5e-4, "q8_0": 5e-4, "q4_1, 8 bits": 2e-2}
"""How far a logit may be off, as a part of the largest: less than in a row with some inputs rounded the other way."""

USUALLY = 2e-4
"""The same for most rows of many."""

USUALLY_OTHERWISE = 6e-3
"""Where attention is off by enough that inputs of 8 bits are rounded the other way in most rows: set after seeing 3.3e-3."""

ATTENTION = {2: 1e-3, 4: 0.0}
"""What attention in whole numbers adds to LIMITS, by the bytes of a KV number: half of what rounding to bf16 does."""

HALF_STEP = 2.0**-8
"""How far a bf16 may be from the number that was rounded to it."""

few = settings(derandomize=True, max_examples=30, deadline=None, phases=[Phase.generate])


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads, shared, head_dim = draw(HEADS)
    hidden, ffn, vocab = (draw(st.integers(1, most)) for most in (4, 5, 4))
    kinds = draw(st.sampled_from(sorted(KINDS))), draw(st.sampled_from(sorted(KINDS)))
    block_tokens, wide = draw(st.sampled_from([1, 3, 4, 7, 16, 64, 80])), draw(st.sampled_from([2, 4]))
    return Shape(
        kv_heads, shared, head_dim, hidden * 32, ffn * 32, vocab * 16, draw(st.integers(1, 2)), block_tokens, wide, kinds
    )


class Sequence:
    """Tokens in chunks, and the blocks that hold exactly them."""

    def __init__(self, chunks: list[int], vocab: int, rng: np.random.Generator) -> None:
        self.tokens = rng.integers(0, vocab, sum(chunks)).astype(np.int32)
        self.ends = np.cumsum(chunks).tolist()
        self.blocks: list[int] = []


def lay_out(sequences: list[Sequence], block_tokens: int, rng: np.random.Generator) -> list[int]:
    """Give blocks to all, scattered; the arena's last is the end of the first sequence. Returns the two that are left."""
    needed = [-(-len(sequence.tokens) // block_tokens) for sequence in sequences]
    count = sum(needed) + 2
    order = [int(block) for block in rng.permutation(count - 1)]
    for sequence, number in zip(sequences, needed, strict=True):
        sequence.blocks, order = order[:number], order[number:]
    left, sequences[0].blocks[-1] = [*order, sequences[0].blocks[-1]], count - 1
    return left


@ALL
@given(st.data())
@few
def test_any_shape_in_any_batch_is_that_of_float64_and_touches_its_own_memory_alone(name: str, data: st.DataObject) -> None:
    shape = data.draw(shapes())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    sequences = [Sequence(chunks, shape.vocab, rng) for chunks in data.draw(st.lists(CHUNKS, min_size=1, max_size=3))]
    left = lay_out(sequences, shape.block_tokens, rng)
    steps = [
        [(sequence, ([0, *sequence.ends])[number], end) for sequence in sequences for end in sequence.ends[number : number + 1]]
        for number in range(max(len(sequence.ends) for sequence in sequences))
    ]
    num_blocks = len(left) + sum(len(sequence.blocks) for sequence in sequences)
    drawn = Drawn(shape, max(2, *(len(sequence.tokens) for sequence in sequences)), int(rng.integers(2**20)))
    max_rows = max(sum(end - start for _, start, end in step) for step in steps)
    running = Running(load(name), drawn, num_blocks, max_rows, data.draw(st.integers(1, 3)))
    running.spoil(left)
    found: dict[Sequence, list[np.ndarray]] = {sequence: [] for sequence in sequences}
    for step in steps:
        logits = running.forward([(sequence.blocks, start, sequence.tokens[start:end]) for sequence, start, end in step])
        for (sequence, _, _), rows in zip(step, logits, strict=True):
            found[sequence].append(rows)
    running.check()
    running.close()
    limit = max(LIMITS[shape.kinds[0]], LIMITS[shape.kinds[1]]) + ATTENTION[shape.wide]
    for sequence in sequences:
        stored = running.kv(sequence.blocks, len(sequence.tokens))
        wanted, kv = reference(drawn, sequence.tokens, stored)
        off = np.abs(np.concatenate(found[sequence]) - wanted).max(1) / np.abs(wanted).max()
        assert off.max() <= limit
        otherwise = shape.wide == 2 and "q4_1, 8 bits" in shape.kinds
        assert len(off) < 8 or np.median(off) <= (USUALLY_OTHERWISE if otherwise else USUALLY)
        rounding = HALF_STEP * np.abs(kv) if shape.wide == 2 else 0
        assert (np.abs(stored - kv) <= rounding + limit * np.abs(kv).max()).all()
