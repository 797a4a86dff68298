"""Sequences that go on from what is stored: exactly from a snapshot, approximately from blocks alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rackserve.base.step import ItemResult
from rackserve.model.deepseek_v41.state import SequenceState
from tests.model.deepseek_v41.golden import (
    CONFIG,
    Bench,
    continuation,
    decode,
    ids_of,
    item,
    prompt,
    run,
    same_state,
    table,
)

IDS, W = prompt("medium"), CONFIG.sliding_window
HISTORY = CONFIG.engram_max_ngram_size - 1


def before(ids: Sequence[int], at: int) -> bytes:
    """The last ids before a position, as an item carries them."""
    return ids_of(ids[max(0, at - HISTORY) : at])


@pytest.fixture(scope="module")
def cold(bench: Bench) -> tuple[ItemResult, SequenceState, list[Tensor]]:
    """The prompt computed at once: result, state and global rows."""
    (result,) = run(bench.runner, item(1, 0, IDS, table(1), logprobs=8))
    state = bench.runner._sequences[1]
    return result, state, bench.global_rows(state)


def store(bench: Bench, at: int, slot: int = 0) -> None:
    """Compute the prompt up to `at` into unreadable blocks, leave the state in a slot and forget the sequence."""
    bench.poison_blocks(0)
    bench.arena.slot(slot).fill_(0xFF)
    run(bench.runner, item(2, 0, IDS[:at], table(), sample=False, snapshot=slot))
    run(bench.runner, retired=(2,))


@pytest.mark.parametrize("at", [1, 2, 3, 15, 16, 17, 32, 33, 34, 35, 58, 59])
def test_a_sequence_goes_on_from_its_snapshot_as_if_nothing_had_been(
    bench: Bench, cold: tuple[ItemResult, SequenceState, list[Tensor]], at: int
) -> None:
    """At odd positions too, where a pair of tokens is cut, and wherever the last ids of the n-gram lookup are cut off."""
    store(bench, at)
    rest = item(3, at, IDS[at:], table(), restore=0, history=before(IDS, at), logprobs=8)
    (result,) = run(bench.runner, rest, retired=(3,))
    state = bench.runner._sequences[3]
    assert (result.tokens, result.logprobs) == (cold[0].tokens, cold[0].logprobs)
    assert same_state(state, cold[1]) and all(map(torch.equal, bench.global_rows(state), cold[2]))
    assert decode(bench.runner, 3, len(IDS), result.tokens, 4, 2) == continuation("medium")[:4]


def test_another_process_goes_on_from_the_same_bytes(
    bench: Bench, cold: tuple[ItemResult, SequenceState, list[Tensor]]
) -> None:
    store(bench, 33, slot=3)
    other = Bench(memory=bytearray(bench.memory))
    (result,) = run(other.runner, item(1, 33, IDS[33:], table(), restore=3, history=before(IDS, 33), logprobs=8))
    assert result.logprobs == cold[0].logprobs
    state = other.runner._sequences[1]
    assert same_state(state, cold[1]) and all(map(torch.equal, other.global_rows(state), cold[2]))


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_without_the_right_ids_before_it_a_sequence_would_go_on_otherwise(
    bench: Bench, cold: tuple[ItemResult, SequenceState, list[Tensor]], lost: int
) -> None:
    store(bench, 33)
    wrong = ids_of(IDS[33 - HISTORY + lost : 33])
    run(bench.runner, item(3, 33, IDS[33:], table(), restore=0, history=wrong), retired=(3,))
    assert not same_state(bench.runner._sequences[3], cold[1])


def test_a_preempted_sequence_goes_on_with_the_same_output(bench: Bench) -> None:
    """Its blocks and the state at a boundary stay; what came after is computed again, beside others that took its place."""
    runner = bench.runner
    store(bench, 32)
    (first,) = run(runner, item(3, 32, IDS[32:], table(), restore=0, history=before(IDS, 32)), retired=(3,))
    output = decode(runner, 3, len(IDS), first.tokens, 7, 3)
    run(runner, item(4, 0, prompt("long"), table(2), snapshot=1), retired=(3,))
    whole = IDS + output
    again = item(3, 32, whole[32:], table(), restore=0, history=before(whole, 32), output_index=len(output))
    beside = item(4, len(prompt("long")), output_index=1)
    resumed, other = run(runner, again, beside)
    assert decode(runner, 3, len(whole), [*output, *resumed.tokens], 12, 3) == continuation("medium")[:12]
    assert other.tokens == (continuation("long")[1],)


def test_a_known_sequence_can_be_set_back(bench: Bench, cold: tuple[ItemResult, SequenceState, list[Tensor]]) -> None:
    store(bench, 35)
    run(bench.runner, item(3, 35, prompt("long")[:20], table(), restore=0, history=before(IDS, 35)), retired=(3,))
    run(bench.runner, item(3, 35, IDS[35:], restore=0, history=before(IDS, 35)))
    assert same_state(bench.runner._sequences[3], cold[1])


LONG = prompt("long")


def replay(bench: Bench, sequence: int, at: int, upto: int) -> ItemResult:
    """After a hit of `at` tokens: compute the last window again for its state, and go on."""
    start = max(0, at - W)
    known = item(
        sequence, start, LONG[start:upto], table(), history=before(LONG, start), replayed=at - start, logprobs=CONFIG.vocab_size
    )
    (result,) = run(bench.runner, known, retired=(sequence,))
    return result


def gap(a: ItemResult, b: ItemResult) -> Tensor:
    """Differences of the log-probabilities of the last position, token by token."""
    rows = [torch.tensor([share for _, share in sorted(result.logprobs[0].top)]) for result in (a, b)]
    return (rows[0] - rows[1]).abs()


@pytest.fixture(scope="module")
def cold_long(bench: Bench) -> tuple[ItemResult, SequenceState, list[Tensor]]:
    (result,) = run(bench.runner, item(5, 0, LONG, table(3), logprobs=CONFIG.vocab_size))
    state = bench.runner._sequences[5]
    return result, state, bench.global_rows(state)


@pytest.mark.parametrize("at", [64, 65, 160])
def test_a_bounded_replay_writes_nothing_that_was_there_and_goes_on_nearly_alike(
    bench: Bench, cold_long: tuple[ItemResult, SequenceState, list[Tensor]], at: int
) -> None:
    bench.poison_blocks(0)
    run(bench.runner, item(6, 0, LONG[:at], table(), sample=False), retired=(6,))
    held = bench.global_rows(bench.runner._sequences[6])
    result = replay(bench, 7, at, len(LONG))
    for source_rows, kept in zip(bench.global_rows(bench.runner._sequences[7]), held, strict=True):
        assert torch.equal(source_rows[: len(kept)], kept)
    off = gap(result, cold_long[0])
    assert bool(off.isfinite().all()) and 0 < float(off.median()) < 1.5  # of logits with a deviation of 3
    assert bench.runner._sequences[7].valid.tolist() == [at - W] * len(bench.runner._sequences[7].valid)


def test_a_replay_of_everything_is_exact(bench: Bench) -> None:
    """What is no longer than a window is replayed from the start, so nothing is missing."""
    bench.poison_blocks(0)
    for at in (8, W - 1, W):
        run(bench.runner, item(6, 0, LONG[:at], table(), sample=False), retired=(6,))
        result = replay(bench, 7, at, 40)
        state = bench.runner._sequences[7]
        (want,) = run(bench.runner, item(8, 0, LONG[:40], table(4), logprobs=CONFIG.vocab_size), retired=(8,))
        assert result.logprobs == want.logprobs and same_state(state, bench.runner._sequences[8])


def tail_only(bench: Bench, sequence: int, ids: list[int], sizes: Sequence[int]) -> ItemResult:
    """A prompt of which only the last window passes the decoder's layers."""
    at, result = 0, None
    run(bench.runner, retired=(sequence,))
    for size in sizes:
        (result,) = run(
            bench.runner,
            item(
                sequence,
                at,
                ids[at : at + size],
                () if at else table(),
                sample=at + size == len(ids),
                full_from=max(0, len(ids) - W),
                logprobs=CONFIG.vocab_size,
            ),
        )
        at += size
    assert result is not None and at == len(ids)
    return result


@pytest.mark.parametrize("length", [5, W])
def test_a_prompt_within_the_window_passes_all_layers(bench: Bench, length: int) -> None:
    bench.poison_blocks(0)
    result = tail_only(bench, 9, LONG[:length], (length,))
    (want,) = run(bench.runner, item(8, 0, LONG[:length], table(4), logprobs=CONFIG.vocab_size), retired=(8,))
    assert result.logprobs == want.logprobs and same_state(bench.runner._sequences[9], bench.runner._sequences[8])


@pytest.mark.parametrize("sizes", [(200,), (64, 64, 64, 8), (100, 90, 1, 9)])
def test_a_decoder_replay_fills_the_global_rows_exactly_whatever_the_chunks(
    bench: Bench, cold_long: tuple[ItemResult, SequenceState, list[Tensor]], sizes: tuple[int, ...]
) -> None:
    bench.poison_blocks(0)
    result = tail_only(bench, 9, LONG, sizes)
    state = bench.runner._sequences[9]
    assert all(map(torch.equal, bench.global_rows(state), cold_long[2]))
    off = gap(result, cold_long[0])
    assert bool(off.isfinite().all()) and 0 < float(off.median()) < 1.5
    encoder = slice(0, CONFIG.first_decoder_layer)
    assert torch.equal(state.windows[encoder], cold_long[1].windows[encoder])
    assert state.valid.tolist() == [0] * CONFIG.first_decoder_layer + [len(LONG) - W] * (
        len(state.valid) - CONFIG.first_decoder_layer
    )
    if len(sizes) > 1:
        run(bench.runner, retired=(10,))
        once = tail_only(bench, 10, LONG, (200,))
        assert result.logprobs == once.logprobs and same_state(state, bench.runner._sequences[10])


def test_skipped_layers_are_not_computed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    block = bench.backbone._blocks[CONFIG.first_decoder_layer]
    compute = type(block.moe).__call__

    def count(moe: object, x: Tensor) -> Tensor:
        rows.append(len(x))
        return compute(moe, x)  # type: ignore[arg-type]

    monkeypatch.setattr(type(block.moe), "__call__", count)
    tail_only(bench, 9, LONG[:80], (40, 40))
    dummy, first, second = (rows[step * CONFIG.num_hidden_layers :][: CONFIG.num_hidden_layers] for step in range(3))
    assert not any(dummy)  # the step that retires
    encoder = CONFIG.first_decoder_layer
    assert first == [40] * encoder + [0] * (CONFIG.num_hidden_layers - encoder)
    assert second == [40] * encoder + [W] * (CONFIG.num_hidden_layers - encoder)
