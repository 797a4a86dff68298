from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from rackserve.assemble import RackConfig
from rackserve.base.errors import ConfigError
from rackserve.base.topology import Topology
from rackserve.digest_model import digest_layout
from rackserve.live.group import open_part
from rackserve.live.launch import CRASHED
from rackserve.live.rank_spec import Limits, RankSpec
from rackserve.live.regions import RegionOwner, RegionShape
from rackserve.live.runner import RunnerSpec
from tests.live.processes import has_ended, new_meeting

LIMITS = Limits(ready=30.0, heartbeat=30.0, step=30.0)
WIDE = Topology(prefill_ranks=2, prefill_tp=2)


def spec_of(limits: Limits = LIMITS, topology: Topology = WIDE) -> RankSpec:
    config = RackConfig(topology=topology)
    return RankSpec("prefill0", "prefill", 1, new_meeting(), (), digest_layout(4), RunnerSpec(block_tokens=4), config, limits)


@contextmanager
def leader(what: str, spec: RankSpec) -> Iterator[subprocess.Popen[str]]:
    command = (sys.executable, "-m", "tests.live.tiny_group", what)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(spec).decode() + "\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


def ends(what: str, spec: RankSpec) -> tuple[int, str, list[int]]:
    """(exit code, standard error, process ids of all devices) of a leader that ends by itself."""
    with leader(what, spec) as process:
        assert process.stdout is not None and process.stderr is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        _, errors = process.communicate(timeout=20)
        return process.returncode, errors, pids


def all_end(pids: list[int]) -> bool:
    end = time.monotonic() + 5.0
    while not all(has_ended(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_results_are_those_of_the_first_device_of_each_rank_and_idling_devices_have_no_limit() -> None:
    with leader("fine", spec_of(Limits(ready=30.0, heartbeat=30.0, step=2.0))) as process:
        assert process.stdout is not None and process.stdin is not None
        pids = process.stdout.readline().split()
        assert len(set(pids)) == 4 and int(pids[0]) == process.pid
        assert process.stdout.readline().split() == [pids[0], pids[2]]
        assert process.stdout.readline().split() == [pids[0], pids[2]]
        assert process.stdout.readline().split() == [str(2 * int(pids[0])), str(2 * int(pids[2]))]  # what each took
        process.stdin.close()
        assert process.wait(10) == 0
    assert all_end([int(pid) for pid in pids])


@pytest.mark.parametrize(
    ("what", "limits", "said"),
    [
        ("fail", LIMITS, "device 1 (pid {}) ended with exit code 70"),
        ("freeze", Limits(30.0, 3.0, 30.0), "device 1 (pid {}) gave no sign of life for "),
        ("stall", Limits(30.0, 30.0, 2.0), "device 1 (pid {}) did not compute step 2 within 1.8 s (settings supervisor.ready"),
    ],
)
def test_a_device_that_fails_freezes_or_stalls_ends_the_whole_group_and_is_named(what: str, limits: Limits, said: str) -> None:
    code, errors, pids = ends(what, spec_of(limits))
    assert code == CRASHED and said.format(pids[1]) in errors
    assert ("RuntimeError: told to fail" in errors) == (what == "fail")
    assert "device 2" not in errors and "device 3" not in errors
    assert all_end(pids)


def test_a_leader_that_fails_in_a_step_says_why_and_takes_its_followers_along() -> None:
    code, errors, pids = ends("leader_fails", spec_of())
    assert code == CRASHED and "RuntimeError: told to fail" in errors
    assert errors.endswith(f"device 0 (pid {pids[0]}) failed in step 2\n")
    assert all_end(pids)


def test_what_a_person_can_mend_in_a_follower_ends_the_leader_with_its_text_and_exit_code() -> None:
    code, errors, _ = ends("unopened", spec_of())
    assert code == ConfigError.exit_code
    assert errors.startswith("ConfigError: no such model (device 1 (pid ") and errors.count("\n") == 1


@pytest.mark.parametrize("victim", range(4))
def test_when_any_device_is_killed_all_end(victim: int) -> None:
    with leader("fine", spec_of()) as process:
        assert process.stdout is not None and process.stderr is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        os.kill(pids[victim], signal.SIGKILL)
        assert process.wait(10) == (CRASHED if victim else -signal.SIGKILL)
        assert all_end(pids)
        assert (f"device {victim} (pid {pids[victim]}) was ended by signal 9" in process.stderr.read()) == (victim > 0)


def test_a_part_maps_the_arena_of_its_rank_and_only_the_first_device_of_a_rank_computes_the_toy_model() -> None:
    spec, owner = spec_of(), RegionOwner()
    shapes = [RegionShape.of(spec.layout, num_slots, 0) for num_slots in (3, 5)]
    try:
        regions = tuple(owner.create(spec.arena(rank), shape) for rank, shape in enumerate(shapes))
        spec = msgspec.structs.replace(spec, regions=regions)
        parts = [open_part(spec, device, "") for device in range(spec.num_devices)]
        assert [part is not None for part in parts] == [True, False, True, False]
        sizes = [len(part._runner._arena) for part in parts if part is not None]  # type: ignore[attr-defined]
        assert sizes == [shape.num_bytes for shape in shapes]
    finally:
        owner.close()
