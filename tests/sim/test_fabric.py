from __future__ import annotations

import pytest

from rackserve.base.errors import ConfigError
from rackserve.sim.fabric import allreduce_s, alltoall_s, link_cost
from rackserve.sim.hardware import chips

GB300 = chips()["gb300"]


def test_an_exchange_is_its_latency_and_the_bytes_that_leave_over_the_link() -> None:
    assert alltoall_s(GB300, 4, 900e9, 1e-6) == pytest.approx(1e-6 + 0.75)
    assert allreduce_s(GB300, 4, 900e9, 1e-6) == pytest.approx(1e-6 + 1.5)


def test_who_is_alone_exchanges_nothing() -> None:
    assert alltoall_s(GB300, 1, 1e9, 1e-6) == allreduce_s(GB300, 1, 1e9, 1e-6) == 0


def test_a_transfer_takes_the_bandwidth_of_its_way() -> None:
    assert link_cost(GB300, "nic", 50).duration_ns(10**9) == 50_000 + 10_000_000
    assert link_cost(GB300, "link", 0, share=0.5).duration_ns(450 * 10**6) == 1_000_000
    assert link_cost(GB300, "host", 0).duration_ns(225 * 10**6) == 1_000_000


def test_a_way_whose_bandwidth_nobody_published_is_refused() -> None:
    with pytest.raises(ConfigError, match="RTX PRO 6000 Blackwell: nic_bytes_per_s is unknown"):
        link_cost(chips()["rtx-pro-6000"], "nic", 10)
