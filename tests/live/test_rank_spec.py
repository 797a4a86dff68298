from __future__ import annotations

import msgspec

from rackserve.assemble import RackConfig
from rackserve.base.topology import Topology
from rackserve.digest_model import digest_layout
from rackserve.live.rank_spec import Beat, KvUse, Limits, RankSpec
from rackserve.live.regions import RegionFile, RegionShape
from rackserve.live.runner import RunnerSpec
from rackserve.live.step_times import StepTimes
from tests.live.processes import new_meeting


def test_a_spec_survives_the_pipe_as_one_line() -> None:
    config = RackConfig(topology=Topology(prefill_workers=2, decode_workers=1))
    region = RegionFile("arena/prefill1.0#3", RegionShape(4, 0, 32, 0), 77, 5)
    limits = Limits(1.0, 2.0, 3.0)
    spec = RankSpec("prefill1", "prefill", 3, new_meeting(), (region,), digest_layout(4), RunnerSpec(), config, limits)
    line = msgspec.json.encode(spec)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=RankSpec) == spec
    assert spec.arena(0) == region.name
    assert spec.workers == ("prefill0", "prefill1", "decode0")


def test_the_devices_of_a_worker_are_those_of_its_role() -> None:
    config = RackConfig(topology=Topology(prefill_tp=3, decode_ranks=2, decode_tp=2))
    spec = RankSpec("prefill0", "prefill", 1, new_meeting(), (), digest_layout(4), RunnerSpec(), config)
    assert (spec.num_ranks, spec.tp_size, spec.num_devices) == (1, 3, 3)
    decode = msgspec.structs.replace(spec, worker="decode0", role="decode")
    assert (decode.num_ranks, decode.tp_size, decode.num_devices) == (2, 2, 4)
    assert decode.arena(1) == "arena/decode0.1#1"


def test_a_beat_survives_the_wire() -> None:
    for beat in (Beat(3, 17), Beat(3, 0, (KvUse(1, 2, 3),), (StepTimes(1, 2, 3),))):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(beat), type=Beat) == beat
