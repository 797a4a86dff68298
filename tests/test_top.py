from __future__ import annotations

import json
import sys
from collections.abc import Callable

import httpx
import pytest

from rackserve.api.holdings import Holding
from rackserve.api.metrics import Metrics
from rackserve.base import events
from rackserve.base.errors import ConfigError
from rackserve.base.ids import Rank
from rackserve.cli import main
from rackserve.relay.metrics import RelayMetrics
from rackserve.top import Server, Sight, lines, quantile, rank_rows, rate, read_series

PREFILL, DECODE = Rank("prefill0"), Rank("decode0")


class Stub:
    """A server of real metrics that an httpx transport reaches."""

    def __init__(self, key: str = "") -> None:
        self.metrics = Metrics([PREFILL, DECODE])
        self.metrics.holdings.look = lambda: ({"decode0.0": Holding(5, 10, 20), "pool.0": Holding(0, 30, 40)}, {})
        self.health = {"phase": "ready", "open_requests": 3, "ranks": [{"worker": "decode0", "state": "up", "pid": 77}]}
        self.status, self.key, self.asked = 200, key, 0

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if self.key and request.url.path == "/metrics" and request.headers.get("authorization") != f"Bearer {self.key}":
            return httpx.Response(401)
        if request.url.path == "/health":
            return httpx.Response(self.status, text=json.dumps(self.health))
        return httpx.Response(self.status, text=self.metrics.exposition().decode())

    def server(self, key: str = "") -> Server:
        return Server("http://stub/v1/", key, httpx.MockTransport(self.answer))


def work(metrics: Metrics) -> None:
    for event in (
        events.RankChanged(DECODE, "up", 1),
        events.QueueChanged(DECODE, 2, 4),
        events.StepDone(DECODE, 1, 40, 60, 3200, 1, 1, 3_000_000),
        events.FirstTokenSent("a", 1, 400_000_000),
        events.RequestEnded("a", "finished", "stop", 1, 1000, 900, 50, 400_000_000, 2_000_000_000),
        events.TransferDone("push", DECODE, 5, 7_000_000, 10),
    ):
        metrics.record(event)


def two_looks(seconds: float = 2.0) -> tuple[Sight, Sight]:
    stub = Stub()
    before = Sight(10.0, stub.server().look().series, stub.health)
    work(stub.metrics)
    return before, Sight(10.0 + seconds, stub.server().look().series, stub.health)


def test_rates_are_of_what_happened_between_the_looks() -> None:
    before, now = two_looks()
    assert rate(before, now, "output_tokens_total") == 25
    assert rate(now, now, "output_tokens_total") == 0
    assert rate(now, Sight(99.0), "output_tokens_total") == 0  # a server that started anew


def test_a_quantile_lies_in_the_bucket_of_its_observation() -> None:
    before, now = two_looks()
    value = quantile(before, now, "time_to_first_token_seconds", 0.5)
    assert value is not None and 0.25 < value <= 0.5
    assert quantile(now, now, "time_to_first_token_seconds", 0.5) is None
    assert quantile(before, now, "no_such", 0.5) is None


def test_a_quantile_beyond_the_last_bucket_is_its_bound() -> None:
    text = 'rackserve_x_bucket{le="1"} 0\nrackserve_x_bucket{le="+Inf"} 4\n'
    now = Sight(1.0, read_series(f"# TYPE rackserve_x histogram\n{text}"))
    assert quantile(Sight(0.0), now, "x", 0.5) == 1.0


def test_a_rank_is_a_row() -> None:
    before, now = two_looks()
    prefill, decode = rank_rows(before, now)
    assert prefill[:5] == ("prefill0.0", "down", "-", "0", "0")
    assert decode == ("decode0.0", "up", "77", "4", "2", "0.5", "20", "25%", "50%", "0")


def test_everything_is_told_in_a_hundred_columns() -> None:
    told = lines(*two_looks())
    assert max(map(len, told)) <= 110
    text = "\n".join(told)
    for part in ("ready   open requests 3", "requests 0.5/s", "input 500 (90% cached), output 25", "pool 75% full", "push 3.5"):
        assert part in text
    assert "TTFT p50/p99 0.375" in text


def test_of_a_router_its_workers_are_shown() -> None:
    metrics = RelayMetrics(["a:1", "b:2"], dict)
    worker = {"worker": "a:1", "up": True, "circuit": "closed", "holdings": "events", "in_flight": 3}
    health = {"ready": True, "open_requests": 3, "workers": [worker, {**worker, "worker": "b:2", "up": False, "in_flight": 0}]}
    before = Sight(10.0, read_series(metrics.exposition().decode()), health)
    metrics.requests.labels("finished").inc(4)
    metrics.prompt.labels("a:1").inc(100)
    metrics.cached.labels("a:1").inc(90)
    metrics.sent.labels("a:1").inc(4)
    metrics.failures.labels("b:2", "no_answer").inc()
    now = Sight(12.0, read_series(metrics.exposition().decode()), health)
    told = lines(before, now)
    assert told[0] == "ready   open requests 3   waiting for a worker 0"
    assert told[1].startswith("requests 2.0/s, input tokens/s 50 (90% cached)")
    assert [row.split() for row in told[4:]] == [
        ["a:1", "yes", "closed", "events", "3", "2.0", "0"],
        ["b:2", "no", "closed", "events", "0", "0.0", "1"],
    ]


def test_prefill_ranks_come_first_in_the_order_of_their_numbers() -> None:
    ranks = [Rank("decode0"), Rank("prefill1"), Rank("prefill0")]
    now = Sight(1.0, read_series(Metrics(ranks).exposition().decode()))
    assert [row[0] for row in rank_rows(now, now)] == ["prefill0.0", "prefill1.0", "decode0.0"]


def test_a_stuck_or_loading_server_says_so() -> None:
    stub = Stub()
    stub.status, stub.health = 503, {"phase": "stuck", "stuck": {"where": "decode", "seconds": 41.2}}
    told = lines(Sight(0.0), stub.server().look())
    assert told[0].startswith("stuck (decode for 41 s)")
    stub.health = {"phase": "loading"}
    assert lines(Sight(0.0), stub.server().look())[0].startswith("loading")


def test_the_key_is_sent_and_missing_is_told() -> None:
    stub = Stub(key="k")
    assert stub.server("k").look().series
    with pytest.raises(ConfigError, match="asks for a key; put it into RACKSERVE_API_KEY"):
        stub.server().look()


@pytest.mark.parametrize(
    ("answer", "says"),
    [(lambda _: httpx.Response(200, text="<html>"), "this is no rackserve"), (None, "is the server running")],
)
def test_what_cannot_be_asked_is_named(answer: Callable[[httpx.Request], httpx.Response] | None, says: str) -> None:
    server = Server("http://127.0.0.1:9", transport=None if answer is None else httpx.MockTransport(answer))
    with pytest.raises(ConfigError, match=says):
        server.look()


def test_once_prints_and_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stub = Stub()
    monkeypatch.setattr("rackserve.top.Server", lambda url, key: stub.server(key))
    assert main(["top", "--once", "--interval", "0.2"]) == 0
    assert capsys.readouterr().out.startswith("ready   open requests 3\n") and stub.asked == 4


def test_without_the_package_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stub = Stub()
    monkeypatch.setattr("rackserve.top.Server", lambda url, key: stub.server(key))
    monkeypatch.setitem(sys.modules, "rackserve.top_screen", None)
    assert main(["top"]) == 2
    assert "pip install -e '.[top]' in the checkout, or use --once" in capsys.readouterr().err
