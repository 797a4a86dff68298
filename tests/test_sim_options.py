from __future__ import annotations

import pytest

from rackserve.cli import parser


def test_settings_axes_and_concurrencies_may_be_several() -> None:
    words = ["sim", "--set", "pool=false", "--set", "seed=3", "--grid", "chip=vr,gb300", "--concurrency", "1,2"]
    options = parser().parse_args(words)
    assert (options.overrides, options.grid, options.concurrency) == (["pool=false", "seed=3"], ["chip=vr,gb300"], (1, 2))
    assert (options.seeds, options.processes, options.sessions, options.floor) == (None, 2, 393, 0.0)


def test_a_price_is_above_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["sim", "--price", "0"])
    assert "argument --price: must be from" in capsys.readouterr().err


def test_the_help_tells_sim_from_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["sim", "--help"])
    assert "on chips that\nnobody here owns" in capsys.readouterr().out
