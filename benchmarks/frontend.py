"""CPU of the front end per request and per streamed token, beside a bare ASGI application and beside vLLM's API server.

All stand before an engine that costs nothing and gives one token a step to every request. What is measured is the CPU time of
the server's process, all its threads. vLLM is used where --vllm names the Python of an environment that has it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from frontend_ours import MAX_MODEL_LEN, MODEL
from measure import Claim, Figure, Options, Result, figure, main

from rackserve.text.deepseek_tokenizer import complete
from rackserve.text.tokenizer import Tokenizer, unpack

ROUNDS = 3
TOKENS = 200
CHARACTERS_PER_TOKEN = 4.1
TURN_TOKENS = 500
LIMIT_TOKEN = 1.5
"""A streamed token may cost so many times that of the bare application."""

LIMIT_REQUEST = 0.67
"""A request may cost this part of vLLM's; a token may cost as much as vLLM's."""

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<｜User｜>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<｜Assistant｜>{{ m['content'] }}{{ eos_token }}{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)

OURS, FLOOR, FAST, VLLM = "rackserve", "bare application", "bare application on httptools and uvloop", "vLLM"


class Load(NamedTuple):
    """`number` requests, `lanes` at a time. `turns`: each is the next turn of its lane's session; the first is not measured."""

    what: str
    lanes: int
    number: int
    prompt: int
    tokens: int
    stream: bool = True
    turns: bool = False


def loads(quick: bool) -> list[Load]:
    short, long, tokens = (200, 2_000, 20) if quick else (1_000, 32_000, TOKENS)
    found = []
    for lanes in (1, 8) if quick else (1, 16, 64):
        number = max(8, lanes)
        found.append(Load(f"request, {short:,} tokens, {lanes} at a time", lanes, 2 * number, short, 1))
        found.append(Load(f"token, {lanes} at a time", lanes, number, short, tokens + 1))
    lanes, number = (2, 4) if quick else (4, 8)
    found.append(Load(f"request, {short:,} tokens, not streamed, {tokens} tokens out", 16, 16, short, tokens, stream=False))
    found.append(Load(f"request, {long:,} tokens", lanes, number, long, 1))
    found.append(Load(f"request, next turn of {long:,} tokens", lanes, number, long, 1, turns=True))
    return found


# ---------------------------------------------------------------- servers


class Server(NamedTuple):
    """A process that listens on `port`."""

    port: int
    pid: int

    def cpu_ns(self) -> int:
        """CPU time of the process with all its threads; not that of others it started."""
        return time.clock_gettime_ns((~self.pid << 3) | 2)  # how Linux names the CPU clock of another process


@contextmanager
def serving(command: list[str], log: Path) -> Iterator[Server]:
    """A server that answers, ended with the block."""
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        while line and not line.strip().isdecimal():
            line = process.stdout.readline()
        deadline = time.monotonic() + 240
        while line and process.poll() is None and time.monotonic() < deadline:
            try:
                asyncio.run(ask(int(line), chat("hello", 0), 1, stream=True))
                break
            except (OSError, RuntimeError):
                time.sleep(0.2)
        else:
            raise RuntimeError(f"{command[0]} {command[1]} does not serve: {log.read_text()[-3000:]}")
        yield Server(int(line), process.pid)
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- load


def chat(text: str, turns: int) -> list[dict[str, str]]:
    """A conversation of one text, in `turns` of the assistant more."""
    messages = [{"role": "user", "content": text}]
    for _ in range(turns):
        messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": text[: TURN_TOKENS * 4]}]
    return messages


async def ask(port: int, messages: list[dict[str, str]], tokens: int, *, stream: bool, session: str = "") -> int:
    """Send one request; how many events its answer had. Raises RuntimeError for an answer that is not whole."""
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    raw = json.dumps(body).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", f"host: 127.0.0.1:{port}", "content-type: application/json"]
    lines += [f"content-length: {len(raw)}", f"x-tokens: {tokens}"]
    lines += [] if stream else ["x-plain: 1"]
    lines += [f"x-session-id: {session}"] if session else []
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head!r} {await reader.read(2000)!r}")
        if not stream:
            size = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(size.split(b":")[1]))
            return tokens
        events, end = 0, b""
        while not end.endswith(b"\r\n0\r\n\r\n"):
            part = await reader.read(1 << 16)
            if not part:
                raise RuntimeError("the stream ended early")
            events += part.count(b'"index"')
            end = (end + part)[-16:]
        return events
    finally:
        writer.close()


async def send(server: Server, load: Load, source: str, draw: Random) -> tuple[float, float]:
    """CPU ns of a request under `load`, and the share of its tokens that came in an event of their own."""
    size = int(load.prompt * CHARACTERS_PER_TOKEN)
    texts = []
    for number in range(load.number):  # none begins like another
        start = draw.randrange(len(source) - size)
        texts.append(f"{draw.random()} {number}: {source[start : start + size]}")
    queue = list(range(load.number))
    share: list[float] = []

    async def lane(name: int) -> None:
        text, turn = texts[name], 0
        while queue:
            number, turn = queue.pop(0), turn + 1
            messages = chat(text, turn) if load.turns else chat(texts[number], 0)
            events = await ask(
                server.port, messages, load.tokens, stream=load.stream, session=f"{text[:20]}" if load.turns else ""
            )
            share.append(min(1.0, events / load.tokens))

    if load.turns:
        for name in range(load.lanes):
            await ask(server.port, chat(texts[name], 0), 1, stream=True, session=f"{texts[name][:20]}")
    before = server.cpu_ns()
    await asyncio.gather(*(lane(name) for name in range(min(load.lanes, load.number))))
    await asyncio.sleep(0.02)  # the server puts things away
    return (server.cpu_ns() - before) / load.number, sum(share) / len(share)


# ---------------------------------------------------------------- what is asked


def prepare(folder: Path, source: str) -> tuple[Path, Path]:
    """Makes a model folder, one that vLLM takes. Returns the files of the answers' ids and of the bare application's bytes."""
    complete(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_MODEL_LEN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    rest = {"num_key_value_heads": 4, "vocab_size": 129_280, "rms_norm_eps": 1e-5, "torch_dtype": "float32"}
    named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": MAX_MODEL_LEN}
    (folder / "config.json").write_text(json.dumps({**named, **shape, **rest}))
    tokenizer = Tokenizer.from_folder(folder)
    answer = unpack(tokenizer.encode("".join(letter for letter in source[:4_000] if letter.isascii())))
    ids, chunks = folder / "ids.json", folder / "chunks.json"
    ids.write_text(json.dumps(answer))
    chunks.write_text(json.dumps(same_bytes(tokenizer, answer)))
    return ids, chunks


def same_bytes(tokenizer: Tokenizer, answer: tuple[int, ...]) -> list[str]:
    """What the bare application sends: events like those of rackserve, one for a token of usual length."""
    head = {"id": "chatcmpl-" + "0" * 32, "object": "chat.completion.chunk", "created": 1_800_000_000, "model": MODEL}

    def event(delta: dict[str, str], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return "data: " + json.dumps({**head, "choices": [choice], "usage": None}, separators=(",", ":")) + "\n\n"

    text = tokenizer.decode(answer)
    usual = "a" * round(len(text) / len(answer))
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
    end = "data: " + json.dumps({**head, "choices": [], "usage": usage}, separators=(",", ":")) + "\n\ndata: [DONE]\n\n"
    plain = json.dumps({**head, "choices": [{"index": 0, "message": {"content": text[: TOKENS * 4]}}], "usage": usage})
    return [event({"role": "assistant", "content": ""}), event({"content": usual}), event({}, "length") + end, plain]


def commands(folder: Path, ids: Path, chunks: Path, vllm: str) -> dict[str, list[str]]:
    here = Path(__file__).parent
    found = {
        OURS: [sys.executable, str(here / "frontend_ours.py"), str(folder), str(ids)],
        FLOOR: [sys.executable, str(here / "frontend_floor.py"), str(chunks)],
    }
    if vllm:
        found[FAST] = [vllm, str(here / "frontend_floor.py"), str(chunks), "httptools"]
        found[VLLM] = [vllm, str(here / "frontend_vllm.py"), str(folder), str(ids)]
    return found


Found = dict[str, dict[str, list[float]]]
"""Load -> server -> CPU ns of a request, round by round."""


def run(options: Options) -> Result:
    source = "".join(path.read_text() for path in sorted(Path(asyncio.__file__).parent.glob("*.py")))
    draw = Random(options.seed)
    found: Found = {}
    shares: dict[str, list[float]] = {}
    with TemporaryDirectory() as place, ExitStack() as opened:
        folder = Path(place)
        ids, chunks = prepare(folder, source)
        servers = {
            name: opened.enter_context(serving(command, folder / f"{number}.log"))
            for number, (name, command) in enumerate(commands(folder, ids, chunks, options.vllm).items())
        }
        names = list(servers)
        for turn in range((2 if options.quick else ROUNDS) + 1):
            for load in loads(options.quick):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    cost, share = asyncio.run(send(servers[name], load, source, draw))
                    if turn:  # the first round warms up
                        found.setdefault(load.what, {}).setdefault(name, []).append(cost)
                        shares.setdefault(name, []).append(share)
                print(turn, load.what, {k: round(v[-1] / 1e3) for k, v in found.get(load.what, {}).items()}, file=sys.stderr)
    return report(found, shares, options)


def per_token(found: Found, options: Options) -> Found:
    """`found` with the cost of tokens instead of that of whole streams: what a stream costs beyond a request of one token."""
    tokens = 20 if options.quick else TOKENS
    out: Found = {}
    before: dict[str, list[float]] = {}
    for what, servers in found.items():
        if what.startswith("token"):
            servers = {
                name: [(all_of_it - one) / tokens for all_of_it, one in zip(values, before[name], strict=True)]
                for name, values in servers.items()
            }
        out[what] = before = servers
    return out


def report(found: Found, shares: dict[str, list[float]], options: Options) -> Result:
    costs = per_token(found, options)
    figures: list[Figure] = []
    claims: list[Claim] = []
    for what, servers in costs.items():
        is_token = what.startswith("token")
        for name, values in servers.items():
            to = FLOOR if is_token else OURS
            reference = servers[to] if name != to else None
            figures.append(figure(f"{what}: {name}", "µs", values, to if reference else "", reference, 1e-3))
        ratios = [own / bare for own, bare in zip(servers[OURS], servers[FLOOR], strict=True)]
        if is_token:
            claims.append(Claim(f"{what}: at most {LIMIT_TOKEN:g} times the bare application's", max(ratios) <= LIMIT_TOKEN))
        if VLLM in servers:
            parts = [own / other for own, other in zip(servers[OURS], servers[VLLM], strict=True)]
            limit = 1.0 if is_token else LIMIT_REQUEST
            claims.append(Claim(f"{what}: at most {limit:g} of vLLM's", max(parts) <= limit))
            figures.append(figure(f"{what}: {OURS}", "µs", servers[OURS], VLLM, servers[VLLM], 1e-3))
    whole, tokens = min(min(values) for values in shares.values()), 20 if options.quick else TOKENS
    notes = (
        f"A token is what a stream of {tokens + 1} tokens costs beyond one of a single token, divided by {tokens}. At least "
        f"{whole * 100:.1f} % of all tokens had an event of their own. Prompts are new, but for the next turns.",
        "The bare application reads the body, tokenises nothing and sends bytes made beforehand.",
        *_about(options.vllm),
    )
    question = "What does the front end cost per request and per streamed token, with an engine that costs nothing?"
    return Result("frontend", question, "CPU time of the server's process", tuple(claims), tuple(figures), notes)


def _about(python: str) -> tuple[str, ...]:
    """What vLLM was measured, if it was."""
    if not python:
        return ()
    named = "from importlib.metadata import version as v; print(*(f'{n} {v(n)}' for n in ('vllm', 'httptools', 'uvloop')))"
    told = subprocess.run([python, "-c", named], capture_output=True, text=True, check=True).stdout.strip()
    return (
        f"{told}: the client of vLLM's engine process is replaced; the rest of its API server is as it comes, less its access "
        "log.",
    )


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
