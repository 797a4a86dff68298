from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from rackserve.api.metrics import Metrics
from rackserve.base import events
from rackserve.base.ids import POOL_RANK, Rank

RANK = Rank("prefill0")

CONTRACT = {
    "rackserve_kv_blocks": ("gauge", ("holder", "state")),
    "rackserve_kv_usage_ratio": ("gauge", ("holder",)),
    "rackserve_step_part_seconds": ("counter", ("part", "rank")),
    "rackserve_engine_info": ("gauge", ("kernels", "rank", "threads")),
    "rackserve_pool_hit_blocks": ("counter", ()),
    "rackserve_pool_missed_blocks": ("counter", ()),
    "rackserve_pool_stored_blocks": ("counter", ()),
    "rackserve_pool_evicted_blocks": ("counter", ()),
    "rackserve_pool_lost_blocks": ("counter", ()),
    "rackserve_pool_refused_blocks": ("counter", ()),
    "rackserve_pool_expired_leases": ("counter", ()),
    "rackserve_pool_expired_grants": ("counter", ()),
    "rackserve_answers_ended": ("counter", ("reason",)),
    "rackserve_queue_time_seconds": ("histogram", ()),
    "rackserve_decode_time_seconds": ("histogram", ()),
    "rackserve_transfer_duration_seconds": ("histogram", ("kind",)),
    "rackserve_requests_received": ("counter", ()),
    "rackserve_requests": ("counter", ("outcome",)),
    "rackserve_prompt_tokens": ("counter", ()),
    "rackserve_cached_prompt_tokens": ("counter", ()),
    "rackserve_output_tokens": ("counter", ()),
    "rackserve_prefill_tokens": ("counter", ("source",)),
    "rackserve_time_to_first_token_seconds": ("histogram", ()),
    "rackserve_inter_token_latency_seconds": ("histogram", ()),
    "rackserve_request_duration_seconds": ("histogram", ()),
    "rackserve_attempts_retried": ("counter", ()),
    "rackserve_messages_dropped": ("counter", ()),
    "rackserve_max_tokens_clamped": ("counter", ()),
    "rackserve_prompt_left_at_tokens": ("histogram", ()),
    "rackserve_unknown_fields": ("counter", ()),
    "rackserve_clients_gone": ("counter", ()),
    "rackserve_error_responses": ("counter", ("status",)),
    "rackserve_requests_running": ("gauge", ("rank",)),
    "rackserve_requests_queued": ("gauge", ("rank",)),
    "rackserve_rank_up": ("gauge", ("rank",)),
    "rackserve_rank_restarts": ("counter", ("rank",)),
    "rackserve_step_duration_seconds": ("histogram", ("rank",)),
    "rackserve_step_tokens": ("counter", ("rank",)),
    "rackserve_preemptions": ("counter", ("rank",)),
    "rackserve_draft_turns": ("counter", ()),
    "rackserve_drafts_verified": ("counter", ("position",)),
    "rackserve_drafts_accepted": ("counter", ("position",)),
    "rackserve_blocks_evicted": ("counter", ("holder",)),
    "rackserve_transfers": ("counter", ("kind", "outcome")),
    "rackserve_transfer_bytes": ("counter", ("kind",)),
}
"""Names, types and labels that dashboards rely on: a change here is a change for users (keep the old name for a release)."""


def contract(metrics: Metrics) -> dict[str, tuple[str, tuple[str, ...]]]:
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        found[family.name] = (family.type, tuple(labels))
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_names_types_and_labels_are_as_written_before_and_after_traffic() -> None:
    metrics = Metrics([RANK])
    assert contract(metrics) == CONTRACT
    drive(metrics)
    assert contract(metrics) == CONTRACT


def test_every_series_starts_at_zero_and_counters_end_in_total() -> None:
    for family in text_string_to_metric_families(Metrics([RANK]).exposition().decode()):
        assert family.samples, family.name
        assert all(sample.value == 0 for sample in family.samples)
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)


def drive(metrics: Metrics) -> None:
    """One finished request of 100 prompt tokens (60 cached), one cancelled, one refused."""
    for event in (
        events.RequestArrived("a", "s", 100, 10),
        events.PrefillAdmitted("a", 1, RANK, 100, 40, 20, 5),
        events.FirstTokenSent("a", 1, 50_000_000),
        events.RequestEnded("a", "finished", "stop", 1, 100, 60, 10, 50_000_000, 2_000_000_000),
        events.RequestEnded("b", "aborted", "cancelled", 1, 30, 0, 2, 10, 20),
        events.RequestEnded("c", "refused", "overloaded", 1, 500, 0, 0, -1, 5),
        events.StepDone(RANK, 1, 40, 60, 3200, 1, 1, 3_000_000, 0),
        events.QueueChanged(RANK, 3, 2),
        events.TransferDone("fetch", RANK, 5, 5000, 10),
        events.TransferDone("push", RANK, 5, 7000, 10, "failed"),
        events.BlocksEvicted(POOL_RANK, 4),
        events.Preempted("a", 1, RANK),
        events.AttemptRetried("a", 1, "rank down"),
        events.MessageDropped("frontend", "TokensEmitted", "late"),
    ):
        metrics.record(event)


def test_a_known_workload_gives_the_numbers_counted_by_hand() -> None:
    metrics = Metrics([RANK])
    drive(metrics)
    assert [value(metrics, "rackserve_requests_total", outcome=o) for o in ("finished", "aborted", "refused")] == [1, 1, 1]
    assert value(metrics, "rackserve_prompt_tokens_total") == 130
    assert value(metrics, "rackserve_cached_prompt_tokens_total") == 60
    assert value(metrics, "rackserve_output_tokens_total") == 12
    sources = [value(metrics, "rackserve_prefill_tokens_total", source=s) for s in ("local", "fetched", "computed")]
    assert sources == [40, 20, 40]
    assert value(metrics, "rackserve_time_to_first_token_seconds_sum") == 0.05
    assert value(metrics, "rackserve_request_duration_seconds_count") == 1
    assert value(metrics, "rackserve_step_duration_seconds_count", rank="prefill0.0") == 1
    assert value(metrics, "rackserve_step_tokens_total", rank="prefill0.0") == 40
    assert value(metrics, "rackserve_requests_running", rank="prefill0.0") == 2
    assert value(metrics, "rackserve_requests_queued", rank="prefill0.0") == 3
    assert value(metrics, "rackserve_transfer_bytes_total", kind="fetch") == 5000
    assert value(metrics, "rackserve_transfer_bytes_total", kind="push") == 0
    assert value(metrics, "rackserve_transfers_total", kind="push", outcome="failed") == 1
    assert value(metrics, "rackserve_blocks_evicted_total", holder="pool.0") == 4
    reasons = [value(metrics, "rackserve_answers_ended_total", reason=r) for r in ("stop", "length", "cancelled", "other")]
    assert reasons == [1, 0, 1, 0]
    assert value(metrics, "rackserve_decode_time_seconds_sum") == 1.95
    assert value(metrics, "rackserve_queue_time_seconds_count") == 1
    assert value(metrics, "rackserve_transfer_duration_seconds_count", kind="fetch") == 1
    assert value(metrics, "rackserve_transfer_duration_seconds_count", kind="push") == 0


def test_a_rank_that_comes_back_is_a_restart_and_a_dead_one_runs_nothing() -> None:
    metrics = Metrics([RANK])
    metrics.record(events.RankChanged(RANK, "up", 1))
    metrics.record(events.QueueChanged(RANK, 3, 2))
    metrics.record(events.RankChanged(RANK, "down", 1))
    assert value(metrics, "rackserve_requests_running", rank="prefill0.0") == 0
    assert value(metrics, "rackserve_rank_restarts_total", rank="prefill0.0") == 0
    metrics.record(events.RankChanged(RANK, "up", 2))
    assert value(metrics, "rackserve_rank_restarts_total", rank="prefill0.0") == 1
    assert value(metrics, "rackserve_rank_up", rank="prefill0.0") == 1


def test_gaps_are_per_token_and_fine_enough_for_fast_decoding() -> None:
    metrics = Metrics()
    metrics.tokens_arrived(0.0008, 4)
    assert value(metrics, "rackserve_inter_token_latency_seconds_bucket", le="0.00025") == 4


def test_only_a_bounded_number_of_unknown_names_is_worth_a_line() -> None:
    metrics = Metrics()
    assert [metrics.unknown_field("a"), metrics.unknown_field("a")] == [True, False]
    assert sum(metrics.unknown_field(str(number)) for number in range(1000)) < 100
    assert value(metrics, "rackserve_unknown_fields_total") == 1002


def test_the_last_batch_of_a_dead_rank_does_not_bring_its_queue_back() -> None:
    rank = Rank("prefill0")
    metrics = Metrics([rank])
    for event in (
        events.RankChanged(rank, "up", 1), events.QueueChanged(rank, 3, 2), events.RankChanged(rank, "down", 1),
        events.QueueChanged(rank, 4, 2),
    ):  # fmt: skip
        metrics.record(event)
    assert value(metrics, "rackserve_requests_running", rank="prefill0.0") == 0
    assert value(metrics, "rackserve_requests_queued", rank="prefill0.0") == 0
    metrics.record(events.RankChanged(rank, "up", 2))
    metrics.record(events.QueueChanged(rank, 1, 0))
    assert value(metrics, "rackserve_requests_queued", rank="prefill0.0") == 1


def test_drafts_are_counted_by_position_and_never_more_accepted_than_verified() -> None:
    metrics = Metrics([RANK])
    for event in (events.DraftsVerified(RANK, 3, (3, 2), (2, 1)), events.DraftsVerified(RANK, 1, (), ())):
        metrics.record(event)
    counts = [
        [value(metrics, f"rackserve_drafts_{what}_total", position=position) for position in ("1", "2", "3")]
        for what in ("verified", "accepted")
    ]
    assert counts == [[3, 2, 0], [2, 1, 0]]
    assert value(metrics, "rackserve_draft_turns_total") == 4
    metrics.record(events.DraftsVerified(RANK, 1, (1,) * 7, (0,) * 7))
    assert value(metrics, "rackserve_drafts_verified_total", position="7") == 1
