"""The part of `doctor` that looks at a running server as a client sees it: reached, let in, ready, and does it answer?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import httpx

from rackserve.api.keys import KEY_VARIABLE

TIMEOUT_S = 10.0
ANSWER_S = 60.0
PROBE_S = 0.5

Verdict = Literal["ok", "note", "bad"]


class Finding(NamedTuple):
    """What was looked at, how it is, and in words with the remedy. "bad": it does not work so."""

    what: str
    verdict: Verdict
    text: str


def examine_server(url: str, key: str = "", transport: httpx.BaseTransport | None = None) -> Iterator[Finding]:
    """Findings about the server at `url`, until one that makes looking further useless."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    if not _is_address(base):
        yield Finding("address", "bad", f"{base!r} is no address; give one such as http://127.0.0.1:8000")
        return
    with httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT_S, trust_env=False, transport=transport) as client:
        try:
            begun = time.monotonic()
            listed = client.get("/v1/models")
            yield Finding("address", "ok", f"{base} answers within {1e3 * (time.monotonic() - begun):.0f} ms")
        except (httpx.HTTPError, OSError) as error:
            yield Finding("address", "bad", _unreached(base, error))
            return
        let_in = _let_in(listed, base, key)
        yield let_in
        if let_in.verdict == "bad":
            return
        yield from _health(client)
        if listed.status_code == 200:
            models = _models(listed)
            yield models
            if models.verdict == "ok":
                yield _answer(client, str(listed.json()["data"][0]["id"]))


def is_rackserve(url: str) -> bool:
    """Whether what answers at `url`, within half a second, tells its health as rackserve does."""
    try:
        told = httpx.get(f"{url}/health", timeout=PROBE_S, trust_env=False).json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError):
        return False
    return isinstance(told, dict) and "ready" in told


def _is_address(base: str) -> bool:
    try:
        parts = urlsplit(base)
        httpx.URL(base)
    except (ValueError, httpx.InvalidURL):
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _unreached(base: str, error: Exception) -> str:
    told = str(error) or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        return f"{base} says nothing within {TIMEOUT_S:g} s ({told}): a firewall, or a server that hangs; ask its /live there"
    if isinstance(error, httpx.ConnectError):
        remedy = "is the server running, and does server.host let others in? By default it listens on 127.0.0.1 only"
        return f"nobody answers at {base} ({told}): {remedy}"
    return f"what answers at {base} does not speak HTTP as expected ({told}); is it http or https, and the right port?"


def _let_in(listed: httpx.Response, base: str, key: str) -> Finding:
    match listed.status_code:
        case 401 if key:
            return Finding("key", "bad", f"the server does not know the key in {KEY_VARIABLE}; its key file has those it knows")
        case 401:
            return Finding("key", "bad", f"the server asks for a key; put it into {KEY_VARIABLE}")
        case 421:
            host = urlsplit(base).hostname
            return Finding("key", "bad", f"the server is not known as {host}; add that name to its security.hosts")
    return Finding("key", "ok", "the key is known" if key else "no key is asked for")


def _health(client: httpx.Client) -> Iterator[Finding]:
    """What /health tells; servers of other kinds may have none."""
    try:
        told: dict[str, Any] = client.get("/health").json()
        phase = str(told.get("phase") or ("ready" if told["ready"] else "not ready"))
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        yield Finding("health", "note", "no /health that could be read; this may be a server of another kind")
        return
    stuck = told.get("stuck") or {}
    match phase:
        case "ready":
            yield Finding("health", "ok", f"ready, {told.get('open_requests', 0)} requests open")
        case "loading":
            yield Finding("health", "bad", "the model is being loaded: ask again soon")
        case "draining":
            yield Finding("health", "bad", "the server is shutting down and takes no new requests")
        case "stuck":
            seconds, where = stuck.get("seconds", 0), stuck.get("where", "the ranks")
            yield Finding("health", "bad", f"work has stood still for {seconds:.0f} s at {where}; its log says why")
        case _:
            yield Finding("health", "bad", f"{phase}: of some role no rank or worker is up; its log says why")
    ranks = told.get("ranks") or []
    down = [f"{rank['worker']} is {rank['state']}" for rank in ranks if rank.get("state") != "up"]
    down += [f"{worker['worker']} is down" for worker in told.get("workers") or [] if not worker.get("up")]
    if down and phase != "loading":
        yield Finding("ranks", "note", f"{', '.join(down)}: requests go to the others meanwhile")
    elif ranks:
        yield Finding("ranks", "ok", f"all {len(ranks)} are up")


def _models(listed: httpx.Response) -> Finding:
    try:
        told = [f"{model['id']} (context {model.get('max_model_len', 'unknown')})" for model in listed.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return Finding("models", "bad", "/v1/models is no list of models; is this an OpenAI-compatible server?")
    return Finding("models", "ok", ", ".join(told)) if told else Finding("models", "bad", "the server serves no model")


def _answer(client: httpx.Client, model: str) -> Finding:
    """One token of an answer."""
    begun = time.monotonic()
    try:
        asked = {"model": model, "prompt": [1], "max_tokens": 1}
        answer = client.post("/v1/completions", json=asked, timeout=ANSWER_S)
    except httpx.HTTPError as error:
        return Finding("answer", "bad", f"no token came within {ANSWER_S:g} s ({str(error) or type(error).__name__})")
    if answer.status_code != 200:
        return Finding("answer", "bad", f"asked for one token it says HTTP {answer.status_code}: {answer.text[:200]}")
    return Finding("answer", "ok", f"one token in {1e3 * (time.monotonic() - begun):.0f} ms")
