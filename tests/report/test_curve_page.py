from __future__ import annotations

from pathlib import Path

from rackserve.report.curve_page import render_curves, write_curve_report
from rackserve.report.curves import compare_curves
from tests.report.pair import NEW, OLD


def test_the_page_has_the_comparison_the_curves_and_the_rules(tmp_path: Path) -> None:
    write_curve_report(tmp_path / "x.html", [NEW, OLD], [compare_curves(NEW, OLD, at=[387])])
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    places = [page.index(part) for part in ("<h2>new over old</h2>", "<h2>The curve</h2>", "How each figure is defined")]
    assert places == sorted(places)


def test_curves_may_stand_alone() -> None:
    page = render_curves([NEW], title="T & t")
    assert "T &amp; t" in page and "<h2>The curve</h2>" in page and "Multiple at matched" not in page
