"""Drawn racks with every law on; and broken versions of the code, which the laws must catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Attempt, Rank
from rackserve.base.keys import count
from rackserve.base.messages import PoolGranted
from rackserve.base.step import StepItem
from rackserve.digest_model import DigestRunner
from rackserve.kv.rank_cache import RankCache
from rackserve.nodes.decode import DecodeNode
from rackserve.nodes.frontend import Frontend
from rackserve.nodes.handover import Errand, Pusher
from rackserve.nodes.prefill import PrefillNode
from rackserve.nodes.worker import Worker
from rackserve.pool.directory import Directory
from rackserve.route.load import LoadBook
from rackserve.runs.accounts import HeldRun
from rackserve.runs.cache import Evicted, RunCache
from rackserve.sched.scheduler import Scheduler
from rackserve.sched.sequence import Sequence
from rackserve.sim.swarm import draw, run_seed

SEEDS = (*range(40), 138)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_law_holds(seed: int) -> None:
    result = run_seed(seed)
    assert result.finished + result.failed + result.cancelled > 0
    assert result.cached_tokens <= result.prompt_tokens


def test_the_seeds_draw_every_kind_of_case() -> None:
    runs = [draw(seed) for seed in SEEDS]
    modes = {(run.layout.has_window, run.layout.stores_state, run.layout.tail_tokens > 0) for run in runs}
    assert modes == {(False, False, False), (True, True, False), (True, False, False), (True, False, True)}
    assert {run.layout.history_tokens for run in runs} == {0, 1, 2, 3}
    assert {run.config.scheduler.num_draft > 0 for run in runs if run.layout.stores_state} == {False, True}
    assert {run.config.topology.pool for run in runs} == {False, True}
    assert {run.config.topology.prefill_ranks for run in runs} == {1, 2}
    assert {run.config.scheduler.max_steps_in_flight for run in runs} == {1, 2}
    assert {run.config.scheduler.num_draft > 0 for run in runs} == {False, True}
    assert len({run.config.router.policy for run in runs}) == 4
    for kind in ("loss", "double", "late", "kills", "segment_losses", "slow_ranks", "engine_failures", "slow_transfers"):
        assert {getattr(run.plan, kind) > 0 for run in runs} == {False, True}, kind


def test_a_failing_seed_says_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_to_release_a_booking(monkeypatch)
    with pytest.raises(InvariantError, match=r"rackserve swarm --seed 3$"):
        run_seed(3)


# ------------------------------------------------------------ mutations: one line of the code is wrong, a law must see it

Break = Callable[[pytest.MonkeyPatch], None]


def evict_head_first(patch: pytest.MonkeyPatch) -> None:
    """Blocks go from the head of a run, its tail stays."""

    def trim(self: RunCache, run: HeldRun, wanted: int, out: Evicted) -> None:
        chain = self._tree.chain_of(run)
        keep = run.end - wanted
        if keep > run.depth and not self.needs_window:
            slots = run.payload.slots
            out.slots.extend(slots[:wanted])
            del slots[:wanted]
            self._tree.shorten(run, keep)
            self.num_blocks -= wanted
            run.payload.account.num_blocks -= wanted
            run.payload.account.leaves.add(run)
        else:
            keep = self._remove_upward(run, out)
        out.removed.append((chain, keep))

    patch.setattr(RunCache, "_trim", trim)


def announce_before_the_step(patch: pytest.MonkeyPatch) -> None:
    """Blocks count as computed when their step is planned."""

    def commit(self: Worker, sequence: Sequence) -> int:
        lease = sequence.lease
        if lease is None:
            return 0
        full = min(sequence.scheduled, sequence.num_known) // self.layout.block_tokens
        chain = sequence.extend_chain_to(full, self.layout.block_tokens)
        self.caches[sequence.dp_rank].commit(lease, chain, min(full, count(chain)))
        return lease.committed

    patch.setattr(Worker, "commit", commit)


def forget_to_release_a_booking(patch: pytest.MonkeyPatch) -> None:
    original = LoadBook.release

    def release(self: LoadBook, rank: Rank, attempt: Attempt) -> bool:
        return False if rank.worker.startswith("decode") else original(self, rank, attempt)

    patch.setattr(LoadBook, "release", release)


def hand_over_before_the_last_push_ended(patch: pytest.MonkeyPatch) -> None:
    original = Pusher.push

    def push(self: Pusher, sequence: Sequence, errand: Errand) -> None:
        original(self, sequence, errand)
        if sequence.state == "pushing" and errand.reserved is not None:
            self._hand_over(sequence, errand)

    patch.setattr(Pusher, "push", push)


def release_blocks_under_a_transfer(patch: pytest.MonkeyPatch) -> None:
    original = Worker.forget

    def forget(self: Worker, sequence: Sequence) -> None:
        holds, sequence.holds = sequence.holds, sequence.in_flight
        original(self, sequence)
        sequence.holds = holds

    patch.setattr(Worker, "forget", forget)


def reuse_a_block_a_push_may_still_write(patch: pytest.MonkeyPatch) -> None:
    """The decode rank's fence is dropped: an aborted reservation is free at once."""
    original = DecodeNode._abort

    def abort(self: DecodeNode, sequence: Sequence) -> None:
        self._visits[sequence.key].exposed = False
        original(self, sequence)

    patch.setattr(DecodeNode, "_abort", abort)


def publish_before_commit(patch: pytest.MonkeyPatch) -> None:
    """The pool shows blocks when it grants their slots."""
    original = Directory.store

    def store(self: Directory, *args: Any) -> PoolGranted:
        granted = original(self, *args)
        if granted.grant:
            self.commit(granted.grant)
        return granted

    patch.setattr(Directory, "store", store)


def reuse_without_withdrawing(patch: pytest.MonkeyPatch) -> None:
    """An evicted block's key stays announced."""

    def give_up(self: RankCache, evicted: Evicted) -> None:
        self._arena.free(evicted.slots)
        self._windows.free(evicted.window_slots)

    patch.setattr(RankCache, "_give_up", give_up)


def count_a_booking_twice(patch: pytest.MonkeyPatch) -> None:
    original = LoadBook.book

    def book(self: LoadBook, rank: Rank, attempt: Attempt, tokens: int) -> None:
        original(self, rank, attempt, tokens)
        self._totals[rank] += tokens

    patch.setattr(LoadBook, "book", book)


def ignore_the_attempt_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Frontend, "_current", lambda self, request, attempt, message: self._live.get(request))


def changed_items(patch: pytest.MonkeyPatch, change: Callable[[StepItem], dict[str, Any]]) -> None:
    """Every planned item differs in some fields."""
    original = Scheduler._plan_item

    def plan_item(self: Scheduler, sequence: Sequence, budget: int, preempted: list[Sequence]) -> StepItem | None:
        item = original(self, sequence, budget, preempted)
        return None if item is None else structs.replace(item, **change(item))

    patch.setattr(Scheduler, "_plan_item", plan_item)


def write_replayed_positions_again(patch: pytest.MonkeyPatch) -> None:
    """Shared blocks get entries that were computed with a window cut off at its start."""
    changed_items(patch, lambda item: {"replayed": 0})


def forget_the_history(patch: pytest.MonkeyPatch) -> None:
    changed_items(patch, lambda item: {"history": b""})


def pass_all_layers_too_late(patch: pytest.MonkeyPatch) -> None:
    changed_items(patch, lambda item: {"full_from": item.full_from + 1})


def snapshot_at_the_end_of_the_item(patch: pytest.MonkeyPatch) -> None:
    """The engine stores the state before the drafts, not where it was asked for."""
    original = DigestRunner._run_item
    patch.setattr(DigestRunner, "_run_item", lambda self, item: original(self, structs.replace(item, snapshot_at=-1)))


def resume_without_replay(patch: pytest.MonkeyPatch) -> None:
    def resume(self: PrefillNode, sequence: Sequence, num_blocks: int) -> None:
        sequence.computed = sequence.scheduled = num_blocks * self.worker.layout.block_tokens

    patch.setattr(PrefillNode, "_resume", resume)


def write_over_the_last_state(patch: pytest.MonkeyPatch) -> None:
    """One slot takes every state of the output, also one behind a stop token."""
    patch.setattr(Sequence, "state_slot", lambda self, num_blocks: self.boundary_slot)


MUTATIONS: dict[Break, int] = {
    evict_head_first: 1,
    announce_before_the_step: 1,
    forget_to_release_a_booking: 0,
    hand_over_before_the_last_push_ended: 1,
    release_blocks_under_a_transfer: 0,
    reuse_a_block_a_push_may_still_write: 5,
    publish_before_commit: 0,
    reuse_without_withdrawing: 1,
    count_a_booking_twice: 0,
    ignore_the_attempt_number: 5,
    write_replayed_positions_again: 0,
    forget_the_history: 1,
    pass_all_layers_too_late: 1,
    snapshot_at_the_end_of_the_item: 3,
    resume_without_replay: 0,
    write_over_the_last_state: 138,
}
"""Each mutation and a seed known to catch it, which is tried first. All seeds pass without mutations."""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_laws_catch(mutation: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    first = MUTATIONS[mutation]
    with pytest.raises(InvariantError, match="swarm seed"):
        for seed in (first, *SEEDS):
            run_seed(seed)
