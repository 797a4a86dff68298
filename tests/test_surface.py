"""What an import brings along: the control plane needs neither torch nor an event loop."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import rackserve

HEAVY = ("torch", "asyncio", "zmq", "threading", "numpy", "starlette", "httpx", "tokenizers", "random", "logging")
# What msgspec and the standard library load themselves is not ours to forbid.

SCRIPT = """
import sys
import msgspec, msgspec.msgpack, hashlib, heapq, dataclasses, typing, collections.abc, array
before = set(sys.modules)
import {modules}
print(*sorted(name for name in {heavy!r} if name in set(sys.modules) - before))
"""

CONTROL = [
    "rackserve", "rackserve.base.messages", "rackserve.base.events", "rackserve.runs.cache", "rackserve.kv.rank_cache",
    "rackserve.sched.lockstep", "rackserve.route.placement", "rackserve.pool.directory", "rackserve.nodes.frontend",
    "rackserve.nodes.router", "rackserve.nodes.prefill", "rackserve.nodes.decode", "rackserve.nodes.pool", "rackserve.assemble",
]  # fmt: skip


def loaded_by(modules: list[str]) -> list[str]:
    script = SCRIPT.format(modules=", ".join(modules), heavy=HEAVY)
    return subprocess.check_output([sys.executable, "-c", script], text=True).split()


def test_the_version_is_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z]+\d*)?", rackserve.__version__)


@pytest.mark.parametrize("modules", [["rackserve"], CONTROL, ["rackserve.sim.swarm"]], ids=["package", "control", "simulator"])
def test_importing_the_control_plane_or_the_simulator_loads_nothing_heavy(modules: list[str]) -> None:
    assert loaded_by(modules) == []


def test_the_check_sees_what_is_loaded() -> None:
    assert "asyncio" in loaded_by(["asyncio"])
