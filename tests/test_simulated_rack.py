from __future__ import annotations

from math import isfinite

import msgspec
import pytest

from rackserve.base.errors import ConfigError
from rackserve.base.topology import Role
from rackserve.bench.session import Session
from rackserve.bench.synth import Recipe, Spread
from rackserve.bench.synth import synthesize as draw
from rackserve.reproduction.workload import coarsened
from rackserve.sim.cost.load import decode_load, prefill_load
from rackserve.simulated_rack import (
    BLOCK_TOKENS,
    SimulatedFigures,
    SimulatedSetup,
    flash_layout,
    prefill_rate,
    rack_config,
    run_rack,
    simulate_rack,
)

SHORT = Recipe(turns=Spread(12, 0.3), groups=Spread(1, 0.1), gap_s=Spread(2, 0.5), output=Spread(100, 0.5), long_gap_share=0)
SETUP = SimulatedSetup(
    chip="vr", prefill_groups=2, concurrency=24, decode_ranks=2, decode_width=32, settle_s=2, window_s=10, batch=2
)


@pytest.fixture(scope="module")
def sessions() -> tuple[Session, ...]:
    return tuple(coarsened(session, BLOCK_TOKENS) for session in draw(6, 1, SHORT))


@pytest.fixture(scope="module")
def pool(sessions: tuple[Session, ...]) -> SimulatedFigures:
    return simulate_rack(SETUP, sessions)


def test_a_replay_on_modelled_hardware_is_the_same_each_time(pool: SimulatedFigures, sessions: tuple[Session, ...]) -> None:
    assert simulate_rack(SETUP, sessions) == pool


def test_figures_of_a_window_fit_together(pool: SimulatedFigures) -> None:
    assert pool.num_failed == 0 and pool.num_requests > 20
    assert pool.requests_per_s == pool.num_requests / SETUP.window_s
    assert pool.total_per_gpu == pytest.approx(pool.tokens_per_request * pool.requests_per_s / SETUP.num_gpus)
    assert pool.ttft_p50_s is not None and pool.ttft_p90_s is not None and 0 < pool.ttft_p50_s <= pool.ttft_p90_s
    assert pool.hit_rate is not None and 0.5 < pool.hit_rate < 1
    assert 0 <= pool.idle_share < 1 and 0 < pool.prefill_busy <= 1 and 0 < pool.decode_busy <= 1


def test_caches_too_small_for_the_sessions_lose_hits_and_time(pool: SimulatedFigures, sessions: tuple[Session, ...]) -> None:
    small = msgspec.structs.replace(SETUP, pool=False, policy="session_affinity", rank_cache_bytes=250e6)
    found = simulate_rack(small, sessions)
    assert found.hit_rate is not None and pool.hit_rate is not None and found.hit_rate < pool.hit_rate
    assert found.uncached_per_request > pool.uncached_per_request
    assert found.ttft_p90_s is not None and pool.ttft_p90_s is not None and found.ttft_p90_s > pool.ttft_p90_s


def test_a_slower_chip_decodes_more_slowly(pool: SimulatedFigures, sessions: tuple[Session, ...]) -> None:
    found = simulate_rack(msgspec.structs.replace(SETUP, chip="gb300"), sessions)
    assert found.interactivity_p90 is not None and pool.interactivity_p90 is not None
    assert found.interactivity_p90 < pool.interactivity_p90


def test_caches_are_as_large_as_memory_leaves_room_for() -> None:
    layout = flash_layout()
    config = rack_config(SETUP, layout)
    assert 90e9 < config.topology.prefill_blocks * layout.block_bytes < 110e9
    assert config.topology.segment_blocks * layout.block_bytes == pytest.approx(1.5e12 / 2 * 0.8, rel=1e-3)
    own = rack_config(msgspec.structs.replace(SETUP, pool=False, rank_cache_bytes=180e9), layout)
    assert own.topology.prefill_blocks * layout.block_bytes == pytest.approx(180e9, rel=1e-3)
    assert not own.topology.pool


def test_full_prefill_steps_have_the_rate_that_was_fitted() -> None:
    assert prefill_rate(SETUP) == pytest.approx(155_000, rel=0.02)


def test_set_ups_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no rack"):
        msgspec.structs.replace(SETUP, chip="h100")
    with pytest.raises(ConfigError, match="decode_ranks"):
        msgspec.structs.replace(SETUP, decode_ranks=33)
    with pytest.raises(ConfigError, match="window_s above 0"):
        msgspec.structs.replace(SETUP, window_s=0.0)


def test_a_window_in_which_nothing_ends_has_zeros_and_no_averages(sessions: tuple[Session, ...]) -> None:
    found = simulate_rack(msgspec.structs.replace(SETUP, concurrency=1, settle_s=0.0, window_s=1e-6), sessions)
    assert (found.num_requests, found.requests_per_s, found.tokens_per_request, found.total_per_gpu) == (0, 0.0, 0.0, 0.0)
    assert (found.hit_rate, found.ttft_p50_s, found.interactivity_p90) == (None, None, None)
    assert all(value is None or isfinite(value) for value in msgspec.to_builtins(found).values())


def test_a_run_leaves_what_intervals_are_made_of(sessions: tuple[Session, ...]) -> None:
    found = run_rack(SETUP, sessions)
    assert found.figures == simulate_rack(SETUP, sessions)
    done = [r for r in found.records if not r.error and found.begin_ns < r.ended_ns <= found.end_ns]
    assert len(done) == found.figures.num_requests and len({r.session for r in found.records}) > 1
    assert len(found.queued) == 10 and all(0 <= value <= SETUP.concurrency * 5 for value in found.queued)
    assert 0 < found.figures.decode_batch <= SETUP.concurrency
    assert 0 < found.figures.num_sessions < found.figures.num_requests


def test_factors_move_what_they_name_and_nothing_else() -> None:
    def changed(**factors: float) -> SimulatedSetup:
        return msgspec.structs.replace(SETUP, **factors)

    def step(setup: SimulatedSetup, role: Role) -> float:
        load = decode_load(16, 16 * 1e5, 6) if role == "decode" else prefill_load(8192, 1e5)
        return setup.model(role).seconds([load])

    slow = changed(decode_time=1.2)
    assert step(slow, "decode") == pytest.approx(1.2 * step(SETUP, "decode")) and step(slow, "prefill") == step(
        SETUP, "prefill"
    )
    assert step(changed(prefill_time=0.8), "prefill") == pytest.approx(0.8 * step(SETUP, "prefill"))
    assert step(changed(memory_bandwidth=1.2), "decode") < step(SETUP, "decode")
    assert changed(link_bandwidth=2.0).hardware.number("nic_bytes_per_s") == 2 * SETUP.hardware.number("nic_bytes_per_s")
    before, after = (rack_config(setup, flash_layout()).topology for setup in (SETUP, changed(cache_size=0.5)))
    assert after.segment_blocks == pytest.approx(before.segment_blocks / 2, abs=1)
    assert after.prefill_blocks == pytest.approx(before.prefill_blocks / 2, abs=1)
    assert after.decode_blocks == before.decode_blocks


def test_speculation_can_be_off_and_is_then_one_token_a_step(sessions: tuple[Session, ...]) -> None:
    off = simulate_rack(msgspec.structs.replace(SETUP, drafts=0, accepted=1.0), sessions)
    on = simulate_rack(SETUP, sessions)
    assert off.interactivity_p90 is not None and on.interactivity_p90 is not None
    assert off.interactivity_p90 < on.interactivity_p90
    with pytest.raises(ConfigError, match="a step with 0 drafts yields from 1 to 1 tokens"):
        msgspec.structs.replace(SETUP, drafts=0)
    with pytest.raises(ConfigError, match="cache_size is a factor"):
        msgspec.structs.replace(SETUP, cache_size=0.0)


def test_a_rack_that_joins_a_replay_later_sees_the_longer_prompts_of_then(sessions: tuple[Session, ...]) -> None:
    growing = Recipe(turns=Spread(300, 0.01), groups=Spread(1, 0.1), gap_s=Spread(2, 0.1), long_gap_share=0, compact_share=0)
    drawn = tuple(coarsened(session, BLOCK_TOKENS) for session in draw(4, 1, growing))
    first = msgspec.structs.replace(SETUP, concurrency=4, warmup_requests=2, window_s=20)
    later = simulate_rack(msgspec.structs.replace(first, joined_s=200.0), drawn)
    assert later.num_failed == 0 and later.num_requests > 10
    assert later.tokens_per_request > 1.1 * simulate_rack(first, drawn).tokens_per_request
    with pytest.raises(ConfigError, match="joined_s must be at least 0"):
        msgspec.structs.replace(SETUP, joined_s=-1.0)


def test_a_decode_group_that_is_whole_is_priced_as_one(sessions: tuple[Session, ...]) -> None:
    whole = msgspec.structs.replace(SETUP, decode_width=2)
    found = simulate_rack(whole, sessions)
    assert found.line_error == 0 and found.num_failed == 0
    assert found.interactivity_p90 is not None
    fastest = 1 / whole.model("decode").seconds([decode_load(0.5, 50_000, 6)]) * whole.accepted
    assert 0.3 * fastest < found.interactivity_p90 < fastest
