"""Each port has two real implementations, and both take what the protocol says."""

from __future__ import annotations

import inspect

import pytest

from rackserve import ports
from rackserve.live.clock import LiveClock
from rackserve.live.engine import ThreadEngine
from rackserve.live.recorder import NodeRecorder
from rackserve.live.store import SharedStore
from rackserve.live.transport import LiveTransport
from rackserve.nodes.decode import DecodeNode
from rackserve.nodes.frontend import Frontend
from rackserve.nodes.pool import PoolNode
from rackserve.nodes.prefill import PrefillNode
from rackserve.nodes.router import Router
from rackserve.sim.engine import SimEngine
from rackserve.sim.host import SimClock, SimRecorder, SimTransport
from rackserve.sim.store import SimStore

IMPLEMENTATIONS: dict[type, tuple[type, ...]] = {
    ports.Clock: (SimClock, LiveClock),
    ports.Transport: (SimTransport, LiveTransport),
    ports.Engine: (SimEngine, ThreadEngine),
    ports.BlockStore: (SimStore, SharedStore),
    ports.Recorder: (SimRecorder, NodeRecorder),
    ports.Node: (Frontend, Router, PoolNode, PrefillNode, DecodeNode),
}


def methods(port: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(value) for name, value in vars(port).items() if not name.startswith("_") and callable(value)
    }


def test_every_port_is_listed_here() -> None:
    protocols = {
        value for value in vars(ports).values() if getattr(value, "_is_protocol", False) and value.__module__ == ports.__name__
    }
    assert set(IMPLEMENTATIONS) == protocols


@pytest.mark.parametrize(("port", "made"), [(port, made) for port, all_made in IMPLEMENTATIONS.items() for made in all_made])
def test_an_implementation_takes_and_returns_what_the_port_says(port: type, made: type) -> None:
    assert methods(port)
    for name, wanted in methods(port).items():
        assert inspect.signature(getattr(made, name)) == wanted, f"{made.__name__}.{name}"
