from __future__ import annotations

import pytest

from rackserve.api.state import ServerState


def test_the_phase_is_the_first_reason_not_to_send_work() -> None:
    state = ServerState(live=False, ready=False, draining=True, loading=True, stall=lambda: "decode")
    phases = [state.phase()]
    for change in ({"live": True}, {"draining": False}, {"loading": False}, {"ready": True}, {"stall": lambda: None}):
        for name, value in change.items():
            setattr(state, name, value)
        phases.append(state.phase())
    assert phases == ["dead", "draining", "loading", "unavailable", "stuck", "ready"]


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
