"""Starts the rank processes, notices their end, tells everyone, and starts them again."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from rackserve.base.errors import ConfigError, FileFormatError, RackserveError, ResourceError
from rackserve.base.events import RankChanged
from rackserve.base.ids import FRONTEND, POOL, ROUTER, SUPERVISOR, NodeId, Rank
from rackserve.base.messages import Drain, Drained, Message, RankDown, RankUp, SegmentJoined, SegmentLost
from rackserve.base.ranges import MAX_SECONDS, MIN_SECONDS, require_range
from rackserve.base.topology import ROLES, Role
from rackserve.base.transfer import arena_region, segment_region
from rackserve.base.units import Time, to_ns, to_seconds
from rackserve.live.host import LiveHost
from rackserve.live.launch import RankProcess, how_it_ended
from rackserve.live.rank_spec import (
    BEAT_CHANNEL,
    BEAT_PERIOD_S,
    READY_CHANNEL,
    REGIONS_CHANNEL,
    Beat,
    Limits,
    RankSpec,
    RankStatus,
    Ready,
)
from rackserve.live.regions import RegionOwner, RegionShape, check_memory
from rackserve.live.transport import Wire
from rackserve.ports import Recorder

ENGINE_COMMAND = (sys.executable, "-m", "rackserve.live.engine_main")

KILL_AFTER_S = 2.0
RESTART_WINDOW_S = 60.0
MAX_RESTARTS = 100

log = logging.getLogger("rackserve.live")


class SupervisorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds.

    ready         a rank process from its start until it listens (it loads the model meanwhile)
    heartbeat     silence after which a rank is taken for stuck and killed
    step          length of one engine step after which the rank is taken for stuck and killed
    backoff       pause before the first restart of a rank; doubles with each further restart within a minute
    max_restarts  restarts of one rank within a minute; then it stays down
    """

    ready: float = 300.0
    heartbeat: float = 10.0
    step: float = 300.0
    backoff: float = 0.1
    max_restarts: int = 5

    def __post_init__(self) -> None:
        require_range("supervisor", self, ("ready", "step", "backoff"), MIN_SECONDS, MAX_SECONDS)
        require_range("supervisor", self, ("heartbeat",), 3 * BEAT_PERIOD_S, MAX_SECONDS)  # a late beat is no silence
        require_range("supervisor", self, ("max_restarts",), 0, MAX_RESTARTS)


@dataclass(slots=True, eq=False)
class _Supervised:
    worker: NodeId
    role: Role
    ranks: tuple[Rank, ...]
    segment: int = -1
    state: str = "down"
    incarnation: int = 0
    process: RankProcess | None = None
    told: Ready = field(default_factory=Ready)
    ready: asyncio.Future[None] | None = None
    beat: Beat | None = None
    beat_ns: Time = 0
    num_restarts: int = 0
    restarts: deque[Time] = field(default_factory=deque)


class Supervisor:
    """Node `supervisor` of the control process, and the keeper of its rank processes: one per worker, which leads its devices.

    The ranks of a worker start and end together. They are announced as down only when the process has been reaped, so that
    they can write nowhere any more. Their memory and their tray's pool segment go with them: the next incarnation gets new
    arenas and joins the pool with a new segment number.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        host: LiveHost,
        wire: Wire,
        regions: RegionOwner,
        template: RankSpec,
        recorder: Recorder,
        config: SupervisorConfig | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        """`template`: the spec of every rank process but for worker, role, incarnation, regions and limits."""
        self._loop = loop
        self._host = host
        self._wire = wire
        self._regions = regions
        self._topology = topology = template.config.topology
        self._template = template
        self._recorder = recorder
        self._config = config or SupervisorConfig()
        self._command = tuple(command)
        self._next_segment = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._drained = loop.create_future()
        self._draining = False
        self._ranks: dict[NodeId, _Supervised] = {}
        for role in ROLES:
            for worker in topology.workers(role):
                ranks = tuple(Rank(worker, dp_rank) for dp_rank in range(topology.group_size(role)))
                self._ranks[worker] = _Supervised(worker, role, ranks)
        wire.listen(READY_CHANNEL, self._on_ready)
        wire.listen(BEAT_CHANNEL, self._on_beat)
        host.add(SUPERVISOR, self)

    # ------------------------------------------------------------ outside

    def handle(self, message: Message) -> None:
        if isinstance(message, Drained) and not self._drained.done():
            self._drained.set_result(None)

    async def start(self, model_bytes: int) -> None:
        """Start all ranks and announce them once all are ready. Raises ResourceError with the reason if one does not start.

        `model_bytes`: what all devices together take besides their KV.
        """
        shapes = [self._arena_shape(rank.role) for rank in self._ranks.values() for _ in rank.ranks]
        shapes += [self._segment_shape()] * self._topology.num_segments
        check_memory(sum(shape.num_bytes for shape in shapes), model_bytes)
        for rank in self._ranks.values():
            self._spawn(rank)
        await asyncio.gather(*(self._await_ready(rank) for rank in self._ranks.values()))
        for rank in self._ranks.values():
            self._announce_up(rank)
        self._tasks = [self._loop.create_task(self._tend(rank)) for rank in self._ranks.values()]
        self._tasks.append(self._loop.create_task(self._watch_beats()))
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    async def drain(self, limit_s: float) -> bool:
        """Let running requests end and take no new ones. False if some still run after `limit_s`."""
        self._draining = True
        self._wire.send(SUPERVISOR, FRONTEND, Drain(SUPERVISOR))
        done, _ = await asyncio.wait((self._drained,), timeout=limit_s)
        return bool(done)

    async def stop(self) -> None:
        """End all ranks: politely, then by force. Returns when all are gone. May be called twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        running = [rank.process for rank in self._ranks.values() if rank.process is not None]
        for process in running:
            process.terminate()
        ends = [process.exited for process in running]
        if ends:
            _, late = await asyncio.wait(ends, timeout=KILL_AFTER_S)
            for process in running:
                process.kill()
            if late:
                await asyncio.wait(late)
        for rank in self._ranks.values():
            self._change(rank, "stopped")

    def status(self) -> tuple[RankStatus, ...]:
        return tuple(self._status(rank) for rank in self._ranks.values())

    def _status(self, rank: _Supervised) -> RankStatus:
        now, beat = time.monotonic_ns(), rank.beat
        alive = rank.process is not None and not rank.process.exited.done()
        return RankStatus(
            rank.worker,
            rank.role,
            rank.state,
            rank.process.pid if rank.process is not None and alive else 0,
            rank.incarnation,
            rank.num_restarts,
            to_seconds(now - rank.beat_ns) if beat else -1.0,
            to_seconds(now - beat.step_started_ns) if beat and beat.step_started_ns else -1.0,
            beat.steps_done if beat else 0,
            rank.told.pids if alive else (),
            beat.kv if beat and alive else (),
            beat.times if beat and alive else (),
            rank.told.kernels,
            rank.told.threads,
        )

    # ------------------------------------------------------------ start and end of one worker

    def _arena_shape(self, role: Role) -> RegionShape:
        return RegionShape.of(self._template.layout, self._topology.num_blocks(role), self._topology.rank_windows)

    def _segment_shape(self) -> RegionShape:
        return RegionShape.of(self._template.layout, self._topology.segment_blocks, self._topology.segment_windows)

    def _spawn(self, rank: _Supervised) -> None:
        """Start the next incarnation. Raises ResourceError if there is no memory for it."""
        rank.incarnation += 1
        for one in rank.ranks:
            self._regions.create(arena_region(one, rank.incarnation), self._arena_shape(rank.role))
        if self._topology.pool:
            rank.segment = self._next_segment
            self._next_segment += 1
            self._regions.create(segment_region(rank.segment), self._segment_shape())
        spec = msgspec.structs.replace(
            self._template,
            worker=rank.worker,
            role=rank.role,
            incarnation=rank.incarnation,
            regions=self._regions.table(),
            limits=Limits(self._config.ready, self._config.heartbeat, self._config.step),
        )
        rank.ready = self._loop.create_future()
        rank.beat = None
        rank.process = RankProcess(self._loop, self._command, msgspec.json.encode(spec), rank.worker)
        self._change(rank, "starting")

    async def _await_ready(self, rank: _Supervised) -> None:
        """Wait until the process listens. If it ends before, or takes too long: an error of its kind, with its last words."""
        assert rank.process is not None and rank.ready is not None
        process = rank.process
        await asyncio.wait((rank.ready, process.exited), timeout=self._config.ready, return_when=asyncio.FIRST_COMPLETED)
        if rank.ready.done() and not process.exited.done():
            return
        if process.exited.done():
            problem = f"{how_it_ended(process.exited.result())} before it was ready"
        else:
            problem = f"was not ready after {self._config.ready:g} s (setting supervisor.ready)"
            process.kill()
            await asyncio.wait((process.exited,))
        self._release(rank)
        self._change(rank, "down")
        # What a person can mend has its own exit code in the process, and keeps it here.
        code = process.exited.result()
        kind = next((kind for kind in (ConfigError, FileFormatError) if kind.exit_code == code), ResourceError)
        raise kind(f"rank {rank.worker} {problem}; its last lines:\n{process.tail()}")

    def _release(self, rank: _Supervised) -> None:
        """Drop the memory of an ended incarnation."""
        for one in rank.ranks:
            self._regions.drop(arena_region(one, rank.incarnation))
        if rank.segment >= 0:
            self._regions.drop(segment_region(rank.segment))

    async def _tend(self, rank: _Supervised) -> None:
        """Restart `rank` whenever it ends, until it has ended too often or the rack drains."""
        while rank.process is not None:
            await asyncio.wait((rank.process.exited,))
            end = how_it_ended(rank.process.exited.result())
            log.warning("rank %s %s; %s", rank.worker, end, "the rack is ending" if self._draining else "starting it again")
            self._announce_down(rank)
            if self._draining:
                return
            while rank.state != "starting":
                pause = self._restart_pause(rank)
                if pause < 0:
                    log.error("rank %s ended too often and stays down", rank.worker)
                    self._change(rank, "failed")
                    return
                await asyncio.sleep(pause)
                try:
                    self._spawn(rank)
                    await self._await_ready(rank)
                except (RackserveError, OSError) as error:  # OSError: the machine is short of something, such as descriptors
                    log.error("rank %s was not started again: %s", rank.worker, error)
                    self._release(rank)
            log.warning("rank %s is up again (incarnation %d)", rank.worker, rank.incarnation)
            self._announce_up(rank)

    def _restart_pause(self, rank: _Supervised) -> float:
        """Seconds to wait before the next restart, which is booked here; negative if there may be none."""
        now = time.monotonic_ns()
        while rank.restarts and rank.restarts[0] < now - to_ns(RESTART_WINDOW_S):
            rank.restarts.popleft()
        if len(rank.restarts) >= self._config.max_restarts:
            return -1.0
        rank.restarts.append(now)
        rank.num_restarts += 1
        return self._config.backoff * float(2 ** (len(rank.restarts) - 1))

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._host.crash(task.exception() or RuntimeError("supervision ended"))

    # ------------------------------------------------------------ announcements

    def _announce_up(self, rank: _Supervised) -> None:
        """Tell the worker who else is up, and everyone else that it is. It knows all memory before anyone may name it."""
        worker = rank.worker
        others = [other for other in self._ranks.values() if other.state == "up"]
        rank.beat_ns = time.monotonic_ns()
        self._wire.peer_up(worker, rank.incarnation)
        self._change(rank, "up")
        self._share_regions()
        for other in others:
            for one in other.ranks:
                self._wire.send(SUPERVISOR, worker, RankUp(one, other.role, other.incarnation))
        for one in rank.ranks:
            self._broadcast(RankUp(one, rank.role, rank.incarnation), but=worker)
        if rank.segment >= 0:
            shape = self._segment_shape()
            joined = SegmentJoined(rank.segment, shape.num_slots, shape.num_window_slots, rank.ranks[0])
            self._wire.send(SUPERVISOR, POOL, joined)

    def _announce_down(self, rank: _Supervised) -> None:
        self._wire.peer_down(rank.worker, rank.incarnation)
        self._release(rank)
        self._change(rank, "down")
        self._share_regions()
        for one in rank.ranks:
            self._broadcast(RankDown(one, rank.incarnation), but=rank.worker)
        if rank.segment >= 0:
            self._wire.send(SUPERVISOR, POOL, SegmentLost(rank.segment))

    def _share_regions(self) -> None:
        table = msgspec.msgpack.encode(self._regions.table())
        for rank in self._ranks.values():
            if rank.state == "up":
                self._wire.send_raw(rank.worker, REGIONS_CHANNEL, table)

    def _broadcast(self, message: Message, but: NodeId) -> None:
        for node in (ROUTER, POOL):
            if self._host.has(node):
                self._wire.send(SUPERVISOR, node, message)
        for rank in self._ranks.values():
            if rank.state == "up" and rank.worker != but:
                self._wire.send(SUPERVISOR, rank.worker, message)

    def _change(self, rank: _Supervised, state: str) -> None:
        if rank.state != state:
            rank.state = state
            for one in rank.ranks:
                self._recorder.record(RankChanged(one, state, rank.incarnation))

    # ------------------------------------------------------------ signs of life

    def _on_ready(self, process: str, incarnation: int, payload: bytes) -> None:
        rank = self._ranks.get(process)
        if rank is not None and rank.incarnation == incarnation and rank.ready is not None and not rank.ready.done():
            rank.told = msgspec.msgpack.decode(payload, type=Ready)
            rank.ready.set_result(None)

    def _on_beat(self, process: str, incarnation: int, payload: bytes) -> None:
        rank = self._ranks.get(process)
        if rank is not None and rank.incarnation == incarnation:
            rank.beat = msgspec.msgpack.decode(payload, type=Beat)
            rank.beat_ns = time.monotonic_ns()

    async def _watch_beats(self) -> None:
        """Kill ranks that are stuck; their end is then noticed like any other. A busy engine does not stop the heartbeat."""
        period = min(0.5, self._config.heartbeat / 4, self._config.step / 4)
        last_look = time.monotonic_ns()
        while True:
            await asyncio.sleep(period)
            now = time.monotonic_ns()
            # beats wait unread while this loop itself is held up (or the machine sleeps): give them a turn to be read
            held_up, last_look = now - last_look > to_ns(2 * period), now
            if held_up:
                continue
            for rank in self._ranks.values():
                if rank.state == "up" and rank.process is not None and self._is_stuck(rank, now):
                    rank.process.kill()

    def _is_stuck(self, rank: _Supervised, now: Time) -> bool:
        worker, beat = rank.worker, rank.beat
        if now - rank.beat_ns > to_ns(self._config.heartbeat):
            log.error("rank %s gave no sign of life for %g s", worker, self._config.heartbeat)
            return True
        if beat and beat.step_started_ns and now - beat.step_started_ns > to_ns(self._config.step):
            log.error("rank %s computes one step for more than %g s", worker, self._config.step)
            return True
        return False
