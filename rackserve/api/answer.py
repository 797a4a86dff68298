"""From output tokens to pieces of text: one stream of deltas per choice, and the choices of a call merged into one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from rackserve.api.call import Call
from rackserve.api.errors import failure
from rackserve.api.gateway import Gateway
from rackserve.base.messages import Output
from rackserve.base.request import Request
from rackserve.base.step import TokenLogprobs
from rackserve.text.detokenizer import Detokenizer
from rackserve.text.dsml_parser import ContentDelta, OutputDelta
from rackserve.text.stops import StopFinder
from rackserve.text.tokenizer import Vocabulary

Gap = Callable[[float, int], None]
"""Told of each wait for output: seconds since the output before, and how many tokens then came."""


class TokenEntry(msgspec.Struct, frozen=True):
    """Log-probabilities of one output token. `start`: characters of the answer before it; `raw`: its bytes."""

    start: int
    raw: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


class Ending(msgspec.Struct, frozen=True):
    """How a choice ended and what it used. `num_calls`: tool calls that are whole; `stop`: the stop string that ended it."""

    finish: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    attempts: int
    reasoning_tokens: int = 0
    num_calls: int = 0
    stop: str | None = None


class Delta(msgspec.Struct, frozen=True):
    """The next piece of choice `index`; the last one has `ending`."""

    index: int
    parts: tuple[OutputDelta, ...] = ()
    entries: tuple[TokenEntry, ...] = ()
    ending: Ending | None = None

    @property
    def text(self) -> str:
        """The content in it."""
        return "".join(part.text for part in self.parts if isinstance(part, ContentDelta))


class AnswerReader:
    """Reads the outputs of one request. What it has shown does not depend on how tokens were grouped into outputs."""

    __slots__ = ("_decoded", "_detokenizer", "_entries", "_request", "_shown", "_stops", "_tokenizer", "num_tokens")

    def __init__(self, tokenizer: Vocabulary, request: Request, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopFinder(stops)
        self._entries: deque[TokenEntry] = deque()  # of tokens whose text is held back
        self._decoded = 0  # characters
        self._shown = 0  # characters
        self.num_tokens = 0  # up to the one that completed a stop string

    @property
    def stopped(self) -> bool:
        """A stop string ended the answer."""
        return self._stops.stopped

    def read(self, output: Output) -> tuple[str, tuple[TokenEntry, ...]]:
        """Text and log-probability entries that `output` lets go; all that is left when it is the last."""
        if self.stopped:
            return "", ()
        logprobs = output.logprobs if len(output.logprobs) == len(output.tokens) else ()
        last = len(output.tokens) - 1
        parts = []
        for place, token in enumerate(output.tokens):
            self.num_tokens += 1
            start = self._decoded
            ends = place == last and output.finish == "stop" and token in self._request.stop_token_ids
            text = "" if ends else self._detokenizer.feed(token)
            self._decoded += len(text)
            if logprobs:
                self._entries.append(self._entry(start, b"" if ends else self._tokenizer.piece(token), logprobs[place]))
            parts.append(self._stops.feed(text))
            if self.stopped:
                break
        if output.finish is not None:
            parts.append(self._stops.feed(self._detokenizer.flush()))
            parts.append(self._stops.flush())
        text = "".join(parts)
        self._shown += len(text)
        return text, self._let_go(everything=output.finish is not None and not self.stopped)

    def _let_go(self, *, everything: bool) -> tuple[TokenEntry, ...]:
        gone = []
        while self._entries and (everything or self._entries[0].start < self._shown):
            gone.append(self._entries.popleft())
        return tuple(gone)

    def _entry(self, start: int, raw: bytes, logprobs: TokenLogprobs) -> TokenEntry:
        top = tuple((self._tokenizer.piece(token), value) for token, value in logprobs.top)
        return TokenEntry(start, raw, logprobs.logprob, top)


async def choice(gateway: Gateway, tokenizer: Vocabulary, call: Call, index: int, gap: Gap) -> AsyncGenerator[Delta, None]:
    """The deltas of choice `index`, the last with its ending. Raises RequestError when the rack refuses or loses it."""
    request = call.requests[index]
    reader = AnswerReader(tokenizer, request, call.ask.stops)
    parser = call.parser()
    heard = 0.0
    async with aclosing(gateway.generate(request)) as outputs:
        async for output in outputs:
            now = time.monotonic()
            if heard and output.tokens and not reader.stopped:
                gap(now - heard, len(output.tokens))
            heard = now if output.tokens else heard
            text, entries = reader.read(output)
            if reader.stopped:
                gateway.cancel(request.id, "stop")  # then wait for the final output: it knows the cached tokens
            ended = output.finish is not None or output.error is not None
            if ended and not reader.stopped and output.finish not in ("stop", "length"):
                raise failure(output.error or "cancelled", output.detail or "the request was cancelled by the server")
            parts = parser.feed(text)
            ending = None
            if ended:
                rest = parser.finish()
                parts += rest.deltas
                ending = Ending(
                    finish="stop" if reader.stopped else output.finish or "stop",
                    prompt_tokens=request.num_tokens,
                    cached_tokens=output.usage.cached_tokens if output.usage is not None else 0,
                    output_tokens=reader.num_tokens,
                    attempts=output.attempts,
                    num_calls=rest.num_calls,
                )
            if parts or entries or ending is not None:
                yield Delta(index, tuple(parts), entries, ending)


async def merge(choices: list[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """The deltas of all `choices` as they come. The first error ends all; leaving early closes all."""
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=2 * len(choices))

    async def pump(source: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(source) as deltas:
                async for delta in deltas:
                    await queue.put(delta)
            await queue.put(None)
        except Exception as error:  # goes on to the reader, whatever it is
            await queue.put(error)

    pumps = [asyncio.create_task(pump(source)) for source in choices]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
