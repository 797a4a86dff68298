"""The frontend owns each request from arrival to its last token: attempts, order of tokens, usage, deadlines, drain."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.events import AttemptRetried, FirstTokenSent, MessageDropped, RequestArrived, RequestEnded
from rackserve.base.ids import FRONTEND, ROUTER, NodeId
from rackserve.base.messages import (
    PREEMPTED,
    AbortAttempt,
    AttemptLost,
    Cancel,
    Drain,
    Drained,
    Message,
    Output,
    Place,
    Placed,
    Refused,
    Submit,
    Timeout,
    TokensEmitted,
)
from rackserve.base.request import Request, Usage
from rackserve.base.step import FAILURES, TokenLogprobs
from rackserve.base.units import Time
from rackserve.nodes.alarms import Alarms
from rackserve.nodes.deadlines import Deadlines
from rackserve.nodes.ports import Ports


class FrontendConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`max_attempts`: attempts after which a request fails, those that were preempted not counted.

    `max_requests`: live ones; more are refused at once.
    """

    max_attempts: int = 5
    max_requests: int = 10_000

    def __post_init__(self) -> None:
        for name in ("max_attempts", "max_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"frontend.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(slots=True)
class _Live:
    """A request that has not ended."""

    request: Request
    reply_to: NodeId
    arrived: Time
    num_prompt_tokens: int
    max_tokens: int
    heard: Time
    attempt: int = 1
    failures: int = 0
    emitted: int = 0
    cached_tokens: int = -1
    first_token: Time = -1
    waiting_since: Time = -1
    output: array[int] = field(default_factory=lambda: array("i"))
    early: list[TokensEmitted] = field(default_factory=list)


class Frontend:
    """Node `frontend`."""

    def __init__(self, config: FrontendConfig, deadlines: Deadlines, ports: Ports) -> None:
        self._config = config
        self._deadlines = deadlines
        self._ports = ports
        self._live: dict[str, _Live] = {}
        self._drain_to: NodeId | None = None
        self._alarms = Alarms(ports.clock, self._on_timeout)
        self._handlers: dict[type[Message], Callable[..., None]] = {
            Submit: self._on_submit,
            Cancel: self._on_cancel,
            Placed: self._on_placed,
            Refused: self._on_refused,
            AttemptLost: self._on_lost,
            TokensEmitted: self._on_tokens,
            Timeout: lambda message: self._alarms.wake(),
            Drain: self._on_drain,
        }

    @property
    def num_live(self) -> int:
        return len(self._live)

    def delivered(self) -> dict[str, tuple[int, int, int]]:
        """For each live request: its attempt, how many output tokens its client has, and how many messages wait for theirs."""
        return {name: (live.attempt, live.emitted, len(live.early)) for name, live in self._live.items()}

    def handle(self, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)

    def _on_submit(self, message: Submit) -> None:
        request, now = message.request, self._ports.clock.now()
        self._ports.recorder.record(RequestArrived(request.id, request.session, request.num_tokens, request.max_tokens))
        live = _Live(request, message.reply_to, now, request.num_tokens, request.max_tokens, now)
        refusal = None
        if request.id in self._live:
            refusal = ("duplicate", f"a request with id {request.id} is running")
        elif self._drain_to is not None:
            refusal = ("draining", "the server is shutting down")
        elif len(self._live) >= self._config.max_requests:
            refusal = ("overloaded", f"{len(self._live)} requests are running; the limit is frontend.max_requests")
        if refusal is not None:
            self._ports.transport.send(message.reply_to, Output(request.id, 0, (), error=refusal[0], detail=refusal[1]))
            self._record_end(live, "refused", refusal[0])
            return
        self._live[request.id] = live
        self._alarms.set(now + self._deadlines.ns("request"), Timeout("request", request.id))
        self._place(live)

    def _place(self, live: _Live) -> None:
        now = self._ports.clock.now()
        live.heard = now
        self._ports.transport.send(ROUTER, Place(live.request))
        self._alarms.set(now + self._deadlines.ns("silence"), Timeout("silence", live.request.id, live.attempt))

    def _on_placed(self, message: Placed) -> None:
        live = self._current(message.placement.request, message.placement.attempt, message)
        if live is not None:
            live.waiting_since = -1

    def _on_refused(self, message: Refused) -> None:
        live = self._current(message.request, message.attempt, message)
        if live is None:
            return
        now = self._ports.clock.now()
        if message.retry and message.code == "unavailable":
            live.waiting_since = now if live.waiting_since < 0 else live.waiting_since
            if now - live.waiting_since < self._deadlines.ns("unavailable"):
                self._alarms.set(now + self._deadlines.ns("retry"), Timeout("retry", live.request.id, live.attempt))
                return
        self._end(live, "refused", error=message.code, detail=message.detail)

    def _on_lost(self, message: AttemptLost) -> None:
        live = self._current(message.request, message.attempt, message)
        if live is not None:
            self._retry(live, message.reason)

    def _retry(self, live: _Live, reason: str) -> None:
        """Place what is left of the request as the next attempt; delivered tokens become part of its prompt."""
        self._ports.recorder.record(AttemptRetried(live.request.id, live.attempt, reason))
        live.failures += reason != PREEMPTED
        if live.failures >= self._config.max_attempts:
            self._end(live, "aborted", error="unavailable", detail=f"gave up after {live.failures} failures: {reason}")
            return
        self._alarms.clear(live.request.id, live.attempt)
        live.early.clear()
        live.attempt += 1
        request = live.request
        fresh = live.output[request.num_emitted :]
        live.request = msgspec.structs.replace(
            request,
            attempt=live.attempt,
            tokens=request.tokens + fresh.tobytes() if request.tokens else b"",
            num_tokens=live.num_prompt_tokens + live.emitted,
            num_emitted=live.emitted,
            max_tokens=live.max_tokens - live.emitted,
        )
        self._place(live)

    def _on_tokens(self, message: TokensEmitted) -> None:
        live = self._current(message.request, message.attempt, message)
        if live is None:
            if message.finish is None:  # an abort was lost on its way: without another the rank would go on to the last token
                over = AbortAttempt(message.request, message.attempt, "attempt is over")
                self._ports.transport.send(message.rank.worker, over)
            return
        if message.index > live.emitted:  # the decode rank's tokens may overtake the first one, which the prefill rank sends
            live.early.append(message)
            if len(live.early) == 1:
                due = self._ports.clock.now() + self._deadlines.ns("reorder")
                self._alarms.set(due, Timeout("reorder", live.request.id, live.attempt))
            return
        early, live.early = live.early, []
        self._take_tokens(live, message)
        for waiting in early:
            self._on_tokens(waiting)

    def _take_tokens(self, live: _Live, message: TokensEmitted) -> None:
        known = live.emitted - message.index
        tokens, logprobs = message.tokens[known:], message.logprobs[known:]
        now = self._ports.clock.now()
        live.heard = now
        if live.cached_tokens < 0:
            live.cached_tokens = min(message.cached_tokens, live.num_prompt_tokens)
        if tokens and live.first_token < 0:
            live.first_token = now
            self._ports.recorder.record(FirstTokenSent(live.request.id, live.attempt, now - live.arrived))
        index = live.emitted
        live.emitted += len(tokens)
        live.output.extend(tokens)
        scores = message.prompt_logprobs if index == 0 else ()  # else the client has them already
        if message.finish is None:
            if tokens:
                output = Output(
                    live.request.id, index, tokens, attempts=live.attempt, logprobs=logprobs, prompt_logprobs=scores
                )
                self._ports.transport.send(live.reply_to, output)
            return
        failure = FAILURES.get(message.finish)
        self._end(
            live,
            "finished" if failure is None else "aborted",
            tokens=tokens,
            index=index,
            finish=message.finish if failure is None else None,
            error=None if failure is None else message.finish,
            detail=failure or "",
            logprobs=logprobs,
            prompt_logprobs=scores,
        )

    def _on_cancel(self, message: Cancel) -> None:
        live = self._live.get(message.request)
        if live is not None:
            self._abort_attempt(live, message.reason)
            self._end(live, "finished" if message.reason == "stop" else "aborted", finish=message.reason)

    def _on_timeout(self, message: Timeout) -> None:
        live = self._live.get(message.key)
        if live is None:
            return
        if message.kind == "request":
            self._abort_attempt(live, "deadline")
            self._end(live, "aborted", error="timeout", detail="the request did not finish within its deadline")
        elif message.attempt != live.attempt:
            return
        elif message.kind == "retry":
            self._place(live)
        elif message.kind == "reorder":
            if live.early:  # the tokens before these were lost on the way: only another attempt can make them again
                self._abort_attempt(live, "output lost")
                self._retry(live, "output lost")
        elif message.kind == "silence":
            due = live.heard + self._deadlines.ns("silence")
            if self._ports.clock.now() < due:
                self._alarms.set(due, message)
            else:
                self._abort_attempt(live, "silent")
                self._retry(live, "silent")

    def _on_drain(self, message: Drain) -> None:
        self._drain_to = message.reply_to
        self._report_drained()

    def _report_drained(self) -> None:
        if self._drain_to is not None and not self._live:
            self._ports.transport.send(self._drain_to, Drained())

    def _abort_attempt(self, live: _Live, reason: str) -> None:
        self._ports.transport.send(ROUTER, AbortAttempt(live.request.id, live.attempt, reason))

    def _current(self, request: str, attempt: int, message: Message) -> _Live | None:
        live = self._live.get(request)
        if live is None or live.attempt != attempt:
            self._ports.recorder.record(MessageDropped(FRONTEND, type(message).__name__, "attempt is over"))
            return None
        return live

    def _end(
        self,
        live: _Live,
        outcome: str,
        *,
        tokens: tuple[int, ...] = (),
        index: int | None = None,
        finish: str | None = None,
        error: str | None = None,
        detail: str = "",
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """The one place where a request ends (law I1)."""
        del self._live[live.request.id]
        self._alarms.clear(live.request.id)
        self._alarms.clear(live.request.id, live.attempt)
        usage = Usage(live.num_prompt_tokens, max(0, live.cached_tokens), live.emitted)
        at = live.emitted if index is None else index
        output = Output(live.request.id, at, tokens, finish, error, detail, usage, live.attempt, logprobs, prompt_logprobs)
        self._ports.transport.send(live.reply_to, output)
        self._record_end(live, outcome, error or finish or "")
        self._report_drained()

    def _record_end(self, live: _Live, outcome: str, reason: str) -> None:
        now = self._ports.clock.now()
        ttft = live.first_token - live.arrived if live.first_token >= 0 else -1
        cached = max(0, live.cached_tokens)
        self._ports.recorder.record(
            RequestEnded(
                live.request.id,
                outcome,
                reason,
                live.attempt,
                live.num_prompt_tokens,
                cached,
                live.emitted,
                ttft,
                now - live.arrived,
            )
        )
