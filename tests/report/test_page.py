from __future__ import annotations

import csv
import io
import json
import struct
from pathlib import Path

import pytest

from rackserve.report.curve_page import write_curve_report
from rackserve.report.curves import compare_curves
from rackserve.report.html import write_report
from rackserve.report.page import page
from tests.report.arms import arm
from tests.report.browser import browse, needs_browser, run_in_page, width_in_window
from tests.report.pair import NEW, OLD


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, [arm("a"), arm("b", slow=1.3, num_failed=2), arm("a", "simulated")], title="A report")
    return path


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("curves") / "curves.html"
    write_curve_report(path, [NEW, OLD], [compare_curves(NEW, OLD, at=[387])])
    return path


def test_a_page_has_its_style_and_script_inside_and_escapes_its_title() -> None:
    text = page("a < b", "c & d", "<p>body</p>")
    assert "<title>a &lt; b</title>" in text and "<p>c &amp; d</p><" in text
    assert "@media print" in text and "function tableCsv" in text and text.endswith("</html>\n")


@needs_browser
def test_pointing_at_a_mark_shows_its_values(curves: Path) -> None:
    said = run_in_page(
        curves,
        """
        const mark = [...document.querySelectorAll(".panel:not(.other) .dot")].find((c) => c.textContent.includes("c = 86"));
        mark.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
        const tip = document.querySelector(".tip");
        const shown = tip.hidden ? "hidden" : tip.textContent;
        document.body.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
        return `${shown}|${tip.hidden}|${mark.querySelector("title")}`;
        """,
    )
    assert said == "old: narrow, c = 86\n387 tokens/s/user (p90)\n29,000 tokens/s per GPU in all|true|null"


@needs_browser
def test_choosing_a_throughput_shows_its_frontier_alone(report: Path) -> None:
    said = run_in_page(
        report,
        """
        const panels = [...document.querySelectorAll(".panel")];
        const shown = () => panels.filter((p) => p.offsetHeight > 0).map((p) => p.dataset.measure);
        const before = shown();
        document.querySelector('input[value="cached"]').click();
        return JSON.stringify([before, shown()]);
        """,
    )
    assert json.loads(said) == [["output"], ["cached"]]


@needs_browser
def test_every_table_can_be_saved_as_csv_with_plain_numbers(report: Path) -> None:
    said = run_in_page(
        report,
        """
        const links = [...document.querySelectorAll("a.csv")];
        links.forEach((link) => { link.addEventListener("click", (e) => e.preventDefault()); link.click(); });
        const tables = document.querySelectorAll("table").length;
        return JSON.stringify([tables, links.map((link) => [link.download, decodeURIComponent(link.href)])]);
        """,
    )
    tables, links = json.loads(said)
    assert tables == len(links) == 3
    files = dict(links)
    assert list(files) == ["figures.csv", "operating-points.csv", "ranks.csv"]
    prefix = "data:text/csv;charset=utf-8,\ufeff"
    assert all(text.startswith(prefix) for text in files.values())
    figures = list(csv.reader(io.StringIO(files["figures.csv"].removeprefix(prefix))))
    assert figures[0][:3] == ["section", "", "live a"]
    assert figures[1][:4] == ["Requests", "done", "40", "38"]
    [cached] = [row for row in figures if row[1] == "cached input"]
    assert all(float(cell) > 0 for cell in cached[2:])
    points = list(csv.reader(io.StringIO(files["operating-points.csv"].removeprefix(prefix))))
    assert len(points) == 4 and len({len(row) for row in points}) == 1


@needs_browser
def test_the_waterfall_shows_the_chosen_session(report: Path) -> None:
    said = run_in_page(
        report,
        """
        const choice = document.getElementById("session"), place = document.getElementById("waterfall");
        const texts = () => [...place.querySelectorAll("text.value")].map((t) => t.textContent);
        const looks = () => [...place.querySelectorAll("rect")].map((r) => r.getAttribute("class"));
        const first = texts().length;
        const failed = [...choice.options].find((o) => o.parentElement.label === "live b" && o.text.startsWith("s1 "));
        choice.value = failed.value;
        choice.dispatchEvent(new Event("change"));
        const tip = place.querySelector("rect title").textContent;
        return JSON.stringify([choice.options.length, first, texts(), looks(), tip]);
        """,
    )
    num_options, first, texts, looks, tip = json.loads(said)
    assert (num_options, first, len(texts)) == (18, 7, 7)
    assert texts[0].endswith("· timeout") and not any("timeout" in text for text in texts[1:])
    assert looks == ["t0", "w2", *["t0", "t1"] * 6]
    assert tip.startswith("b/1\n") and "failed: timeout" in tip and "first token after " in tip


@needs_browser
def test_printing_opens_what_is_folded(report: Path) -> None:
    said = run_in_page(
        report,
        """
        dispatchEvent(new Event("beforeprint"));
        return [...document.querySelectorAll("details")].every((each) => each.open);
        """,
    )
    assert said == "true"


@needs_browser
@pytest.mark.parametrize(("name", "look"), [("report", "--force-light-mode"), ("curves", "--force-dark-mode")])
def test_the_page_is_painted_and_fits_a_narrow_window(
    name: str, look: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path: Path = request.getfixturevalue(name)
    empty = tmp_path / "empty.html"
    empty.write_text(page("x", "", ""), encoding="utf-8")
    sizes = []
    for shown in (empty, path):
        shot = tmp_path / "shot.png"
        browse(shown, "--window-size=1280,1200", f"--screenshot={shot}", look)
        assert struct.unpack(">II", shot.read_bytes()[16:24]) == (1280, 1200)
        sizes.append(shot.stat().st_size)
    assert sizes[1] > 8 * sizes[0], "far more is painted than on an empty page"
    assert width_in_window(path, 400) == 400
