from __future__ import annotations

import pytest

from rackserve.sim.cost.kernels import Kernels, kernel_sets
from rackserve.sim.hardware import Value

SHARES = (
    "memory_efficiency",
    "overlap",
    "decode_rate_share",
    "prefill_rate_share",
    "far_share",
    "local_experts",
    "local_residuals",
)


@pytest.mark.parametrize("kernels", kernel_sets().values(), ids=kernel_sets())
def test_every_coefficient_is_known_has_a_source_and_lies_in_its_range(kernels: Kernels) -> None:
    for name in Kernels.__struct_fields__:
        value: Value = getattr(kernels, name)
        assert value.mark in ("measured", "published", "fitted", "assumed") and value.source, name
        assert value.get(name) >= 0, name
        assert value.get(name) <= 1 or name not in SHARES, name
    assert min(kernels.number(name) for name in ("blocks_in_flight", "weight_stages", "expert_rate_gain")) >= 1


@pytest.mark.parametrize("name", kernel_sets())
def test_what_is_fitted_says_to_what(name: str) -> None:
    values: list[Value] = [getattr(kernel_sets()[name], field) for field in Kernels.__struct_fields__]
    for value in values:
        if value.mark == "fitted":
            assert any(word in value.source for word in ("notes", "2026-1"))


def test_nothing_is_fitted_to_a_held_out_figure() -> None:
    held_out = ("0.93", "29K", "29,", "1.7 M", "387", "58x", "29.8", "4.2 s", "0.98", "0.38", "10.3", "1,117", "68 %")
    for kernels in kernel_sets().values():
        for field in Kernels.__struct_fields__:
            assert not [figure for figure in held_out if figure in getattr(kernels, field).source]
