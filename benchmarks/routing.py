"""`rackserve route` beside routers that others wrote: hit rate, CPU per request and time to the first byte.

All get the same agent sessions for the same stub workers (see `stub_workers`). Peers are used where their environments are
named: --routers (a Python with sglang-router and vllm-router), --dynamo (one with ai-dynamo-runtime).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx
import msgspec
from measure import Claim, Figure, Options, Result, figure, main
from stub_workers import BLOCK, IDS, MODEL, NUM_WORKERS, TOKEN_US

from rackserve.bench.wire import LeanTransport

LANES = 12
ROUNDS = 3

# ---------------------------------------------------------------- Dynamo's selection, in its own environment

SELECT = """
import asyncio, json, sys
from dynamo._core import SelectionService

async def main():
    port, block, workers = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    ids = {ord(" "): 0, **{byte: at for at, byte in enumerate(b"abcdefghijklmnopqrstuvwxyz|", 1)}}
    service = SelectionService(indexer_threads=2)
    for number, (url, events) in enumerate(workers):
        await service.upsert_worker({"worker_id": number, "model_name": "m", "routing_group": "default", "endpoint": url,
            "block_size": block, "data_parallel_start_rank": 0, "data_parallel_size": 1, "kv_events_endpoints": {0: events},
            "max_num_batched_tokens": 8192, "total_kv_blocks": 100000})

    async def serve(reader, writer):
        while line := await reader.readline():
            asked = json.loads(line)
            if asked["do"] == "select":
                tokens = [ids[byte] for byte in asked["prompt"].encode()]
                found = await service.select_and_reserve({"model_name": "m", "token_ids": tokens, "selection_id": asked["id"]})
                told = {"worker": found["worker_id"] if "worker_id" in found else found["worker"]["worker_id"]}
            else:
                if asked["do"] == "computed":
                    await service.prefill_complete(asked["id"])
                else:
                    await service.free_reservation(asked["id"])
                told = {}
            writer.write(json.dumps(told).encode() + b"\\n")

    await asyncio.start_server(serve, "127.0.0.1", port, limit=1 << 24)
    await asyncio.Event().wait()

asyncio.run(main())
"""


# ---------------------------------------------------------------- load


def sessions(seed: int, number: int, turns: int) -> list[list[str]]:
    """Prompts of agent sessions turn by turn: one of three system prompts, an own task, and more with every turn."""
    draw = random.Random(seed)

    def text(length: int) -> str:
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz     ", k=length))

    systems = [text(3000) for _ in range(3)]
    out = []
    for at in range(number):
        prompt, prompts = systems[at % 3] + "|" + text(1500), []
        for _ in range(turns):
            prompts.append(prompt)
            prompt += "|" + text(draw.randrange(400, 2000))
        out.append(prompts)
    return out


Send = Callable[[str, str, str], Awaitable[float]]
"""(request id, session, prompt) -> seconds to the first byte."""


async def replay(work: list[list[str]], send: Send) -> list[float]:
    """All sessions, LANES at a time, each turn after the one before it; the times to the first byte."""
    queue, times = list(enumerate(work)), []

    async def lane() -> None:
        while queue:
            number, prompts = queue.pop(0)
            for turn, prompt in enumerate(prompts):
                times.append(await send(f"{number}-{turn}", f"s{number}", prompt))

    await asyncio.gather(*(lane() for _ in range(LANES)))
    return times


def through(client: httpx.AsyncClient, url: str) -> Send:
    """Requests to a router, or a worker, at `url`."""

    async def send(name: str, session: str, prompt: str) -> float:
        body = {"model": MODEL, "prompt": prompt, "stream": True, "max_tokens": 4, "stream_options": {"include_usage": True}}
        begun = time.monotonic()
        headers = {"content-type": "application/json", "x-session-id": session, "x-request-id": name}
        async with client.stream("POST", url + "/v1/completions", content=msgspec.json.encode(body), headers=headers) as answer:
            pieces = answer.aiter_raw()
            first = await anext(pieces)
            took = time.monotonic() - begun
            tail = first
            async for piece in pieces:
                tail = piece
            if answer.status_code != 200 or b"[DONE]" not in tail:
                raise RuntimeError(f"{url}: HTTP {answer.status_code}, {tail[-300:]!r}")
        return took

    return send


async def selecting(client: httpx.AsyncClient, port: int, urls: list[str]) -> Send:
    """Requests straight to the worker that the selection service at `port` names."""
    free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    direct = [through(client, url) for url in urls]

    async def ask(what: object) -> dict[str, int]:
        link = free.pop() if free else await asyncio.open_connection("127.0.0.1", port)
        link[1].write(msgspec.json.encode(what) + b"\n")
        told: dict[str, int] = json.loads(await link[0].readline())
        free.append(link)
        return told

    async def send(name: str, session: str, prompt: str) -> float:
        begun = time.monotonic()
        found = await ask({"do": "select", "id": name, "prompt": prompt})
        chosen = time.monotonic() - begun
        took = await direct[found["worker"]](name, session, prompt)
        await ask({"do": "computed", "id": name})
        await ask({"do": "free", "id": name})
        return chosen + took

    return send


# ---------------------------------------------------------------- routers


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and all below it."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry)] = int(fields[1])
            spent[int(entry)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_below(process: int) -> bool:
        while process not in (pid, 0, 1):
            process = parents.get(process, 0)
        return process == pid

    return sum(seconds for process, seconds in spent.items() if is_below(process))


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, ended with all it started."""
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    env |= {"HF_HUB_OFFLINE": "1", "DYN_LOG": "error"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=env)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def free_ports(number: int, step: int = 1) -> int:
    """The first of `number` consecutive ports, of which every `step`-th could be had just now."""
    for first in range(21_000, 60_000, 97):
        try:
            for port in range(first, first + number, step):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise OSError("no free ports")


def model_folder(folder: Path) -> Path:
    """A tokenizer of one token per character."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = {"\u0120": 0} | {chr(byte): at for byte, at in IDS.items() if chr(byte).isalpha()}
    backend = Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("|", special=True, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1000000}')
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 28, "max_position_embeddings": 1000000}')
    return folder


class Fleet:
    """Where the stub workers are."""

    def __init__(self, first: int, folder: Path) -> None:
        self.ports = list(range(first, first + NUM_WORKERS))
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.events = [f"tcp://127.0.0.1:{port + NUM_WORKERS}" for port in self.ports]
        self.replays = [f"tcp://127.0.0.1:{port + 2 * NUM_WORKERS}" for port in self.ports]
        self.folder = folder


def commands(fleet: Fleet, port: int, options: Options) -> dict[str, list[str]]:
    """How each router is started on `port`."""
    own = [sys.executable, "-m", "rackserve", "route", "--port", str(port)]
    plain = [word for url in fleet.urls for word in ("--worker", url)]
    told = [
        word
        for url, events, replay in zip(fleet.urls, fleet.events, fleet.replays, strict=True)
        for word in ("--worker", f"{url},events={events},replay={replay}")
    ]
    found = {
        OURS_TEXT: [*own, *plain],
        OURS_EVENTS: [*own, *told, "--tokenizer", str(fleet.folder), "--block-tokens", str(BLOCK)],
        BLIND: [*own, *plain, "--policy", "round_robin"],
    }
    if options.routers:
        place = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *fleet.urls]
        vllm = [str(Path(options.routers).parent / "vllm-router"), *place]
        found["sglang-router, cache_aware"] = [
            options.routers, "-m", "sglang_router.launch_router", *place, "--policy", "cache_aware", "--model-path",
            str(fleet.folder), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + 1), "--log-level", "error",
        ]  # fmt: skip
        found["vllm-router, cache_aware"] = [*vllm, "--policy", "cache_aware"]
        sources = [f"{url}={events}" for url, events in zip(fleet.urls, fleet.events, strict=True)]
        replays = [f"{url}={replay}" for url, replay in zip(fleet.urls, fleet.replays, strict=True)]
        found["vllm-router, kv_aware"] = [
            *vllm, "--policy", "kv_aware", "--kv-event-block-size", str(BLOCK), "--kv-event-model", MODEL,
            *(word for source in sources for word in ("--kv-event-source", source)),
            *(word for source in replays for word in ("--kv-event-replay-source", source)),
        ]  # fmt: skip
    if options.dynamo:
        workers = json.dumps(list(zip(fleet.urls, fleet.events, strict=True)))
        found[DYNAMO] = [options.dynamo, "-c", SELECT, str(port), str(BLOCK), workers]
    return found


OURS_TEXT, OURS_EVENTS = "rackserve route, learned from text", "rackserve route, KV events"
BLIND = "rackserve route, round robin"
DYNAMO = "Dynamo SelectionService, selection alone"


async def measure(name: str, command: list[str], fleet: Fleet, port: int, work: list[list[str]], log: Path) -> list[float]:
    """Hit rate, CPU ms per request, median and 90th percentile of ms to the first byte, most work of a worker over the mean."""
    async with httpx.AsyncClient(transport=LeanTransport(), timeout=None, trust_env=False) as client:
        with running(command, log) as process:
            url = f"http://127.0.0.1:{port}"
            send = await selecting(client, port, fleet.urls) if name == DYNAMO else through(client, url)
            async with asyncio.timeout(90):
                while True:
                    try:
                        for _ in range(NUM_WORKERS):
                            await send("w", "w", "warm up " * 4)
                        break
                    except (httpx.HTTPError, OSError, RuntimeError, ValueError):
                        if process.poll() is not None:
                            raise RuntimeError(f"{name} ended: {log.read_text()[-2000:]}") from None
                        await asyncio.sleep(0.2)
            await asyncio.sleep(1.0)  # subscriptions
            for worker in fleet.urls:
                await client.post(worker + "/reset")
            await asyncio.sleep(0.2)
            before = cpu_seconds(process.pid)
            times = sorted(await replay(work, send))
            spent = cpu_seconds(process.pid) - before
        stats = [(await client.get(worker + "/stats")).json() for worker in fleet.urls]
    computed = [prompt - cached for _, prompt, cached in stats]
    hits = sum(cached for _, _, cached in stats) / sum(prompt for _, prompt, _ in stats)
    uneven = max(computed) / (sum(computed) / len(computed))
    return [hits, spent / len(times) * 1e3, median(times) * 1e3, times[int(len(times) * 0.9)] * 1e3, uneven]


def run(options: Options) -> Result:
    number, turns, rounds = (6, 3, 1) if options.quick else (32, 8, ROUNDS)
    work = sessions(options.seed, number, turns)
    unique = sum(len(prompts[-1]) for prompts in work)
    max_blocks = round(1.3 * unique / BLOCK / NUM_WORKERS)
    found: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        fleet = Fleet(free_ports(3 * NUM_WORKERS), model_folder(folder))
        stubs = [sys.executable, str(Path(__file__).with_name("stub_workers.py")), str(fleet.ports[0]), str(max_blocks)]
        with running(stubs, folder / "stub.log") as stub_process:
            while b"ready" not in (folder / "stub.log").read_bytes():
                if stub_process.poll() is not None:
                    raise RuntimeError((folder / "stub.log").read_text())
                time.sleep(0.05)
            port = free_ports(2)
            routers = commands(fleet, port, options)
            names = list(routers)
            for turn in range(rounds):
                for name in names[turn:] + names[:turn]:
                    values = asyncio.run(measure(name, routers[name], fleet, port, work, folder / "router.log"))
                    found.setdefault(name, []).append(values)
                    print(f"{turn} {name}: {values}", file=sys.stderr, flush=True)
    return report(found, work, max_blocks)


KINDS = (
    "share of prompt tokens cached",
    "CPU per request (ms)",
    "first byte, median (ms)",
    "first byte, 90th percentile (ms)",
    "most prompt tokens computed by a worker over the mean",
)


def report(found: dict[str, list[list[float]]], work: list[list[str]], max_blocks: int) -> Result:
    figures: list[Figure] = []
    for at, kind in enumerate(KINDS):
        own = [values[at] for values in found[OURS_TEXT]]
        for name, rounds in found.items():
            values = [values[at] for values in rounds]
            if name == OURS_TEXT:
                figures.append(figure(f"{kind}: {name}", "", values))
            else:
                figures.append(figure(f"{kind}: {name}", "", values, OURS_TEXT, own))
    figures += _throughput(found)
    hits = {name: [values[0] for values in rounds] for name, rounds in found.items()}
    peers = [name for name in found if not name.startswith("rackserve")]
    more = min(a - b for a, b in zip(hits[OURS_EVENTS], hits[BLIND], strict=True))
    claims = [Claim("placing by what workers hold finds more cached than taking turns, by 10 points at least", more >= 0.1)]
    if peers:
        ours, theirs = min(hits[OURS_TEXT] + hits[OURS_EVENTS]), max(max(hits[name]) for name in peers)
        claims.append(Claim("no peer finds more cached by more than 3 points", theirs - ours <= 0.03))
        sooner = all(other[2] >= own[2] for name in peers for other, own in zip(found[name], found[OURS_TEXT], strict=True))
        claims.append(
            Claim("with no peer the first byte comes sooner in the median than with records learned from text", sooner)
        )
    requests = sum(map(len, work))
    mean = sum(len(prompt) for prompts in work for prompt in prompts) / requests
    notes = (
        f"{requests} requests of {len(work)} sessions, {LANES} sessions at once, {mean:,.0f} prompt tokens (characters) on "
        f"average; {NUM_WORKERS} workers of {max_blocks} blocks of {BLOCK} tokens, {TOKEN_US:g} µs of prefill per uncached "
        "token. One run of each router a round; ratios within a round.",
        "CPU is that of the router's processes from the first to the last request, idle work included; requests per second "
        "of CPU are what one core would pass at most. Dynamo's selection "
        "forwards nothing: its figure is for choosing alone, with the prompt turned to ids in Python.",
    )
    question = "Does `rackserve route` find as much cached as routers that others wrote, and at what cost?"
    return Result(
        "routing", question, "wall time; CPU time of the router where it says so", tuple(claims), tuple(figures), notes
    )


def _throughput(found: dict[str, list[list[float]]]) -> list[Figure]:
    """Requests that a core passes in a second, and ours beside those of each peer."""
    rates = {name: [1e3 / max(1e-3, values[1]) for values in rounds] for name, rounds in found.items()}
    figures = [figure(f"requests per second of CPU: {name}", "1/s", values) for name, values in rates.items()]
    pairs = [(own, peer) for peer in rates if not peer.startswith("rackserve") for own in (OURS_TEXT, OURS_EVENTS)]
    figures += [figure(f"requests per second of CPU: {own}", "1/s", rates[own], peer, rates[peer]) for own, peer in pairs]
    return figures


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
