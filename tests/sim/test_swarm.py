"""A seed is a whole run: same seed, same log, in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rackserve.base.errors import InvariantError
from rackserve.base.messages import Output
from rackserve.base.step import Step, StepItem
from rackserve.sim.swarm import build, describe, draw, run_seed, step_time

SCRIPT = "from rackserve.sim.swarm import run_seed; print(*(run_seed(seed, checked=False).digest for seed in (4, 10, 29)))"


def test_the_same_seed_gives_the_same_digest_under_any_hash_seed() -> None:
    runs = []
    for seed in ("0", "1", "4242"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        runs.append(subprocess.check_output([sys.executable, "-c", SCRIPT], env=environment, text=True).split())
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0])) == 3
    assert runs[0] == [run_seed(seed).digest for seed in (4, 10, 29)]  # looking at the laws changes nothing


def test_every_request_is_counted_once() -> None:
    for seed in (2, 29):
        result = run_seed(seed)
        rack, client = build(draw(seed))
        rack.host.run()
        assert result.finished + result.failed + result.cancelled >= draw(seed).num_sessions
        assert all(call.ends == 1 for call in client.calls.values())


def test_the_client_notices_output_that_is_wrong_late_or_out_of_order() -> None:
    run = draw(2)
    _, client = build(run)
    client._send("s0")
    (name,) = client.calls
    with pytest.raises(InvariantError, match="came after 0 tokens"):
        client.handle(Output(name, 1, (5,)))
    with pytest.raises(InvariantError, match="ended 0 times"):
        client.check()
    client.handle(Output(name, 0, (), finish="cancelled"))
    with pytest.raises(InvariantError, match="after its end"):
        client.handle(Output(name, 0, (5,)))


def test_a_drawn_case_can_be_read() -> None:
    text = describe(draw(7))
    assert '"prefill_workers"' in text
    assert "FaultPlan" in text
    assert draw(7) == draw(7) != draw(8)


def test_a_step_of_more_tokens_takes_longer() -> None:
    short, long = (Step(0, (StepItem(1, 0, tokens, b"", (), False),)) for tokens in (1, 9))
    assert 0 < step_time(short) < step_time(long)
