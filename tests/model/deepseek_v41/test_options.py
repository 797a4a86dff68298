from __future__ import annotations

import math
import subprocess
import sys

import pytest

from rackserve.base.errors import ConfigError
from rackserve.model.deepseek_v41.layout import RESUME_MODES
from rackserve.model.deepseek_v41.options import RunnerOptions


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("synthetic_acceptance", -1.0),
        ("synthetic_acceptance", 0.5),
        ("synthetic_acceptance", 1e9),
        ("synthetic_acceptance", math.nan),
        ("engram_owners", ()),
        ("engram_hot_rows", -1),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"runner\.{field}"):
        RunnerOptions(**{field: value})


def test_the_exact_and_real_thing_is_what_one_gets_without_asking() -> None:
    options = RunnerOptions()
    assert (options.resume, options.synthetic_acceptance, options.draft_policy) == ("exact", 0.0, "all")
    assert options.resume in RESUME_MODES
    assert RunnerOptions(synthetic_acceptance=3.51).synthetic_acceptance == 3.51


def test_options_are_read_without_torch() -> None:
    script = "import sys, rackserve.model.deepseek_v41.options; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "False"
