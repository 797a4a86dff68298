"""The prefill worker's laws, on a small rack."""

from __future__ import annotations

from functools import partial

import pytest
from msgspec.structs import replace

from rackserve.base.events import AttemptRetried, PrefillAdmitted, StepDone
from rackserve.base.messages import (
    BlocksStored,
    PoolFound,
    PoolRelease,
    PushesEnded,
    Reserve,
    Reserved,
    TransferFailed,
)
from tests.nodes.rig import BLOCK, MS, SHORT, Rig, prompt


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 8, 9])
def test_a_wholly_cached_prompt_still_computes_its_last_token(num_tokens: int) -> None:
    rig = Rig()
    whole = (num_tokens - 1) // BLOCK * BLOCK
    for turn in range(3):
        answer = rig.submit(f"r{turn}", prompt(num_tokens))
        rig.rest()
        assert answer.usage is not None
        assert answer.usage.cached_tokens == (whole if turn else 0)
    more = rig.submit("more", prompt(num_tokens) + answer.tokens + prompt(5, 3))
    rig.rest()
    assert more.usage is not None
    assert more.usage.cached_tokens == num_tokens // BLOCK * BLOCK


def test_cached_and_computed_tokens_add_up_to_the_prompt() -> None:
    rig = Rig(topology={"pool": True, "prefill_workers": 2})
    for number in range(12):
        rig.submit(f"r{number}", prompt(8 + 3 * (number % 4)), at=number * 2 * MS)
    rig.rest()
    admitted = rig.events_of(PrefillAdmitted)
    computed = sum(step.new_tokens for step in rig.events_of(StepDone) if step.rank.worker.startswith("prefill"))
    assert len(admitted) == 12
    assert computed == sum(event.prompt_tokens - event.local_tokens - event.fetched_tokens for event in admitted)


def test_siblings_wait_for_the_shared_prefix_instead_of_computing_it_again() -> None:
    rig = Rig()
    for number in range(6):
        rig.submit(f"r{number}", prompt(40) + prompt(3, number + 1))
    rig.rest()
    computed = sum(step.new_tokens for step in rig.events_of(StepDone) if step.rank.worker == "prefill0")
    assert computed == 40 + 6 * 3


def test_a_small_request_passes_one_that_does_not_fit_and_the_large_one_is_still_served() -> None:
    rig = Rig(topology={"prefill_blocks": 20}, scheduler={"max_skips": 3})
    rig.submit("first", prompt(40), 1)
    large = rig.submit("large", prompt(72, 1), 1, at=MS)
    small = [rig.submit(f"s{number}", prompt(4, number + 2), 1, at=2 * MS) for number in range(10)]
    rig.rest()
    before = [answer for answer in small if answer.ended < large.ended]
    assert 1 <= len(before) <= 3


def test_a_prompt_that_waits_too_long_for_blocks_is_placed_again() -> None:
    rig = Rig(topology={"prefill_blocks": 8}, deadlines=replace(SHORT, queue=0.5))
    rig.submit("first", prompt(32), 8)
    rig.submit("second", prompt(32, 1), 8, at=MS)
    rig.lose(Reserved)  # the first cannot hand over: its blocks come free at a deadline only
    rig.rest()
    assert "queue deadline" in {event.reason for event in rig.events_of(AttemptRetried) if event.request == "second"}


def test_every_lease_is_released_however_its_lookup_ends() -> None:
    """A third of the lookups is fetched, a third aborted between lookup and load, a third lost."""
    rig = Rig(topology={"pool": True, "prefill_blocks": 12, "segment_blocks": 200}, scheduler={"max_sequences": 2})
    for number in range(12):
        rig.submit(f"warm{number}", prompt(24, number), 2, at=number * 40 * MS)
    rig.rest()
    rig.lose(PoolFound, 6, lambda message: int(message.request[1:]) % 3 == 2)
    for number in range(18):
        rig.submit(f"r{number}", prompt(24, number % 12), 2, at=rig.host.now + number * 40 * MS)
        if number % 3 == 1:
            rig.on_message(
                PoolFound, partial(rig.cancel, f"r{number}"), when=lambda found, name=f"r{number}": found.request == name
            )
    rig.rest()
    found = [message.lease for message in rig.messages_of(PoolFound) if message.lease]
    released = [message.lease for message in rig.messages_of(PoolRelease)]
    assert len(found) >= 12
    assert len(released) == len(set(released)) >= len(found) - 6
    pool = rig.rack.pool
    assert pool is not None
    assert pool.directory.num_held == 0
    assert pool.directory.counters.expired_leases == len(found) - len(released)


def test_what_could_not_be_loaded_is_computed_and_reported_as_computed() -> None:
    rig = Rig(topology={"pool": True, "prefill_workers": 2, "decode_workers": 1}, router={"policy": "round_robin"})
    rig.submit("warm", prompt(40), 1)
    rig.rest()

    def lose_all() -> None:
        for worker in rig.rack.sites:
            rig.rack.lose_segment(worker)

    rig.on_message(PoolFound, lose_all)
    again = rig.submit("again", prompt(40), 6)
    rig.rest()
    assert rig.messages_of(PoolFound)[-1].slots
    assert again.usage is not None
    assert again.usage.cached_tokens == 0
    assert again.tokens == rig.cold(again)


def test_a_pool_that_does_not_answer_costs_one_deadline_and_nothing_else() -> None:
    rig = Rig(topology={"pool": True})
    rig.lose(PoolFound, 100)
    answer = rig.submit("r", prompt(20))
    rig.rest()
    assert answer.finish == "length"
    assert SHORT.ns("lookup") < answer.first - answer.sent < SHORT.ns("lookup") + 20 * MS


def test_a_fetched_prefix_is_not_computed() -> None:
    rig = Rig(topology={"pool": True, "prefill_workers": 2}, router={"policy": "round_robin"})
    rig.submit("warm", prompt(41), 2)
    rig.rest()
    rig.submit("again", prompt(41), 2)
    rig.rest()
    second = rig.events_of(PrefillAdmitted)[1]
    assert (second.rank.worker, second.local_tokens, second.fetched_tokens) == ("prefill1", 0, 40)


def test_pushes_nobody_collects_are_swept_by_time_alone() -> None:
    """The decode rank never answers and no more work comes: the blocks still come free, and the next request is served."""
    rig = Rig(topology={"prefill_blocks": 20}, max_attempts=1)
    rig.lose(Reserve, 4)
    for number in range(4):
        rig.submit(f"r{number}", prompt(20, number))
    rig.run(1000 * MS)
    assert rig.prefill().worker.caches[0].usable == 0
    rig.run(SHORT.ns("handover"))
    assert rig.prefill().worker.caches[0].usable == 20
    late = rig.submit("late", prompt(20, 9))
    rig.rest()
    assert late.finish == "length"


def test_one_failed_push_fails_its_attempt_and_nobody_else() -> None:
    rig = Rig()
    other = rig.submit("other", prompt(12, 1), 20)
    rig.run(10 * MS)
    store = rig.rack.sites["prefill0"].store
    assert store is not None
    store.slowdown = 50.0
    hit = rig.submit("hit", prompt(24), 6)
    rig.run(12 * MS)
    pushes = rig.prefill().worker.moves.under_way()
    assert {sequence.request.id for _, sequence in pushes} == {"hit"}
    store.cancel(pushes[0][0].number)
    store.slowdown = 1.0
    rig.rest()
    assert (other.attempts, other.finish) == (1, "length")
    assert (hit.attempts, hit.finish) == (2, "length")


def test_notices_of_transfers_that_are_over_are_counted_and_ignored() -> None:
    rig = Rig()
    rig.submit("r", prompt(20))
    rig.rest()
    free = rig.prefill().worker.caches[0].num_free
    for number in (1, 2, 999):
        rig.host.post("prefill0", rig.host.now, TransferFailed(number, "late"))
    rig.rest()
    assert rig.prefill().worker.caches[0].num_free == free
    assert rig.submit("again", prompt(20)).ends == 0
    rig.rest()


def test_blocks_are_announced_only_after_the_step_that_computed_them() -> None:
    rig = Rig(topology={"decode_workers": 1}, scheduler={"max_batched_tokens": 8})
    rig.submit("r", prompt(24), 1)
    rig.rest()
    times = [now for now, source, _, message in rig.sent if isinstance(message, BlocksStored) and source == "prefill0"]
    ends = [now for now, node, event in rig.events if isinstance(event, StepDone) and node == "prefill0"]
    assert len(times) == 3
    assert times == ends


def test_a_request_that_ends_with_its_first_token_frees_its_reservation() -> None:
    rig = Rig()
    first = rig.cold(rig.submit("probe", prompt(12), 1))[0]
    stopped = rig.submit("stopped", prompt(12), 20, stop=(first,))
    rig.rest()
    assert (stopped.finish, stopped.tokens) == ("stop", [first])
    assert len(rig.messages_of(PushesEnded)) == 1
