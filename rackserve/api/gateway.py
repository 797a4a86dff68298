"""The node that clients' answers come back to, in the event loop of the control plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from rackserve.base.errors import InvariantError
from rackserve.base.ids import FRONTEND, NodeId
from rackserve.base.messages import Cancel, Message, Output, Submit
from rackserve.base.request import Request
from rackserve.base.step import TokenLogprobs
from rackserve.ports import Transport

CANCEL_WAIT_S = 5.0
"""How long a reader that cancelled waits for the final output."""


class _Mailbox:
    """Output of one request that has arrived and not been read yet.

    Outputs that wait are joined into one, so a slow reader costs at most `max_tokens` tokens of memory and loses nothing.
    """

    __slots__ = (
        "_alone",
        "_index",
        "_limit",
        "_logprobs",
        "_prompt_logprobs",
        "_request",
        "_tokens",
        "_waiting",
        "cancelled",
        "last",
        "ready",
        "received",
        "running",
        "since",
        "timer",
    )

    def __init__(self, request: Request) -> None:
        self._request = request.id
        self._limit = request.max_tokens
        self._index = 0  # output number of the first unread token
        self._alone: Output | None = None  # all that is unread, where that is one output as it came
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.received = 0
        self.last: Output | None = None
        self.running = True  # the frontend has not said that the request ended
        self.cancelled = False
        self.ready = False  # there is something to take
        self.since = -1.0  # when the reader began to wait; -1: it does not
        self.timer: asyncio.TimerHandle | None = None  # looks whether it waits for too long
        self._waiting: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        """Take in what the frontend sent. Tokens seen before are skipped, a gap or a surplus ends the answer with an error."""
        if output.finish is not None or output.error is not None:
            self.running = False
        if self.last is not None:
            return
        seen = self.received - output.index
        tokens = output.tokens[max(0, seen) :]
        if output.error is None and seen < 0:
            self.end("output_lost", f"output tokens {self.received} to {output.index - 1} were lost on the way")
            return
        if self.received + len(tokens) > self._limit:
            self.end("internal", f"more than the {self._limit} output tokens asked for arrived")
            return
        self.received += len(tokens)
        if not self.running:
            self.last = output
        elif seen == 0 and not self.ready:
            self._alone = output
            self._wake()
            return
        self._join()
        self._tokens += tokens
        self._logprobs += output.logprobs[max(0, seen) :]
        self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
        self._wake()

    def _join(self) -> None:
        """Put the one output that was alone with those that come after it."""
        if self._alone is not None:
            self._tokens += self._alone.tokens
            self._logprobs += self._alone.logprobs
            self._prompt_logprobs = self._alone.prompt_logprobs
            self._alone = None

    def end(self, code: str, detail: str) -> None:
        """End the answer with an error of the gateway's own, unless it has ended already."""
        if self.last is None:
            self._join()
            self.last = Output(self._request, self.received, (), error=code, detail=detail)
            self._wake()

    def _wake(self) -> None:
        self.ready = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def filled(self) -> None:
        """Return when there is something to take. For one reader."""
        if not self.ready:
            loop = asyncio.get_running_loop()
            self.since, self._waiting = loop.time(), loop.create_future()
            await self._waiting
            self.since = -1.0

    def take(self) -> Output:
        """Everything unread as one output; the final one once nothing more will come."""
        alone, self._alone = self._alone, None
        if alone is not None:
            self._index += len(alone.tokens)
            self.ready = False
            return alone
        index, tokens, logprobs = self._index, tuple(self._tokens), tuple(self._logprobs)
        prompt, self._prompt_logprobs = self._prompt_logprobs, ()
        self._index += len(tokens)
        self._tokens.clear()
        self._logprobs.clear()
        self.ready = False
        end = self.last
        if end is None:
            return Output(self._request, index, tokens, logprobs=logprobs, prompt_logprobs=prompt)
        ended = (end.finish, end.error, end.detail, end.usage, end.attempts)
        return Output(self._request, index, tokens, *ended, logprobs, prompt)


class Gateway:
    """Node `api`: submits requests to the frontend and hands each reader its own outputs.

    `wait_s` bounds every wait for the next output (seconds); the frontend's deadlines come first, this is the backstop.
    """

    __slots__ = ("_boxes", "_closed", "_idle", "_node", "_transport", "_wait_s")

    def __init__(self, transport: Transport, *, node: NodeId = "api", wait_s: float = 900.0) -> None:
        self._transport = transport
        self._node = node
        self._wait_s = wait_s
        self._boxes: dict[str, _Mailbox] = {}
        self._closed = ""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        """Requests whose reader has not left."""
        return len(self._boxes)

    def handle(self, message: Message) -> None:
        """Deliver an `Output` to its reader; those of readers that left are dropped."""
        if isinstance(message, Output):
            box = self._boxes.get(message.request)
            if box is not None:
                box.put(message)

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Outputs of `request` in order, each token once; the last one has `finish` or `error` set.

        Close the generator to cancel. Whatever way it is left before the frontend ended the request, one Cancel is sent.
        """
        if request.id in self._boxes:
            raise InvariantError(f"request id {request.id} is already being served")
        if self._closed:
            yield Output(request.id, 0, (), error="draining", detail=self._closed)
            return
        box = self._boxes[request.id] = _Mailbox(request)
        self._idle.clear()
        self._watch(box)
        try:
            self._transport.send(FRONTEND, Submit(request, self._node))
            done = False
            while not done:
                await box.filled()
                output = box.take()
                done = output.finish is not None or output.error is not None
                yield output
        finally:
            self.cancel(request.id)
            if box.timer is not None:
                box.timer.cancel()
            del self._boxes[request.id]
            if not self._boxes:
                self._idle.set()

    def cancel(self, request: str, reason: str = "cancelled") -> None:
        """Tell the frontend that no more output is wanted, at most once and not after the request ended.

        The reader may stay for the final output, which then says `reason` and carries the usage.
        """
        box = self._boxes.get(request)
        if box is not None and box.running and not box.cancelled:
            box.cancelled = True
            self._transport.send(FRONTEND, Cancel(request, reason))
            self._watch(box)

    def _watch(self, box: _Mailbox) -> None:
        """End the answer whose reader has waited for too long; else look again when that may be.

        One timer for a request, as one for each wait would be one for each token.
        """
        wait_s = min(self._wait_s, CANCEL_WAIT_S) if box.cancelled else self._wait_s
        loop = asyncio.get_running_loop()
        left = wait_s if box.ready or box.since < 0 else box.since + wait_s - loop.time()
        if left <= 0:
            box.end("timeout", f"no output for {wait_s:g} seconds")
            return
        if box.timer is not None:
            box.timer.cancel()
        box.timer = loop.call_later(left, self._watch, box)

    def close(self, detail: str) -> None:
        """End every open answer with an error that says `detail`, and refuse later ones."""
        self._closed = detail
        for box in self._boxes.values():
            box.end("draining", detail)

    async def wait_idle(self) -> None:
        """Return when no answer is open."""
        await self._idle.wait()
