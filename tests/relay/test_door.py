"""Who may use the router, what of a client's key reaches a worker, and what keeps tenants apart there."""

from __future__ import annotations

import asyncio
import hashlib

import msgspec
import pytest

from rackserve.api.guard import LOGIN, OPEN
from rackserve.api.keys import KEY_VARIABLE, KeyEntry, KeyRing
from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.cli import main
from rackserve.config import SecurityConfig
from rackserve.relay.config import RouteConfig, WorkerConfig
from rackserve.relay.door import WORKER_KEY_VARIABLE, Door
from rackserve.relay.http import routes
from tests.relay.rig import PROMPT, routing, run, until


def key(name: str, tenant: str = "", *, admin: bool = False) -> KeyEntry:
    """The entry of a key that reads as its name."""
    return KeyEntry(name, hashlib.sha256(name.encode()).hexdigest(), tenant, admin)


KEYS = KeyRing([key("alice", "a"), key("anna", "a"), key("bob", "b"), key("root", admin=True)])
WHOLE = {"prompt": PROMPT}
ROOT = {"authorization": "Bearer root"}


def test_every_route_needs_a_key_but_the_written_list() -> None:
    async def test() -> None:
        async with routing(1, door=Door(KEYS)) as rig:
            table = [(method, route.path) for route in routes(rig.relay) for method in route.methods or {"GET", "POST"}]
            assert len(table) > 10
            spelled = [
                ("POST", path) for path in ("//v1/completions", "/v1/completions/", "/V1/completions", "/v1/../v1/models")
            ]
            for method, path in [*table, *spelled, ("OPTIONS", "/v1/models"), ("DELETE", "/health"), ("GET", "/new"), LOGIN]:
                opened = (("GET" if method == "HEAD" else method), path) in OPEN - {LOGIN}
                for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
                    answer = await rig.client.request(method, path, headers=headers, content=b"{}")
                    assert (answer.status_code == 401) is not opened, (method, path)
            assert not rig.workers[0].seen
            assert (await rig.post(WHOLE, **ROOT)).status_code == 200

    run(test)


@pytest.mark.parametrize("sent", [{"authorization": "Bearer root"}, {"x_api_key": "root"}])
@pytest.mark.parametrize("worker_key", ["", "of the workers"])
def test_the_router_s_own_key_reaches_no_worker(sent: dict[str, str], worker_key: str) -> None:
    async def test() -> None:
        async with routing(1, door=Door(KEYS, worker_key)) as rig:
            assert (await rig.post(WHOLE, **sent, cookie="c=1", x_own="1")).status_code == 200
            headers = rig.workers[0].seen[0].headers
            assert headers.get("authorization") == (f"Bearer {worker_key}" if worker_key else None)
            assert not {"x-api-key", "cookie"} & headers.keys() and headers["x-own"] == "1"

    run(test)


def test_without_keys_of_its_own_the_router_passes_on_what_clients_send() -> None:
    async def test() -> None:
        async with routing(1) as rig:
            await rig.post(WHOLE, authorization="Bearer theirs", x_api_key="theirs")
            headers = rig.workers[0].seen[0].headers
            assert headers["authorization"] == "Bearer theirs" and headers["x-api-key"] == "theirs"
        async with routing(1, door=Door(worker_key="w")) as rig:
            await rig.post(WHOLE, authorization="Bearer theirs")
            assert rig.workers[0].seen[0].headers["authorization"] == "Bearer w"

    run(test)


def test_a_tenant_s_prompts_are_salted_for_the_workers_and_share_nothing_with_another_s() -> None:
    async def test() -> None:
        async with routing(1, door=Door(KEYS)) as rig:
            salts = {}
            for name, asked in (("alice", {}), ("anna", {}), ("bob", {}), ("bob", {"cache_salt": "own"}), ("root", {})):
                await rig.post({**WHOLE, **asked}, authorization=f"Bearer {name}")
                salts[name, *asked] = rig.workers[0].seen[-1].body.get("cache_salt")
            assert salts["alice",] == salts["anna",] != salts["bob",] and salts["root",] is None
            assert len(set(salts.values())) == 4 and salts["bob", "cache_salt"] != "own"
            assert all(body.body["prompt"] == PROMPT for body in rig.workers[0].seen)
            for path, salted in (("/v1/messages", True), ("/v1/responses", True), ("/tokenize", False)):
                await rig.post(WHOLE, path, authorization="Bearer alice")
                assert ("cache_salt" in rig.workers[0].seen[-1].body) is salted
            read = rig.relay.reader.read
            bodies = [msgspec.json.encode(seen.body) for seen in rig.workers[0].seen]
            chains = [read("/v1/completions", body, {}).chain for body in bodies]
            assert chains[0] == chains[1] and len({chain[:16] for chain in chains[:5]}) == 4

    run(test)


def test_a_tenant_s_salt_that_is_no_text_is_refused_as_a_server_refuses_it() -> None:
    async def test() -> None:
        async with routing(1, door=Door(KEYS)) as rig:
            for salt in (5, ["own"], {}, True):
                told = await rig.post({**WHOLE, "cache_salt": salt}, authorization="Bearer alice")
                error = told.json()["error"]
                assert (told.status_code, error["param"], error["code"]) == (400, "cache_salt", "invalid_type")
            assert not rig.workers[0].seen
            assert (await rig.post({**WHOLE, "cache_salt": None}, authorization="Bearer alice")).status_code == 200

    run(test)


def test_health_keeps_its_details_from_those_without_a_key() -> None:
    async def test() -> None:
        async with routing(1, door=Door(KEYS)) as rig:
            assert (await rig.client.get("/health")).json() == {"live": True, "ready": True, "draining": False}
            assert (await rig.client.get("/health", headers=ROOT)).json()["workers"][0]["worker"] == rig.workers[0].name
            assert (await rig.client.get("/ready")).status_code == 200
            rig.relay.lose(rig.relay.fleet.workers[0])
            assert (await rig.client.get("/ready")).status_code == 503

    run(test)


def test_people_get_no_form_where_there_is_nothing_to_sign_in_to() -> None:
    async def test() -> None:
        async with routing(1, door=Door(KEYS)) as rig:
            answer = await rig.client.get("/", headers={"accept": "text/html", "cookie": "rackserve_session=x"})
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"

    run(test)


def test_bodies_and_heads_are_bounded() -> None:
    async def test() -> None:
        async with routing(1, change=lambda config: msgspec.structs.replace(config, body_bytes=1000)) as rig:
            assert (await rig.post({"prompt": "1 " * 400})).status_code == 200
            answer = await rig.post({"prompt": "1 " * 600})
            assert answer.status_code == 413 and "body_bytes" in answer.json()["error"]["message"]
            many = {f"x-{number}": "1" for number in range(120)}
            assert (await rig.client.get("/v1/models", headers=many)).status_code == 431
            assert (await rig.client.get("/v1/models", headers={"origin": "http://evil"})).status_code == 403
            assert len(rig.workers[0].seen) == 1

    run(test)


def test_a_client_s_own_deadline_ends_its_call_everywhere() -> None:
    async def test() -> None:
        async with routing(1) as rig:
            rig.workers[0].hold = asyncio.Event()
            answer = await rig.post(WHOLE, x_request_timeout="0.2")
            assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
            await rig.quiet()
            assert rig.count("requests", "failed") == 1
            assert (await rig.post(WHOLE, x_request_timeout="soon")).status_code == 400

    run(test)


def test_a_tenant_at_its_bound_is_refused_at_once_and_another_is_not() -> None:
    async def test() -> None:
        change = lambda config: msgspec.structs.replace(config, tenant_requests=1)  # noqa: E731
        async with routing(1, change=change, door=Door(KEYS)) as rig:
            rig.workers[0].hold = asyncio.Event()
            first = asyncio.create_task(rig.post(WHOLE, authorization="Bearer alice"))
            await until(lambda: rig.workers[0].num_open == 1)
            refused = await rig.post(WHOLE, authorization="Bearer anna")
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            other = asyncio.create_task(rig.post(WHOLE, authorization="Bearer bob"))
            await until(lambda: rig.workers[0].num_open == 2)
            rig.workers[0].hold.set()
            assert {(await each).status_code for each in (first, other)} == {200}

    run(test)


def config(host: str = "127.0.0.1", **security: object) -> RouteConfig:
    return RouteConfig(workers=(WorkerConfig("http://w:1"),), host=host, security=SecurityConfig(**security))  # type: ignore[arg-type]


def test_on_loopback_only_its_own_names_are_known() -> None:
    assert Door.open(config(), {}).hosts == {"127.0.0.1", "localhost", "::1"}
    assert "rack.local" in Door.open(config(hosts=("Rack.local",)), {}).hosts
    assert Door.open(config("0.0.0.0"), {KEY_VARIABLE: "k"}).hosts == frozenset()


def test_elsewhere_than_on_loopback_it_does_not_start_without_a_key_unless_that_is_meant() -> None:
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        Door.open(config("0.0.0.0"), {WORKER_KEY_VARIABLE: "w"})
    assert not Door.open(config("0.0.0.0", keyless=True), {}).keys
    assert Door.open(config("0.0.0.0"), {KEY_VARIABLE: "k"}).keys
    with pytest.raises(FileFormatError, match="no-such"):
        Door.open(config(key_file="no-such"), {})


def test_the_command_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert main(["route", "--worker", "http://127.0.0.1:9", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "rackserve key" in capsys.readouterr().err
