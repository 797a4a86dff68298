"""Clients leave by the thousand, at every stage of a request: all is given back, and what they wanted is not computed."""

from __future__ import annotations

import pytest
from msgspec import structs

from rackserve.base.events import StepDone
from rackserve.base.ids import NodeId
from rackserve.base.messages import (
    HandOver,
    Message,
    Placed,
    PoolFound,
    PoolGranted,
    PoolLookup,
    PoolStore,
    Prefill,
    Reserve,
    Reserved,
    TokensEmitted,
)
from rackserve.base.rng import draw_below
from rackserve.base.units import NS_PER_MS, NS_PER_US
from rackserve.sim.checks import check_at_rest
from tests.nodes.rig import MS, SHORT, Rig, prompt

LEAVERS = 2_000
AT_ONCE = 20


def test_thousands_that_leave_at_any_time_leave_a_rack_as_it_was() -> None:
    """With a pool and two ranks of each role; a tenth stays. Laws of a rack at rest are checked at the end of each wave."""
    rig = Rig(topology={"prefill_workers": 2, "decode_workers": 2, "pool": True}, max_requests=AT_ONCE)
    rig.host.after_event = lambda: None  # too dear for so many; what holds at rest is what this is about
    kept, left, at = [], 0, 0
    for number in range(LEAVERS):
        name = f"{number}"
        at += draw_below(2_000, "pause", number) * NS_PER_US
        answer = rig.submit(name, prompt(20 + draw_below(60, "length", number), number % 50), 8, at=at)
        if number % 10:
            rig.cancel(name, at + draw_below(30_000, "leave", number) * NS_PER_US)
            left += 1
        else:
            kept.append(answer)
        if number % AT_ONCE == AT_ONCE - 1:
            rig.run()
            check_at_rest(rig.rack)
            at = rig.host.now
    rig.rest()
    ends = [answer.finish for answer in rig.client.answers.values()]
    assert ends.count("cancelled") > left // 2
    assert all(answer.finish == "length" for answer in kept)


def holdings(rig: Rig) -> dict[str, int]:
    """Everything that is held for somebody, of every kind, over the whole rack."""
    workers = [node.worker for node in rig.rack.workers().values()]
    caches = [cache for worker in workers for cache in worker.caches]
    pool, router, frontend = rig.rack.pool, rig.rack.router, rig.rack.frontend
    assert pool is not None
    directory = pool.directory
    return {
        "requests": frontend.num_live,
        "bookings": sum(not book.is_idle() for book in (router.prefill_load, router.decode_load)),
        "promises": not router.promises.is_empty(),
        "sequences": sum(len(worker.sequences) for worker in workers),
        "waiting": sum(len(queue) for worker in workers for queue in worker.queues),
        "places": sum(worker.num_active(rank) for worker in workers for rank in range(len(worker.ranks))),
        "transfers": sum(len(worker.moves) for worker in workers),
        "offers": sum(not worker.spiller.is_quiet for worker in workers),
        "leases on ranks": sum(cache.num_leases for cache in caches),
        "blocks in use": sum(cache.num_in_use for cache in caches),
        "pinned blocks": sum(cache.num_cached + cache.num_free - cache.usable for cache in caches),
        "leases and grants of the pool": directory.num_held,
        "pool slots that are neither free nor cached": directory.blocks.total
        - directory.blocks.num_free
        - directory.num_blocks,
        "alarms": sum(len(alarms) for alarms in (frontend._alarms, router._alarms, *(worker.alarms for worker in workers))),
    }


STAGES = (Placed, Prefill, PoolLookup, PoolFound, Reserve, Reserved, TokensEmitted, HandOver, PoolStore, PoolGranted)


@pytest.mark.parametrize("stage", STAGES)
def test_leaving_at_any_stage_gives_everything_back_long_before_a_deadline(stage: type[Message]) -> None:
    """Before the first token, in prefill, while KV is fetched, pushed or spilled, and in decode; forty at once, twice over."""
    rig = Rig(
        topology={"prefill_workers": 2, "decode_workers": 2, "pool": True, "segment_blocks": 300},
        deadlines=structs.replace(SHORT, lookup=8, transfer=9, fence=1, queue=100, silence=200),
        max_requests=200,
        lease_s=60,
    )
    rig.host.after_event = lambda: None
    for number in range(40):
        rig.submit(f"warm{number}", prompt(48, number), 1)
    rig.run(2_000 * MS)
    at_rest = dict.fromkeys(holdings(rig), 0)
    assert holdings(rig) == at_rest
    left: set[str] = set()

    def rule(source: NodeId, target: NodeId, message: Message) -> None:
        key = message.placement.request if isinstance(message, Placed | Prefill | Reserve) else getattr(message, "request", "")
        if isinstance(message, stage) and key not in left and key.startswith("leaver"):
            left.add(key)
            rig.host.call(rig.host.now, lambda: rig.cancel(key))

    rig.rules.append(rule)
    for wave in range(2):
        for number in range(40):
            tokens = [*prompt(48, number), *prompt(30, 5 * number + wave)]
            rig.submit(f"leaver{wave}/{number}", tokens, 40, at=rig.host.now + number * MS // 2)
        rig.run(3_000 * MS)
        assert holdings(rig) == at_rest
    assert len(left) >= 40
    assert rig.rack.pool is not None and rig.rack.pool.directory.counters.expired_leases == 0
    rig.rest()


@pytest.mark.parametrize("moment", [Placed, Prefill, TokensEmitted])
def test_compute_stops_within_two_steps_of_leaving(moment: type[Placed | Prefill | TokensEmitted]) -> None:
    rig = Rig(topology={"prefill_blocks": 256, "decode_blocks": 512})
    rig.on_message(moment, lambda: rig.cancel("leaver"))
    rig.submit("leaver", prompt(600), 1_000)
    rig.run(3_000 * NS_PER_MS)
    begun = next(at for at, _, _, message in rig.sent if isinstance(message, moment))
    steps = [at for at, _, event in rig.events if isinstance(event, StepDone) and at > begun]
    assert len(steps) <= 2
    rig.rest()
