from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from rackserve.bench.records import Recording, RequestRecord, RunInfo
from rackserve.cli import parser
from rackserve.config import Settings, load_settings
from rackserve.demo import ARMS, DEMO_SETTINGS, PARALLEL, STAGES, TIME_SCALE, _Demo
from rackserve.digest_model import cold_output, digest_layout
from rackserve.live.runner import RunnerSpec
from rackserve.model.files import open_model
from rackserve.replay import ReplaySpec
from rackserve.text.tokenizer import pack
from rackserve.verify import Answer, Transcript
from tests.test_verify import request


def demo(*arguments: str, base: Settings | None = None, folder: Path = Path("nowhere")) -> _Demo:
    options = parser().parse_args(["demo", *arguments])
    assert isinstance(options, argparse.Namespace)
    stage = STAGES[options.model]
    return _Demo(options, stage if base is None else msgspec.structs.replace(stage, settings=base), 42, folder)


def test_the_arms_differ_in_pool_and_policy_alone() -> None:
    arms = [demo()._settings(name) for name in ARMS]
    assert [(arm.topology.pool, arm.router.policy) for arm in arms] == [
        (False, "session_affinity"),
        (True, "least_uncached_work"),
    ]
    one, two = (
        msgspec.structs.replace(
            arm,
            topology=msgspec.structs.replace(arm.topology, pool=True),
            router=msgspec.structs.replace(arm.router, policy="least_load"),
        )
        for arm in arms
    )
    assert one == two
    labels = [demo()._spec(name).label for name in ARMS]
    assert labels == ["a", "b"]


def test_both_arms_replay_the_same_requests() -> None:
    one, two = (demo()._spec(name) for name in ARMS)
    assert (one.trace, one.concurrency, one.seed) == (two.trace, two.concurrency, two.seed)


def test_a_setting_of_the_user_reaches_both_arms() -> None:
    base = load_settings(None, ["topology.prefill_blocks=99"], DEMO_SETTINGS)
    assert [demo(base=base)._settings(name).topology.prefill_blocks for name in ARMS] == [99, 99]


def test_options_reach_the_replay() -> None:
    name = list(ARMS)[-1]
    assert demo("--concurrency", "3")._spec(name).concurrency == 3
    assert demo()._spec(name).concurrency > 1
    assert demo("--serial")._spec(name).serial and not demo()._spec(name).serial
    assert [key[:1] for key in demo("--serial")._arms] == ["b"]


def test_each_model_is_asked_in_its_own_tokens() -> None:
    name = list(ARMS)[-1]
    spec = demo("--model", "golden")._spec(name)
    assert (spec.vocabulary, spec.config["model"]) == ((3, 500), "golden")
    assert demo()._spec(name).vocabulary == STAGES["embedded"].vocabulary


def test_synthetic_acceptance_is_written_where_the_figures_are() -> None:
    base = load_settings(None, ["runner.synthetic_acceptance=3.5"], STAGES["golden"].settings)
    name = list(ARMS)[-1]
    assert demo("--model", "golden", base=base)._spec(name).config["synthetic acceptance"].startswith("3.5 tokens a step: not")
    assert "synthetic acceptance" not in demo("--model", "golden")._spec(name).config


@pytest.mark.parametrize(("parallel", "devices", "ranks"), [("", 3, 2), ("tp2", 6, 2), ("dep2", 6, 4)])
def test_parallel_spreads_every_worker_over_two_devices(parallel: str, devices: int, ranks: int) -> None:
    topology = load_settings(None, PARALLEL[parallel], DEMO_SETTINGS).topology
    assert (topology.num_devices, len(topology.ranks("prefill"))) == (devices, ranks)


@pytest.mark.parametrize("name", STAGES)
def test_every_request_of_the_demo_fits_every_rank_and_the_model(name: str) -> None:
    stage = STAGES[name]
    topology, block_tokens = stage.settings.topology, stage.settings.runner.block_tokens
    room = min(topology.prefill_blocks, topology.decode_blocks) * block_tokens
    if name == "golden":
        room = min(room, open_model(name).config.max_positions)
    spec = ReplaySpec("x", stage.trace(), 1, TIME_SCALE, serial=True)
    plan = spec.plan()
    plan.start(0)
    longest = 0
    while not plan.done:
        for send in plan.take_due(0):
            longest = max(longest, send.request.input_tokens + send.request.output_tokens)
            plan.on_finished(send.key, 0)
    assert 0 < longest <= room


# ---------------------------------------------------------------- judgements


def recording(host: str, cached: list[int]) -> Recording:
    requests = [
        RequestRecord(f"r{number}", "s", 0, 0, 1, 10, 3, prompt_tokens=10, cached_tokens=value, output_tokens=3)
        for number, value in enumerate(cached)
    ]
    return Recording(RunInfo("b", host, 1, 3), tuple(requests))


def test_live_and_simulated_must_agree_on_every_request(capsys: pytest.CaptureFixture[str]) -> None:
    same = [recording("live", [0, 4]), recording("simulated", [0, 4])]
    assert demo("--serial")._report_exactness(same) == 0
    assert "2 of 2 requests have the same cached and uncached tokens" in capsys.readouterr().out
    assert demo("--serial")._report_exactness([recording("live", [0, 4]), recording("simulated", [0, 5])]) == 1
    out = capsys.readouterr().out
    assert "r1: live 4 cached" in out and "1 of 2 requests have the same" in out


def verified(tokens: list[int], complete: bool = True) -> int:
    run = demo(base=msgspec.structs.replace(DEMO_SETTINGS, runner=RunnerSpec(block_tokens=4)))
    run._layout = digest_layout(4)
    transcript = Transcript()
    transcript.answers["r"] = Answer(request("r", [1, 2, 3]), tokens, complete)
    return run._verify([transcript, Transcript()])


def test_every_answer_must_be_complete_and_that_of_a_cold_rank(capsys: pytest.CaptureFixture[str]) -> None:
    right = cold_output(pack([1, 2, 3]), 6)
    assert verified(right) == 0
    assert "1 answers compared with a cold rank: 1 equal, 0 differ at ties, 0 wrong, 0 incomplete" in capsys.readouterr().out
    assert verified(right[:3], complete=False) == 1
    assert "1 equal, 0 differ at ties, 0 wrong, 1 incomplete" in capsys.readouterr().out
    assert verified([*right[:5], (right[5] + 1) % 64]) == 1
    out = capsys.readouterr().out
    assert "WRONG: r: output 5" in out and "0 equal, 0 differ at ties, 1 wrong, 0 incomplete" in out


def test_a_run_without_any_answer_is_judged_too() -> None:
    run = demo(base=msgspec.structs.replace(DEMO_SETTINGS, runner=RunnerSpec(block_tokens=4)))
    run._layout = digest_layout(4)
    assert run._verify([Transcript()]) == 0
