from __future__ import annotations

import pytest

from rackserve.api.state import ServerState


@pytest.mark.parametrize(
    ("state", "takes_work"),
    [
        (ServerState(), False),
        (ServerState(ready=True), True),
        (ServerState(ready=True, draining=True), False),
        (ServerState(ready=True, live=False), False),
    ],
)
def test_work_is_taken_only_when_live_ready_and_not_draining(state: ServerState, takes_work: bool) -> None:
    assert state.takes_work is takes_work
