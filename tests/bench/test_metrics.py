from __future__ import annotations

import json
import statistics
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.events import DraftsVerified, StepDone
from rackserve.base.ids import Rank
from rackserve.base.units import NS_PER_MS, to_ns
from rackserve.bench.frontier import operating_point
from rackserve.bench.metrics import (
    STAMPED_LATE,
    Throughput,
    bench_serve_keys,
    failures_of,
    percentile,
    result_json,
    summarize,
    tpot_ms,
)
from rackserve.bench.records import ClientLoad, RequestRecord, RunInfo, recorded

RUN = RunInfo("a", "live", 2, 4)


def record(number: int, sent_s: float, times_ms: list[float], outputs: int, **changes: Any) -> RequestRecord:
    """A request sent when due, with chunks at the given milliseconds after its sending."""
    sent = to_ns(sent_s)
    chunks = tuple(sent + round(ms * NS_PER_MS) for ms in times_ms)
    made: dict[str, Any] = {
        "due_ns": sent, "planned_prompt_tokens": 100, "planned_output_tokens": outputs, "prompt_tokens": 100,
        "output_tokens": outputs, "first_ns": chunks[0] if chunks else -1, "last_ns": chunks[-1] if chunks else -1,
        "ended_ns": chunks[-1] if chunks else sent, "num_chunks": len(chunks), "chunk_ns": chunks,
    }  # fmt: skip
    return RequestRecord(id=str(number), session="s", sent_ns=sent, **(made | changes))


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=20))
def test_percentiles_interpolate_linearly(values: list[int]) -> None:
    ordered = sorted(values)
    assert (percentile(ordered, 0), percentile(ordered, 1)) == (ordered[0], ordered[-1])
    assert percentile(ordered, 0.5) == statistics.median(ordered)
    assert [percentile(ordered, n / 10) for n in range(1, 10)] == pytest.approx(
        statistics.quantiles(ordered, n=10, method="inclusive")
    )


def test_time_per_token_counts_tokens_not_chunks() -> None:
    chunked = record(0, 0, [30.0 * n for n in range(1, 11)], 30)  # 10 chunks of 3 tokens, one every 30 ms
    assert tpot_ms(chunked) == pytest.approx(270 / 29)
    summary = summarize(RUN, [chunked])
    assert summary.tpot_ms is not None
    assert summary.chunk_gap_ms is not None
    assert (summary.tpot_ms.p50, summary.chunk_gap_ms.p50) == (pytest.approx(270 / 29), 30)


def test_an_answer_in_one_chunk_gives_no_time_per_token_and_is_counted() -> None:
    summary = summarize(RUN, [record(0, 0, [300], 30), record(1, 0, [100, 200], 11), record(2, 0, [50], 1)])
    assert summary.tpot_ms is not None
    assert (summary.tpot_ms.count, summary.tpot_ms.p50, summary.num_no_gap) == (1, 10, 2)
    assert summary.coverage == 0.5, "of the two answers that have a gap to measure"
    assert not summary.valid
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.count == 3


def test_chunks_that_came_at_one_moment_give_no_time_per_token_and_are_warned_of() -> None:
    fast = [record(n, n, [10, 10, 10], 3) for n in range(3)]
    summary = summarize(RUN, [*fast, record(3, 3, [10, 20, 30], 3)])
    assert (tpot_ms(fast[0]), summary.num_no_gap, summary.coverage, summary.valid) == (None, 3, 1.0, True)
    assert summary.tpot_ms is not None and summary.tpot_ms.count == 1
    assert summary.warnings == (
        "3 answers came faster than the client could tell their chunks apart; they have no time per token",
    )


def test_a_few_tokens_that_came_in_one_chunk_say_nothing_of_a_server_and_more_do() -> None:
    """Two tokens of a fast engine are both there when a busy server comes to send the first."""
    streamed = [record(n, n, [10, 20, 30], 3) for n in range(8)]
    few = summarize(RUN, [*streamed, record(8, 8, [10], 2), record(9, 9, [10], 3)])
    assert (few.num_no_gap, few.coverage, few.valid, len(few.warnings)) == (2, 1.0, True, 1)
    more = summarize(RUN, [*streamed, record(8, 8, [10], 4)])
    assert more.coverage == pytest.approx(8 / 9) and not more.valid


@pytest.mark.parametrize(("counted", "warned"), [(100, 0), (109, 0), (91, 0), (120, 1), (600, 1), (50, 1)])
def test_prompts_much_longer_or_shorter_than_meant_are_warned_of(counted: int, warned: int) -> None:
    summary = summarize(RUN, [record(n, n, [10, 20], 2, prompt_tokens=counted) for n in range(4)])
    assert summary.valid and len(summary.warnings) == warned
    assert all(text.startswith(f"prompts are {counted / 100:.2g} times as long as meant") for text in summary.warnings)


def test_percentiles_over_requests_and_over_all_gaps_have_different_names() -> None:
    many = record(0, 0, [10.0 * n for n in range(1, 102)], 101)
    slow = record(1, 0, [10, 1010], 2)
    summary = summarize(RUN, [many, slow])
    assert summary.tpot_ms is not None
    assert summary.chunk_gap_ms is not None
    assert (summary.tpot_ms.p50, summary.tpot_ms.p90, summary.tpot_ms.p99) == pytest.approx((505, 901, 990.1))
    assert (summary.chunk_gap_ms.p50, summary.chunk_gap_ms.p90, summary.chunk_gap_ms.p99) == pytest.approx((10, 10, 10))
    assert summary.chunk_gap_ms.count == 101
    assert (summary.interactivity_p50, summary.interactivity_p90) == pytest.approx((1000 / 505, 1000 / 901))
    document = json.loads(result_json(summary))
    assert "one value per request" in document["definitions"]["tpot_ms"]
    assert "over all gaps between chunks" in document["definitions"]["chunk_gap_ms"]
    assert document["bench_serve"]["median_tpot_ms"] == pytest.approx(505)
    assert document["bench_serve"]["median_itl_ms"] == pytest.approx(10)


def test_the_two_interactivities_are_different_figures() -> None:
    summary = summarize(RUN, [record(0, 0, [900, 1000], 11)])
    assert summary.interactivity_p90 == pytest.approx(100)
    assert summary.interactivity_e2e_normalised == pytest.approx(11)


@pytest.mark.parametrize(("hit", "cached", "uncached"), [(0, 0, 200), (50, 100, 100), (97, 194, 6)])
def test_throughput_is_three_numbers_and_the_total_is_labelled(hit: int, cached: int, uncached: int) -> None:
    records = [record(n, n, [500, 1000], 10, cached_tokens=hit) for n in range(2)]  # 2 s in all
    summary = summarize(RUN, records)
    assert summary.throughput == Throughput(cached / 2, uncached / 2, 10)
    assert summary.throughput_per_gpu == Throughput(cached / 8, uncached / 8, 2.5), "all four GPUs, prefill and decode"
    assert summary.hit_rate == hit / 100
    document = json.loads(result_json(summary))
    assert set(document["throughput"]) == {"cached_input", "uncached_input", "output", "total_with_cached_input"}
    assert document["throughput"]["total_with_cached_input"] == 110
    assert bench_serve_keys(summary)["output_throughput"] == 10


def test_the_hit_rate_stands_beside_the_ideal_ones() -> None:
    one = record(0, 0, [1, 2], 2, cached_tokens=40, ideal_cached_tokens=60, trace_blocks=25, trace_block_hits=20)
    summary = summarize(RUN, [one])
    assert (summary.hit_rate, summary.ideal_hit_rate, summary.ideal_trace_hit_rate) == (0.4, 0.6, 0.8)


def test_a_late_client_cannot_hide_a_stall() -> None:
    on_time = [record(n, n / 10, [10, 20], 2) for n in range(50)]
    late = [record(n, n / 10, [10, 20], 2, due_ns=to_ns(n / 10 - 5)) for n in range(50, 60)]
    summary = summarize(RUN, on_time + late)
    assert summary.e2e_ms is not None
    assert summary.e2e_from_due_ms is not None
    assert (summary.e2e_ms.p99, summary.e2e_from_due_ms.p99) == pytest.approx((20, 5020))
    assert summary.send_delay_ms is not None
    assert summary.send_delay_ms.p99 == pytest.approx(5000)
    assert not summary.valid
    assert "the client could not keep up" in summary.invalid_reasons[0]


def test_failures_are_counted_by_kind_and_latencies_are_of_successes_only() -> None:
    good = [record(n, 0, [10, 20], 2) for n in range(16)]
    bad = [
        record(20, 0, [], 2, error="http_500"),
        record(21, 0, [5, 6000], 2, error="timeout"),
        record(22, 0, [], 2, error="timeout"),
    ]
    cut = record(23, 0, [7000], 2, error="unfinished")
    summary = summarize(RUN, [*good, *bad, cut, record(24, 0, [9000], 1, warmup=True)])
    assert (summary.num_sent, summary.num_done, summary.num_failed, summary.num_unfinished) == (20, 16, 3, 1)
    assert summary.failures == {"http_500": 1, "timeout": 2}
    assert summary.num_warmup == 1
    assert summary.ttft_ms is not None
    assert (summary.ttft_ms.count, summary.ttft_ms.max) == (16, 10)
    assert summary.output_tokens == 32, "tokens of unfinished requests count nowhere"
    assert summary.invalid_reasons == ("3 of 19 requests failed, above 10%",)
    assert summary.exit_code == 1


def test_a_run_in_which_everything_failed_still_has_a_summary() -> None:
    for records in ([], [record(0, 0, [], 2, error="connect")]):
        summary = summarize(RUN, records)
        assert "no request succeeded" in summary.invalid_reasons
        assert (summary.ttft_ms, summary.interactivity_p90, summary.throughput) == (None, None, Throughput(0, 0, 0))
        assert json.loads(result_json(summary))["valid"] is False


def test_context_overflows_and_wrong_lengths_and_impossible_counts_make_a_run_invalid() -> None:
    good = [record(n, 0, [10, 20], 2) for n in range(60)]
    assert summarize(RUN, good).valid
    overflow = summarize(RUN, [*good, record(61, 0, [], 2, error="context_overflow")])
    assert overflow.invalid_reasons == ("1 of 61 requests overflowed the context, above 1%",)
    short = summarize(RUN, [*good, record(61, 0, [10, 20], 2, planned_output_tokens=9)])
    assert (short.num_output_mismatch, short.valid) == (1, False)
    assert not summarize(RUN, [*good, record(61, 0, [10, 20], 2, cached_tokens=101)]).valid


def test_the_servers_count_is_used_and_a_difference_to_the_clients_is_shown() -> None:
    spaces = record(0, 0, [10.0 * n for n in range(1, 16)], 15, received_tokens=1)
    same = record(1, 0, [10.0 * n for n in range(1, 16)], 15, received_tokens=15)
    unknown = record(2, 0, [10.0 * n for n in range(1, 16)], 15, planned_prompt_tokens=90)
    summary = summarize(RUN, [spaces, same, unknown])
    assert (summary.output_tokens, summary.num_received_mismatch, summary.num_prompt_mismatch) == (45, 1, 1)
    assert summary.tpot_ms is not None
    assert summary.tpot_ms.max == pytest.approx(10)


def test_the_steady_window_leaves_out_the_thin_tail() -> None:
    run = RunInfo("a", "live", 2, 1, steady_end_ns=to_ns(10))
    records = [record(0, 0, [1, 4000], 100), record(1, 5, [1, 5000], 100), record(2, 5, [1, 95_000], 100)]
    summary = summarize(run, records)
    assert summary.steady_throughput is not None
    assert (summary.throughput.output, summary.steady_throughput.output, summary.steady_s) == (3, 20, 10)


def test_acceptance_is_by_position_and_a_step_counts_the_token_no_draft_gave() -> None:
    rank = Rank("decode0")
    events = recorded((0, "decode0", event) for event in (
        DraftsVerified(rank, 4, (4, 3), (3, 1)), DraftsVerified(rank, 1, (1, 1, 1), (1, 1, 0)), DraftsVerified(rank, 1, (), ()),
    ))  # fmt: skip
    summary = summarize(RUN, [record(0, 0, [10, 20], 2)], events=events)
    assert summary.draft_acceptance == (4 / 5, 2 / 4, 0)
    assert summary.tokens_per_step_with_bonus == 1 + 6 / 6
    assert json.loads(result_json(summary))["draft_acceptance"] == [0.8, 0.5, 0.0]


def test_without_drafts_there_is_no_acceptance() -> None:
    nothing = recorded([(0, "decode0", DraftsVerified(Rank("decode0"), 3, (), ()))])
    for events in ((), nothing):
        summary = summarize(RUN, [record(0, 0, [10, 20], 2)], events=events)
        assert (summary.draft_acceptance, summary.tokens_per_step_with_bonus) == (None, None)


@pytest.mark.parametrize(
    ("load", "warned"),
    [
        (ClientLoad(0.1, 2.0, 50.0, 0.3), 0),
        (ClientLoad(0.1, 9.0, 50.0, 0.3), 1),  # 9 ms late at 20 ms a token
        (ClientLoad(0.1, 2.0, 50.0, 0.95), 1),
        (ClientLoad(4.0, 40.0, 90.0, 1.0), 2),
    ],
)
def test_it_says_when_the_client_was_the_bottleneck(load: ClientLoad, warned: int) -> None:
    slow = msgspec.structs.replace(RUN, client=load)
    summary = summarize(slow, [record(n, n, [10, 30, 50], 3) for n in range(3)])
    assert len(summary.warnings) == warned and all("the client was the bottleneck" in text for text in summary.warnings)
    assert summary.valid, "a warning does not make a run invalid"
    assert any(STAMPED_LATE in text for text in summary.warnings) is (load.lag_p99_ms > 8)
    slow_tokens = summarize(slow, [record(n, n, [10, 310, 610], 3) for n in range(3)])
    assert len(slow_tokens.warnings) == (load.cpu_share > 0.9), "some ms matter little at 300 ms a token"


def test_a_run_that_stopped_itself_is_invalid_for_that_reason() -> None:
    stopped = msgspec.structs.replace(RUN, aborted="the warm-up request a/0/0/0 failed")
    summary = summarize(stopped, [record(1, 0, [10, 30, 50], 3)])
    assert (summary.valid, summary.invalid_reasons) == (False, ("the warm-up request a/0/0/0 failed",))


def test_the_names_of_vllm_bench_serve_stand_for_the_same_figures() -> None:
    summary = summarize(RUN, [record(n, n, [10, 30, 50 + 10 * n], 3) for n in range(3)])
    keys = bench_serve_keys(summary)
    assert summary.ttft_ms is not None and summary.tpot_ms is not None and summary.chunk_gap_ms is not None
    assert keys["std_tpot_ms"] == pytest.approx(statistics.pstdev([20, 25, 30]))
    assert (keys["p90_ttft_ms"], keys["p99_itl_ms"]) == (summary.ttft_ms.p90, summary.chunk_gap_ms.p99)
    assert (keys["num_prompts"], keys["completed"], keys["failed"], keys["max_concurrency"]) == (3, 3, 0, 2)
    assert keys["total_token_throughput"] == summary.throughput.total_with_cached_input


def test_gaps_of_a_simulated_run_are_absent_where_decode_takes_many_steps_at_once() -> None:
    def gaps(host: str, num_passes: int) -> object:
        step = StepDone(Rank("decode0"), 1, 1, 0, 0, 1, 1, 10, num_passes=num_passes)
        return summarize(
            RunInfo("x", host, 1, 1), [record(0, 0, [10, 20], 2)], events=recorded([(5, "decode0", step)])
        ).chunk_gap_ms

    assert gaps("simulated", 9) is None
    assert gaps("simulated", 1) is not None and gaps("live", 9) is not None


def test_a_completed_session_took_all_requests_over_the_sessions_that_ended() -> None:
    records = [record(number, 0, [10, 20], 2) for number in range(3)]
    summary = summarize(RunInfo("x", "live", 1, 1, num_sessions=2), records)
    assert (summary.num_sessions_done, summary.requests_per_session) == (2, 1.5)
    assert summarize(RunInfo("x", "live", 1, 1, num_sessions=0), records).requests_per_session is None
    assert summarize(RunInfo("x", "live", 1, 1), records).requests_per_session is None
    point = operating_point(summary)
    assert point is not None and point.requests_per_session == 1.5


def test_failures_are_told_by_kind_with_what_the_first_said() -> None:
    failed = [
        record(n, 0, [], 4, error=kind, detail=f"why {n}")
        for n, kind in enumerate(("too_large", "timeout", "too_large", "unfinished", ""))
    ]
    assert failures_of(failed) == [
        "2 requests failed (too_large), such as 0: why 0",
        "1 requests failed (timeout), such as 1: why 1",
    ]
