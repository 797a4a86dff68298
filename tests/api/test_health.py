from __future__ import annotations

import msgspec
import pytest

from rackserve.api.health import PATHS, Health
from rackserve.api.state import ServerState


@pytest.mark.parametrize("loading", [True, False])
def test_a_server_that_is_loading_or_has_lost_a_role_lives_and_is_not_ready(loading: bool) -> None:
    health = Health(ServerState(loading=loading))
    answers = [health.answer(path) for path in PATHS]
    assert [answer and answer[0] for answer in answers] == [200, 503, 503]
    assert answers[1] is not None
    assert msgspec.json.decode(answers[1][1])["phase"] == ("loading" if loading else "unavailable")


def test_only_health_tells_details_and_other_paths_are_not_answered() -> None:
    health = Health(ServerState(ready=True, detail=lambda: {"ranks": [1]}), lambda: 3)
    told = {path: msgspec.json.decode((health.answer(path) or (0, b"", {}))[1]) for path in PATHS}
    assert told["/health"]["ranks"] == [1] and told["/health"]["open_requests"] == 3
    assert told["/live"] == {"live": True} and "ranks" not in told["/ready"]
    assert health.answer("/v1/models") is None
