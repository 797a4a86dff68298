from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.events import RequestPlaced, StepDone
from rackserve.base.ids import Rank
from rackserve.base.units import to_ns
from rackserve.bench.records import recorded
from rackserve.report.compare import Arm
from rackserve.report.rank_sections import BINS, MAX_BINS, balance_section, heat_rows, waterfall_data, waterfall_section
from tests.report.arms import arm


def step(
    rank: int, start_s: float, took_s: float, tokens: int, *, role: str = "prefill", dummy: bool = False
) -> tuple[int, str, StepDone]:
    done = StepDone(Rank(f"{role}0", rank), 0, tokens, 0, 0, tokens, 0, to_ns(took_s), dummy)
    return to_ns(start_s + took_s), f"{role}0", done


@settings(derandomize=True, max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 100), st.floats(0, 30), st.integers(0, 9000)), min_size=1, max_size=20)
)
def test_the_work_of_all_cells_is_the_work_of_all_steps(steps: list[tuple[int, float, float, int]]) -> None:
    rows, until_s = heat_rows(recorded([step(*one) for one in steps]), "prefill")
    for row in rows:
        rank = int(row.name[-1])
        assert BINS <= len(row.values) <= MAX_BINS
        work = sum(row.values) * until_s / len(row.values)
        assert work == pytest.approx(sum(tokens for r, _, _, tokens in steps if r == rank), rel=1e-6, abs=1e-6)


def test_work_is_spread_over_the_time_of_its_step() -> None:
    [row], until_s = heat_rows(recorded([step(0, 0, 30, 300), step(0, 45, 15, 300)]), "prefill")
    assert until_s == pytest.approx(60)
    assert row.values == pytest.approx([10] * 30 + [0] * 15 + [20] * 15)


def test_a_run_of_minutes_is_shown_second_by_second_and_a_long_one_in_ten_minutes_of_cells() -> None:
    for seconds, cells in ((200, 200), (7_200, MAX_BINS), (3, BINS)):
        [row], _ = heat_rows(recorded([step(0, 0, seconds, 9)]), "prefill")
        assert len(row.values) == cells


def test_a_decode_rank_shows_its_mean_batch_and_dummy_steps_are_no_work() -> None:
    events = recorded([step(0, 0, 60, 8, role="decode"), step(1, 0, 60, 8, role="decode", dummy=True), step(0, 0, 60, 9)])
    rows, _ = heat_rows(events, "decode")
    assert [row.name for row in rows] == ["decode0.0", "decode0.1"]
    assert rows[0].values == pytest.approx([8] * BINS) and set(rows[1].values) == {0.0}


def test_idle_ranks_are_rows_too_and_ranks_stand_in_the_order_of_their_numbers() -> None:
    costs = tuple((Rank(f"prefill{n}"), 5) for n in (10, 2, 0))
    placed = RequestPlaced("r", 1, Rank("prefill10"), Rank("decode0"), 0, 0, 0, costs)
    rows, _ = heat_rows(recorded([(0, "router", placed), step(0, 0, 1, 9)]), "prefill")
    assert [row.name for row in rows] == ["prefill0.0", "prefill2.0", "prefill10.0"]
    assert set(rows[1].values) == set(rows[2].values) == {0.0}


def test_maps_of_all_runs_have_one_scale() -> None:
    busy, calm = (arm(name) for name in "ab")
    calm = msgspec.structs.replace(calm, events=recorded([step(0, 0, 60, 60)]))
    busy = msgspec.structs.replace(busy, events=recorded([step(0, 0, 60, 600)]))
    page = balance_section([busy, calm])
    assert page.count('class="h8" x') == page.count('class="h1" x') == 1 and page.count("10 positions/s</p>") == 1


def test_a_run_without_steps_has_no_map() -> None:
    assert heat_rows((), "prefill") == ([], 0.0)
    assert balance_section([Arm(arm("a").summary)]) == ""


def test_there_is_a_map_per_run_and_role_and_the_ranks_as_a_table() -> None:
    page = balance_section([arm("a"), arm("b", "simulated")])
    for name in ("live a", "simulated b"):
        for role in ("prefill", "decode"):
            assert f"{role} ranks of {name} over time" in page
    assert page.count('<td class="words">prefill0.1</td>') == 2


def test_a_waterfall_has_each_sessions_requests_in_order_of_sending_without_warm_up() -> None:
    one = arm("a", num=12, num_failed=1)
    warm = msgspec.structs.replace(one.records[0], id="warm", warmup=True)
    lost = msgspec.structs.replace(one.records[11], first_ns=-1, error="timeout")
    [run] = waterfall_data([msgspec.structs.replace(one, records=(warm, lost, *one.records[:11]))])
    assert run["name"] == "live a"
    sessions = {session["name"]: session["requests"] for session in run["sessions"]}  # type: ignore[attr-defined]
    assert sorted(sessions) == [f"s{n}" for n in range(6)]
    assert [request[0] for request in sessions["s5"]] == ["a/5", "a/11"]
    _, due, sent, first, _, prompt, cached, output, error = sessions["s5"][1]
    assert first is None and error == "timeout" and due == sent == pytest.approx(1.1)
    assert (prompt, cached, output) == (lost.prompt_tokens, lost.cached_tokens, 16)


def test_the_page_lists_sessions_to_choose_from_and_its_data_ends_no_script() -> None:
    one = arm("a")
    bad = msgspec.structs.replace(one, records=tuple(msgspec.structs.replace(r, session="</script><b>") for r in one.records))
    page = waterfall_section([bad])
    assert "&lt;/script&gt;&lt;b&gt; (40 requests)" in page
    assert page.count("</script>") == 1 and "<b>" not in page.split("<figure")[1].split("</b>", 1)[1]
    assert waterfall_section([Arm(one.summary)]) == ""
