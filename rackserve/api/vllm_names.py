"""The same numbers under vLLM's names, for dashboards and tools that know no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

OURS, THEIRS = "rackserve_", "vllm:"

RENAMED = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_duration_seconds": "e2e_request_latency_seconds",
    "queue_time_seconds": "request_queue_time_seconds",
    "decode_time_seconds": "request_decode_time_seconds",
    "prompt_tokens": "prompt_tokens",
    "cached_prompt_tokens": "prompt_tokens_cached",
    "output_tokens": "generation_tokens",
}
"""Ours -> vLLM's, without prefixes: histograms and counters that mean the same."""

FINISHED = {"stop": "stop", "length": "length", "abort": "cancelled", "error": "other"}
"""vLLM's finished_reason -> our reason."""


class VllmNames(Collector):
    """Reads what `registry` holds under our names. Label model_name is `model`; engine is "0", as of the rack as a whole."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.model = ""
        self._registry = registry

    @property
    def _labels(self) -> dict[str, str]:
        return {"model_name": self.model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """The families of vLLM that have a meaning here."""
        ours = {family.name.removeprefix(OURS): family for family in self._registry.collect()}
        for name, theirs in RENAMED.items():
            yield self._renamed(ours[name], theirs)
        running, waiting = (total(ours[name]) for name in ("requests_running", "requests_queued"))
        yield self._gauge("num_requests_running", "Requests that have had a step", running)
        yield self._gauge("num_requests_waiting", "Requests that wait for their first step", waiting)
        usage = GaugeMetricFamily(
            f"{THEIRS}kv_cache_usage_perc", "KV blocks in use, 1 is all", labels=(*self._labels, "holder")
        )
        for sample in ours["kv_usage_ratio"].samples:
            usage.add_metric((*self._labels.values(), sample.labels["holder"]), sample.value)
        yield usage
        yield from self._counters(ours)
        ended = self._family("request_success", "Answers that ended", "finished_reason")
        for reason, own in FINISHED.items():
            ended.add_metric((*self._labels.values(), reason), total(ours["answers_ended"], reason=own))
        yield ended
        per_position = self._family("spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, the first at 0", "position")
        for sample in ours["drafts_accepted"].samples:
            place = str(int(sample.labels["position"]) - 1)
            per_position.add_metric((*self._labels.values(), place), sample.value)
        yield per_position

    def _counters(self, ours: Mapping[str, Metric]) -> Iterator[Metric]:
        local, fetched, computed = (total(ours["prefill_tokens"], source=source) for source in ("local", "fetched", "computed"))
        verified = ours["drafts_verified"]
        for name, text, value in (
            ("num_preemptions", "Sequences that gave way", total(ours["preemptions"])),
            ("prefix_cache_queries", "Prompt tokens looked for in the caches of ranks", local + fetched + computed),
            ("prefix_cache_hits", "Prompt tokens found there", local),
            ("external_prefix_cache_queries", "Prompt tokens looked for in the pool", fetched + computed),
            ("external_prefix_cache_hits", "Prompt tokens fetched from there", fetched),
            ("spec_decode_num_drafts", "Drafts as sequences of tokens", total(verified, position="1")),
            ("spec_decode_num_draft_tokens", "Draft tokens verified", total(verified)),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted", total(ours["drafts_accepted"])),
        ):
            family = self._family(name, text)
            family.add_metric(tuple(self._labels.values()), value)
            yield family

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(THEIRS + name, family.documentation, family.type)
        for sample in family.samples:
            renamed.add_sample(
                sample.name.replace(family.name, THEIRS + name, 1), {**sample.labels, **self._labels}, sample.value
            )
        return renamed

    def _family(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(THEIRS + name, text, labels=(*self._labels, *labels))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(THEIRS + name, text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family


def total(family: Metric, **labels: str) -> float:
    """The sum of a family's series that have these labels."""
    return sum(sample.value for sample in family.samples if labels.items() <= sample.labels.items())
