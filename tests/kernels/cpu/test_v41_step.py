"""A whole DeepSeek-V4.1 pass between fences, into poison and with rubbish in its buffers, has the bits of one that is alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rackserve.kernels.cpu import library, v41
from rackserve.model.deepseek_v41 import native, spans, state
from rackserve.model.deepseek_v41.native import MAX_ROWS
from rackserve.model.deepseek_v41.state import SequenceState
from tests.kernels.fence import POISON, Fence
from tests.model.deepseek_v41.golden import BLOCK_TOKENS, LAYOUT, NUM_BLOCKS, Bench, prompt

FOUND = library.find()
pytestmark = pytest.mark.skipif(FOUND is None or not v41.serves(FOUND), reason="no native kernels were built here")

IDS = prompt("long")
LENGTHS = st.sampled_from([1, 2, 3, 31, 32, 33, 63, 64, 65, 66, 95, 96, 97, 127, 128, 129])
NUMPY = {torch.float32: np.float32, torch.uint8: np.uint8, torch.int64: np.int64}
CHUNKS = st.sampled_from([1, 2, 7, 8, 9, 16, 17, 32, 63, 64, 65])


class Fenced:
    """Torch, but for new tensors: they lie between fences."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(self._fence.empty(shape, NUMPY[dtype]))

    def tensor(self, values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(self._fence.copy(np.array(values, NUMPY[dtype])))

    zeros = empty  # the model writes all that it reads


def fenced(fence: Fence, threads: int, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The golden model over an arena that ends with its last block, and everything its passes read and write fenced."""
    for module in (native, spans, state):
        monkeypatch.setattr(module, "torch", Fenced(fence))
    arena = fence.empty(NUM_BLOCKS * LAYOUT.block_bytes, np.uint8)
    return Bench(memory=arena, kernels="native", threads=threads)  # type: ignore[arg-type]


def spoil(bench: Bench) -> None:
    """Leave NaN in all buffers, by rows whose windows and blocks nobody wrote."""
    rubbish = bench.begin(0)
    rubbish.begin(64, IDS[60:64])
    rubbish.valid.fill_(0)
    rubbish.windows.fill_(POISON)
    (logits,) = bench.compute((rubbish, IDS[:MAX_ROWS]))
    assert bool(logits.isnan().all())
    bench.draft(rubbish, 5)
    bench.arena._blocks.fill_(POISON)


@pytest.fixture(scope="module")
def alone() -> Bench:
    return Bench(kernels="native")


@pytest.fixture(scope="module")
def whole(alone: Bench) -> Tensor:
    return alone.through(IDS)[0]


@given(st.lists(st.tuples(LENGTHS, CHUNKS), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 2**20))
@settings(derandomize=True, max_examples=10, deadline=None, phases=[Phase.generate])
def test_ragged_batches_up_to_the_ends_of_blocks_change_no_bit_and_stay_in_their_memory(
    alone: Bench, whole: Tensor, wanted: list[tuple[int, int]], threads: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        fence, rng = Fence(), np.random.default_rng(seed)
        bench = fenced(fence, threads, monkeypatch)
        spoil(bench)
        blocks = [int(block) for block in rng.permutation(NUM_BLOCKS)]
        blocks.remove(NUM_BLOCKS - 1)
        sequences: list[tuple[SequenceState, int, int]] = []
        for number, (length, chunk) in enumerate(wanted):
            sequence, count = bench.begin(), -(-length // BLOCK_TOKENS)
            sequence.blocks, blocks = blocks[:count], blocks[count:]
            if number == 0:
                sequence.blocks[-1] = NUM_BLOCKS - 1
            sequences.append((sequence, length, chunk))
        while parts := [(at, min(length, at.length + chunk)) for at, length, chunk in sequences if at.length < length]:
            starts = [at.length for at, _ in parts]
            found = bench.compute(*((at, IDS[at.length : end]) for at, end in parts))
            for (at, _), start, logits in zip(parts, starts, found, strict=True):
                assert torch.equal(logits, whole[start : at.length])
        for at, length, _ in sequences[:2]:
            found, right = bench.draft(at, 5), alone.draft(alone.through(IDS[:length])[1], 5)
            assert torch.equal(found.logits, right.logits) and torch.equal(found.confidence, right.confidence)
        free = torch.tensor(sorted(set(range(NUM_BLOCKS)) - {block for at, *_ in sequences for block in at.blocks}))
        assert bool((bench.arena._blocks[free] == POISON).all())
        fence.check()
