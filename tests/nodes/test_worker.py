"""What prefill and decode workers share: places, steps, spilling, recording."""

from __future__ import annotations

import pytest

from rackserve.base.errors import InvariantError
from rackserve.base.events import BlocksEvicted, DraftsVerified, QueueChanged, StepDone
from rackserve.base.ids import Rank
from rackserve.base.messages import PoolGranted, PoolStore
from rackserve.base.step import ItemResult, Step, StepItem, StepResult
from rackserve.base.units import NS_PER_MS, NS_PER_US
from rackserve.nodes.worker import MAX_BRANCHES, drafts_verified
from tests.nodes.rig import BLOCK, MS, SHORT, Rig, prompt


def test_a_group_ends_with_its_slowest_rank_and_idle_ranks_take_dummy_steps() -> None:
    rig = Rig(topology={"prefill_ranks": 2}, router={"policy": "round_robin"}, scheduler={"max_steps_in_flight": 1})
    rig.submit("long", prompt(16), 1)  # prefill0.0
    rig.submit("short", prompt(2, 1), 1)  # prefill0.1, behind it by a message
    rig.submit("alone", prompt(16, 2), 1, at=50 * MS)  # prefill0.0 again
    rig.rest()
    steps: dict[int, list[StepDone]] = {}
    for step in rig.events_of(StepDone):
        steps.setdefault(step.number, []).append(step)
    for group in steps.values():
        assert [step.rank for step in group] == [Rank("prefill0", 0), Rank("prefill0", 1)]
        slowest = max(step.new_tokens for step in group)
        assert {step.duration_ns for step in group} == {NS_PER_MS + slowest * 100 * NS_PER_US}
        assert [step.dummy for step in group] == [step.num_sequences == 0 for step in group]
        assert not all(step.dummy for step in group)
    assert [step.dummy for step in steps[max(steps)]] == [False, True]


def test_each_rank_of_a_group_has_its_own_places() -> None:
    rig = Rig(topology={"prefill_ranks": 2, "decode_ranks": 2}, scheduler={"max_sequences": 2})
    for number in range(12):
        rig.submit(f"r{number}", prompt(8, number), 6)
    most = 0

    def look() -> None:
        nonlocal most
        for node in rig.rack.workers().values():
            for dp_rank in (0, 1):
                assert node.worker.num_active(dp_rank) <= 2
                most = max(most, node.worker.num_active(dp_rank))

    check = rig.host.after_event
    assert check is not None
    rig.host.after_event = lambda: (check(), look())[0]
    rig.rest()
    assert most == 2


def test_a_step_is_recorded_with_what_it_cost() -> None:
    rig = Rig()
    rig.submit("r", prompt(20), 2)
    rig.rest()
    first, second, third = rig.events_of(StepDone)
    assert (first.new_tokens, first.context_tokens, first.attended, first.num_sampled) == (16, 0, 136, 0)
    assert (second.new_tokens, second.context_tokens, second.attended, second.num_sampled) == (4, 16, 17 + 18 + 19 + 20, 1)
    assert (third.rank.worker, third.new_tokens, third.context_tokens, third.attended) == ("decode0", 1, 20, 21)


def test_queue_records_go_up_and_come_back_to_nothing() -> None:
    rig = Rig(scheduler={"max_sequences": 2})
    for number in range(6):
        rig.submit(f"r{number}", prompt(12, number), 4)
    rig.rest()
    for worker in ("prefill0", "decode0"):
        changes = [event for event in rig.events_of(QueueChanged) if event.rank.worker == worker]
        assert max(event.queued for event in changes) > 1
        assert (changes[-1].queued, changes[-1].running) == (0, 0)


def test_evicted_blocks_are_counted() -> None:
    rig = Rig(topology={"prefill_blocks": 6})
    for number in range(4):
        rig.submit(f"r{number}", prompt(4 * BLOCK, number), 1)
    rig.rest()
    evicted = sum(event.num_blocks for event in rig.events_of(BlocksEvicted))
    assert evicted == 4 * 4 - rig.prefill().worker.caches[0].num_cached


def test_a_pool_that_grants_nothing_or_nothing_in_time_costs_no_blocks() -> None:
    rig = Rig(topology={"pool": True})
    rig.lose(PoolGranted, 2)
    rig.submit("r", prompt(20), 1)
    rig.run(10 * MS)
    assert rig.prefill().worker.caches[0].usable == 64 - 5  # held for the spill
    rig.run(SHORT.ns("lookup"))
    assert rig.prefill().worker.caches[0].usable == 64
    rig.rest()


def test_a_late_grant_is_given_back() -> None:
    rig = Rig(topology={"pool": True})
    rig.rules.append(lambda source, target, message: [2 * SHORT.ns("lookup")] if isinstance(message, PoolGranted) else None)
    rig.submit("r", prompt(20), 1)
    rig.rest()
    assert len(rig.messages_of(PoolStore)) == 1
    assert rig.rack.pool is not None
    assert rig.rack.pool.directory.num_blocks == 0


def test_a_restarted_worker_uses_new_memory() -> None:
    rig = Rig()
    before = rig.prefill().worker.region(0)
    rig.rack.kill("prefill0", noticed_after=MS)
    rig.run(2 * MS)
    rig.rack.start("prefill0")
    rig.run(MS)
    assert rig.prefill().worker.region(0) != before
    rig.submit("r", prompt(20), 4)
    rig.rest()


def test_ready_work_without_a_step_in_flight_is_noticed() -> None:
    rig = Rig(scheduler={"max_steps_in_flight": 1})
    rig.submit("r", prompt(60), 4)
    rig.run(2 * MS)
    rig.prefill().check()
    rig.prefill().worker.group._in_flight.clear()
    with pytest.raises(InvariantError, match="no step in flight"):
        rig.prefill().check()


def test_drafts_are_counted_by_position_over_the_items_of_a_step() -> None:
    items = tuple(StepItem(number, 5, 1, b"", (), True, num_draft=drafts) for number, drafts in enumerate((3, 3, 2, 0)))
    done = [((1, 1, 1), 3), ((1,), 1), ((1, 1), 2), ((1,), 0)]
    results = tuple(ItemResult(number, tokens, (), verified) for number, (tokens, verified) in enumerate(done))
    rank = Rank("decode0")
    assert drafts_verified(rank, Step(0, items), StepResult(0, results)) == DraftsVerified(rank, 3, (3, 2, 1), (2, 1, 0))
    assert drafts_verified(rank, Step(0, items[3:]), StepResult(0, results[3:])) is None
    nothing = StepResult(0, (ItemResult(0, (1,)),))
    assert drafts_verified(rank, Step(0, items[:1]), nothing) == DraftsVerified(rank, 1, (), ())


def test_a_sequence_can_be_asked_for_states_ahead_of_it_and_for_so_many() -> None:
    rig = Rig(window=True, scheduler={"max_batched_tokens": BLOCK, "max_steps_in_flight": 1})
    rig.submit("r", prompt(12 * BLOCK), 1)
    rig.run(5 * MS)
    worker = rig.prefill().worker
    (sequence,) = worker.sequences.values()
    passed, last = sequence.scheduled // BLOCK, 12
    assert 0 < passed < 6
    assert not worker.want_state(sequence, passed)
    assert worker.want_state(sequence, last) and not sequence.branches  # its own
    wanted = [worker.want_state(sequence, blocks) for blocks in range(passed + 1, last)]
    assert wanted == [True] * MAX_BRANCHES + [False] * (last - 1 - passed - MAX_BRANCHES)
    assert worker.want_state(sequence, passed + 1)  # asked for before
    rig.rest()
    assert sorted(sequence.branched) == list(range(passed + 1, passed + 1 + MAX_BRANCHES))
