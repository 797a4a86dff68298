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
from rackserve.text.tokenizer import Vocabulary, unpack

Gap = Callable[[float, int], None]
"""Told of each wait for output: seconds since the output before, and how many tokens then came."""


class TokenEntry(msgspec.Struct, frozen=True):
    """Log-probabilities of one token. `start`: characters of the answer before it; `raw`: its bytes.

    The first token of an echoed prompt has none: `logprob` is None.
    """

    start: int
    raw: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]


class Ending(msgspec.Struct, frozen=True):
    """How a choice ended and what it used.

    num_calls        tool calls that are whole
    stop             the stop string that ended it
    prompt_logprobs  of the prompt's tokens from the second on, if they were asked for
    """

    finish: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    attempts: int
    reasoning_tokens: int = 0
    num_calls: int = 0
    stop: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


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
    """Reads the outputs of one request. What it has shown does not depend on how tokens were grouped into outputs.

    start          characters of the answer before the first output token: those of an echoed prompt
    reasoning_end  id of the token that ends the reasoning the output begins with; -1: it begins with none
    """

    __slots__ = (
        "_decoded", "_detokenizer", "_entries", "_reasoning_end", "_request", "_shown", "_stops", "_tokenizer",
        "num_reasoning", "num_tokens",
    )  # fmt: skip

    def __init__(
        self, tokenizer: Vocabulary, request: Request, stops: tuple[str, ...], start: int = 0, reasoning_end: int = -1
    ) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopFinder(stops)
        self._entries: deque[TokenEntry] = deque()  # of tokens whose text is held back
        self._decoded = self._shown = start  # characters
        self._reasoning_end = reasoning_end
        self.num_tokens = 0  # up to the one that completed a stop string
        self.num_reasoning = 0  # of those, up to the end of the reasoning

    @property
    def stopped(self) -> bool:
        """A stop string ended the answer."""
        return self._stops.stopped

    @property
    def stop(self) -> str | None:
        """The stop string that did."""
        return self._stops.found

    def read(self, output: Output) -> tuple[str, tuple[TokenEntry, ...]]:
        """Text and log-probability entries that `output` lets go; all that is left when it is the last."""
        if self.stopped:
            return "", ()
        logprobs = output.logprobs if len(output.logprobs) == len(output.tokens) else ()
        if output.finish is None and not (logprobs or self._entries or self._stops.wanted) and self._reasoning_end < 0:
            text = self._detokenizer.feed(*output.tokens)  # as below, for nearly all outputs of nearly all answers
            self.num_tokens += len(output.tokens)
            self._decoded += len(text)
            self._shown += len(text)
            return text, ()
        last = len(output.tokens) - 1
        parts = []
        for place, token in enumerate(output.tokens):
            self._count(token)
            start = self._decoded
            ends = place == last and output.finish == "stop" and token in self._request.stop_token_ids
            text = "" if ends else self._detokenizer.feed(token)
            self._decoded += len(text)
            if logprobs:
                raw = b"" if ends else self._tokenizer.piece(token)
                self._entries.append(entry_of(self._tokenizer, start, raw, logprobs[place]))
            parts.append(self._stops.feed(text))
            if self.stopped:
                break
        if output.finish is not None:
            parts.append(self._stops.feed(self._detokenizer.flush()))
            parts.append(self._stops.flush())
        text = "".join(parts)
        self._shown += len(text)
        return text, self._let_go(everything=output.finish is not None and not self.stopped)

    def _count(self, token: int) -> None:
        self.num_tokens += 1
        if self._reasoning_end >= 0:
            self.num_reasoning += 1
            if token == self._reasoning_end:
                self._reasoning_end = -1

    def _let_go(self, *, everything: bool) -> tuple[TokenEntry, ...]:
        gone = []
        while self._entries and (everything or self._entries[0].start < self._shown):
            gone.append(self._entries.popleft())
        return tuple(gone)


def entry_of(tokenizer: Vocabulary, start: int, raw: bytes, logprobs: TokenLogprobs) -> TokenEntry:
    """The entry of one token."""
    top = tuple((tokenizer.piece(token), value) for token, value in logprobs.top)
    return TokenEntry(start, raw, logprobs.logprob, top)


async def choice(gateway: Gateway, tokenizer: Vocabulary, call: Call, index: int, gap: Gap) -> AsyncGenerator[Delta, None]:
    """The deltas of choice `index`, the last with its ending. Raises RequestError when the rack refuses or loses it."""
    request = call.requests[index]
    echo = Echo(tokenizer, request, call.ask.logprobs >= 0) if call.ask.echo else None
    reader = AnswerReader(tokenizer, request, call.ask.stops, len(echo.text) if echo else 0, call.reasoning_end)
    parser = call.parser()
    heard = 0.0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    async with aclosing(gateway.generate(request)) as outputs:
        async for output in outputs:
            now = time.monotonic()
            if heard and output.tokens and not reader.stopped:
                gap(now - heard, len(output.tokens))
            heard = now if output.tokens else heard
            prompt_logprobs = prompt_logprobs or output.prompt_logprobs
            text, entries = reader.read(output)
            if reader.stopped:
                gateway.cancel(request.id, "stop")  # then wait for the final output: it knows the cached tokens
            ended = output.finish is not None or output.error is not None
            if ended and not reader.stopped and output.finish not in ("stop", "length"):
                raise failure(output.error or "cancelled", output.detail or "the request was cancelled by the server")
            parts = [] if call.ask.max_tokens == 0 else parser.feed(text)
            if echo is not None and (output.tokens or ended):
                yield Delta(index, (ContentDelta(echo.text),), echo.entries(prompt_logprobs))
                echo = None
            ending = None
            if ended:
                rest = parser.finish()
                parts += rest.deltas
                ending = _ending(call, request, reader, output, rest.num_calls, prompt_logprobs)
            if call.ask.max_tokens == 0:
                entries = ()
            if parts or entries or ending is not None:
                yield Delta(index, tuple(parts), entries, ending)


def _ending(
    call: Call, request: Request, reader: AnswerReader, last: Output, num_calls: int, prompt: tuple[TokenLogprobs, ...]
) -> Ending:
    nothing = call.ask.max_tokens == 0  # a token had to be drawn all the same, for what is known of the prompt
    finish = "stop" if reader.stopped else last.finish or "stop"
    return Ending(
        finish="length" if nothing else finish,
        prompt_tokens=request.num_tokens,
        cached_tokens=last.usage.cached_tokens if last.usage is not None else 0,
        output_tokens=0 if nothing else reader.num_tokens,
        attempts=last.attempts,
        reasoning_tokens=reader.num_reasoning,
        num_calls=num_calls,
        stop=reader.stop,
        prompt_logprobs=prompt,
    )


class Echo:
    """The prompt of a request as the beginning of its answer."""

    __slots__ = ("_ids", "_starts", "_tokenizer", "_wanted", "text")

    def __init__(self, tokenizer: Vocabulary, request: Request, wanted: bool) -> None:
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._ids = unpack(request.tokens)
        self._starts = []
        detokenizer, parts, size = Detokenizer(tokenizer), [], 0
        for token in self._ids:
            self._starts.append(size)
            parts.append(detokenizer.feed(token))
            size += len(parts[-1])
        self.text = "".join([*parts, detokenizer.flush()])

    def entries(self, logprobs: tuple[TokenLogprobs, ...]) -> tuple[TokenEntry, ...]:
        """Entries of the prompt's tokens; there are none if they were not asked for."""
        if not self._wanted:
            return ()
        first = TokenEntry(0, self._tokenizer.piece(self._ids[0]), None, ())
        pairs = zip(self._ids[1:], self._starts[1:], logprobs, strict=True)
        return (first, *(entry_of(self._tokenizer, at, self._tokenizer.piece(token), each) for token, at, each in pairs))


def merge(choices: list[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """The deltas of all `choices` as they come. The first error ends all; leaving early closes all."""
    return choices[0] if len(choices) == 1 else _merge(choices)


async def _merge(choices: list[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
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
