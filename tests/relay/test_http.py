"""The router's paths."""

from __future__ import annotations

from tests.relay.rig import PROMPT, routing, run
from tests.relay.stub import StubWorker


def test_health_says_who_is_up_and_how_holdings_are_known() -> None:
    async def test() -> None:
        async with routing(2) as rig:
            told = (await rig.client.get("/health")).json()
            assert told["ready"] is True
            assert [worker["up"] for worker in told["workers"]] == [True, True]
            assert {worker["holdings"] for worker in told["workers"]} == {"learned"}
            for worker in rig.relay.fleet.workers:
                rig.relay.lose(worker)
            assert (await rig.client.get("/health")).status_code == 503
            assert (await rig.client.get("/live")).status_code == 200

    run(test)


def test_the_models_are_those_of_the_workers_with_what_fits_all_of_them() -> None:
    async def test() -> None:
        workers = [StubWorker(context=8192), StubWorker(context=4096), StubWorker(), StubWorker("other")]
        async with routing(workers=workers) as rig:
            told = (await rig.client.get("/v1/models")).json()["data"]
            assert [(model["id"], model.get("max_model_len")) for model in told] == [("m", 4096), ("other", None)]

    run(test)


def test_unknown_paths_and_methods_get_an_error_body() -> None:
    async def test() -> None:
        async with routing(1) as rig:
            for method, path, status in (
                ("GET", "/nowhere", 404),
                ("GET", "/v1/completions", 405),
                ("POST", "/v1/models", 405),
            ):
                answer = await rig.client.request(method, path)
                assert answer.status_code == status
                assert answer.json()["error"]["message"]
            assert (await rig.post({"prompt": PROMPT}, "/v1/completions/")).status_code == 404
            assert not rig.workers[0].seen

    run(test)


def test_a_body_that_is_no_object_reaches_no_worker() -> None:
    async def test() -> None:
        async with routing(1) as rig:
            for raw in (b"", b"[]", b"{", b"\xff"):
                assert (await rig.client.post("/v1/completions", content=raw)).status_code == 400
            assert not rig.workers[0].seen
            await rig.quiet()

    run(test)
