from __future__ import annotations

from prometheus_client import CollectorRegistry

from rackserve.api.step_parts import PARTS, StepParts
from rackserve.base.ids import Rank
from rackserve.live.step_times import StepTimes


def test_each_scrape_asks_anew_and_what_is_not_known_is_zero() -> None:
    parts, registry = StepParts([Rank("prefill0"), Rank("decode0", 1)]), CollectorRegistry()
    registry.register(parts)

    def seconds(rank: str) -> list[float | None]:
        name = "rackserve_step_part_seconds_total"
        return [registry.get_sample_value(name, {"rank": rank, "part": part}) for part in PARTS]

    assert seconds("prefill0.0") == seconds("decode0.1") == [0, 0, 0]
    parts.look = lambda: {"decode0.1": (3.0, 0.5, 2.0)}
    assert seconds("prefill0.0") == [0, 0, 0] and seconds("decode0.1") == [3.0, 0.5, 2.0]


def test_the_parts_are_those_that_engines_tell() -> None:
    assert StepTimes.__struct_fields__ == PARTS
