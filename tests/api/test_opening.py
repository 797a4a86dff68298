from __future__ import annotations

import httpx

from rackserve.api.health import Health
from rackserve.api.opening import Opening
from rackserve.api.state import ServerState
from tests.api.rig import Rig, run, text


async def get(app: Opening, method: str, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://rig") as client:
        return await client.request(method, path)


def test_a_server_that_loads_lives_and_refuses_work_in_the_dialect_that_was_spoken() -> None:
    async def scene() -> None:
        opening = Opening(Health(ServerState(loading=True)))
        assert (await get(opening, "GET", "/live")).status_code == 200
        health = await get(opening, "GET", "/health")
        assert (health.status_code, health.json()["phase"]) == (503, "loading")
        for path in ("/v1/chat/completions", "/metrics", "/nothing"):
            answer = await get(opening, "POST", path)
            assert answer.status_code == 503 and "retry-after" in answer.headers
            assert answer.json()["error"]["code"] == "unavailable"
        assert (await get(opening, "POST", "/v1/messages")).json()["type"] == "error"

    run(scene())


def test_once_open_the_application_answers_and_its_answers_are_waited_for_and_ended() -> None:
    async def scene() -> None:
        opening = Opening(Health(ServerState()))
        await opening.wait_idle()
        opening.close("nothing to close")
        rig = Rig(text("x"))
        opening.open(rig.app, rig.gateway)
        assert (await get(opening, "GET", "/v1/models")).status_code == 200
        await opening.wait_idle()
        opening.close("over")
        assert (await rig.post("/v1/completions", {"prompt": "a"})).status_code == 503

    run(scene())


def test_its_lifespan_begins_and_ends() -> None:
    async def scene() -> list[str]:
        messages = ["lifespan.startup", "lifespan.shutdown"]
        sent: list[str] = []

        async def receive() -> dict[str, str]:
            return {"type": messages.pop(0)}

        async def send(message: dict[str, str]) -> None:
            sent.append(message["type"])

        await Opening(Health(ServerState()))({"type": "lifespan"}, receive, send)  # type: ignore[arg-type]
        return sent

    assert run(scene()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
