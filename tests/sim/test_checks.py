"""The checks of the laws see what they are there to see."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Rank
from rackserve.base.keys import prefix
from rackserve.base.messages import BlocksStored, TokensEmitted
from rackserve.sim.checks import FrontendWatch, blocks_of, check_always, check_at_rest, check_every, check_index
from tests.nodes.rig import MS, Rig, prompt


def under_way() -> Rig:
    """A rack with a push, a spill and a decode under way."""
    rig = Rig(topology={"pool": True, "decode_blocks": 64}, scheduler={"max_batched_tokens": 8})
    for site in rig.rack.sites.values():
        assert site.store is not None
        site.store.slowdown = 30.0
    rig.submit("r", prompt(24), 8)
    rig.run(8 * MS)
    kinds = {transfer.kind for transfer, _ in rig.prefill().worker.moves.under_way()}
    assert "push" in kinds
    check_always(rig.rack)
    return rig


def free_source(rig: Rig) -> None:
    _, sequence = rig.prefill().worker.moves.under_way()[0]
    assert sequence.lease is not None
    sequence.lease.blocks = [slot + 40 for slot in sequence.lease.blocks]


def free_target(rig: Rig) -> None:
    (sequence,) = rig.decode().worker.sequences.values()
    sequence.lease = None


def book_twice(rig: Rig) -> None:
    rig.rack.router.prefill_load._totals[Rank("prefill0")] = 99


def place_twice(rig: Rig) -> None:
    placed = rig.rack.router._placed
    placed["r", 2] = placed["r", 1]


@pytest.mark.parametrize(
    ("spoil", "law"),
    [
        (free_source, "does not hold blocks|two owners"),
        (free_target, "does not hold blocks"),
        (book_twice, "counted"),
        (place_twice, "two attempts"),
    ],
)
def test_a_broken_law_is_seen_after_the_event(spoil: Callable[[Rig], None], law: str) -> None:
    rig = under_way()
    spoil(rig)
    with pytest.raises(InvariantError, match=law):
        check_always(rig.rack)


def test_laws_may_be_checked_once_in_so_many_events() -> None:
    rig = under_way()
    check_every(rig.rack, 5)
    book_twice(rig)
    before = rig.host.num_events
    with pytest.raises(InvariantError, match="counted"):
        rig.host.run()
    assert rig.host.num_events - before <= 5
    calls: list[int] = []
    check_every(rig.rack, 3)
    after_event = rig.host.after_event
    assert after_event is not None
    for number in range(1, 10):
        try:
            after_event()
        except InvariantError:
            calls.append(number)
    assert calls == [3, 6, 9]


def test_a_rack_with_work_left_is_not_at_rest() -> None:
    with pytest.raises(InvariantError, match="never ended"):
        check_at_rest(under_way().rack)


@pytest.mark.parametrize("more", [True, False])
def test_an_index_that_claims_more_or_less_than_there_is_is_seen(more: bool) -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(24), 1)
    rig.rest()
    index, rank = rig.rack.router.index, Rank("prefill0")
    chain = answer.request.chain
    index.drop(rank)
    number = rig.prefill().worker.announcers[0].number
    for event in range(1, number + 1):
        index.apply(BlocksStored(rank, event, chain + b"x" * 16 if more else prefix(chain, 3), 0))
    with pytest.raises(InvariantError, match=f"claims {7 if more else 3} blocks for prefill0.0, it has 6"):
        check_index(rig.rack)


def test_a_late_message_that_changes_something_is_seen() -> None:
    rig = Rig()
    rig.submit("r", prompt(12), 30)
    rig.run(10 * MS)
    frontend = rig.rack.frontend
    frontend._current = lambda request, attempt, message: frontend._live.get(request)  # type: ignore[method-assign]
    got = frontend.delivered()["r"][1]
    with pytest.raises(InvariantError, match="I10"):
        FrontendWatch(frontend).handle(TokensEmitted("r", 0, Rank("decode0"), got, (5,), 0))


def test_blocks_of_chains_are_counted_once() -> None:
    assert blocks_of([b"a" * 16 + b"b" * 16, b"a" * 16 + b"c" * 16]) == {b"a" * 16, b"b" * 16, b"c" * 16}


def test_a_lease_that_nobody_gave_back_is_seen_at_rest() -> None:
    rig = Rig()
    rig.submit("r", prompt(24), 2)
    rig.rest()
    assert rig.prefill().worker.caches[0].acquire(b"", 0, 1) is not None
    with pytest.raises(InvariantError, match="still holds"):
        check_at_rest(rig.rack)
