from __future__ import annotations

import argparse

import pytest

from rackserve import profile_command
from rackserve.base.errors import ConfigError, RackserveError, ResourceError
from rackserve.kernels.cpu import library
from rackserve.model.files import open_model


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    profile_command.add_arguments(parser)
    return parser.parse_args(given)


def test_what_is_no_kernel_is_the_rest_and_shares_make_a_whole() -> None:
    table = profile_command.as_table({"qkv": 0.3, "attend": 0.1}, 0.5, 10)
    assert [line.split() for line in table.splitlines()] == [
        ["qkv", "30.000", "ms", "60.0%"],
        ["attend", "10.000", "ms", "20.0%"],
        ["around", "10.000", "ms", "20.0%"],
        ["step", "50.000", "ms"],
    ]


def test_a_model_of_another_family_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"--model golden is a DeepSeek-V4\.1: profile measures models of the Llama family only"
    ):
        profile_command.profile(options("--model", "golden"))


@pytest.fixture
def model() -> None:
    if library.find() is None:
        pytest.skip("no kernels are built here")
    try:
        open_model("embedded")
    except RackserveError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("more", [(), ("--prefill",), ("--batch", "3", "--threads", "2")])
def test_each_stage_of_a_real_step_is_told(more: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert profile_command.profile(options("--model", "embedded", "--context", "20", "--steps", "2", *more)) == 0
    told = {line.split()[0]: float(line.split()[1]) for line in capsys.readouterr().out.splitlines()[1:]}
    assert told["gate_up"] > 0 and told["head"] > 0 and told["around"] > 0
    assert told["step"] == pytest.approx(sum(value for name, value in told.items() if name != "step"), abs=0.02)


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--context", "1000000"), "model has 8192 positions"),
        (("--context", str(10**20)), "model has 8192 positions"),
        (("--steps", str(10**20)), "model has 8192 positions"),
        (("--batch", "1024", "--context", "8000", "--prefill"), "at most 65536 tokens a step"),
    ],
)
def test_what_the_model_or_a_step_cannot_hold_is_refused(given: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        profile_command.profile(options("--model", "embedded", *given))


@pytest.mark.usefixtures("model")
def test_kv_that_memory_cannot_hold_is_refused_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_command, "available_bytes", lambda *_: 1 << 20)
    with pytest.raises(ResourceError, match=r"--batch 2 and --context 100: KV takes \d+ MiB of memory, 1 are available"):
        profile_command.profile(options("--model", "embedded", "--batch", "2", "--context", "100"))


@pytest.mark.parametrize("number", ["-1", "0", "1000000000", str(10**20), str(2**32 + 1)])
def test_batches_and_threads_out_of_range_are_refused_with_the_range(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option, most in (("--batch", 1024), ("--threads", 256)):
        with pytest.raises(SystemExit):
            options(option, number)
        assert f"argument {option}: must be from 1 to {most}, got {number}" in capsys.readouterr().err


def test_the_largest_context_that_fits_is_named_and_every_stage_is_explained() -> None:
    assert profile_command.fitting(1, 8192) == "the model has 8192 positions; with so many steps --context 8190 is the most"
    assert profile_command.fitting(9000, 8192).endswith("--steps 8190 is the most")
    loaded = library.find()
    if loaded is not None:
        assert set(loaded.stages) | {profile_command.AROUND} <= set(profile_command.LINES.replace(",", " ").split())
