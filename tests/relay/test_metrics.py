"""Every series of every worker is there from the first scrape."""

from __future__ import annotations

from rackserve.relay.metrics import FAILURES, OUTCOMES, RelayMetrics


def test_series_exist_from_the_first_scrape() -> None:
    metrics = RelayMetrics(["a:1", "b:2"], lambda: {"worker_up": {"a:1": 1.0, "b:2": 0.0}})
    text = metrics.exposition().decode()
    for worker in ("a:1", "b:2"):
        assert f'rackserve_route_worker_requests_total{{worker="{worker}"}} 0.0' in text
        for kind in FAILURES:
            assert f'rackserve_route_worker_failures_total{{kind="{kind}",worker="{worker}"}} 0.0' in text
    for outcome in OUTCOMES:
        assert f'rackserve_route_requests_total{{outcome="{outcome}"}} 0.0' in text
    assert 'rackserve_route_worker_up{worker="a:1"} 1.0' in text
    assert "_created" not in text
