"""The ports a host hands to a node."""

from __future__ import annotations

from dataclasses import dataclass

from rackserve.ports import BlockStore, Clock, Engine, Recorder, Transport


@dataclass(frozen=True, slots=True)
class Ports:
    """`store` and `engine` are there for workers only."""

    clock: Clock
    transport: Transport
    recorder: Recorder
    store: BlockStore | None = None
    engine: Engine | None = None
