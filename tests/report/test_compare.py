from __future__ import annotations

import io
import re

import msgspec
from rich.console import Console

from rackserve.bench.metrics import STAMPED_LATE, summarize
from rackserve.bench.records import RunInfo
from rackserve.report.compare import Arm, compare, is_rough, print_comparison, text_of, verdicts
from tests.report.arms import arm


def test_ratios_are_within_a_host_to_its_first_arm_and_simulated_to_live_of_one_label() -> None:
    arms = [arm("sticky", slow=2), arm("least"), arm("sticky", "simulated", slow=2.2), arm("least", "simulated", slow=1.1)]
    table = compare(arms)
    assert table.arm_names == ("live sticky", "live least", "simulated sticky", "simulated least")
    assert table.ratio_names == (
        "live: least / sticky", "simulated: least / sticky", "sticky: simulated / live", "least: simulated / live"
    )  # fmt: skip
    [rate] = [row for row in table.rows if row.name == "requests/s"]
    assert rate.ratios[2:] == ("0.91×", "0.91×")
    assert float(rate.ratios[0].rstrip("×")) > 1.9


def test_throughput_rows_are_three_and_the_total_names_cached_input() -> None:
    rows = [row for row in compare([arm("a")]).rows if row.section == "Tokens/s per GPU or rank"]
    assert [row.name for row in rows] == ["output", "uncached input", "cached input", "all three, cached input included"]
    parts = [float(row.cells[0].replace(",", "")) for row in rows]
    assert abs(sum(parts[:3]) - parts[3]) < 2


def test_a_simulated_figure_stands_beside_its_models_error() -> None:
    table = compare([arm("a"), arm("a", "simulated"), arm("b", "simulated", step_error=0.042)])
    [error] = [row for row in table.rows if row.name.startswith("step-time model")]
    assert error.cells == ("–", "not calibrated", "4.2%")
    assert not any(row.name.startswith("step-time model") for row in compare([arm("a")]).rows)


def test_figures_no_arm_has_are_left_out_and_missing_ones_are_dashes() -> None:
    empty = Arm(summarize(RunInfo("b", "live", 1, 1), []))
    assert not any(row.section == "Rack" for row in compare([empty]).rows)
    [balance] = [row for row in compare([arm("a"), empty]).rows if row.name.startswith("largest")]
    assert balance.cells[1] == balance.ratios[0] == "–"


def test_what_became_of_drafts_is_shown_by_position_where_there_were_any() -> None:
    plain = arm("a")
    assert not any(row.section == "Drafts" for row in compare([plain]).rows)
    drafted = msgspec.structs.replace(
        plain, summary=msgspec.structs.replace(plain.summary, draft_acceptance=(0.75, 0.5), tokens_per_step_with_bonus=2.25)
    )
    rows = [row for row in compare([plain, drafted]).rows if row.section == "Drafts"]
    assert [(row.name, row.cells) for row in rows] == [
        ("tokens per step, the bonus included", ("–", "2.25")),
        ("draft 1 accepted, of those verified", ("–", "75.0%")),
        ("draft 2 accepted, of those verified", ("–", "50.0%")),
    ]
    out = io.StringIO()
    print_comparison([drafted], Console(file=out, width=140))
    assert "tokens per step, the bonus included" in out.getvalue() and "draft 2" not in out.getvalue()


def test_numbers_have_three_digits() -> None:
    shown = [text_of(value, "number") for value in (0.1234, 1.234, 12.34, 123.4, 12345.6, None)]
    assert shown == ["0.12", "1.23", "12.3", "123", "12,346", "–"]
    assert (text_of(1234, "count"), text_of(0.5, "share")) == ("1,234", "50.0%")


def test_the_printed_table_says_why_a_run_is_invalid() -> None:
    out = io.StringIO()
    print_comparison([arm("a"), arm("b", num_failed=9)], Console(file=out, width=140))
    text = out.getvalue()
    assert "interactivity p90 (slow tail)" in text
    assert "invalid live b: 9 of 40 requests failed, above 10%" in text
    assert "invalid live a" not in text


def test_a_valid_run_whose_client_was_late_says_so_in_the_table() -> None:
    late = msgspec.structs.replace(arm("b").summary, warnings=(f"the client was busy, so {STAMPED_LATE}",))
    [row] = [row for row in compare([arm("a"), Arm(late), arm("c", num_failed=9)]).rows if row.name == "valid run"]
    assert row.cells == ("yes", "yes, but late stamps", "NO")


def test_a_sentence_about_two_arms_does_not_hide_a_loss_of_interactivity() -> None:
    [line] = verdicts([arm("a"), arm("b", slow=2)])
    assert line.startswith("live: b / a: ")
    speeds = re.search(r"interactivity ([\d.]+)x at p50 and ([\d.]+)x at p90", line)
    assert speeds is not None
    assert all(float(ratio) < 0.7 for ratio in speeds.groups())


def test_a_run_without_times_per_token_has_no_interactivity_in_its_sentence() -> None:
    [line] = verdicts([arm("a"), Arm(summarize(RunInfo("b", "live", 1, 1), []))])
    assert "interactivity" not in line


def test_scattered_step_times_make_a_simulated_arm_rough_and_are_said_once() -> None:
    arms = [arm("a", "simulated", step_error=0.25), arm("b", "simulated", step_error=0.31), arm("c", "simulated")]
    assert [is_rough(each) for each in arms] == [False, True, False]
    out = io.StringIO()
    print_comparison(arms, Console(file=out, width=160))
    assert out.getvalue().count("step times scattered (machine busy?)") == 1
    assert "(error: simulated b 31.0%)" in out.getvalue()
    assert "not calibrated" in out.getvalue().splitlines()[1], "in the head of its column"
    quiet = io.StringIO()
    print_comparison(arms[:1], Console(file=quiet, width=160))
    assert "scattered" not in quiet.getvalue()
