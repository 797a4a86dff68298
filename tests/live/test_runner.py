from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import pytest

from rackserve.assemble import RackConfig
from rackserve.base.errors import ConfigError, ResourceError
from rackserve.base.request import Constraint, Request, SamplingParams
from rackserve.base.step import Step, StepItem
from rackserve.base.units import MIB
from rackserve.digest_model import cold_output, digest_layout
from rackserve.kernels.cpu import library as kernels
from rackserve.live import runner as runner_module
from rackserve.live.rack import LiveRack
from rackserve.live.runner import RunnerSpec, check_drafts, layout_of, open_runner, process_bytes, require_packages, unsupported
from rackserve.model import extra
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.thread_group import ThreadGroup
from tests.model import libraries, tiny
from tests.text import small_model

LAYOUT_SCRIPT = """
import sys
from rackserve.live.rack import LiveRack
from rackserve.live.runner import RunnerSpec, check_drafts, layout_of, process_bytes, require_packages
spec = RunnerSpec(kind=sys.argv[1], model=sys.argv[2], block_tokens=16)
process_bytes(spec)
require_packages(spec)
print(layout_of(spec).block_bytes, *sorted({"torch", "gguf", "safetensors", "numpy"} & set(sys.modules)))
"""


def test_the_digest_runner_computes_in_the_given_arena() -> None:
    spec = RunnerSpec(block_tokens=4, vocab_size=50)
    arena = memoryview(bytearray(4 * layout_of(spec).block_bytes))
    tokens = b"".join(token.to_bytes(4, "little") for token in range(6))
    item = StepItem(1, 0, 6, tokens, (2, 0), sample=True)
    result = open_runner(spec, arena, 4).run(Step(0, (item,)))
    assert list(result.items[0].tokens) == cold_output(tokens, 1, vocab_size=50)
    assert any(arena[:32]) and any(arena[64:96]) and not any(arena[32:64])


def test_a_paced_step_takes_as_long_as_asked_for_and_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(runner_module.time, "monotonic_ns", partial(next, count(0, 1_000_000)))
    monkeypatch.setattr(runner_module.time, "sleep", waits.append)
    tokens = b"".join(token.to_bytes(4, "little") for token in range(6))
    step = Step(0, (StepItem(1, 0, 6, tokens, (2, 0), sample=True),))
    paced, plain = (
        open_runner(spec, memoryview(bytearray(4 * layout_of(spec).block_bytes)), 4)
        for spec in (RunnerSpec(block_tokens=4, step_ms=40.0, token_us=500.0), RunnerSpec(block_tokens=4))
    )
    assert paced.run(step) == plain.run(step) and waits == [pytest.approx(0.042)]
    assert paced.kernel_ns == plain.kernel_ns == 2_000_000
    with pytest.raises(ConfigError, match=r"runner\.step_ms and runner\.token_us mean nothing to runner\.kind llama"):
        RunnerSpec(kind="llama", step_ms=1.0)


def test_the_layout_is_that_of_the_model() -> None:
    assert layout_of(RunnerSpec(block_tokens=8, window=True)) == digest_layout(8, window=True)


def test_a_wrong_spec_is_refused_by_name() -> None:
    for wrong in (0, 2**31):
        with pytest.raises(ConfigError, match=r"runner\.vocab_size must be at"):
            RunnerSpec(vocab_size=wrong)
    with pytest.raises(ConfigError, match=r"runner\.block_tokens must be at most 65536"):
        RunnerSpec(block_tokens=65_537)
    with pytest.raises(ConfigError, match=r"runner\.block_tokens"):
        RunnerSpec(block_tokens=0)
    with pytest.raises(msgspec.ValidationError, match="kind"):
        msgspec.json.decode(b'{"kind": "gpt"}', type=RunnerSpec)
    with pytest.raises(msgspec.ValidationError, match="speed"):
        msgspec.json.decode(b'{"speed": 1}', type=RunnerSpec)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v41"])
def test_the_control_process_learns_layout_and_size_without_torch(kind: str, tmp_path: Path) -> None:
    folder = "golden" if kind == "deepseek_v41" else str(tiny.write_folder(tmp_path / "model"))
    out = subprocess.check_output([sys.executable, "-c", LAYOUT_SCRIPT, kind, folder], text=True)
    spec = RunnerSpec(kind=kind, model=folder, block_tokens=16)  # type: ignore[arg-type]
    assert out.split() == [str(layout_of(spec).block_bytes)]


# ---------------------------------------------------------------- DeepSeek-V4.1

GOLDEN = RunnerSpec(kind="deepseek_v41", model="golden", block_tokens=32)


def test_the_layout_says_how_a_prefix_is_resumed() -> None:
    exact, bounded, decoder = (
        layout_of(msgspec.structs.replace(GOLDEN, resume=resume)) for resume in ("exact", "bounded_replay", "decoder_replay")
    )
    assert exact.stores_state and exact.history_tokens == 3
    assert (bounded.replay_tokens, bounded.tail_tokens) == (16, 0)
    assert (decoder.replay_tokens, decoder.tail_tokens) == (16, 16)
    with pytest.raises(ConfigError, match=r"runner\.block_tokens is 15: no block of this model may cut"):
        layout_of(msgspec.structs.replace(GOLDEN, block_tokens=15))


def test_an_engine_gets_the_options_of_the_spec() -> None:
    spec = msgspec.structs.replace(GOLDEN, weights="stored", engram_hot_rows=7)
    assert spec.options == RunnerOptions(weights="stored", engram_hot_rows=7)


def test_a_device_of_a_group_holds_its_part() -> None:
    torch = msgspec.structs.replace(GOLDEN, kernels="torch")
    alone, half, experts = process_bytes(torch), process_bytes(torch, tp_size=2), process_bytes(torch, ep_size=2)
    assert 400 * MIB < half < experts < alone
    assert process_bytes(msgspec.structs.replace(torch, weights="stored")) < alone


def test_the_model_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    folder = str(tiny.write_folder(tmp_path / "model"))
    for spec in (RunnerSpec(kind="llama", model="golden"), RunnerSpec(kind="deepseek_v41", model=folder)):
        with pytest.raises(ConfigError, match=r"set runner\.kind to"):
            layout_of(spec)


@pytest.mark.parametrize(("acceptance", "warnings"), [(0.0, 0), (3.5, 1)])
def test_synthetic_acceptance_is_told_loudly(acceptance: float, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    spec = msgspec.structs.replace(GOLDEN, synthetic_acceptance=acceptance)
    open_runner(spec, memoryview(bytearray(2 * layout_of(spec).block_bytes)), 2)
    told = [record for record in caplog.records if record.levelno >= logging.WARNING and "not the model's" in record.message]
    assert len(told) == warnings


@pytest.mark.skipif(
    kernels.find() is None or not hasattr(os, "sched_getaffinity"), reason="no native kernels, or no cores to choose"
)
def test_a_step_of_deepseek_v41_is_shared_by_as_many_threads_as_asked_for_on_their_cores() -> None:
    core, before = max(os.sched_getaffinity(0)), set(os.listdir("/proc/self/task"))
    spec = msgspec.structs.replace(GOLDEN, kernels="native")
    runner = open_runner(spec, memoryview(bytearray(2 * layout_of(spec).block_bytes)), 2, threads=3, cores=(core,) * 3)
    born = set(os.listdir("/proc/self/task")) - before
    assert [os.sched_getaffinity(int(thread)) for thread in born].count({core}) == 2
    del runner  # with which its threads end


def test_a_llama_cannot_be_split(tmp_path: Path) -> None:
    spec = RunnerSpec(kind="llama", model=str(tiny.write_folder(tmp_path / "model")))
    arena = memoryview(bytearray(2 * layout_of(spec).block_bytes))
    with pytest.raises(ConfigError, match=r"llama cannot be split .* topology\.decode_tp to 1"):
        ThreadGroup(2, lambda collectives: open_runner(spec, arena, 2, collectives))


def test_a_rack_without_the_packages_of_its_model_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = extra.find_spec
    monkeypatch.setattr(extra, "find_spec", lambda name: None if name == "torch" else real(name))
    with pytest.raises(ResourceError, match=r"needs torch: pip install -e '\.\[engine\]' in the checkout"):
        LiveRack(RackConfig(), RunnerSpec(kind="llama"))
    with pytest.raises(ResourceError, match=r"runner\.kind deepseek_v41 needs torch"):
        require_packages(RunnerSpec(kind="deepseek_v41"))
    LiveRack(RackConfig(), RunnerSpec(kind="digest"))
    require_packages(RunnerSpec(kind="digest"))


@pytest.mark.parametrize(
    ("library", "line"),
    [(libraries.by_itself, ""), (libraries.by_count, "in tiles of 16 rows"), (libraries.by_place, "row by row")],
)
def test_a_rank_says_in_one_line_if_it_must_cut_its_products(
    library: libraries.Scale, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    libraries.install(monkeypatch, library)
    spec = RunnerSpec(kind="llama", model=str(tiny.write_folder(tmp_path / "model")))
    with caplog.at_level(logging.WARNING):
        open_runner(spec, memoryview(bytearray(2 * layout_of(spec).block_bytes)), 2)
    assert len(caplog.messages) == bool(line) and line in "".join(caplog.messages)


def test_with_native_kernels_weights_are_held_as_they_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_folder(tmp_path)
    spec, golden = RunnerSpec(kind="llama", model=str(tmp_path)), msgspec.structs.replace(GOLDEN, weights="stored")
    monkeypatch.setattr("rackserve.kernels.cpu.choice.chosen", lambda _: "")
    slow, widened = process_bytes(spec), process_bytes(GOLDEN)
    monkeypatch.setattr("rackserve.kernels.cpu.choice.chosen", lambda _: "avx2")
    assert process_bytes(spec) == slow > process_bytes(msgspec.structs.replace(spec, kernels="native"))
    monkeypatch.setattr("rackserve.kernels.cpu.choice.chosen", lambda _: "avx512")
    assert slow - process_bytes(spec) == 80 * MIB + (tmp_path / "model.safetensors").stat().st_size
    (tmp_path / "quantised.blocks").write_bytes(b"less")
    assert process_bytes(spec) == 320 * MIB + 4
    assert process_bytes(GOLDEN) == process_bytes(golden) < widened
    assert process_bytes(GOLDEN, ep_size=2) > process_bytes(golden, ep_size=2), "torch computes where experts are spread"


def test_a_rank_process_is_expected_to_hold_its_weights_in_float32(tmp_path: Path) -> None:
    weights = tiny.write_folder(tmp_path) / "model.safetensors"
    small_model.write_folder(tmp_path)
    expected = process_bytes(RunnerSpec(kind="llama", model=str(tmp_path), kernels="torch"))
    assert expected - 2 * weights.stat().st_size == 400 * MIB
    assert process_bytes(RunnerSpec(kind="digest")) < 100 * MIB


def test_more_drafts_than_the_model_makes_are_refused() -> None:
    spec = RunnerSpec(kind="deepseek_v41", model="golden", block_tokens=32)
    check_drafts(spec, 5)
    check_drafts(RunnerSpec(kind="digest"), 100)
    with pytest.raises(ConfigError, match=r"num_draft is 6: this model drafts 5 tokens"):
        check_drafts(spec, 6)


def test_what_the_toy_model_cannot_do_is_named_before_it_is_tried() -> None:
    plain, model = Request("r", "s", b"", b"", 1, 1), RunnerSpec(kind="llama")
    scored = msgspec.structs.replace(plain, prompt_logprobs=0)
    dictated = msgspec.structs.replace(plain, sampling=SamplingParams(constraint=Constraint("json_object")))
    assert [unsupported(RunnerSpec(), request) for request in (plain, scored, dictated)] == [
        None,
        "prompt_logprobs",
        "constraint",
    ]
    assert [unsupported(model, request) for request in (plain, scored, dictated)] == [None] * 3
