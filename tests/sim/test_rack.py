"""A simulated rack: production nodes whose workers come and go."""

from __future__ import annotations

import pytest

from rackserve.base.errors import InvariantError
from rackserve.base.ids import ROUTER, Rank
from rackserve.base.messages import RankDown, RankUp, SegmentJoined, SegmentLost
from tests.nodes.rig import MS, Rig, prompt


def test_every_rank_is_announced_to_everyone_alive() -> None:
    rig = Rig(topology={"prefill_workers": 2, "decode_ranks": 2, "pool": True})
    rig.run(MS)
    assert rig.rack.router._up == {
        "prefill": {Rank("prefill0"): 1, Rank("prefill1"): 1},
        "decode": {Rank("decode0"): 1, Rank("decode0", 1): 1},
    }
    rig.sent.clear()
    rig.rack.kill("prefill0", noticed_after=MS)
    rig.run(2 * MS)
    rig.rack.start("prefill0")
    rig.run(MS)
    heard = {(target, type(message)) for _, _, target, message in rig.sent if isinstance(message, RankUp | RankDown)}
    assert heard == {(name, RankDown) for name in (ROUTER, "pool", "prefill1", "decode0")} | {
        (name, RankUp) for name in (ROUTER, "pool", "prefill0", "prefill1", "decode0")
    }
    assert rig.rack.router._up["prefill"][Rank("prefill0")] == 2


def test_a_death_is_noticed_late_but_the_dead_write_nothing() -> None:
    rig = Rig(topology={"prefill_workers": 2})
    rig.submit("r", prompt(24), 4)
    rig.run(2 * MS)
    regions = rig.rack.sites["prefill0"].regions
    rig.rack.kill("prefill0", noticed_after=50 * MS)
    killed = rig.host.now
    rig.run(40 * MS)
    assert not [1 for now, source, _, _ in rig.sent if source == "prefill0" and now > killed]
    assert not rig.messages_of(RankDown)
    assert regions[0] not in rig.rack.regions._regions
    rig.rest()


def test_only_the_living_can_be_killed() -> None:
    rig = Rig()
    rig.rack.kill("prefill0", noticed_after=MS)
    with pytest.raises(InvariantError, match="dead already"):
        rig.rack.kill("prefill0", noticed_after=MS)


def test_a_tray_that_comes_back_joins_under_a_new_number() -> None:
    rig = Rig(topology={"pool": True})
    rig.rack.lose_segment("prefill0")
    rig.rack.join_segment("prefill0")
    rig.rack.kill("decode0", noticed_after=MS)
    rig.run(2 * MS)
    rig.rack.start("decode0")
    rig.run(MS)
    joined = [message.segment for message in rig.messages_of(SegmentJoined)]
    assert sorted({message.segment for message in rig.messages_of(SegmentLost)}) == [0, 1]
    assert joined[-2:] == [2, 3]
    rig.rest()


def test_without_a_pool_there_are_no_segments() -> None:
    rig = Rig()
    rig.rack.lose_segment("prefill0")
    rig.run(MS)
    assert not rig.messages_of(SegmentLost)
    assert not rig.messages_of(SegmentJoined)
