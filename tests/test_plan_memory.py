"""The command that says what fits, before anything is fetched or started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rackserve.base.errors import ConfigError
from rackserve.cli import main
from rackserve.plan_memory import SHIPPED, capacity_bytes, config_path, parse_size
from rackserve.sim.hardware import chips

GOLDEN = Path(__file__).parent / "golden" / "deepseek_v41_tiny"
EP8 = ["--set", "topology.prefill_ranks=8", "--set", "topology.decode_ranks=8"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan-memory", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_released_model_is_the_default_and_its_totals_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    for text in (
        "510,285,574,488 B", "288.778 GB", "7.933 GB", "551.57 B parameters", "196.614 B", "14.225 B",
        "layer 1 94.415 GiB, layer 14 94.418 GiB", "890 B per token", "windows 2,703,360 B", "DSpark windows 202,752 B",
        "open groups, at most 12,288 B", "vision and aligner (estimate, not loaded)",
        "prefill device: 1 of 2", "decode device: 1 of 1",
    ):  # fmt: skip
        assert text in out, text
    assert config_path(SHIPPED) == config_path(None)


def test_settings_shape_the_plan_and_a_fitting_one_says_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *EP8, "--device", "H200")
    assert code == 0 and out.endswith("fits\n")
    assert "prefill device: 1 of 16 (2 workers of 8 ranks of 1 devices)" in out
    assert "of 126,900,000,000 bytes: " in out and "more KV blocks" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "h200"], "prefill device: no room for routed experts"),
        ([*EP8, "--device-memory", "70GB"], "prefill device: no room for Engram tables"),
        ([*EP8, "--device-memory", "70GB", "--engram-shards", "0", "--set", "topology.decode_blocks=200000"],
         "decode device: no room for KV blocks"),
        ([*EP8, "--device", "h200", "--set", "runner.weights=widened"], "prefill device: no room for routed experts"),
    ],
)  # fmt: skip
def test_what_does_not_fit_ends_with_the_line_that_breaks(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 4 and err.startswith(f"rackserve: {says}") and err.count("\n") == 1
    assert "decode device: 1 of" in out and "fits" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device-memory", "lots"], "--device-memory 'lots' is no size"),
        (["--device", "abacus"], "--device 'abacus' is unknown; choose h100"),
        (["--set", "topology.prefill_tp=3"], "topology.prefill_tp or topology.prefill_ranks: tensor parallel 3: o_groups is 8"),
        (["--set", "topology.decode_ranks=5"], "topology.decode_tp or topology.decode_ranks: expert parallel 5"),
        (["--set", "topology.rank_windows=0"], "topology.rank_windows must be at least 3"),
        (["--set", "runner.block_tokens=31"], "runner.block_tokens is 31"),
    ],
)
def test_a_wrong_value_is_named_with_exit_code_2(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2 and err.startswith(f"rackserve: {says}"), err


def test_a_config_is_a_file_or_its_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "--config", str(GOLDEN))
    assert code == 0 and "3,633,164 B" in out and "vision" not in out
    assert config_path(str(GOLDEN)) == config_path(str(GOLDEN / "config.json"))
    code, _, err = run(capsys, "--config", str(tmp_path / "none.json"))
    assert code == 3 and "none.json: cannot be read" in err


@pytest.mark.parametrize(
    ("text", "size"),
    [("141GB", 141 * 10**9), ("80 GiB", 80 << 30), ("1.5kB", 1500), ("1000", 1000), ("141e9", 141 * 10**9), ("2b", 2)],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "0.1", "1 GX", "nan", "inf", "1e999", "9" * 400, "1GB2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(text)


def test_usable_is_a_share_of_what_the_device_has() -> None:
    assert capacity_bytes(None, None, 0.5) is None
    assert capacity_bytes("1000", None, 0.5) == 500
    assert capacity_bytes(None, "h200", 1.0) == 141 * 10**9


def test_both_commands_about_memory_know_the_same_chips_and_plan_with_the_same_share(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, chip in chips().items():
        code, out, _ = run(capsys, *EP8, "--device", name, "--set", "topology.decode_blocks=1")
        assert f"of {int(0.9 * chip.number('memory_bytes')):,} bytes" in out
        assert code in (0, 4)


def test_planning_needs_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; from rackserve.cli import main; sys.exit(main(['plan-memory']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and "890 B per token" in done.stdout
