from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rackserve.api.call import Caller
from rackserve.api.health import PATHS, Health, knows
from rackserve.api.state import ServerState


@pytest.mark.parametrize("loading", [True, False])
def test_a_server_that_is_loading_or_has_lost_a_role_lives_and_is_not_ready(loading: bool) -> None:
    health = Health(ServerState(loading=loading))
    answers = [health.answer(path, details=False) for path in PATHS]
    assert [answer and answer[0] for answer in answers] == [200, 503, 503]
    assert answers[1] is not None
    assert msgspec.json.decode(answers[1][1])["phase"] == ("loading" if loading else "unavailable")


def test_only_health_tells_details_and_other_paths_are_not_answered() -> None:
    health = Health(ServerState(ready=True, detail=lambda: {"ranks": [1]}), lambda: 3)
    told = {path: msgspec.json.decode((health.answer(path, details=True) or (0, b"", {}))[1]) for path in PATHS}
    assert told["/health"]["ranks"] == [1] and told["/health"]["open_requests"] == 3
    assert told["/live"] == {"live": True} and "ranks" not in told["/ready"]
    assert health.answer("/v1/models", details=True) is None


def test_details_of_health_are_for_those_whom_the_guard_knows() -> None:
    asked: dict[str, dict[str, Any]] = {
        "no guard": {}, "no keys": {"caller": Caller(admin=True)}, "a key": {"caller": Caller("t", False, "alice")},
    }  # fmt: skip
    assert all(knows(scope) for scope in asked.values()) and not knows({"caller": Caller()})
    health = Health(ServerState(ready=True, detail=lambda: {"ranks": [1]}), lambda: 3)
    told = msgspec.json.decode((health.answer("/health", details=False) or (0, b"", {}))[1])
    assert told == {"live": True, "ready": True, "phase": "ready"}
