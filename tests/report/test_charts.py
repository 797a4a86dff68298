from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.report.charts import LEVELS, MAX_NUMBERED, SHAPES, HeatRow, Mark, Series, curve_chart, heat_map, shades
from rackserve.report.plots import HEIGHT, LETTER, WIDTH

numbers = st.floats(0.01, 1e7)


def boxes(root: ET.Element) -> list[tuple[float, float, float, float]]:
    """Left, right, top, bottom of every label of a series or mark."""
    found = []
    for text in root.iter("text"):
        look = text.attrib.get("class", "")
        if look.startswith(("name", "value")):
            size = LETTER * len(text.text or "") * (1 if look.startswith("name") else 0.9)
            x, y = float(text.attrib["x"]), float(text.attrib["y"])
            left = x if text.attrib["text-anchor"] == "start" else x - size
            found.append((left, left + size, y - 10, y + 2))
    return found


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12), st.booleans(), st.booleans())
def test_marks_and_labels_lie_inside_and_labels_overlap_nothing(
    pairs: list[tuple[float, float]], log_y: bool, from_zero: bool
) -> None:
    series = [Series(f"s{n}", n, (Mark(x, y, "tip", f"c {n}"),)) for n, (x, y) in enumerate(pairs)]
    root = ET.fromstring(curve_chart(series, "t", "x", "y", log_y=log_y, from_zero=from_zero))
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.iter("circle")]
    assert len(dots) == len(pairs)
    assert all(60 <= x <= WIDTH and 10 <= y <= HEIGHT - 40 for x, y in dots)
    placed = boxes(root)
    for n, (left, right, top, bottom) in enumerate(placed):
        assert left > 60 and right < WIDTH
        for other in placed[n + 1 :]:
            assert not (left < other[1] and other[0] < right and top < other[3] and other[2] < bottom)
        assert not any(left < x + 5 and x - 5 < right and top < y + 5 and y - 5 < bottom for x, y in dots)


def test_a_mark_tells_what_it_is_and_an_invalid_one_is_hollow() -> None:
    marks = (Mark(1, 1, "a <b>\nmore"), Mark(2, 2, "c", hollow=True))
    root = ET.fromstring(curve_chart([Series("s", 3, marks)], "t", "x", "y"))
    assert [(dot.attrib["class"], dot[0].text) for dot in root.iter("circle")] == [
        ("dot s3", "a <b>\nmore"),
        ("dot s3 hollow", "c"),
    ]


def test_a_band_without_an_upper_bound_reaches_the_top() -> None:
    band = ((0.0, 1.0, 2.0), (10.0, 2.0, inf))
    root = ET.fromstring(curve_chart([Series("s", 0, band=band, line=((0, 1), (10, 3)))], "t", "x", "y"))
    [path] = [path.attrib["d"] for path in root.iter("path") if path.attrib["class"].startswith("band")]
    ys = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", path)]
    assert min(ys) == 14 and len(ys) == 4


def test_what_no_point_bounds_is_drawn_apart_from_what_was_measured() -> None:
    drawn = curve_chart([Series("s", 0, line=((1, 2), (2, 1)), assumed=((0, 2), (1, 2)))], "t", "x", "y")
    looks = [path.attrib["class"] for path in ET.fromstring(drawn).iter("path")]
    assert looks == ["curve s0 assumed", "curve s0"]


def test_marks_differ_without_colour_too() -> None:
    marks = tuple(Mark(n + 1, n + 1, f"tip {n}", shape=n) for n in range(len(SHAPES) + 1))
    root = ET.fromstring(curve_chart([Series("s", 0, marks)], "t", "x", "y"))
    drawn = [mark for mark in root.iter() if mark.attrib.get("class", "").startswith("dot")]
    assert [mark.tag for mark in drawn] == ["circle", *["path"] * (len(SHAPES) - 1), "circle"]
    assert len({mark.attrib["d"].split("m")[1] for mark in drawn if mark.tag == "path"}) == len(SHAPES) - 1
    assert [mark[0].text for mark in drawn] == [f"tip {n}" for n in range(len(SHAPES) + 1)]


def test_whiskers_reach_as_far_as_a_mark_may_lie_and_stay_inside() -> None:
    mark = Mark(50, 50, "t", x_range=(40, 60), y_range=(20, 100))
    root = ET.fromstring(curve_chart([Series("s", 0, (mark,))], "t", "x", "y", top=80.0))
    across, up = [path.attrib["d"] for path in root.iter("path") if path.attrib["class"].startswith("whisker")]
    left, right = (float(number) for number in re.findall(r"[M H]([\d.]+)", across)[::2])
    circle = next(root.iter("circle"))
    assert left < float(circle.attrib["cx"]) < right
    low, high = (float(number) for number in re.findall(r"[ V]([\d.]+)", up))
    assert low > float(circle.attrib["cy"]) > high >= 14


def test_no_label_lies_on_a_line() -> None:
    steep = tuple((10 + n, 100 - 3 * n) for n in range(30))
    marks = tuple(Mark(x, y, "t", f"c {n}") for n, (x, y) in enumerate(steep[::10]))
    root = ET.fromstring(curve_chart([Series("s", 0, marks, steep)], "t", "x", "y"))
    [path] = [path.attrib["d"] for path in root.iter("path")]
    corners = [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)]
    for left, right, top, bottom in boxes(root):
        assert not any(left < x < right and top < y < bottom for x, y in corners)


def test_with_many_marks_only_series_have_labels() -> None:
    marks = tuple(Mark(n % 9, n % 7, "tip", f"c {n}") for n in range(MAX_NUMBERED + 1))
    drawn = curve_chart([Series("s", 0, marks)], "t", "x", "y")
    assert 'class="value"' not in drawn and 'class="name s0"' in drawn


def test_nothing_to_draw_says_so() -> None:
    assert "no data" in curve_chart([Series("s", 0)], "t", "x", "y")
    assert "no data" in curve_chart([Series("s", 0, (Mark(1, 0, "t"),))], "t", "x", "y", log_y=True)
    assert "no data" in heat_map([HeatRow("r", (0, 0))], "t", "u", 1, 0)


def test_a_heat_map_shades_by_share_of_the_top_and_joins_neighbours() -> None:
    rows = [HeatRow("prefill0.0", (0, 0, 80, 80)), HeatRow("prefill<1>", (1, 40, 40, 0))]
    root = ET.fromstring(heat_map(rows, "t", "positions/s", 8.0, 80))
    cells = [(cell.attrib["class"], float(cell.attrib["width"]), cell[0].text) for cell in root.iter("rect")]
    quarter = (WIDTH - 102) / 4
    assert [look for look, _, _ in cells] == ["h0", f"h{LEVELS}", "h1", f"h{LEVELS // 2}", "h0"]
    assert [round(width / quarter) for _, width, _ in cells] == [2, 2, 1, 2, 1]
    assert cells[1][2] == "prefill0.0, 4 to 8 s: 80 positions/s"
    assert cells[3][2] == "prefill<1>, 2 to 6 s: 40 positions/s"


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1e6), min_size=5, max_size=5), min_size=1, max_size=40))
def test_the_cells_of_a_heat_map_fill_each_row_once(values: list[list[float]]) -> None:
    rows = [HeatRow(f"r{n}", tuple(row)) for n, row in enumerate(values)]
    root = ET.fromstring(heat_map(rows, "t", "u", 10.0, max(max(row) for row in values)))
    widths: dict[str, float] = {}
    for cell in root.iter("rect"):
        widths[cell.attrib["y"]] = widths.get(cell.attrib["y"], 0) + float(cell.attrib["width"])
    if max(max(row) for row in values) > 0:
        assert len(widths) == len(rows)
        assert all(abs(width - (WIDTH - 102)) < 1 for width in widths.values())


def test_the_legend_of_shades_has_all_of_them() -> None:
    assert re.findall(r'class="h(\d)"', shades(12.5, "sequences")) == [str(n) for n in range(LEVELS + 1)]
    assert "12.5 sequences" in shades(12.5, "sequences")
