from __future__ import annotations

import pytest

from rackserve.base.errors import ConfigError
from rackserve.sim.cost.setup import Setup
from rackserve.sim.hardware import chips
from tests.sim.cost.models import PLAIN, flash, with_chip, with_kernels


def test_a_group_over_more_chips_than_a_link_joins_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"16 chips .ep 16 x tp 1. exceed the 8 of B200"):
        flash("b200", "decode", ep=16)


def test_experts_that_cannot_be_cut_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match="384 experts cannot be cut over ep 5 evenly"):
        flash("gb300", "decode", ep=5)


@pytest.mark.parametrize(("tp", "ep", "shards"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_widths_below_one_are_refused(tp: int, ep: int, shards: int) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        flash("gb300", "decode", tp=tp, ep=ep, table_shards=shards)


def test_reads_in_flight_sustain_their_bytes_over_their_latency() -> None:
    kernels = with_kernels("blackwell", weight_stages=7, stage_bytes=1000, memory_latency_us=2)
    setup = Setup(architecture=PLAIN, chip=with_chip(num_sms=100), kernels=kernels, role="decode")
    assert setup.staged_bytes_per_s == pytest.approx(7 * 1000 * 100 / 2e-6)


def test_more_stages_lift_the_limit_that_seven_put_on_rubin_by_twelve_percent() -> None:
    first, now = flash("vr", "decode", kernels="rubin-first").setup, flash("vr", "decode").setup
    assert now.bytes_per_s / first.staged_bytes_per_s == pytest.approx(1.12, rel=0.01)
    assert now.staged_bytes_per_s > now.bytes_per_s


def test_only_a_chip_with_two_memory_domains_loses_by_reads_that_no_kernel_places() -> None:
    assert flash("gb300", "decode").setup.spread_share == 1
    assert flash("vr", "decode").setup.spread_share == pytest.approx(0.85)
    assert chips()["vr"].number("memory_domains") == 2


def test_experts_read_locally_are_faster_by_the_published_share() -> None:
    first, now = flash("vr", "decode", kernels="rubin-first").setup, flash("vr", "decode").setup
    gain = now.domain_share("local_experts") / first.domain_share("local_experts")
    assert 1.16 <= gain <= 1.2
