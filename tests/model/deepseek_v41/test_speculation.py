"""Drafts that are right by a plan, so that every number of them stands: output and state are those of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rackserve.base.request import SamplingParams
from rackserve.model.deepseek_v41.dspark import Drafting, Drafts, DSpark
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.deepseek_v41.state import SequenceState
from tests.model.deepseek_v41.golden import (
    CONFIG,
    LAYOUT,
    PROMPTS,
    Bench,
    Job,
    complete,
    continuation,
    item,
    prompt,
    run,
    same_state,
    table,
)

BLOCK, NUM_TOKENS = CONFIG.dspark_block_size, 18
IDS, TRUTH = prompt("medium"), continuation("medium")


@dataclass
class Plan:
    """How many drafts of each step are right, over and over."""

    rights: tuple[int, ...]
    step: int = 0

    def draft(self, head: DSpark, requests: Sequence[Drafting]) -> list[Drafts]:
        """In place of `DSpark.draft`: what follows by TRUTH, and something else from a chosen place on."""
        found = []
        for request in requests:
            right = self.rights[self.step % len(self.rights)]
            self.step += 1
            follows = [*TRUTH[request.output_index :], *[0] * BLOCK][:BLOCK]
            tokens = [token if place < right else (token + 1) % CONFIG.vocab_size for place, token in enumerate(follows)]
            found.append(Drafts(tokens, torch.zeros(BLOCK, CONFIG.vocab_size), torch.zeros(BLOCK)))
        return found


def planned(monkeypatch: pytest.MonkeyPatch, *rights: int) -> None:
    plan = Plan(rights)
    monkeypatch.setattr(DSpark, "draft", lambda head, requests: plan.draft(head, requests))


class Plain:
    """State and global rows after each position of plain decoding."""

    def __init__(self, bench: Bench) -> None:
        self.states: dict[int, SequenceState] = {}
        self.rows: dict[int, list[Tensor]] = {}
        self.slots: dict[int, Tensor] = {}
        state = bench.begin(1)
        bench.compute((state, IDS))
        self._keep(bench, state)
        for token in TRUTH[:NUM_TOKENS]:
            bench.compute((state, [token]))
            self._keep(bench, state)

    def _keep(self, bench: Bench, state: SequenceState) -> None:
        slot = torch.zeros(LAYOUT.window_bytes, dtype=torch.uint8)
        state.store(slot)
        self.slots[state.length] = slot
        self.states[state.length] = SequenceState(CONFIG)
        self.states[state.length].restore(slot, state.length, state.history)
        self.rows[state.length] = bench.global_rows(state)

    def agrees(self, bench: Bench, state: SequenceState) -> bool:
        rows = bench.global_rows(state)
        return same_state(state, self.states[state.length]) and all(map(torch.equal, rows, self.rows[state.length]))


@pytest.fixture(scope="module")
def plain(bench: Bench) -> Plain:
    return Plain(bench)


def steps_of(bench: Bench, num_draft: int, sequence: int = 5) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Decode sequence after sequence step by step: (position before, tokens, verified)."""
    bench.poison_blocks(0)
    (first,) = run(bench.runner, item(sequence, 0, IDS, table(0)), retired=(sequence,))
    at, done = len(IDS), list(first.tokens)
    while len(done) < NUM_TOKENS:
        drafts = min(num_draft, NUM_TOKENS - len(done) - 1)
        (result,) = run(bench.runner, item(sequence, at, output_index=len(done), num_draft=drafts))
        yield at, result.tokens, result.num_verified
        done += result.tokens
        at += len(result.tokens)
    assert done == TRUTH[:NUM_TOKENS]


@pytest.mark.parametrize("rights", [(0,), (1,), (2,), (3,), (4,), (5,), (3, 0, 5, 1, 4, 2)])
def test_output_and_state_are_those_of_plain_decoding_however_many_drafts_stand(
    bench: Bench, plain: Plain, monkeypatch: pytest.MonkeyPatch, rights: tuple[int, ...]
) -> None:
    planned(monkeypatch, *rights)
    lengths = set()
    for number, (at, tokens, verified) in enumerate(steps_of(bench, BLOCK)):
        assert len(tokens) == min(rights[number % len(rights)], verified) + 1
        state = bench.runner._sequences[5]
        assert state.length == at + len(tokens)
        assert plain.agrees(bench, state)
        lengths.add(state.length % 2)
    assert lengths == {0, 1} or rights in ((1,), (3,), (5,))


def test_steps_from_an_odd_position_leave_the_state_of_plain_decoding_too(
    bench: Bench, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch, 0, 1, 1, 3, 3, 5)  # one token first: pairs are then cut everywhere
    for _, _, _ in steps_of(bench, BLOCK):
        assert plain.agrees(bench, bench.runner._sequences[5])


@pytest.mark.parametrize("num_draft", [1, 2, 3, 4])
def test_no_more_drafts_are_verified_than_were_asked_for(bench: Bench, monkeypatch: pytest.MonkeyPatch, num_draft: int) -> None:
    planned(monkeypatch, 5)
    for _, tokens, verified in steps_of(bench, num_draft):
        assert verified <= num_draft and len(tokens) == verified + 1


@pytest.mark.parametrize("right", [0, 2, 5])
def test_a_snapshot_is_the_state_before_its_position_or_is_not_taken(
    bench: Bench, plain: Plain, monkeypatch: pytest.MonkeyPatch, right: int
) -> None:
    planned(monkeypatch, right)
    start = len(IDS)
    for at in range(start + 1, start + 7):
        slot = bench.arena.slot(2)
        slot.fill_(0xFF)
        run(bench.runner, item(6, 0, IDS, table(2)), retired=(6,))
        run(bench.runner, item(6, start, output_index=1, num_draft=BLOCK, snapshot=2, snapshot_at=at))
        if at <= start + 1 + right:
            assert torch.equal(slot, plain.slots[at])
        else:
            assert set(slot.tolist()) == {0xFF}
        assert plain.agrees(bench, bench.runner._sequences[6])


def test_drafts_are_verified_where_one_token_is_computed_and_output_wanted(bench: Bench) -> None:
    items = [
        item(7, 0, IDS[:1], table(2), num_draft=2),
        item(7, 1, IDS[1:3], num_draft=2),
        item(7, 3, IDS[3:4], sample=False, num_draft=2),
        item(7, 4, IDS[4:5]),
        item(7, 5, IDS[5:6], num_draft=2),
    ]
    assert [run(bench.runner, one)[0].num_verified for one in items] == [0, 0, 0, 0, 2]


HOT = [SamplingParams(temperature=temperature, seed=seed) for temperature, seed in ((0.0, 0), (1e-7, 1), (1.0, 2), (2.0, 3))]


def test_a_sequence_has_the_same_output_alone_and_among_others_with_any_drafts_and_temperature(bench: Bench) -> None:
    def jobs() -> list[Job]:
        return [Job(prompt(PROMPTS[k % 2]), 5, (40,), k, HOT[k]) for k in range(4)]

    together = complete(bench.runner, *jobs(), first=20)
    for job, want in zip(jobs(), together, strict=True):
        assert complete(bench.runner, job, first=30) == [want]
        assert job.verified <= 4 * job.num_draft
    assert together[0] == continuation("short")[:5]
    assert together[1] == continuation("medium")[:5]  # a tiny temperature is as good as none
    again = Job(prompt("short"), 5, (40,), 2, SamplingParams(temperature=1.0, seed=9))
    assert complete(bench.runner, again, first=40) != [together[2]]


def test_synthetic_acceptance_takes_as_many_as_it_says_whatever_the_drafts() -> None:
    bench = Bench(RunnerOptions(synthetic_acceptance=2.5))
    run(bench.runner, item(1, 0, IDS, table(0)))
    at, counts = len(IDS), []
    for _ in range(12):
        (result,) = run(bench.runner, item(1, at, output_index=at - len(IDS) + 1, num_draft=BLOCK))
        assert result.num_verified == BLOCK
        counts.append(len(result.tokens))
        at += len(result.tokens)
    assert set(counts) == {2, 3}
    assert bench.runner._sequences[1].length == at
