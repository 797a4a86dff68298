"""What a run leaves behind: one record per request, the rack's events, and a head that says how they came about. JSONL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from rackserve.base.errors import FileFormatError
from rackserve.base.events import AnyEvent, Event
from rackserve.base.request import Request
from rackserve.base.units import Time
from rackserve.bench.ideal import IdealCache
from rackserve.bench.plan import Send


class ClientLoad(msgspec.Struct, frozen=True):
    """Whether the client itself kept up: how late its event loop woke up, in ms, and its CPU time per second of a core."""

    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    cpu_share: float


class RunInfo(msgspec.Struct, frozen=True, tag="run"):
    """How a run was made.

    host            live or simulated
    loop            closed (a session's next turn waits for its answer), serial (one request in flight over everything) or open
                    (every request at its planned time)
    num_gpus        all GPUs (or CPU ranks) of the rack, prefill and decode: the divisor of every per-GPU figure
    steady_end_ns   when the first lane found no further session; the steady window ends there
    step_error      held-out relative error of the step-time model of a simulated run; None: not calibrated (or live)
    aborted         why the run was stopped before it could mean anything; else empty
    client          of a live run: whether the client kept up
    num_sessions    session trees that ended after warming up with all their requests sent; None: not counted
    interrupted     a person ended the run before its end
    """

    label: str
    host: str
    concurrency: int
    num_gpus: int
    loop: str = "closed"
    seed: int = 42
    started_ns: Time = 0
    ended_ns: Time = 0
    steady_end_ns: Time | None = None
    step_error: float | None = None
    config: dict[str, str] = {}
    aborted: str = ""
    client: ClientLoad | None = None
    num_sessions: int | None = None
    interrupted: bool = False


class RequestRecord(msgspec.Struct, frozen=True, tag="request", omit_defaults=True):
    """One request from its planned sending to its end. Times are on one clock of the run; -1 means it never happened.

    due_ns                 when the plan wanted it sent; sent_ns: when it was
    first_ns, last_ns      arrival of the first and of the last output tokens; ended_ns: the request was over
    planned_*_tokens       what was asked for
    prompt_tokens, cached_tokens, output_tokens   the server's count (`usage`)
    received_tokens        output tokens the client itself counted; -1 where it cannot without a tokenizer
    num_chunks, chunk_ns   how many pieces the output came in (a chunk may hold several tokens); their arrivals, if kept
    ideal_cached_tokens    what an infinite cache of the served block size would have hit
    trace_blocks, trace_block_hits   blocks of the trace in the prompt, and those seen before in this play
    error                  "" = done; else the kind of failure, "unfinished" when the run ended first
    """

    id: str
    session: str
    due_ns: Time
    sent_ns: Time
    ended_ns: Time
    planned_prompt_tokens: int
    planned_output_tokens: int
    first_ns: Time = -1
    last_ns: Time = -1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    received_tokens: int = -1
    num_chunks: int = 0
    chunk_ns: tuple[Time, ...] = ()
    ideal_cached_tokens: int = 0
    trace_blocks: int = 0
    trace_block_hits: int = 0
    attempts: int = 1
    warmup: bool = False
    error: str = ""
    detail: str = ""


class RecordedEvent(msgspec.Struct, frozen=True, tag="event"):
    """An event with the time at which and the node on which it was recorded."""

    at_ns: Time
    node: str
    event: AnyEvent


class Recording(msgspec.Struct, frozen=True):
    """Everything one run left behind."""

    run: RunInfo
    requests: tuple[RequestRecord, ...]
    events: tuple[RecordedEvent, ...] = ()


class OpenRecord:
    """A request in flight, as its client sees it."""

    __slots__ = ("_chunks", "_ideal", "_prompt_tokens", "_send", "_trace_hits", "received_tokens", "sent_ns")

    def __init__(self, send: Send, request: Request, ideal: IdealCache, now: Time) -> None:
        self._send = send
        self._prompt_tokens = request.num_tokens
        self._ideal = ideal.add_prompt(request.chain, request.num_tokens)
        self._trace_hits = ideal.add_trace_blocks(send.scope, send.request.hash_ids)
        self._chunks: list[Time] = []
        self.received_tokens = -1
        self.sent_ns = now

    def add_chunk(self, now: Time, num_tokens: int | None) -> None:
        """Output arrived: `num_tokens` of it, or None where the client cannot tell."""
        self._chunks.append(now)
        if num_tokens is not None:
            self.received_tokens = max(0, self.received_tokens) + num_tokens

    def close(
        self,
        now: Time,
        *,
        error: str = "",
        detail: str = "",
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int = 0,
        attempts: int = 1,
    ) -> RequestRecord:
        """The record of the request, ended at `now`."""
        send = self._send
        return RequestRecord(
            id=str(send.key),
            session=send.key.tree,
            due_ns=send.due_ns,
            sent_ns=self.sent_ns,
            ended_ns=now,
            planned_prompt_tokens=self._prompt_tokens,
            planned_output_tokens=send.request.output_tokens,
            first_ns=self._chunks[0] if self._chunks else -1,
            last_ns=self._chunks[-1] if self._chunks else -1,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            received_tokens=self.received_tokens,
            num_chunks=len(self._chunks),
            chunk_ns=tuple(self._chunks),
            ideal_cached_tokens=self._ideal,
            trace_blocks=send.request.num_blocks,
            trace_block_hits=self._trace_hits,
            attempts=attempts,
            warmup=send.warmup,
            error=error,
            detail=detail,
        )


_line_decoder = msgspec.json.Decoder(RunInfo | RequestRecord | RecordedEvent)


def recorded(events: Iterable[tuple[Time, str, Event]]) -> tuple[RecordedEvent, ...]:
    """Events as a host keeps them, (time, node, event), for a `Recording`."""
    return tuple(RecordedEvent(at_ns, node, event) for at_ns, node, event in events)  # type: ignore[arg-type]


def write_recording(path: Path | str, recording: Recording) -> None:
    """Write the run, one JSON object a line: the head, then requests, then events."""
    encoder = msgspec.json.Encoder()
    lines: Sequence[RunInfo | RequestRecord | RecordedEvent] = (recording.run, *recording.requests, *recording.events)
    with Path(path).open("wb") as file:
        for line in lines:
            file.write(encoder.encode(line) + b"\n")


def read_recording(path: Path | str) -> Recording:
    """Read what `write_recording` wrote; a damaged line raises FileFormatError."""
    run: RunInfo | None = None
    requests: list[RequestRecord] = []
    events: list[RecordedEvent] = []
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror}); give a recording of a run") from None
    for number, raw in enumerate(lines, 1):
        try:
            line = _line_decoder.decode(raw)
        except msgspec.MsgspecError as error:
            raise FileFormatError(f"{path}:{number}: {error}; the recording is damaged, run it again") from None
        if isinstance(line, RunInfo):
            run = line
        elif isinstance(line, RequestRecord):
            requests.append(line)
        else:
            events.append(line)
    if run is None:
        raise FileFormatError(f"{path}:1: has no head line of type run; give a recording of a run")
    return Recording(run, tuple(requests), tuple(events))
