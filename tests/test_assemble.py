"""From configuration to nodes: what cannot work is refused before anything runs."""

from __future__ import annotations

import math

import msgspec
import pytest

from rackserve.assemble import RackConfig, RatesConfig, build_frontend, build_pool, build_router
from rackserve.base.errors import ConfigError
from rackserve.base.topology import Topology
from rackserve.digest_model import digest_layout
from rackserve.nodes.deadlines import Deadlines
from rackserve.nodes.frontend import Frontend, FrontendConfig
from rackserve.nodes.pool import PoolNode
from rackserve.nodes.router import Router
from rackserve.pool.directory import PoolConfig
from tests.nodes.clock import Notes
from tests.nodes.rig import Rig, prompt

WINDOW = digest_layout(4, window=True)


def test_a_pool_lease_that_ends_under_a_transfer_is_refused() -> None:
    RackConfig()
    with pytest.raises(ConfigError, match=r"deadlines\.lookup \+ deadlines\.transfer"):
        RackConfig(deadlines=Deadlines(transfer=20.0))
    RackConfig(deadlines=Deadlines(transfer=20.0), pool=PoolConfig(60 * 10**9))
    RackConfig(deadlines=Deadlines(transfer=20.0), topology=Topology(pool=False))


@pytest.mark.parametrize(
    ("topology", "name"),
    [
        (Topology(rank_windows=2, segment_windows=4), "rank_windows"),
        (Topology(rank_windows=8, segment_windows=0), "segment_windows"),
    ],
)
def test_a_model_with_resume_state_needs_slots_for_it(topology: Topology, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"topology\.{name}"):
        RackConfig(topology=topology).check_layout(WINDOW)
    RackConfig(topology=topology).check_layout(digest_layout(4))


def test_a_state_that_is_only_handed_over_needs_one_slot_and_none_in_the_pool() -> None:
    replayed = digest_layout(4, replay=3)
    RackConfig(topology=Topology(rank_windows=1, segment_windows=0)).check_layout(replayed)
    with pytest.raises(ConfigError, match=r"topology\.rank_windows must be at least 1"):
        RackConfig(topology=Topology(rank_windows=0)).check_layout(replayed)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e-300, 1e300])
@pytest.mark.parametrize("name", ["prefill_tokens_per_s", "fetch_bytes_per_s"])
def test_a_rate_that_cannot_be_measured_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"rates\.{name} must be at"):
        RatesConfig(**{name: value})


def test_a_fetch_may_have_no_latency_but_not_any() -> None:
    assert RatesConfig(fetch_latency_s=0).fetch_latency_s == 0
    for value in (-1.0, math.nan, math.inf, 1e8):
        with pytest.raises(ConfigError, match=r"rates\.fetch_latency_s must be at"):
            RatesConfig(fetch_latency_s=value)


def test_the_cost_of_a_fetch_stays_a_number_that_can_be_counted_with() -> None:
    assert RatesConfig(prefill_tokens_per_s=1e15, fetch_bytes_per_s=1e-6).fetch_cost(WINDOW) == 1e9


@pytest.mark.parametrize(("name", "value"), [("fence", 1e-7), ("booking", 1e8), ("request", math.inf), ("reorder", 1e300)])
def test_a_wait_too_short_or_too_long_to_count_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"deadlines\.{name} must be at"):
        RackConfig(deadlines=Deadlines(**{name: value}))


def test_counts_of_the_frontend_are_bounded() -> None:
    with pytest.raises(ConfigError, match=r"frontend\.max_requests must be at most"):
        RackConfig(frontend=FrontendConfig(max_requests=10**30))


def test_the_fewest_resume_slots_allowed_serve_a_session() -> None:
    """One state is resumed from while two are stored: with two slots a second turn could never start."""
    rig = Rig(window=True, topology={"rank_windows": 3})
    history = prompt(9)
    for turn in range(3):
        answer = rig.submit(f"t{turn}", history, 4)
        rig.rest()
        assert answer.finish == "length"
        history = history + answer.tokens + prompt(4, turn)


def test_a_config_can_be_written_down_and_read_again() -> None:
    config = RackConfig(topology=Topology(prefill_workers=3))
    assert msgspec.json.decode(msgspec.json.encode(config), type=RackConfig) == config
    with pytest.raises(msgspec.ValidationError, match="prefil_workers"):
        msgspec.json.decode(b'{"topology": {"prefil_workers": 3}}', type=RackConfig)


def test_control_nodes_are_built_from_one_config() -> None:
    config, ports = RackConfig(), Notes().ports()
    assert isinstance(build_frontend(config, ports), Frontend)
    assert isinstance(build_router(config, WINDOW, ports), Router)
    assert isinstance(build_pool(config, WINDOW, ports), PoolNode)
