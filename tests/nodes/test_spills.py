"""From a rank to the pool: one offer after the other, each settled once, nothing held for a pool that does not answer."""

from __future__ import annotations

import pytest

from rackserve.base.events import PrefillAdmitted
from rackserve.base.ids import POOL
from rackserve.base.keys import count
from rackserve.base.messages import PoolCancel, PoolCommit, PoolGranted, PoolStore
from rackserve.kv.rank_cache import RankCache
from tests.nodes.rig import BLOCK, Rig, prompt

SHARED = prompt(4 * BLOCK)


def forked() -> Rig:
    """The second request parts from the first and leaves a state there; it has not ended yet."""
    rig = Rig(window=True, topology={"pool": True})
    rig.submit("a", SHARED + prompt(2 * BLOCK, 7), 1)
    rig.rest()
    rig.submit("b", SHARED + prompt(2 * BLOCK, 8), 1)
    return rig


def test_the_whole_is_offered_first_and_then_the_part_at_whose_end_a_state_was_left() -> None:
    rig = forked()
    rig.rest()
    stores = [message for message in rig.messages_of(PoolStore) if message.request == "b"]
    assert [count(store.chain) for store in stores] == [6, 4]
    assert all(store.with_window for store in stores)
    grants = [message for message in rig.messages_of(PoolGranted) if message.request == "b"]
    assert [(grant.from_block, len(grant.slots), grant.window_slot is not None) for grant in grants] == [
        (4, 2, True),
        (4, 0, True),
    ]


def test_a_late_copy_of_the_first_grant_is_not_taken_for_the_second() -> None:
    rig = forked()

    def deliver_the_first_again() -> None:
        first = next(message for message in rig.messages_of(PoolGranted) if message.request == "b")
        rig.host.send(POOL, "prefill0", first)

    rig.on_message(PoolStore, deliver_the_first_again, when=lambda store: store.request == "b" and count(store.chain) == 4)
    rig.rest()
    first, second = sorted({message.grant for message in rig.messages_of(PoolGranted) if message.request == "b"})
    assert first in {message.grant for message in rig.messages_of(PoolCancel)}
    assert second in {message.grant for message in rig.messages_of(PoolCommit)}


@pytest.mark.parametrize("lost", [PoolStore, PoolGranted])
def test_without_an_answer_nothing_is_held_any_longer(lost: type[PoolStore] | type[PoolGranted]) -> None:
    rig = forked()
    rig.lose(lost, when=lambda message: message.request == "b")
    rig.rest()
    assert len([message for message in rig.messages_of(PoolStore) if message.request == "b"]) == 1


def test_a_state_the_rank_gave_up_meanwhile_is_not_offered() -> None:
    rig = forked()
    cache = rig.prefill().worker.caches[0]

    def give_up() -> None:
        for _ in range(24):
            cache._give_up(cache._cache.evict_window(1))

    rig.on_message(PoolStore, give_up, when=lambda store: store.request == "b")
    rig.rest()
    assert [count(message.chain) for message in rig.messages_of(PoolStore) if message.request == "b"] == [6]


def test_blocks_without_a_state_are_offered_only_where_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankCache, "commit_window", lambda self, lease, num_blocks, slot: None)
    for model, offered in (({"window": True}, False), ({"replay": 2}, True)):
        rig = Rig(model=model, topology={"pool": True})
        rig.submit("a", prompt(3 * BLOCK), 1)
        rig.rest()
        assert bool(rig.messages_of(PoolStore)) == offered
        assert rig.events_of(PrefillAdmitted)
