"""Traces of requests for OpenTelemetry: a server span each, with what it waited for and computed below it.

Spans are made when a request has ended, from the recorded events: nothing is measured that is not measured anyway.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rackserve import __version__
from rackserve.api.call import Call, Caller
from rackserve.base.errors import ConfigError
from rackserve.base.events import PrefillAdmitted, RequestEnded, TransferDone
from rackserve.base.units import Time
from rackserve.live.recorder import Recorded

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

MAX_OPEN = 100_000

LINGER_S = 1.0
"""How long a request that has ended waits for what the ranks have recorded of it: their events come in batches."""

SPANS = {"fetch": "fetch", "push": "transfer"}
"""Kinds of transfers that a request waits for, and the names of their spans."""

OPERATIONS = {"completion": "text_completion"}
"""Values of gen_ai.operation.name; all other kinds of calls are chat."""


@dataclass(slots=True)
class _Open:
    """A request on its way: what its call said, and when and how a prefill rank took it on (the last one that did).

    moved  kind of transfer -> begin of the first, end of the last, and bytes, of the last attempt
    """

    attributes: dict[str, Any]
    parent: Any
    admitted: Time = -1
    prefill: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    moved: dict[str, tuple[Time, Time, int]] = field(default_factory=dict)


class Tracer:
    """A witness and a sink (see recorder). The caller's traceparent is honoured, and so is its wish not to be sampled.

    later  calls what it is given in LINGER_S seconds
    """

    def __init__(self, provider: TracerProvider, later: Callable[[Callable[[], None]], object]) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._later = later
        self._ended: dict[str, tuple[RequestEnded, Time]] = {}
        self._tracer = provider.get_tracer("rackserve", __version__)
        self._extract = TraceContextTextMapPropagator().extract
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._to_epoch = time.time_ns() - time.monotonic_ns()

    def begin(self, call: Call, caller: Caller, headers: Mapping[str, str]) -> None:
        """Remember what only the front end knows of the requests in `call`."""
        parent = self._extract({"traceparent": headers.get("traceparent", ""), "tracestate": headers.get("tracestate", "")})
        sampling = call.ask.sampling
        attributes = {
            "gen_ai.operation.name": OPERATIONS.get(call.ask.kind, "chat"),
            "gen_ai.provider.name": "rackserve",
            "gen_ai.request.model": call.ask.model or call.model,
            "gen_ai.response.model": call.model,
            "gen_ai.response.id": call.id,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
        for request in call.requests:
            self._open[request.id] = _Open({**attributes, "gen_ai.request.max_tokens": request.max_tokens}, parent)
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def __call__(self, recorded: Recorded) -> None:
        event, now = recorded.event, recorded.t
        if not isinstance(event, PrefillAdmitted | TransferDone | RequestEnded):
            return
        known = self._open.get(event.request)
        if known is None:
            return
        if isinstance(event, RequestEnded):
            self._ended[event.request] = (event, now)
            self._later(partial(self._settle, event.request))
            return
        if event.attempt > known.attempt:
            known.attempt = event.attempt
            known.moved.clear()
        if isinstance(event, TransferDone):
            begin, end, num_bytes = known.moved.get(event.kind, (now, 0, 0))
            known.moved[event.kind] = (min(begin, now - event.duration_ns), max(end, now), num_bytes + event.num_bytes)
            return
        known.admitted = now
        known.prefill = {
            "rackserve.rank": str(event.rank),
            "rackserve.cached_tokens.local": event.local_tokens,
            "rackserve.cached_tokens.fetched": event.fetched_tokens,
        }

    def _settle(self, request: str) -> None:
        """Nothing more will be heard of a request that has ended."""
        ended, known = self._ended.pop(request, None), self._open.pop(request, None)
        if ended is not None and known is not None:
            self._export(known, *ended)

    def _export(self, known: _Open, event: RequestEnded, end: Time) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        begin = end - event.total_ns
        operation = known.attributes["gen_ai.operation.name"]
        span = self._tracer.start_span(
            f"{operation} {known.attributes['gen_ai.response.model']}",
            known.parent,
            SpanKind.SERVER,
            {
                **known.attributes,
                "gen_ai.usage.input_tokens": event.prompt_tokens,
                "gen_ai.usage.output_tokens": event.output_tokens,
                "gen_ai.usage.cache_read.input_tokens": event.cached_tokens,
                "gen_ai.response.finish_reasons": (event.reason,),
                "rackserve.outcome": event.outcome,
                "rackserve.attempts": event.attempts,
            },
            start_time=begin + self._to_epoch,
        )
        if event.outcome != "finished":
            span.set_attribute("error.type", event.reason)
            span.set_status(Status(StatusCode.ERROR, event.reason))
        first = begin + event.ttft_ns if event.ttft_ns >= 0 else end
        admitted = min(known.admitted, first) if known.admitted >= 0 else first
        parts: list[tuple[str, Time, Time, dict[str, Any]]] = [
            ("queue", begin, admitted, {}),
            ("prefill", admitted, first, known.prefill),
        ]
        for kind, name in SPANS.items():
            if kind in known.moved:
                start, stop, num_bytes = known.moved[kind]
                parts.append((name, max(start, begin), min(stop, end), {"rackserve.bytes": num_bytes}))
        if event.ttft_ns >= 0:
            parts.append(("decode", first, end, {}))
        for name, start, stop, attributes in parts:
            if start < stop:
                child = self._tracer.start_span(
                    name, set_span_in_context(span), attributes=attributes, start_time=start + self._to_epoch
                )
                child.end(stop + self._to_epoch)
        span.end(end + self._to_epoch)

    def close(self) -> None:
        """Send what is left; returns within seconds if nobody takes it."""
        for request in list(self._ended):
            self._settle(request)
        self._provider.shutdown()


def open_tracer(endpoint: str, later: Callable[[Callable[[], None]], object]) -> Tracer:
    """A tracer that sends to `endpoint` (OTLP over HTTP) from a thread of its own, in batches, and drops what is too much.

    Raises ConfigError if the packages are missing.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"server.otlp_endpoint needs the extra otel ({error}): pip install -e '.[otel]' in the checkout"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "rackserve", "service.version": __version__}))
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=2)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider, later)
