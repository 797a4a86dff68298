from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from rackserve.base.costs import StepCost
from rackserve.bench.frontier import Curve, OperatingPoint
from rackserve.bench.metrics import DEFINITIONS, summarize
from rackserve.bench.records import RunInfo
from rackserve.report.compare import Arm
from rackserve.report.html import MAX_BARS, curves_of, render_report, timeline_rows, write_report
from tests.report.arms import arm


class _Balance(HTMLParser):
    """Fails on a tag that is closed out of order."""

    VOID = frozenset({"meta", "line", "rect", "circle", "path", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID or self.get_starttag_text()[-2:] != "/>":  # type: ignore[index]
            self.open.append(tag) if tag != "meta" else None

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_needs_nothing_from_anywhere(tmp_path: Path) -> None:
    arms = [arm("a<b>"), arm("c", num_failed=9), arm("c", "simulated")]
    write_report(tmp_path / "report.html", arms, title="T & t", costs={"prefill": StepCost(1e6, 5, 1, 2, 3, 50, 0.03, 0.1)})
    page = (tmp_path / "report.html").read_text()
    parser = _Balance()
    parser.feed(page)
    assert parser.open == []
    page = page.replace('const SVG = "http://www.w3.org/2000/svg";', "")  # a name, not an address
    assert not re.search(r"<link|src=|href=|https?:|@import|url\(|fetch\(|XMLHttpRequest", page)
    assert "a&lt;b&gt;" in page
    assert "<b>a" not in page
    assert "T &amp; t" in page
    assert "prefers-color-scheme: dark" in page


def test_the_page_says_what_cannot_be_trusted_and_how_figures_are_defined() -> None:
    page = render_report([arm("a", num_failed=9), arm("a", "simulated"), arm("b", "simulated", step_error=0.07)])
    assert "9 of 40 requests failed, above 10%" in page
    assert "timeout 9" in page
    assert "step-time model error: not calibrated" in page
    assert "step-time model error: 7.0%" in page
    assert all(name in page for name in DEFINITIONS)
    assert "route.policy = a" in page


def test_a_run_in_which_everything_failed_can_be_reported() -> None:
    page = render_report([Arm(summarize(RunInfo("a", "live", 1, 1), []))])
    assert "no request succeeded" in page
    assert "no data" in page


def test_live_and_simulated_points_are_curves_apart_and_runs_without_rates_are_no_points() -> None:
    empty = Arm(summarize(RunInfo("c", "live", 1, 1), []))
    curves = curves_of([arm("a"), arm("a", "simulated"), arm("b"), empty])
    assert [(curve.name, [point.label for point in curve.points]) for curve in curves] == [
        ("live", ["a", "b"]),
        ("simulated", ["a"]),
    ]


def test_other_runs_can_be_drawn_into_the_frontier() -> None:
    page = render_report([arm("a")], curves=[Curve("last year", (OperatingPoint("earlier", 9, 500.0, 1.0),))])
    assert "last year: earlier, c = 9" in page


def test_requests_are_drawn_on_the_ranks_they_were_placed_on() -> None:
    one = arm("a", num=12)
    rows = dict(timeline_rows(one))
    assert list(rows) == ["prefill0.0", "prefill0.1", "decode0.0"]
    assert len(rows["decode0.0"]) == 12 == len(rows["prefill0.0"]) + len(rows["prefill0.1"])
    first = one.records[0]
    [waiting] = [bar for name in ("prefill0.0", "prefill0.1") for bar in rows[name] if bar.start == 0]
    assert (waiting.end, waiting.part) == ((first.first_ns - first.sent_ns) / 1e9, 0)
    assert waiting.end in {bar.start for bar in rows["decode0.0"]}


def test_a_rough_simulation_is_not_green_and_an_uncalibrated_one_says_so_at_the_top() -> None:
    page = render_report([arm("a"), arm("b", "simulated", step_error=0.3), arm("c", "simulated"), arm("d", num_failed=9)])
    assert re.findall(r'class="card (\w+)"', page) == ["valid", "rough", "rough", "invalid"]
    assert page.count("step times scattered (machine busy?)") == 1
    headline = page[: page.index("Side by side")]
    assert 'simulated c <small class="warn">not calibrated' in headline
    assert 'simulated b <small class="warn">step-time error 30.0%' in headline


def test_the_slow_tail_of_the_table_is_the_low_dot_of_its_curve() -> None:
    one = arm("a")
    dots = dict(re.findall(r'cy="([\d.]+)" r="3.5"><title>live a: p90 \(slow tail\) = ([\d.]+)', render_report([one])))
    assert list(dots) == ["231.8"], "10 % of the height"
    assert dots["231.8"] == f"{one.summary.interactivity_p90:.3g}"


def test_one_arm_gives_figures_not_a_comparison() -> None:
    alone, both = render_report([arm("a")]), render_report([arm("a"), arm("b")])
    assert '<h2>Figures</h2><div class="scroll fit"><table data-name="figures">' in alone
    assert '<h2>Side by side</h2><div class="scroll"><table data-name="figures">' in both


def test_prices_of_a_step_have_readable_units_and_a_dash_for_none() -> None:
    page = render_report([arm("a")], costs={"decode": StepCost(105.2e6, 8_310, 0, 616, 0, 276, 0.1, None)})
    row = page[page.index("<th>decode</th>") :]
    assert re.findall(r"<td>([^<]*)</td>", row)[:8] == [
        "105 ms",
        "8.31 µs",
        "–",
        "616 ns",
        "–",
        "276",
        "10.0%",
        "not calibrated",
    ]


def test_a_run_of_very_many_requests_has_no_timeline() -> None:
    one, many = arm("a"), arm("b", num=MAX_BARS + 1)
    page = render_report([one, many]).split("<h2>Where requests ran</h2>")[1].split("<h2>")[0]
    assert "timeline of live a" in page and "timeline of live b" not in page


def test_timelines_of_all_arms_end_at_one_time() -> None:
    page = render_report([arm("a"), arm("b", slow=3)]).split("<h2>Where requests ran</h2>")[1]
    ends = re.findall(r'>([^<]*)</text><text class="axis"[^>]*>seconds', page)
    assert len(ends) == 2
    assert len(set(ends)) == 1
