"""What a tuning names is what the kernels read."""

from __future__ import annotations

from dataclasses import fields

from rackserve.kernels.cpu.build import SOURCES
from rackserve.kernels.cpu.v41 import SIZES
from rackserve.kernels.cpu.v41_tuning import Tuning


def test_every_part_is_in_the_plan_in_the_order_of_the_header() -> None:
    names = tuple(field.name for field in fields(Tuning))
    assert SIZES[-len(names) :] == names
    assert f"int32_t {', '.join(names)};" in (SOURCES / "v41_plan.h").read_text()
