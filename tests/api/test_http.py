from __future__ import annotations

import pytest

from tests.api.rig import Rig, run, text


def test_models_tell_name_and_context() -> None:
    async def scene() -> None:
        response = await Rig(text("x")).request("GET", "/v1/models")
        (model,) = response.json()["data"]
        assert response.json()["object"] == "list"
        assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 256)

    run(scene())


@pytest.mark.parametrize(
    ("ready", "draining", "live", "status"),
    [(True, False, True, 200), (False, False, True, 503), (True, True, True, 503), (True, False, False, 503)],
)
def test_health_is_green_only_when_work_is_taken(ready: bool, draining: bool, live: bool, status: int) -> None:
    async def scene() -> None:
        rig = Rig(text("x"))
        rig.state.ready, rig.state.draining, rig.state.live = ready, draining, live
        rig.state.detail = lambda: {"ranks": [{"rank": "prefill0.0", "age_s": 1.5}]}
        response = await rig.request("GET", "/health")
        assert response.status_code == status
        told = response.json()
        assert (told["live"], told["ready"], told["draining"]) == (live, status == 200, draining)
        assert told["ranks"][0]["rank"] == "prefill0.0"

    run(scene())


@pytest.mark.parametrize(
    ("path", "stuck", "status"),
    [("/live", True, 200), ("/ready", True, 503), ("/health", True, 503), ("/live", False, 200), ("/ready", False, 200)],
)
def test_stuck_is_alive_and_not_ready_and_work_is_still_taken(path: str, stuck: bool, status: int) -> None:
    async def scene() -> None:
        rig = Rig(text("x"))
        rig.state.stall = lambda: {"where": "decode", "seconds": 41.5} if stuck else None
        response = await rig.request("GET", path)
        assert response.status_code == status
        if path != "/live":
            assert response.json().get("stuck") == ({"where": "decode", "seconds": 41.5} if stuck else None)
        assert (await rig.post("/v1/completions", {"prompt": "a"})).status_code == 200

    run(scene())


def test_metrics_are_in_the_prometheus_text_format() -> None:
    async def scene() -> None:
        response = await Rig(text("x")).request("GET", "/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        assert 'rackserve_requests_total{outcome="finished"} 0.0' in response.text

    run(scene())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/unknown", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("POST", "//v1/completions", 404),
        ("POST", "/v1/completions/", 404),
    ],
)
def test_other_paths_and_methods_get_an_error_body(method: str, path: str, status: int) -> None:
    async def scene() -> None:
        response = await Rig(text("x")).request(method, "http://rig" + path)
        assert response.status_code == status
        assert response.json()["error"]["type"].endswith("_error")
        assert response.json()["error"]["code"] == {404: "not_found", 405: "method_not_allowed"}[status]

    run(scene())
