from __future__ import annotations

import logging
from typing import Any

import pytest

from rackserve.api.call import Caller
from rackserve.api.http import create_app
from rackserve.api.journal import MAX_OPEN, Journal, RefusalLog
from rackserve.api.logs import FIELDS
from rackserve.base.events import RequestEnded
from rackserve.live.recorder import Recorded
from tests.api.rig import Rig, run, text

SECRET = "the prompt nobody may read"


def ended(request: str, outcome: str = "finished", ttft: int = 50_000_000) -> Recorded:
    return Recorded(0, "frontend", RequestEnded(request, outcome, "stop", 1, 100, 60, 10, ttft, 2_000_000_000))


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    return [(record.getMessage(), getattr(record, FIELDS)) for record in caplog.records if record.name == "rackserve.requests"]


def test_a_request_is_one_line_when_it_ends_without_prompt_or_key(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        rig, journal = Rig(text("the answer")), Journal()
        rig.app = create_app(rig.gateway, rig.factory, rig.metrics, rig.state, [journal])
        answer = await rig.post("/v1/completions", {"prompt": SECRET, "n": 2, "model": "tiny"})
        assert answer.status_code == 200
        first, second = rig.frontend.submitted
        journal(ended(first.id))
        journal(ended(second.id, "aborted", ttft=-1))
        journal(ended("of nobody"))
        assert journal._open == {}

    caplog.set_level(logging.INFO, "rackserve.requests")
    run(scene())
    (what, told), (_, other), (_, unknown) = lines(caplog)
    assert what == "request" and told["call"] == other["call"] and told["id"] != other["id"]
    assert (told["model"], told["kind"], told["stream"], told["outcome"]) == ("tiny", "completion", False, "finished")
    assert (told["prompt_tokens"], told["cached_tokens"], told["output_tokens"]) == (100, 60, 10)
    assert (told["ttft_s"], told["duration_s"]) == (0.05, 2.0)
    assert "ttft_s" not in other and "model" not in unknown and "key" not in told
    assert SECRET not in str(lines(caplog)) and "the answer" not in str(lines(caplog))


def test_the_key_is_told_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rackserve.requests")

    async def scene() -> None:
        rig, journal = Rig(text("x")), Journal()

        async def from_alice(scope: Any, receive: Any, send: Any) -> None:
            app = create_app(rig.gateway, rig.factory, rig.metrics, rig.state, [journal])
            await app({**scope, "caller": Caller("a-team", False, "alice")}, receive, send)

        rig.app = from_alice  # type: ignore[assignment]
        await rig.post("/v1/completions", {"prompt": "a"}, headers={"authorization": "Bearer rk-secret"})
        journal(ended(rig.frontend.submitted[0].id))

    run(scene())
    ((_, told),) = lines(caplog)
    assert (told["key"], told["tenant"]) == ("alice", "a-team") and "rk-secret" not in str(told)


def test_a_line_says_where_its_prompt_left_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rackserve.requests")

    async def scene() -> None:
        rig, journal = Rig(text("x")), Journal()
        rig.app = create_app(rig.gateway, rig.factory, rig.metrics, rig.state, [journal])
        for prompt in ("0123", "01234", "01X3"):
            await rig.post("/v1/completions", {"prompt": prompt, "session_id": "s", "n": 2})
        for request in rig.frontend.submitted:
            journal(ended(request.id))

    run(scene())
    assert [told.get("left_at") for _, told in lines(caplog)] == [None] * 4 + [2] * 2


def test_a_refusal_is_a_line_and_what_went_well_is_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rackserve.requests")

    async def scene() -> None:
        rig = Rig(text("x"))
        rig.app = RefusalLog(rig.app, counted.append)  # type: ignore[assignment]
        await rig.request("GET", "/v1/models")
        rig.state.ready = False
        assert (await rig.request("GET", "/ready")).status_code == 503
        rig.state.ready = True
        await rig.request("GET", "/nothing%0aINFO")
        await rig.post("/v1/completions", {"prompt": SECRET, "n": -1})

    counted: list[str] = []
    run(scene())
    assert counted == ["404", "400"]
    (what, first), (_, second) = lines(caplog)
    assert what == "refused" and (first["method"], first["path"], first["status"]) == ("GET", "/nothing\nINFO", 404)
    assert second["status"] == 400 and SECRET not in str(second)


def test_requests_that_never_end_do_not_pile_up() -> None:
    journal = Journal()
    journal._open.update((str(number), {}) for number in range(MAX_OPEN))
    rig_call = run(_one_call())
    journal.begin(rig_call, Caller(), {})
    assert len(journal._open) == MAX_OPEN and "0" not in journal._open


async def _one_call() -> Any:
    calls = []

    class Keep:
        def begin(self, call: Any, caller: Caller, headers: Any) -> None:
            calls.append(call)

    rig = Rig(text("x"))
    rig.app = create_app(rig.gateway, rig.factory, rig.metrics, rig.state, [Keep()])
    await rig.post("/v1/completions", {"prompt": "a"})
    return calls[0]
