from __future__ import annotations

import msgspec

from rackserve.simulated_rack import SimulatedSetup
from rackserve.whatif.grid import Variant
from rackserve.whatif.points import pair_of, point_of
from rackserve.whatif.runs import ResultRow, seeds_of
from rackserve.whatif.sensitivity import Choice, Variation
from rackserve.whatif.show import (
    choice_text,
    costs_table,
    document,
    notes,
    pairs_table,
    pareto,
    points_table,
    sensitivity_table,
    table,
)
from tests.whatif.small import SETUP, row

GOOD, FULL = Variant("good", SETUP), Variant("full", msgspec.structs.replace(SETUP, pool=False))
BAD = Variant("bad", msgspec.structs.replace(SETUP, prefill_groups=3))


def made() -> dict[SimulatedSetup, ResultRow]:
    rows = {setup: row(setup, 1_000, 10) for setup in seeds_of(GOOD.setup, 2)}
    rows |= {setup: row(setup, 900, 20, 9.0, 0.97) for setup in seeds_of(FULL.setup, 2)}
    rows |= {setup: msgspec.structs.replace(row(setup), figures=None, error="no room") for setup in seeds_of(BAD.setup, 2)}
    return rows


RESULTS = [point_of(variant, made(), 2) for variant in (GOOD, FULL, BAD)]


def test_a_full_racks_waiting_times_are_not_claimed_and_it_says_why() -> None:
    lines = points_table(RESULTS)
    assert lines[0].split()[0] == "configuration" and lines[0].endswith("rack")
    good, full, bad = lines[1:4]
    assert good.startswith("*") and good.endswith("STABLE") and " 0.5 " in good and "not claimed" not in good
    assert not full.startswith("*") and full.endswith("SATURATED") and full.count("not claimed") == 2
    assert bad.endswith("no result") and lines[4] == "no result for bad c=30: no room"
    assert any("not claimed where prefill was busy for 95 %" in text for text in notes(RESULTS))
    assert not any("not claimed" in text for text in notes(RESULTS[:1]))
    assert notes(RESULTS)[3] == "never full, so its peak is where the concurrencies end: good"


def test_pairs_show_changes_with_intervals_and_agreeing_seeds() -> None:
    pair = pair_of(FULL, GOOD, made(), 2, "per_gpu")
    assert pair is not None
    lines = pairs_table("good", [(FULL, {"per_gpu": pair})], 2)
    assert lines[0] == "change against good, in %, seed by seed"
    assert "-10 [-10, -10] 2/2" in lines[2] and lines[2].split()[-1] == "–"


def test_costs_of_a_session_are_those_of_the_requests_it_took() -> None:
    lines = costs_table(RESULTS, 3.6)
    cells = lines[2].split()
    assert cells.pop() == "~" and lines[-1].endswith("fewer than 30, so rough"), "four sessions drained"
    per_request, per_session = float(cells[-2]), float(cells[-1])
    assert cells[0] == "good" and abs(per_session / per_request - 20) < 0.01
    assert abs(per_request - 0.001 * 6 / (40 / 150)) < 1e-5


def test_few_sessions_are_marked_where_there_is_only_one_configuration() -> None:
    rows = {setup: row(setup, 1_000, 10) for setup in seeds_of(SETUP, 2)}
    assert costs_table([point_of(Variant("", SETUP), rows, 2)], 3.6)[2].split()[-1] == "~"


def test_the_choice_is_a_sentence_and_its_flips_are_named() -> None:
    best = Choice("good", 10.0, "full", 1.25)
    assert choice_text(best, 50, False) == "recommended at 50 tok/s/user by throughput per GPU: good, 25.0% before full"
    assert choice_text(Choice("a", 1.0, "b", 1.01), 0, True).endswith("a, 1.0% before b, which is as good")
    assert choice_text(None, 900, False).endswith("none, no configuration is so fast")
    assert "the only one" in choice_text(Choice("a", 1.0), 0, False)
    found = [
        Variation("prefill_time", 1.2, Choice("full", 9.0, "good", 1.1), True), Variation("cache_size", 0.8, None, True),
        Variation("cache_size", 1.1, best, False),
    ]  # fmt: skip
    lines = sensitivity_table(best, found)
    assert lines[-1] == "the recommendation flips with: prefill_time +20%, cache_size -20%"
    assert lines[2].split() == ["prefill_time", "+20%", "full", "-10.0%", "10.0%", "FLIPS"]
    assert sensitivity_table(best, found[2:])[-1] == "the recommendation holds under every variation"


def test_columns_line_up_and_the_document_is_plain() -> None:
    assert table(("a", "b"), [("long", "1"), ("x", "22")]) == ["a      b", "long   1", "x     22"]
    found = msgspec.json.decode(msgspec.json.encode(document(RESULTS, None, (), 0.0)))
    assert [point["pareto"] for point in found["points"]] == [True, False, False] and pareto(RESULTS) == {0}
