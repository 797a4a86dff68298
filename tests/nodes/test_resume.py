"""Going on behind a cached prefix: from a stored state, from one left for others, or by computing the last positions again."""

from __future__ import annotations

from typing import Any

import pytest

from rackserve.base.events import DraftsVerified, PrefillAdmitted, RequestPlaced
from rackserve.base.keys import count
from rackserve.base.messages import PoolStore
from rackserve.base.step import GroupStep, StepItem
from rackserve.sim.engine import SimEngine
from tests.nodes.rig import BLOCK, MODELS, MS, Answer, Rig, prompt

SHARED = prompt(6 * BLOCK)
EXACT = {"window": True, "history": 2}


def cached(answer: Answer) -> int:
    assert answer.usage is not None and answer.finish == "length"
    return answer.usage.cached_tokens


def items_of(rig: Rig, worker: str = "prefill0") -> list[StepItem]:
    """Every item given to the engine of a worker from now on."""
    engine = rig.rack.sites[worker].engine
    assert isinstance(engine, SimEngine)
    items: list[StepItem] = []
    original = engine.start

    def start(step: GroupStep) -> None:
        items.extend(item for part in step.steps for item in part.items)
        original(step)

    engine.start = start  # type: ignore[method-assign]
    return items


# ------------------------------------------------------------ a stored state


@pytest.mark.parametrize(("in_flight", "num_draft"), [(1, 0), (2, 0), (1, 1), (1, 3), (1, 6)])
def test_the_next_turn_hits_all_full_blocks_whatever_drafts_were_accepted(in_flight: int, num_draft: int) -> None:
    scheduler = {"max_steps_in_flight": in_flight, "num_draft": num_draft}
    rig = Rig(model=EXACT, topology={"pool": True, "prefill_workers": 2}, router={"policy": "round_robin"}, scheduler=scheduler)
    history, known = prompt(9), 0
    for turn in range(9):
        answer = rig.submit(f"t{turn}", history, 5 + turn)
        rig.rest()
        assert cached(answer) == max(0, known - 1) // BLOCK * BLOCK
        known = len(history) + len(answer.tokens)
        history = history + answer.tokens + prompt(1 + turn % 3, turn)


def test_a_third_session_resumes_where_two_have_parted() -> None:
    rig = Rig(model=EXACT)
    answers = []
    for number in range(3):
        answers.append(rig.submit(f"s{number}", SHARED + prompt(3 * BLOCK, 7 + number), 2))
        rig.rest()
    assert [cached(answer) for answer in answers] == [0, 0, len(SHARED)]


def test_a_branch_is_never_required() -> None:
    """Three window slots: none is left for a state on the way."""
    rig = Rig(model=EXACT, topology={"rank_windows": 3})
    for number in range(4):
        rig.submit(f"s{number}", SHARED + prompt(3 * BLOCK, 7 + number), 2)
    rig.rest()
    assert all(answer.finish == "length" for answer in rig.client.answers.values())


def test_those_that_come_while_a_shared_prefix_is_computed_wait_for_its_state() -> None:
    rig = Rig(model=EXACT, scheduler={"max_batched_tokens": BLOCK})
    first = rig.submit("a", SHARED + prompt(3 * BLOCK, 7), 2)
    others = [rig.submit(f"b{number}", SHARED + prompt(5, 8 + number), 2, at=2 * MS) for number in range(3)]
    shorter = rig.submit("c", SHARED[: 5 * BLOCK] + prompt(5, 20), 2, at=2 * MS)
    rig.rest()
    assert cached(first) == 0
    assert [cached(other) for other in others] == [len(SHARED)] * 3
    assert cached(shorter) == 5 * BLOCK


def test_one_that_comes_after_the_place_where_it_parts_does_not_wait() -> None:
    rig = Rig(model=EXACT, scheduler={"max_batched_tokens": BLOCK})
    rig.submit("a", prompt(20 * BLOCK), 2)
    late = rig.submit("b", prompt(20 * BLOCK)[: 2 * BLOCK] + prompt(3, 9), 2, at=8 * MS)
    rig.rest()
    assert cached(late) == 0
    assert rig.events_of(PrefillAdmitted)[-1].waited_ns == 0


@pytest.mark.parametrize("burst", [True, False])
def test_a_fleet_with_one_system_prompt_computes_it_once_per_worker_at_most(burst: bool) -> None:
    """Subagents at once or one after the other: a state is left where they part, and the pool has it for other ranks."""
    workers, tails = 4, 3 * BLOCK
    rig = Rig(
        model=EXACT,
        topology={"pool": True, "prefill_workers": workers, "prefill_blocks": 200, "decode_blocks": 800, "rank_windows": 60},
        scheduler={"max_batched_tokens": 32, "max_sequences": 16},
    )
    for number in range(16):
        rig.submit(f"a{number}", SHARED + prompt(tails, 7 + number), 2, at=0 if burst else 20 * MS * number)
    for number in range(8):
        rig.submit(f"b{number}", SHARED + prompt(tails, 30 + number), 2, at=900 * MS)
    rig.rest()
    work: dict[str, int] = {}
    for event in rig.events_of(PrefillAdmitted):
        uncached = event.prompt_tokens - event.local_tokens - event.fetched_tokens
        work[event.rank.worker] = work.get(event.rank.worker, 0) + uncached
    assert sum(work.values()) - 24 * tails <= (workers if burst else 2) * len(SHARED)
    if burst:
        assert max(work.values()) <= 2 * sum(work.values()) / workers


def test_the_pool_gets_the_state_at_a_branch_too() -> None:
    rig = Rig(model=EXACT, topology={"pool": True, "prefill_workers": 2}, router={"policy": "session_affinity"})
    for number in range(2):
        rig.submit(f"s{number}", SHARED + prompt(3 * BLOCK, 7 + number), 2, session="a")
        rig.rest()
    used = rig.events_of(RequestPlaced)[0].prefill
    elsewhere = next(name for name in (f"session{n}" for n in range(20)) if _lands_elsewhere(rig, name, used.worker))
    answer = rig.submit("s9", SHARED + prompt(3 * BLOCK, 19), 2, session=elsewhere)
    rig.rest()
    admitted = rig.events_of(PrefillAdmitted)[-1]
    assert (admitted.rank != used, admitted.fetched_tokens, cached(answer)) == (True, len(SHARED), len(SHARED))
    assert any(count(message.chain) == len(SHARED) // BLOCK for message in rig.messages_of(PoolStore))


def _lands_elsewhere(rig: Rig, session: str, worker: str) -> bool:
    rig.submit(f"probe-{session}", prompt(3, 50), 1, session=session)
    rig.rest()
    return rig.events_of(RequestPlaced)[-1].prefill.worker != worker


def test_a_fetched_state_serves_the_next_session_on_that_rank() -> None:
    rig = Rig(model=EXACT, topology={"pool": True, "prefill_workers": 2}, router={"policy": "round_robin"})
    for number in range(4):
        rig.submit(f"s{number}", SHARED + prompt(1, 7 + number), 1)
        rig.rest()
    admitted = rig.events_of(PrefillAdmitted)
    assert [event.fetched_tokens for event in admitted] == [0, len(SHARED), 0, 0]
    assert [event.local_tokens for event in admitted] == [0, 0, len(SHARED), len(SHARED)]


# ------------------------------------------------------------ bounded replay


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("replay", [1, 3, BLOCK, 2 * BLOCK + 1])
def test_a_hit_saves_all_but_the_last_positions(replay: int, pool: bool) -> None:
    rig = Rig(
        model={"replay": replay, "history": 3},
        topology={"pool": pool, "prefill_workers": 2 if pool else 1},
        router={"policy": "round_robin"},
    )
    whole = [prompt(13), [*prompt(13), 5, 6], [*prompt(13), 5, 9]]
    answers = []
    for number, tokens in enumerate(whole):
        answers.append(rig.submit(f"r{number}", tokens, 3))
        rig.rest()
    assert [cached(answer) for answer in answers] == [0, 3 * BLOCK - replay, 3 * BLOCK - replay]
    fetched = [event.fetched_tokens for event in rig.events_of(PrefillAdmitted)]
    assert fetched == [0, (3 * BLOCK - replay) * pool, 0]


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_replayed_positions_are_told_from_new_ones_in_every_chunk(chunk: int) -> None:
    rig = Rig(model={"replay": 6, "history": 2}, scheduler={"max_batched_tokens": chunk})
    rig.submit("a", SHARED, 1)
    rig.rest()
    items = items_of(rig)
    rig.submit("b", [*SHARED, 3, 4], 1)
    rig.rest()
    assert items[0].start == len(SHARED) - 6
    for item in items:
        assert item.replayed == max(0, min(item.start + item.num_tokens, len(SHARED)) - item.start)
    assert sum(item.replayed for item in items) == 6
    assert len(items[0].history) == 2 * 4 and not any(item.history for item in items[1:])


def test_a_hit_of_no_more_than_the_replay_is_worth_nothing_and_is_not_fetched() -> None:
    rig = Rig(model={"replay": 2 * BLOCK}, topology={"pool": True, "prefill_workers": 2}, router={"policy": "round_robin"})
    for number in range(2):
        rig.submit(f"r{number}", [*prompt(2 * BLOCK), 9, number], 1)
        rig.rest()
    assert [cached(answer) for answer in rig.client.answers.values()] == [0, 0]
    assert not [event for event in rig.events_of(PrefillAdmitted) if event.fetched_tokens]


def test_nobody_waits_for_blocks_that_would_be_worth_nothing() -> None:
    for replay, waits in ((2 * BLOCK, False), (2 * BLOCK - 1, True)):
        rig = Rig(model={"replay": replay}, scheduler={"max_batched_tokens": 2, "max_steps_in_flight": 1})
        for number in range(2):
            rig.submit(f"r{number}", [*prompt(2 * BLOCK), number, 3], 1)
        rig.rest()
        assert (rig.events_of(PrefillAdmitted)[-1].waited_ns > 0) == waits


def test_the_router_expects_what_the_rank_then_saves() -> None:
    rig = Rig(model={"replay": 5}, topology={"pool": True, "prefill_workers": 2}, router={"policy": "round_robin"})
    for number in range(4):
        rig.submit(f"r{number}", [*SHARED, number], 2)
        rig.rest()
    placed = [event.predicted_cached_tokens for event in rig.events_of(RequestPlaced)]
    assert placed == [event.local_tokens + event.fetched_tokens for event in rig.events_of(PrefillAdmitted)]
    assert placed[1:] == [len(SHARED) - 5] * 3


@pytest.mark.parametrize("model", MODELS[4:])
def test_no_state_is_kept_for_others_but_each_hand_over_carries_one(model: dict[str, Any]) -> None:
    rig = Rig(model=model, topology={"pool": True, "segment_windows": 0, "rank_windows": 1})
    for number in range(3):
        rig.submit(f"r{number}", [*SHARED, number], 5)
        rig.rest()
    assert not any(message.with_window for message in rig.messages_of(PoolStore))
    assert all(not cache.layout.stores_state for node in rig.rack.workers().values() for cache in node.worker.caches)


def test_only_the_tail_of_a_prompt_passes_all_layers_and_all_of_the_output() -> None:
    rig = Rig(model={"replay": 5, "tail": True}, scheduler={"max_batched_tokens": 7})
    prefill, decode = items_of(rig), items_of(rig, "decode0")
    rig.submit("a", prompt(20), 4)
    rig.submit("b", prompt(3, 1), 4)
    rig.rest()
    assert {(item.start + item.num_tokens <= 3, item.full_from) for item in prefill if item.sequence == 2} == {(True, 0)}
    assert {item.full_from for item in prefill if item.sequence == 1} == {15}
    assert {item.full_from for item in decode} == {0}


# ------------------------------------------------------------ drafts


@pytest.mark.parametrize("model", MODELS)
def test_what_was_drafted_is_recorded_by_position(model: dict[str, Any]) -> None:
    rig = Rig(model=model, scheduler={"num_draft": 3, "max_steps_in_flight": 1})
    answers = [rig.submit(f"r{number}", prompt(9, number), 20) for number in range(3)]
    rig.rest()
    events = rig.events_of(DraftsVerified)
    for event in events:
        assert event.num_sequences >= event.verified[0] and len(event.verified) == len(event.accepted) <= 3
        assert list(event.accepted) == sorted(event.accepted, reverse=True)
        assert all(good <= tried for good, tried in zip(event.accepted, event.verified, strict=True))
    decoded = sum(len(answer.tokens) - 1 for answer in answers)
    turns, accepted = (sum(event.num_sequences for event in events), sum(sum(event.accepted) for event in events))
    assert 0 < turns + accepted <= decoded  # the last token of an answer may come from a step without drafts


def test_output_placed_again_is_history_too() -> None:
    """A message that says how far an answer got is lost: the next attempt looks back at tokens of the first one."""
    rig = Rig(model={"replay": 5, "history": 3}, scheduler={"num_draft": 3, "max_steps_in_flight": 1})
    answer = rig.submit("a", prompt(9), 30)
    rig.run(12 * MS)
    assert 1 < len(answer.tokens) < 30
    rig.rack.kill("decode0", noticed_after=MS)
    rig.host.call(rig.host.now + 5 * MS, lambda: rig.rack.start("decode0"))
    rig.rest()
    assert (answer.attempts, answer.finish) == (2, "length")
