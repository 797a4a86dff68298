from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rackserve.api.http import create_app
from rackserve.api.tracing import open_tracer
from rackserve.base.errors import ConfigError
from rackserve.base.events import PrefillAdmitted, RequestEnded, TransferDone
from rackserve.base.ids import Rank
from rackserve.live.recorder import Recorded
from tests.api.rig import Rig, run, text

SECOND = 10**9
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


Move = tuple[int, int, int]
"""End, duration and attempt of a push of 1,000 bytes."""


def spans_of(
    headers: dict[str, str],
    *,
    admitted: bool = True,
    ttft: int = 3 * SECOND,
    outcome: str = "finished",
    moves: Sequence[Move] = (),
    late: Sequence[Move] = (),
    closed: bool = False,
) -> list[Any]:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from rackserve.api.tracing import Tracer

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    waiting: list[Callable[[], None]] = []
    tracer = Tracer(provider, waiting.append)

    async def scene() -> None:
        rig = Rig(text("x"))
        rig.app = create_app(rig.gateway, rig.factory, rig.metrics, rig.state, [tracer])
        await rig.post("/v1/completions", {"prompt": "secret words", "max_tokens": 7}, headers=headers)
        name = rig.frontend.submitted[0].id
        if admitted:
            tracer(Recorded(101 * SECOND, "prefill0", PrefillAdmitted(name, 1, Rank("prefill0"), 100, 40, 20, 5)))
        for end, lasted, attempt in moves:
            done = TransferDone("push", Rank("prefill0"), 2, 1000, lasted, "finished", name, attempt)
            tracer(Recorded(end, "prefill0", done))
        tracer(Recorded(110 * SECOND, "frontend", RequestEnded(name, outcome, "stop", 1, 100, 60, 10, ttft, 10 * SECOND)))
        tracer(Recorded(111 * SECOND, "frontend", RequestEnded("of nobody", "finished", "stop", 1, 1, 0, 1, 1, 2)))
        for end, lasted, attempt in late:
            done = TransferDone("push", Rank("prefill0"), 2, 1000, lasted, "finished", name, attempt)
            tracer(Recorded(end, "prefill0", done))
        assert not exporter.get_finished_spans(), "ranks may still tell of it"
        tracer.close() if closed else waiting[0]()

    run(scene())
    return sorted(exporter.get_finished_spans(), key=lambda span: (span.kind.name != "SERVER", span.start_time))


def test_a_request_is_a_server_span_with_its_parts_below_it() -> None:
    server, *parts = spans_of({"traceparent": PARENT})
    assert server.kind.name == "SERVER" and server.name == "text_completion tiny"
    assert format(server.context.trace_id, "032x") == PARENT[3:35] and format(server.parent.span_id, "016x") == PARENT[36:52]
    assert server.attributes["gen_ai.usage.input_tokens"] == 100
    assert server.attributes["gen_ai.usage.cache_read.input_tokens"] == 60
    assert server.attributes["gen_ai.request.max_tokens"] == 7
    assert [(p.name, (p.end_time - p.start_time) // SECOND) for p in parts] == [
        ("queue", 1), ("prefill", 2), ("decode", 7)
    ]  # fmt: skip
    assert all(part.parent.span_id == server.context.span_id for part in parts)
    assert parts[0].start_time == server.start_time and parts[-1].end_time == server.end_time
    assert parts[1].attributes["rackserve.rank"] == "prefill0.0"
    assert "secret" not in str([span.to_json() for span in (server, *parts)])


def test_a_request_that_ended_early_has_the_parts_it_came_to() -> None:
    server, *parts = spans_of({}, admitted=False, ttft=-1, outcome="aborted")
    assert server.parent is None and server.status.status_code.name == "ERROR" and server.attributes["error.type"] == "stop"
    assert [part.name for part in parts] == ["queue"]


@pytest.mark.parametrize("closed", [False, True])
def test_the_transfer_is_a_span_from_the_first_push_of_the_last_attempt_to_the_end_of_the_last(closed: bool) -> None:
    """Also where the ranks tell of it when the request has ended, as their events come in batches."""
    moves = [(101 * SECOND, SECOND, 1), (102 * SECOND, SECOND // 2, 2)]
    server, *parts = spans_of({}, moves=moves, late=[(104 * SECOND, SECOND, 2)], closed=closed)
    transfer = next(part for part in parts if part.name == "transfer")
    assert {part.name for part in parts} == {"queue", "prefill", "transfer", "decode"}
    assert transfer.parent.span_id == server.context.span_id and transfer.attributes["rackserve.bytes"] == 2000
    offsets = [round((at - server.start_time) / SECOND, 3) for at in (transfer.start_time, transfer.end_time)]
    assert offsets == [1.5, 4.0]


def test_a_client_that_does_not_want_a_trace_gets_none() -> None:
    assert spans_of({"traceparent": PARENT[:-1] + "0"}) == []


def test_missing_packages_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[otel\]' in the checkout"):
        open_tracer("http://127.0.0.1:4318", print)


def test_a_collector_that_is_not_there_costs_no_more_than_seconds() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    open_tracer("http://127.0.0.1:9", print).close()
