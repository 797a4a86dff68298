from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from rackserve.api.holdings import Holding
from rackserve.api.metrics import Metrics
from rackserve.base.events import DraftsVerified, QueueChanged
from rackserve.base.ids import Rank
from tests.api.test_metrics import RANK, drive

LABELS = {"model_name": "m", "engine": "0"}

NAMES = {
    "num_requests_running", "num_requests_waiting", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_decode_time_seconds", "prompt_tokens",
    "prompt_tokens_cached", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries",
    "external_prefix_cache_hits", "kv_cache_usage_perc", "request_success", "num_preemptions", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
}  # fmt: skip


def scrape(metrics: Metrics) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        family.name.removeprefix("vllm:"): [(s.name.removeprefix("vllm:"), dict(s.labels), s.value) for s in family.samples]
        for family in families
        if family.name.startswith("vllm:")
    }


def named(*ranks: Rank) -> Metrics:
    metrics = Metrics(ranks, aliases=True)
    metrics.vllm_names.model = "m"
    return metrics


def test_without_being_asked_for_there_is_none() -> None:
    assert scrape(Metrics([RANK])) == {}


def test_all_exist_from_the_first_scrape_with_the_labels_that_dashboards_group_by() -> None:
    families = scrape(named(RANK))
    assert families.keys() == NAMES
    for samples in families.values():
        assert samples and all(labels.items() >= LABELS.items() and value == 0 for _, labels, value in samples)


def test_they_are_our_numbers() -> None:
    metrics = named(RANK, Rank("decode0"))
    drive(metrics)
    metrics.record(DraftsVerified(RANK, 3, (3, 2), (2, 1)))
    metrics.record(QueueChanged(Rank("decode0"), 1, 4))
    metrics.holdings.look = lambda: ({"decode0.0": Holding(3, 0, 12)}, {})
    families = scrape(metrics)
    one = {name: samples[0][2] for name, samples in families.items() if len(samples) == 1}
    assert one == {
        "num_requests_running": 6,
        "num_requests_waiting": 4,
        "prompt_tokens": 130,
        "prompt_tokens_cached": 60,
        "generation_tokens": 12,
        "prefix_cache_queries": 100,
        "prefix_cache_hits": 40,
        "external_prefix_cache_queries": 60,
        "external_prefix_cache_hits": 20,
        "num_preemptions": 1,
        "spec_decode_num_drafts": 3,
        "spec_decode_num_draft_tokens": 5,
        "spec_decode_num_accepted_tokens": 3,
    }
    assert ("time_to_first_token_seconds_sum", LABELS, 0.05) in families["time_to_first_token_seconds"]
    assert ("request_success_total", {**LABELS, "finished_reason": "abort"}, 1) in families["request_success"]
    assert ("kv_cache_usage_perc", {**LABELS, "holder": "decode0.0"}, 0.25) in families["kv_cache_usage_perc"]
    places = [(labels["position"], value) for _, labels, value in families["spec_decode_num_accepted_tokens_per_pos"]]
    assert places[:3] == [("0", 2), ("1", 1), ("2", 0)]
