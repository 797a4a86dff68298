"""Prometheus metrics of a router. Series of the workers exist from the first scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rackserve.api import metrics as api_metrics

OUTCOMES = ("finished", "failed", "refused", "worker_refused", "hung_up")
"""How requests end: with a worker's whole answer; broken off, given up after tries, or with a status of 500 or more; refused
here; refused by a worker, with a status below 500; or left by the client."""

FAILURES = ("no_answer", "broken_off", "status_429", "status_502", "status_503", "status_504")
_FIRST_BYTE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PLACING_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
assert api_metrics  # it turns the library's `_created` series off


class RelayMetrics:
    """Counts of the router; gauges are asked for at each scrape from `gauges`: name -> value by worker."""

    def __init__(self, workers: Iterable[str], gauges: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        self.registry = CollectorRegistry()
        self._gauges_now = gauges
        names = tuple(workers)
        self.requests = self._counter("requests", "Requests that ended", "outcome", values=OUTCOMES)
        self.retries = self._counter("retries", "Tries of a request beyond its first")
        self.retries_denied = self._counter("retries_denied", "Tries again that the retry budget did not allow")
        self.sent = self._counter("worker_requests", "Tries sent to a worker", "worker", values=names)
        self.failures = self._counter("worker_failures", "Tries that a worker failed", "worker", "kind")
        for name in names:
            for kind in FAILURES:
                self.failures.labels(name, kind)
        self.prompt = self._counter("prompt_tokens", "Prompt tokens, as workers told them", "worker", values=names)
        self.cached = self._counter("cached_tokens", "Of those, tokens found cached, as workers told", "worker", values=names)
        self.predicted = self._counter("predicted_cached_tokens", "Of those, as predicted here", "worker", values=names)
        self.untold = self._counter("keyed_by_text", "Prompts keyed by text in spite of a tokenizer", "reason")
        self.first_byte = self._histogram("time_to_first_byte", "From arrival to the first byte of the answer", _FIRST_BYTE_S)
        self.placing = self._histogram("placing", "From arrival to a place: reading, keying, waiting", _PLACING_S)
        self._gauges: dict[str, Gauge] = {}
        for name, text in _GAUGES.items():
            self._gauges[name] = Gauge(f"rackserve_route_{name}", text, ["worker"], registry=self.registry)
        self.waiting = Gauge("rackserve_route_waiting_requests", "Requests that wait for a place", registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str, values: Iterable[str] = ()) -> Counter:
        counter = Counter(f"rackserve_route_{name}", text, labels, registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"rackserve_route_{name}_seconds", text, buckets=buckets, registry=self.registry)

    def exposition(self) -> bytes:
        """All metrics in the Prometheus text format."""
        for name, values in self._gauges_now().items():
            for worker, value in values.items():
                self._gauges[name].labels(worker).set(value)
        return generate_latest(self.registry)


_GAUGES = {
    "worker_up": "1 while the worker answers",
    "worker_circuit_open": "1 while its circuit is not closed",
    "worker_in_flight": "Requests sent there that have not ended",
    "worker_booked_tokens": "Tokens of prefill booked there",
    "worker_event_gaps": "Times KV events of the worker were missing",
    "worker_event_restarts": "Times the worker's KV events began anew",
    "worker_events_unread": "KV events of the worker that could not be read",
    "worker_blocks_unplaced": "Blocks it told of whose history or size is not known here",
}
