"""How many streamed tokens can the benchmark client take on one core before it distorts what it measures?"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from measure import Claim, Options, Result, figure, interleave, main, rate

from rackserve.base.keys import CacheNamespace
from rackserve.base.units import NS_PER_S
from rackserve.bench.client import Target, replay_over_http
from rackserve.bench.closed_loop import Replay
from rackserve.bench.ideal import IdealCache
from rackserve.bench.metrics import percentile, tpot_ms
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.records import RequestRecord
from rackserve.bench.session import Session, TraceRequest
from rackserve.bench.tally import Tally

GAP_S = 0.025
STREAMS = 50
"""50 streams of a token every 25 ms are the 2,000 tokens/s that the client must take without strain."""

TARGET = STREAMS / GAP_S

CHUNK = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" ab"}]}\n\n'


async def serve() -> None:
    """Streams a token every GAP_S, by a timetable of its own: a process beside the client. Prints its port."""

    def framed(raw: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(raw), raw)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop, piece = asyncio.get_running_loop(), framed(CHUNK)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                body = json.loads(await reader.readexactly(int(length.split(b":")[1])))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                due = loop.time()
                for _ in range(body["max_tokens"]):
                    due += GAP_S
                    await asyncio.sleep(due - loop.time())
                    writer.write(piece)
                usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
                end = [{"choices": [{"text": "", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
                last = "".join(f"data: {json.dumps(event)}\n\n" for event in end) + "data: [DONE]\n\n"
                writer.write(framed(last.encode()) + b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def replay(port: int, streams: int, tokens: int) -> tuple[list[RequestRecord], Tally]:
    """One run of the benchmark client: `streams` requests at once, `tokens` each."""
    ids = b"\0\0\0\0"
    sessions = [Session(f"s{n}", 64, (TraceRequest(0, 0, 64, tokens, ids),)) for n in range(streams)]
    maker, tally = RequestMaker(CacheNamespace("m", "", 64, "")), Tally()
    target = Target(f"http://127.0.0.1:{port}", "m")
    return asyncio.run(replay_over_http(Replay(sessions, streams), maker, IdealCache(64), target, tally=tally)), tally


class _Bare(asyncio.Protocol):
    """Takes the same bytes and only notes when they came."""

    def __init__(self, body: bytes, done: asyncio.Future[list[int]]) -> None:
        self._body, self._done = body, done
        self._times: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(self._body) + self._body)

    def data_received(self, data: bytes) -> None:
        self._times.append(time.monotonic_ns())
        if data.endswith(b"\r\n0\r\n\r\n"):
            self._done.set_result(self._times)


async def read_only(port: int, streams: int, tokens: int) -> list[list[int]]:
    """The arrival times of every stream, through bare sockets: what any client in this language pays and sees."""
    loop, body = asyncio.get_running_loop(), json.dumps({"prompt": [0] * 64, "max_tokens": tokens}).encode()
    done = [loop.create_future() for _ in range(streams)]
    opened = [await loop.create_connection(lambda one=one: _Bare(body, one), "127.0.0.1", port) for one in done]
    times = await asyncio.gather(*done)
    for transport, _ in opened:
        transport.abort()
    return times


def p99_error_ms(streams: Iterable[Sequence[int]]) -> float:
    """How far gaps between tokens are from the timetable: 99 % of them less. The first two and the last segments hold more."""
    gaps = [abs((b - a) / 1e6 - GAP_S * 1_000) for times in streams for a, b in pairwise(times[1:-1])]
    return percentile(sorted(gaps), 0.99)


def cpu_ns_per_token(action: Callable[[], object], tokens: int) -> float:
    started = time.process_time_ns()
    action()
    return (time.process_time_ns() - started) / tokens


def run(options: Options) -> Result:
    """CPU time per streamed token beside bare sockets, and how far gaps between tokens are from the server's timetable."""
    tokens = 20 if options.quick else 120
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            errors: list[float] = []
            bare: list[float] = []
            off: list[float] = []

            def client() -> float:
                records: list[RequestRecord] = []
                cost = cpu_ns_per_token(lambda: records.extend(replay(port, STREAMS, tokens)[0]), STREAMS * tokens)
                assert all(not record.error for record in records)
                errors.append(p99_error_ms([record.chunk_ns for record in records]))
                off.append(max(abs((tpot_ms(record) or 0) / (GAP_S * 1_000) - 1) for record in records))
                return cost

            def sockets() -> float:
                times: list[list[int]] = []
                cost = cpu_ns_per_token(lambda: times.extend(asyncio.run(read_only(port, STREAMS, tokens))), STREAMS * tokens)
                bare.append(p99_error_ms(times))
                return cost

            variants = {"client": client, "sockets": sockets}
            kept = interleave(variants, options.rounds)
        finally:
            server.kill()
    errors, bare, off = errors[1:], bare[1:], off[1:]
    share = [TARGET * cost / NS_PER_S for cost in kept["client"]]
    return Result(
        "client",
        f"{run.__doc__} Load: {STREAMS} streams of a token every {GAP_S * 1_000:g} ms, that is {TARGET:,.0f} tokens/s.",
        "CPU time of the client's process; wall time for the gaps",
        (Claim(f"{TARGET:,.0f} streamed tokens/s take less than half a core", max(share) < 0.5),),
        (
            rate("the client: tokens per second of a core", "tokens/s", kept["client"], 1, "bare sockets", kept["sockets"]),
            rate("bare sockets: tokens per second of a core", "tokens/s", kept["sockets"], 1, "bare sockets", kept["sockets"]),
            figure(f"share of a core at {TARGET:,.0f} tokens/s", "%", share, scale=100),
            figure("p99 error of a gap, the client", "ms", errors, "bare sockets", bare),
            figure("p99 error of a gap, bare sockets", "ms", bare),
            figure("largest error of a request's time per token", "%", off, scale=100),
        ),
        ("Server and client share the machine with whatever else runs on it, and all streams send at the same moment.",),
    )


if __name__ == "__main__":
    if "--serve" in sys.argv:
        asyncio.run(serve())
    else:
        raise SystemExit(main(run, __doc__))
