from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from rackserve.api.admission import DEADLINE, MAX_RETRY_AFTER_S, Admission
from rackserve.api.call import Caller
from rackserve.api.journal import RefusalLog
from tests.api.rig import Rig, Script, run, text

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


class Place:
    """An application that answers with `status` once it may, and the clients before it, each of a tenant."""

    def __init__(self, tenant_requests: int = 2) -> None:
        self.now, self.status, self.entered = 0.0, 200, 0
        self.go = asyncio.Event()
        self.admission = Admission(self._answer, tenant_requests, lambda: self.now)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.entered += 1
        await self.go.wait()
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"retry-after", b"1")]})
        await send({"type": "http.response.body", "body": b""})

    async def ask(
        self, tenant: str = "", headers: dict[str, str] | None = None, method: str = "POST", key: str = "k"
    ) -> httpx.Response:
        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            await self.admission({**scope, "caller": Caller(tenant, key=key)}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://rig") as client:
            return await client.request(method, "/v1/chat/completions", headers=headers)


def test_a_tenant_at_its_bound_is_refused_at_once_and_others_are_not() -> None:
    async def scene() -> None:
        place = Place(tenant_requests=2)
        running = [asyncio.ensure_future(place.ask(tenant)) for tenant in ("a", "a", "b")]
        while place.entered < 3:
            await asyncio.sleep(0)
        refused = await place.ask("a")  # nothing was answered yet, so it did not wait
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
        error = refused.json()["error"]
        assert error["code"] == "overloaded" and "limits.tenant_requests" in error["message"]
        place.go.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 3
        assert place.admission.num_open == 0 and (await place.ask("a")).status_code == 200

    run(scene())


def test_strangers_take_no_places_of_keys_without_a_tenant() -> None:
    async def scene() -> None:
        place = Place(tenant_requests=1)
        running = [asyncio.ensure_future(place.ask(key=key)) for key in ("", "k")]
        while place.entered < 2:
            await asyncio.sleep(0)
        assert [(await place.ask(key=key)).status_code for key in ("", "k")] == [429, 429]
        place.go.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]

    run(scene())


def test_reading_is_not_counted() -> None:
    async def scene() -> None:
        place = Place(tenant_requests=1)
        running = asyncio.ensure_future(place.ask("a"))
        while not place.entered:
            await asyncio.sleep(0)
        place.go.set()
        assert (await place.ask("a", method="GET")).status_code == 200
        await running

    run(scene())


def test_a_client_that_leaves_gives_its_place_back() -> None:
    async def scene() -> None:
        place = Place(tenant_requests=1)
        running = asyncio.ensure_future(place.ask("a"))
        while not place.entered:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert place.admission.num_open == 0

    run(scene())


def test_the_wait_told_with_a_refusal_is_what_is_open_over_the_measured_rate() -> None:
    async def scene() -> None:
        place = Place(tenant_requests=30)
        place.go.set()
        for place.now in (0.0, 1.0, 2.0, 3.0):
            await place.ask()
        place.now = 4.0  # four ends in four seconds
        place.go.clear()
        running = [asyncio.ensure_future(place.ask()) for _ in range(30)]
        while place.entered < 34:
            await asyncio.sleep(0)
        assert (await place.ask()).headers["retry-after"] == "30"
        place.now = 1e6
        assert place.admission.retry_after() == MAX_RETRY_AFTER_S
        place.status = 429  # also where it is the rack that refuses; and refusals are no ends
        place.now = 4.0
        place.go.set()
        told = [int(answer.headers["retry-after"]) for answer in await asyncio.gather(*running)]
        assert told == sorted(told, reverse=True) and told[0] == 30 and told[-1] == 1

    run(scene())


@pytest.mark.parametrize("wrong", ["soon", "0", "-1", "nan", "inf", "86401", ""])
def test_a_deadline_that_is_none_is_refused_by_name(wrong: str) -> None:
    async def scene() -> None:
        place = Place()
        answer = await place.ask(headers={DEADLINE: wrong})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == DEADLINE and not place.entered

    run(scene())


@asynccontextmanager
async def client_of(rig: Rig, started: asyncio.Event | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """`started` is set once a response has begun."""
    count = rig.metrics.error_sent

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def watched(message: Any) -> None:
            await send(message)
            if started is not None:
                started.set()

        await rig.app(scope, receive, watched)

    transport = httpx.ASGITransport(RefusalLog(Admission(app, 10, count=count), count))
    async with httpx.AsyncClient(transport=transport, base_url="http://rig") as client:
        yield client


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_at_its_deadline_a_call_ends_with_an_error_and_its_request_is_cancelled(path: str, stream: bool) -> None:
    async def scene() -> None:
        rig, loop, started = Rig(Script(ids=text("abc").ids[:3], hold=True)), asyncio.get_running_loop(), asyncio.Event()
        async with client_of(rig, started) as client:
            body = {**CHAT, "stream": stream, "max_tokens": 50}
            call = asyncio.create_task(client.post(path, json=body, headers={DEADLINE: "5"}))
            await (started if stream else rig.frontend.held).wait()
            now = loop.time
            loop.time = lambda: now() + 6  # type: ignore[method-assign]  # and so it has passed
            answer = await call
        assert answer.status_code == (200 if stream else 504)
        before, _, last = answer.text.strip().rpartition("data: ")
        assert before.endswith("event: error\n") is (stream and path == "/v1/messages")
        assert "x-request-timeout" in json.loads(last)["error"]["message"]
        assert len(rig.frontend.cancelled) == 1 and rig.frontend.gateway.num_open == 0
        assert rig.metric("rackserve_error_responses_total", status="stream" if stream else "504") == 1

    run(scene())


def test_a_call_within_its_deadline_is_as_without() -> None:
    async def scene() -> None:
        async with client_of(Rig(text("abc"))) as client:
            plain = await client.post("/v1/chat/completions", json=CHAT)
            timed = await client.post("/v1/chat/completions", json=CHAT, headers={DEADLINE: "10"})
        assert plain.status_code == timed.status_code == 200 and plain.json()["choices"] == timed.json()["choices"]

    run(scene())


def test_a_full_rack_refuses_before_the_prompt_is_read_and_only_what_needs_a_place() -> None:
    """Counted in turns of the loop: nothing is waited for but the client's own sending, and that after the answer."""

    async def scene() -> None:
        sent: list[dict[str, Any]] = []
        told_after: list[int] = []
        parts = 5

        async def never(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError("the call was let through")

        async def receive() -> dict[str, Any]:
            nonlocal parts
            told_after.append(len(sent))
            parts -= 1
            return {"type": "http.request", "body": b"x" * 1000, "more_body": parts > 0}

        async def send(message: Any) -> None:
            sent.append(message)

        admission = Admission(never, 10, is_full=lambda: True)
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
        call = admission(scope, receive, send)
        with pytest.raises(StopIteration):
            call.__await__().send(None)  # it ends in its first turn
        start, body, end = sent
        assert start["status"] == 429 and dict(start["headers"])[b"retry-after"]
        assert json.loads(body["body"])["error"]["code"] == "overloaded" and body["more_body"] and not end.get("more_body")
        assert parts == 0 and set(told_after) == {2}, "the client is told first, then its body is read off"

    run(scene())


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/login"])
def test_a_full_rack_still_does_what_needs_no_place(path: str) -> None:
    async def scene() -> None:
        place = Place()
        place.admission = Admission(place._answer, 2, is_full=lambda: True)
        place.go.set()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(place.admission), base_url="http://rig") as client:
            assert (await client.post(path, content=b"x")).status_code == 200
            assert (await client.post("/v1/messages", content=b"x")).json()["error"]["type"] == "rate_limit_error"

    run(scene())
