"""A live rack and a simulated one, given the same trace, agree on everything that timing cannot change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from rackserve.base.keys import CacheNamespace
from rackserve.bench.demo import demo_trace
from rackserve.bench.metrics import Summary
from rackserve.bench.records import read_recording
from rackserve.commands import link_of
from rackserve.config import load_settings
from rackserve.demo import ARMS, CONCURRENCY, DEMO_SETTINGS, TIME_SCALE
from rackserve.digest_model import digest_layout
from rackserve.replay import ASSUMED_COSTS, ReplaySpec, arm_of, exact_differences, num_gpus, replay_live, replay_simulated
from tests.e2e.rig import command, left_behind, serve, shared_memory


@pytest.mark.parametrize("wide", [[], ["topology.decode_ranks=2", "topology.prefill_tp=2", "topology.decode_tp=2"]])
def test_one_request_at_a_time_every_cached_token_agrees_and_every_answer_is_exact(
    wide: list[str], tmp_path: Path, digest: list[str]
) -> None:
    shared, folder = shared_memory(), tmp_path / "demo"
    options = [*digest, *(part for setting in wide for part in ("--set", setting))]
    with command(tmp_path, "demo", "--serial", "--verify", "--out", str(folder), *options) as running:
        code = running.ends(60.0)
        live, simulated = (read_recording(folder / f"{host}-b.jsonl").requests for host in ("live", "simulated"))
        assert exact_differences(live, simulated) == []
        # On a busy machine this instant model's tokens arrive in one chunk, which makes the run's latencies (alone) invalid.
        assert code == 0 or (code == 1 and "invalid" in running.output), running.errors
        assert (
            f"{len(live)} of {len(live)} requests have the same cached and uncached tokens live and simulated" in running.output
        )
        assert f"{len(live)} answers compared with a cold rank: {len(live)} equal, 0 differ" in running.output
    assert len(live) == demo_trace().num_requests
    assert sum(record.cached_tokens for record in live) > 0
    assert (folder / "report.html").stat().st_size > 0 and (folder / "costs.json").stat().st_size > 0
    assert not left_behind(shared)


def test_with_many_sessions_at_once_the_totals_agree_within_a_tenth(tmp_path: Path, digest: list[str]) -> None:
    arm = [f"{key}={value}" for name, changes in ARMS.items() if name.startswith("b") for key, value in changes.items()]
    settings = load_settings(None, arm, DEMO_SETTINGS)
    config = tmp_path / "settings.yaml"
    config.write_bytes(msgspec.yaml.encode({name: getattr(settings, name) for name in ("topology", "router", "scheduler")}))
    spec = ReplaySpec("b", demo_trace(time_scale=TIME_SCALE), CONCURRENCY, TIME_SCALE)
    gpus = num_gpus(settings.rack)
    with serve(tmp_path, "--config", str(config), *digest) as rack:
        live = arm_of(asyncio.run(replay_live(spec, rack.url, "digest", CacheNamespace("digest", "0", 16, ""), gpus))).summary
    link = link_of(settings)
    simulated = arm_of(replay_simulated(spec, settings.rack, digest_layout(16), ASSUMED_COSTS, link)).summary
    assert live.valid and simulated.valid
    assert live.num_done == simulated.num_done == spec.trace.num_requests
    assert live.prompt_tokens == simulated.prompt_tokens and live.output_tokens == simulated.output_tokens
    assert live.cached_tokens == pytest.approx(simulated.cached_tokens, rel=0.1)
    assert uncached(live) == pytest.approx(uncached(simulated), rel=0.1)


def uncached(summary: Summary) -> int:
    """Prompt tokens that were computed."""
    return summary.prompt_tokens - summary.cached_tokens
