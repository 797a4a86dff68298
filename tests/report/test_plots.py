from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.report.plots import HEIGHT, WIDTH, Bar, Point, cdf, part_bars, scatter, ticks, timeline

positive = st.floats(1e-6, 1e9)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_cover_the_range_with_few_even_round_steps(low: float, span: float) -> None:
    marks = ticks(low, low + span)
    assert marks[0] <= low + 1e-6 * abs(low)
    assert marks[-1] >= low + span - 1e-6 * (abs(low) + span)
    assert 2 <= len(marks) <= 9


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.lists(positive, min_size=1, max_size=30), st.lists(positive, max_size=30))
def test_a_cdf_stays_inside_its_frame_and_ends_at_the_top(first: list[float], second: list[float]) -> None:
    root = ET.fromstring(cdf({"a<b": first, "c": second}, "t", "ms"))
    paths = [path.attrib["d"] for path in root.iter("path")]
    assert len(paths) == 1 + bool(second)
    for path in paths:
        ys = [float(y) for y in re.findall(r"V([\d.]+)", path)]
        xs = [float(x) for x in re.findall(r"H([\d.]+)", path)]
        assert ys[-1] == min(ys) == 14, "the last value lies at 100 %"
        assert xs == sorted(xs)
        assert min(xs) >= 56 - 0.1
        assert max(xs) <= WIDTH - 16 + 0.1
    assert root.attrib["viewBox"] == f"0 0 {WIDTH} {HEIGHT}"


def test_parts_of_throughput_are_separate_bars_on_one_scale() -> None:
    root = ET.fromstring(part_bars([("a", (10, 20, 40)), ("b", (5, 0, 0))], ("out", "un", "ca"), "t"))
    bars = [(bar.attrib["class"], float(bar.attrib["width"])) for bar in root.iter("rect")]
    assert [name for name, _ in bars] == ["p0", "p1", "p2"] * 2
    assert [width / bars[2][1] for _, width in bars[:4]] == [0.25, 0.5, 1, 0.125]
    assert {bar.attrib["x"] for bar in root.iter("rect")} == {"190"}


def test_bars_that_overlap_in_time_do_not_overlap_on_the_page() -> None:
    bars = [Bar(0, 2, 0, "x"), Bar(1, 3, 1, "y"), Bar(2, 4, 0, "z"), Bar(1.5, 1.6, 0, "w")]
    root = ET.fromstring(timeline([("r<0>", bars), ("r1", [Bar(0, 1, 0, "v")])], "t"))
    boxes = [[float(bar.attrib[k]) for k in ("x", "y", "width", "height")] for bar in root.iter("rect")]
    for i, (x, y, width, height) in enumerate(boxes):
        for other_x, other_y, _, _ in boxes[i + 1 :]:
            assert not (y <= other_y < y + height and x - 0.2 <= other_x < x + width - 0.2)
    assert len({y for _, y, _, _ in boxes}) == 4, "three lanes in the first band, one in the second"


def test_only_frontier_points_of_one_group_are_joined() -> None:
    points = [Point(1, 9, 0, "a", True), Point(5, 5, 1, "b", True), Point(2, 3, 2, "c", False), Point(3, 3, 2, "d", group="z")]
    root = ET.fromstring(scatter(points, "t", "x", "y"))
    [line] = [path.attrib["d"] for path in root.iter("path")]
    assert line.count("L") == 1
    assert len(list(root.iter("circle"))) == 4
    labels = sorted(float(text.attrib["y"]) for text in root.iter("text") if text.text in {"a", "b", "c", "d"})
    assert min(b - a for a, b in pairwise(labels)) >= 13, "labels do not overlap"


def test_drawings_without_data_say_so() -> None:
    for svg in (cdf({"a": []}, "t", "ms"), part_bars([], (), "t"), timeline([("r", [])], "t"), scatter([], "t", "x", "y")):
        assert "no data" in svg
