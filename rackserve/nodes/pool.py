"""The pool node: directory of the rack's KV pool. It hands out leases and grants; the bytes move between ranks and trays."""

from __future__ import annotations

from collections.abc import Callable

from rackserve.base.events import BlocksEvicted, MessageDropped
from rackserve.base.ids import POOL, POOL_RANK
from rackserve.base.keys import count
from rackserve.base.kv_layout import KvLayout
from rackserve.base.messages import (
    Message,
    PoolCancel,
    PoolCommit,
    PoolGranted,
    PoolLookup,
    PoolRelease,
    PoolStore,
    RankDown,
    SegmentJoined,
    SegmentLost,
    SnapshotWanted,
    Timeout,
)
from rackserve.base.units import Time
from rackserve.nodes.ports import Ports
from rackserve.nodes.presence import Announcer
from rackserve.pool.directory import Directory, PoolConfig
from rackserve.runs.accounts import TenantsConfig
from rackserve.runs.cache import Removed


class PoolNode:
    """Node `pool`. Presence events go out before the answer that made them true (see `Directory`)."""

    def __init__(self, config: PoolConfig, layout: KvLayout, ports: Ports, tenants: TenantsConfig | None = None) -> None:
        self.directory = Directory(config, needs_window=layout.stores_state, tenants=tenants)
        self._ports = ports
        self.announcer = Announcer(POOL_RANK, ports.transport, self.directory.chains)
        self._sweep_at: Time | None = None
        self._sweep_every = config.lease_ns
        self._handlers: dict[type[Message], Callable[..., None]] = {
            PoolLookup: self._on_lookup,
            PoolRelease: lambda message: self._note(message, self.directory.release(message.lease)),
            PoolStore: self._on_store,
            PoolCommit: self._on_commit,
            PoolCancel: lambda message: self._note(message, self.directory.cancel(message.grant)),
            SegmentJoined: self._on_segment_joined,
            SegmentLost: lambda message: self._note(message, self.directory.segment_lost(message.segment)),
            RankDown: lambda message: self.directory.rank_down(message.rank),
            SnapshotWanted: lambda message: self.announcer.snapshot(),
            Timeout: self._on_timeout,
        }

    def handle(self, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)
            self._announce()
            self._arm()

    def _on_lookup(self, message: PoolLookup) -> None:
        now = self._ports.clock.now()
        found = self.directory.lookup(message.key, message.rank, message.chain, message.from_block, now)
        self._ports.transport.send(message.rank.worker, found)

    def _on_store(self, message: PoolStore) -> None:
        now = self._ports.clock.now()
        granted = self.directory.store(
            message.key, message.rank, message.chain, message.from_block, message.with_window, now, message.tenant
        )
        self._announce()
        self._ports.transport.send(message.rank.worker, granted)

    def _on_commit(self, message: PoolCommit) -> None:
        self.directory.commit(message.grant)

    def _on_segment_joined(self, message: SegmentJoined) -> None:
        self.directory.segment_joined(message.segment, message.num_slots, message.num_window_slots, message.rank)

    def _on_timeout(self, message: Timeout) -> None:
        """End what is past its deadline, and remind writers of grants that are: one that is not writing cancels."""
        now = self._ports.clock.now()
        if self._sweep_at is None or now < self._sweep_at:
            return
        self._sweep_at = None
        self.directory.expire(now)
        for number, grant in self.directory.late_grants.items():
            reminder = PoolGranted(*grant.attempt, grant=number, from_block=0, slots=())
            self._ports.transport.send(grant.rank.worker, reminder)

    def _arm(self) -> None:
        """Keep one timer running for the earliest deadline."""
        due = self.directory.next_deadline()
        if due is None and self.directory.late_grants:
            due = self._ports.clock.now() + self._sweep_every
        if due is not None and (self._sweep_at is None or due < self._sweep_at):
            self._sweep_at = due
            self._ports.clock.call_at(due, Timeout("sweep", ""))

    def _announce(self) -> None:
        events = self.directory.take_events()
        self.announcer.announce(events)
        removed = sum(count(event.chain) - event.keep for event in events if isinstance(event, Removed))
        if removed:
            self._ports.recorder.record(BlocksEvicted(POOL_RANK, removed))

    def _note(self, message: Message, known: bool) -> None:
        if not known:
            self._ports.recorder.record(MessageDropped(POOL, type(message).__name__, "ended before"))

    def check(self) -> None:
        """Raise InvariantError if a law does not hold in the directory."""
        self.directory.check()
