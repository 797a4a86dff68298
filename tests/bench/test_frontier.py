from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import FileFormatError
from rackserve.bench.frontier import (
    MEASURES,
    Curve,
    OperatingPoint,
    frontier,
    operating_point,
    read_curve,
    write_frontier,
)
from rackserve.bench.metrics import Summary, Throughput, result_json, summarize
from rackserve.bench.records import RequestRecord, RunInfo


def run(label: str = "a", host: str = "live", *, step_error: float | None = None) -> Summary:
    """A run of one request with 100 ms per token."""
    done = RequestRecord("r", "s", 0, 0, 2_000_000_000, 10, 11, 1_000_000_000, 2_000_000_000, 10, 4, 11, num_chunks=11)
    return summarize(RunInfo(label, host, 3, 2, step_error=step_error), [done])


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=12))
def test_the_frontier_is_what_no_other_valid_point_beats(drawn: list[tuple[int, int, bool]]) -> None:
    points = [OperatingPoint("x", 1, x, y, valid=valid) for x, y, valid in drawn]
    real = [p for p in points if p.valid and p.interactivity and p.per_gpu]
    naive = {
        p for p in real
        if not any(q.interactivity >= p.interactivity and q.per_gpu >= p.per_gpu and q != p for q in real)
    }  # fmt: skip
    best = frontier(points)
    assert set(best) == naive
    assert len(best) == len(naive)
    assert list(best) == sorted(best, key=lambda p: p.interactivity)


def test_each_throughput_has_its_own_frontier() -> None:
    cached = OperatingPoint("cached", 1, 10, 100, parts=Throughput(98, 1, 1))
    busy = OperatingPoint("busy", 1, 10, 50, parts=Throughput(10, 20, 20))
    unknown = OperatingPoint("unknown", 1, 10, 60)
    best = {measure: frontier([cached, busy, unknown], measure)[0].label for measure in MEASURES}
    assert best == {"total": "cached", "cached": "cached", "uncached": "busy", "output": "busy"}
    assert unknown.throughput("output") is None


def test_a_run_becomes_a_point_by_its_slow_tail() -> None:
    point = operating_point(run(), requests_per_session=30)
    assert point == OperatingPoint(
        "a", 3, 10.0, 21 / 4, parts=Throughput(4 / 4, 6 / 4, 11 / 4), num_gpus=2, ttft_p50_ms=1000, ttft_p90_ms=1000,
        hit_rate=0.4, requests_per_s=0.5, requests_per_session=30,
    )  # fmt: skip
    assert point.requests_per_gpu == 0.25
    assert operating_point(summarize(RunInfo("a", "live", 3, 2), [])) is None


def test_a_run_of_a_sweep_is_named_by_its_concurrency_which_is_no_configuration() -> None:
    labels = [point.label for name in ("c3", "c4") if (point := operating_point(run(name)))]
    assert labels == ["", "c4"], "the runs have concurrency 3"


def test_a_simulated_point_says_how_far_to_trust_it() -> None:
    trusts = [operating_point(run("a", "simulated", step_error=error)) for error in (None, 0.042)]
    assert [point.trust if point else "" for point in trusts] == ["not calibrated", "step-time error 4.2%"]


@pytest.mark.parametrize(
    ("speed", "total", "parts", "says"),
    [
        (-1, 5, None, "`interactivity` must be a number of at least 0"),
        (float("inf"), 5, None, "`interactivity`"),
        (1, float("nan"), None, "`per_gpu`"),
        (1, 5, Throughput(1, 1, 1), "its `parts` add up to 3"),
    ],
)
def test_a_point_that_cannot_be_is_refused(speed: float, total: float, parts: Throughput | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        OperatingPoint("x", 1, speed, total, parts=parts)


def test_a_frontier_file_reads_back_and_carries_the_rules(tmp_path: Path) -> None:
    point = operating_point(run())
    assert point is not None
    curve = Curve("mine", (point, OperatingPoint("published", 0, 387, 1.7e6)))
    write_frontier(tmp_path / "x.frontier.json", curve)
    assert read_curve(tmp_path / "x.frontier.json") == read_curve(tmp_path) == curve
    assert "interactivity" in msgspec.json.decode((tmp_path / "x.frontier.json").read_bytes())["definitions"]


def test_a_summary_and_a_folder_of_summaries_are_curves(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / f"live-{label}.summary.json").write_bytes(result_json(run(label)))
    assert [point.label for point in read_curve(tmp_path).points] == ["a", "b"]
    one = read_curve(tmp_path / "live-b.summary.json")
    assert (one.name, one.points) == ("live b", (operating_point(run("b")),))


def test_live_and_simulated_runs_are_no_one_curve(tmp_path: Path) -> None:
    for host in ("live", "simulated"):
        (tmp_path / f"{host}.summary.json").write_bytes(result_json(run("a", host)))
    with pytest.raises(FileFormatError, match="live and simulated runs"):
        read_curve(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        (b"[", "give a frontier file"),
        (b"{}", "missing required field"),
        (b'{"rackserve_frontier": 2, "name": "x", "points": []}', "Invalid enum value 2"),
        (b'{"rackserve_frontier": 1, "name": "x", "points": []}', "`points` is empty"),
        (b'{"rackserve_frontier": 1, "name": "x", "points": [{"label": "a"}]}', "missing required field `concurrency`"),
        (
            b'{"rackserve_frontier": 1, "name": "x", "points": '
            b'[{"label": "a", "concurrency": 1, "interactivity": -1, "per_gpu": 1}]}',
            "must be a number of at least 0",
        ),
        (result_json(summarize(RunInfo("a", "live", 1, 1), [])), "no answer of this run gave a time per token"),
    ],
)
def test_a_file_that_is_no_curve_is_named(content: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileFormatError) as caught:
        read_curve(path)
    assert str(caught.value).startswith(f"{path}: ") and says in str(caught.value)


def test_a_folder_without_or_with_too_many_results_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="holds no frontier or summary"):
        read_curve(tmp_path)
    for name in ("a", "b"):
        write_frontier(tmp_path / f"{name}.frontier.json", Curve(name, (OperatingPoint("x", 1, 1, 1),)))
    with pytest.raises(FileFormatError, match="holds 2 frontier files"):
        read_curve(tmp_path)
