from __future__ import annotations

import argparse

import pytest

from rackserve import profile_command
from rackserve.base.errors import ConfigError, RackserveError
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
def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="positions"):
        profile_command.profile(options("--model", "embedded", "--context", "1000000"))
