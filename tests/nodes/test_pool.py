"""The pool node's laws: nothing is visible before it is written, and nothing is held for ever."""

from __future__ import annotations

from rackserve.base.events import PrefillAdmitted
from rackserve.base.ids import POOL, POOL_RANK, Rank
from rackserve.base.keys import count, prefix
from rackserve.base.messages import (
    BlocksStored,
    Message,
    PoolCancel,
    PoolCommit,
    PoolFound,
    PoolGranted,
    PoolLookup,
    PoolRelease,
    PoolStore,
)
from rackserve.nodes.pool import PoolNode
from rackserve.pool.directory import Directory
from tests.nodes.rig import MS, Rig, prompt


def pooled(**topology: int) -> Rig:
    return Rig(topology={"pool": True, "prefill_workers": 2} | topology, router={"policy": "round_robin"})


def directory(rig: Rig) -> Directory:
    assert isinstance(rig.rack.pool, PoolNode)
    return rig.rack.pool.directory


def test_finished_work_is_spilled_and_found_by_every_other_rank() -> None:
    rig = pooled()
    first = rig.submit("t1", prompt(20), 9)
    rig.rest()
    rig.submit("t2", prompt(20) + first.tokens + prompt(2, 3), 2)
    rig.rest()
    second = rig.events_of(PrefillAdmitted)[1]
    assert (second.rank, second.local_tokens, second.fetched_tokens) == (Rank("prefill1"), 0, 28)  # prompt and answer


def test_blocks_are_announced_only_after_their_writer_has_committed() -> None:
    rig = pooled()
    rig.submit("r", prompt(20), 1)
    rig.rest()
    stored = next(now for now, source, _, m in rig.sent if isinstance(m, BlocksStored) and m.holder == POOL_RANK)
    committed = next(now for now, _, _, message in rig.sent if isinstance(message, PoolCommit))
    assert stored > committed


def test_a_writer_that_dies_half_way_leaves_a_miss_and_a_free_key() -> None:
    """Another writer may store the same blocks, and a reader in between finds nothing."""
    rig = pooled()
    for site in rig.rack.sites.values():
        assert site.store is not None
        site.store.slowdown = 20.0
    rig.submit("a", prompt(20), 1)
    rig.on_message(
        PoolGranted, lambda: rig.host.call(rig.host.now + MS, lambda: rig.rack.kill("prefill0", noticed_after=20 * MS))
    )
    rig.run(15 * MS)
    assert "prefill0" not in rig.rack.workers()
    rig.submit("b", prompt(20), 1)  # computed on prefill1, whose store request comes while the dead writer is not noticed
    rig.run(15 * MS)
    assert directory(rig).num_blocks == 0
    rig.run(100 * MS)
    rig.submit("c", prompt(20), 1)
    rig.rest()
    assert directory(rig).num_blocks == 5
    assert [event.fetched_tokens for event in rig.events_of(PrefillAdmitted)] == [0, 0, 0]
    rig.rack.start("prefill0")
    rig.submit("d", prompt(20), 1)
    rig.rest()
    assert {event.request: event.fetched_tokens for event in rig.events_of(PrefillAdmitted)}["d"] in (0, 16)


def test_a_lost_commit_keeps_the_slots_out_of_reach_until_the_writer_says_it_is_done() -> None:
    rig = pooled()
    rig.lose(PoolCommit)
    rig.submit("r", prompt(20), 1)
    rig.run(1000 * MS)
    assert (directory(rig).num_held, directory(rig).num_blocks) == (1, 0)
    rig.rest()  # past the grant's deadline the writer is asked, and cancels
    assert directory(rig).num_held == 0
    assert directory(rig).counters.expired_grants == 1
    assert len(rig.messages_of(PoolCancel)) == 1


def test_ends_told_twice_late_or_of_unknown_holds_change_nothing() -> None:
    rig = pooled()
    rig.submit("a", prompt(20), 1)
    rig.rest()
    rig.submit("b", prompt(20), 1)
    rig.rest()
    before = (directory(rig).num_blocks, directory(rig).blocks.num_free)
    late: list[Message] = list(rig.messages_of(PoolCommit))
    late += rig.messages_of(PoolRelease)
    late += [PoolCommit(99), PoolCancel(99), PoolRelease(99), PoolCancel(rig.messages_of(PoolCommit)[0].grant)]
    for message in late:
        rig.host.post(POOL, rig.host.now, message)
    rig.rest()
    assert (directory(rig).num_blocks, directory(rig).blocks.num_free) == before


def test_a_doubled_grant_is_written_once() -> None:
    rig = pooled()
    rig.rules.append(lambda source, target, message: [0, MS] if isinstance(message, PoolGranted) else None)
    rig.submit("r", prompt(20), 1)
    rig.rest()
    assert directory(rig).num_blocks == 5
    assert len(rig.messages_of(PoolCommit)) == 1


def test_leased_blocks_outlive_everything_stored_after_them() -> None:
    """A slow fetch reads five blocks while other prompts fill the pool several times over."""
    rig = pooled(segment_blocks=4, decode_workers=1)
    rig.submit("warm", prompt(20), 1)
    rig.rest()
    for site in rig.rack.sites.values():
        assert site.store is not None
    reader = rig.rack.sites["prefill1"].store
    assert reader is not None
    reader.slowdown = 300.0
    again = rig.submit("again", prompt(21), 6)
    for number in range(10):
        rig.submit(f"r{number}", prompt(20, number + 1), 1, at=rig.host.now + (1 + number) * 5 * MS)
    rig.rest()
    assert directory(rig).counters.evicted > 0
    assert again.usage is not None
    assert again.usage.cached_tokens == 20
    assert again.tokens == rig.cold(again)


def test_the_lease_of_a_dead_reader_ends_with_it() -> None:
    rig = pooled()
    rig.submit("warm", prompt(20), 1)
    rig.rest()
    rig.submit("again", prompt(21), 6)
    rig.on_message(PoolFound, lambda: rig.rack.kill("prefill1", noticed_after=3 * MS))
    while "prefill1" in rig.rack.workers():
        rig.run(MS // 20)
    rig.run(2 * MS)
    assert directory(rig).num_held == 1
    rig.run(5 * MS)
    assert directory(rig).num_held == 0
    rig.rest()


def test_losing_a_tray_is_a_miss_and_never_an_error() -> None:
    rig = pooled()
    for number in range(4):
        rig.submit(f"a{number}", prompt(20, number), 2)
    rig.rest()
    assert directory(rig).num_blocks > 0
    for worker in rig.rack.sites:
        rig.rack.lose_segment(worker)
        rig.rack.join_segment(worker)
    rig.run(MS)
    assert directory(rig).num_blocks == 0
    for number in range(4):
        rig.submit(f"b{number}", prompt(20, number), 2)
    rig.rest()
    assert all(answer.attempts == 1 for answer in rig.client.answers.values())
    assert rig.rack.router.index.holding(POOL_RANK)


def test_a_store_request_for_blocks_the_pool_has_gets_nothing() -> None:
    rig = pooled()
    answer = rig.submit("a", prompt(20), 1)
    rig.rest()
    chain = prefix(answer.request.chain, 5)
    assert count(chain) == 5
    rig.host.post(POOL, rig.host.now, PoolStore("x", 1, Rank("prefill0"), chain, 0))
    rig.host.post(POOL, rig.host.now, PoolLookup("y", 1, Rank("prefill0"), chain, 5))
    rig.rest()
    assert rig.messages_of(PoolGranted)[-1].grant == 0
    assert rig.messages_of(PoolFound)[-1].lease == 0
