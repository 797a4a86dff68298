from __future__ import annotations

import pytest

from rackserve.cli import main
from rackserve.sim.hardware import MARKS


def test_the_terms_add_up_to_the_step_and_each_says_how_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost-model", "--chip", "gb300", "--ep", "16"]) == 0
    table = capsys.readouterr().out.split("around here")[0].splitlines()
    assert table[0] == "deepseek-v4.1-flash, decode on 16 x GB300 NVL72 (ep 16, tp 1)"
    rows = [line for line in table if line.endswith(MARKS)]
    names = {row[:20].strip() for row in rows}
    assert {"experts", "attention", "indexer", "residual streams", "all-to-all", "launches", "draft head"} <= names
    total = sum(float(row[20:32]) for row in rows)
    assert float(table[-1].split()[1]) == pytest.approx(total, abs=0.1 * len(rows))


def test_a_prefill_step_on_rubin_is_shown_with_its_line_and_unknown_values(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["cost-model", "--chip", "vr", "--role", "prefill", "--ep", "2", "--table-shards", "18", "--tail", "128"])
    out = capsys.readouterr().out
    assert code == 0
    assert "us a token" in out and "ps a pair of positions" in out
    assert (
        "l2_bytes                  unknown  unknown" in out.replace("   unknown  unknown", "  unknown  unknown")
        or "unknown" in out
    )
    assert "tables                          11.264 GB" in out


@pytest.mark.parametrize(("chip", "ranks"), [("gb300", 2), ("vr", 2), ("h200", 4), ("h100", 8)])
def test_without_a_width_the_narrowest_group_that_holds_the_model_is_shown(
    chip: str, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cost-model", "--chip", chip]) == 0
    out = capsys.readouterr().out
    assert f"decode on {ranks} x " in out and "sequences" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--chip", "h1000"], 2, "--chip 'h1000' is unknown; choose one of h100, "),
        (["--model", "x"], 2, "--model 'x' is unknown"),
        (["--kernels", "x"], 2, "--kernels 'x' is unknown; choose one of blackwell"),
        (["--ep", "7"], 2, "384 experts cannot be cut over ep 7 evenly"),
        (["--chip", "h100", "--ep", "2"], 4, "H100 SXM, decode: no room for experts: "),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    options: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cost-model", *options]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(f"rackserve: {says}")
    assert not captured.out, "nothing is printed before it is known to fit"


def test_more_sequences_than_a_rank_holds_are_refused_with_how_many_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost-model", "--sequences", "1000000"]) == 4
    assert "no room for cached tokens" in (told := capsys.readouterr()).err and told.out == ""
