"""The devices of one worker. The rank process is device 0 and leads; each further device is a process that follows it.

A follower is a child of the leader, started as `python -m rackserve.live.group`, with a socket to the leader as its standard
input. It ends with the leader in any case: the kernel kills it when its parent dies, a thread leaves at the end of the socket.
The leader ends when a follower ends or falls silent, which it names, or exceeds a limit, where others may have waited for it.
The devices of a group share every step, so none can go on without the others; the supervisor starts the whole worker again.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection, Pipe, wait
from typing import NoReturn

import msgspec

from rackserve.base.errors import RackserveError, ResourceError
from rackserve.base.step import GroupStep, Step, StepResult
from rackserve.base.units import Time, to_ns, to_seconds
from rackserve.live.cores import cores_of
from rackserve.live.launch import CRASHED, end_with_parent, how_it_ended
from rackserve.live.rank_spec import BEAT_PERIOD_S, RankSpec, Ready
from rackserve.live.regions import map_region
from rackserve.live.runner import TimedRunner, open_runner

FOLLOWER_COMMAND = (sys.executable, "-m", "rackserve.live.group")

LOOK_S = 0.25
"""How often the leader looks at its followers' limits."""

EARLIER = 0.9
"""Part of the supervisor's limits after which the leader ends by itself, so that the device at fault gets named."""

BLAME_S = 1.0
"""A device that fails waits this long before it says so: if another is gone, the leader's watch names that one first."""


class FollowerSpec(msgspec.Struct, frozen=True):
    """A follower: device `device` of the worker that `rank` describes. The first frame it gets; each later one is a `Step`.

    `rendezvous`: path of the file by which the devices find each other, empty if they have nothing to tell each other.
    """

    rank: RankSpec
    device: int
    rendezvous: str


class Opened(msgspec.Struct, frozen=True, tag=True):
    """follower -> leader: its part of the model is open."""


class Unopened(msgspec.Struct, frozen=True, tag=True):
    """follower -> leader: its part of the model cannot be opened, for a reason a person can mend; it ends."""

    text: str
    exit_code: int


class Computed(msgspec.Struct, frozen=True, tag=True):
    """follower -> leader: its part of a step is done. `kernel_ns`: time that it spent in kernels so far."""

    result: StepResult
    kernel_ns: Time = 0


class Alive(msgspec.Struct, frozen=True, tag=True):
    """follower -> leader: a sign of life, as the leader itself gives to the supervisor."""


Answer = Opened | Unopened | Computed | Alive


def open_part(spec: RankSpec, device: int, rendezvous: str) -> TimedRunner | None:
    """What `device` computes with; None if nothing. RackserveError for what a person can mend.

    The tensor-parallel devices of a rank map the same arena here, because they compute the same bytes of KV and their exchanges
    keep them within a layer of each other; on GPUs each would hold its own copy. The toy model has no exchanges, so that a late
    device would read what an early one has written for the next step: there the first device of a rank computes alone.
    """
    dp_rank, tp_rank = divmod(device, spec.tp_size)
    if spec.runner.kind == "digest" and tp_rank:
        return None
    own = next(file for file in spec.regions if file.name == spec.arena(dp_rank))
    collectives = None
    if rendezvous:
        from rackserve.model.collectives import TorchCollectives
        from rackserve.model.parallel import Share

        share = Share(tp_rank, spec.tp_size, dp_rank, spec.num_ranks)
        collectives = TorchCollectives(
            share, rendezvous, ready_s=EARLIER * spec.limits.ready, limit_s=EARLIER * spec.limits.step
        )
    place = cores_of(spec, device)
    memory = map_region(own).memory
    return open_runner(spec.runner, memory, own.shape.num_slots, collectives, threads=place.threads, cores=place.cores)


# ------------------------------------------------------------ the leader's side


class _Follower:
    """A follower as the leader sees it. `beat_ns`: its last sign of life, 0 before it has opened its part."""

    __slots__ = ("beat_ns", "connection", "device", "process")

    def __init__(self, spec: RankSpec, device: int, rendezvous: str) -> None:
        self.device = device
        self.beat_ns: Time = 0
        try:
            self.connection, child = Pipe()
            with child:
                self.process = subprocess.Popen(FOLLOWER_COMMAND, stdin=child.fileno())
            self.connection.send_bytes(msgspec.msgpack.encode(FollowerSpec(spec, device, rendezvous)))
        except OSError as error:
            raise ResourceError(
                f"device {device} of {spec.worker} cannot be started: {error.strerror}; free memory, or lower "
                f"topology.{spec.role}_tp or topology.{spec.role}_ranks"
            ) from error

    def __str__(self) -> str:
        return f"device {self.device} (pid {self.process.pid})"


class Group:
    """All devices of a worker. `run` is called from one thread.

    A worker of one device is this process alone. In a larger one, an exception in a step ends the process: the other devices
    may be anywhere in that step, and nothing but a new start brings them together again.

    kernel_ns  time that the first device of each rank spent in kernels so far
    """

    def __init__(self, spec: RankSpec) -> None:
        """Start the followers; returns when every device has opened its part of the model, on the thread that called.

        The caller's thread must live as long as the process: the kernel ends the followers with it. RackserveError for what a
        person can mend; the same in a follower ends this process with its text and exit code.
        """
        self._spec = spec
        self._decoder = msgspec.msgpack.Decoder(Answer)
        self._changed = threading.Condition()  # guards the four below
        self._owing: dict[int, _Follower] = {}
        self._answers: dict[int, Computed] = {}
        self.kernel_ns: list[Time] = [0] * spec.num_ranks
        self._task = ""
        self._deadline: Time = 0
        rendezvous = ""
        if spec.num_devices > 1 and spec.runner.kind != "digest":
            # in anonymous memory, reached through this process: it leaves nothing behind, however we end
            rendezvous = f"/proc/{os.getpid()}/fd/{os.memfd_create('rackserve:rendezvous', os.MFD_CLOEXEC)}"
        self._followers = [_Follower(spec, device, rendezvous) for device in range(1, spec.num_devices)]
        self._watcher = threading.Thread(target=self._watch, name="followers", daemon=True)
        if self._followers:
            self._expect("open its part of the model", spec.limits.ready)
            self._watcher.start()
        try:
            self._runner = open_part(spec, 0, rendezvous)
        except RackserveError:
            if self._followers:
                self._watcher.join(BLAME_S)
            raise
        self._gather()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of all devices, in order."""
        return (os.getpid(), *(follower.process.pid for follower in self._followers))

    @property
    def ready(self) -> Ready:
        """What is told of the group once it is there. Devices compute alike; without native kernels, on one core."""
        kernels = self._runner.path if self._runner is not None else ""
        threads = 1 if kernels in ("torch", "digest") else cores_of(self._spec, 0).threads
        return Ready(self.pids, kernels, threads)

    def run(self, step: GroupStep) -> tuple[StepResult, ...]:
        """The results of all ranks. Ends the process if a device of several fails."""
        assert self._runner is not None
        if not self._followers:
            alone = self._runner.run(step.steps[0])
            self.kernel_ns[0] = self._runner.kernel_ns
            return (alone,)
        try:
            self._expect(f"compute step {step.number}", self._spec.limits.step)
            parts = [msgspec.msgpack.encode(part) for part in step.steps]
            for follower in self._followers:
                follower.connection.send_bytes(parts[follower.device // self._spec.tp_size])
            own = self._runner.run(step.steps[0])
        except Exception as error:
            self._watcher.join(BLAME_S)
            _say_why(error)
            self._end(f"device 0 (pid {os.getpid()}) failed in step {step.number}")
        answers = self._gather()
        others = [answers[rank * self._spec.tp_size] for rank in range(1, self._spec.num_ranks)]
        self.kernel_ns[:] = [self._runner.kernel_ns, *(answer.kernel_ns for answer in others)]
        return (own, *(answer.result for answer in others))

    def _expect(self, task: str, limit_s: float) -> None:
        """From now on every follower owes an answer."""
        with self._changed:
            self._task = f"{task} within {EARLIER * limit_s:g} s"
            self._deadline = time.monotonic_ns() + to_ns(EARLIER * limit_s)
            self._owing = {follower.device: follower for follower in self._followers}
            self._answers = {}

    def _gather(self) -> dict[int, Computed]:
        """Wait for the answers of all followers. The watch ends the process if one does not come."""
        with self._changed:
            while self._owing:
                self._changed.wait()
            return self._answers

    def _watch(self) -> None:
        """Take in what the followers say, and end the process if one is gone, silent or late."""
        last_look = time.monotonic_ns()
        try:
            while True:
                self._hear()
                now = time.monotonic_ns()
                held_up, last_look = now - last_look > to_ns(4 * LOOK_S), now
                if not held_up:  # else what waits unread gets a turn first
                    self._look(now)
        except Exception as error:
            _say_why(error)
            self._end("the watch over the followers failed")

    def _hear(self) -> None:
        """Take what followers have said by now; wait up to LOOK_S for something."""
        said = wait([follower.connection for follower in self._followers], LOOK_S)
        for follower in self._followers:
            if follower.connection in said:
                try:
                    frame = follower.connection.recv_bytes()
                except (EOFError, OSError):
                    self._end(f"{follower} {_end_of(follower.process)}")
                self._take(follower, self._decoder.decode(frame))

    def _take(self, follower: _Follower, answer: Answer) -> None:
        follower.beat_ns = time.monotonic_ns()
        if isinstance(answer, Unopened):
            self._end(f"{answer.text} ({follower})", answer.exit_code)
        if isinstance(answer, Alive):
            return
        with self._changed:
            self._owing.pop(follower.device)
            if isinstance(answer, Computed):
                self._answers[follower.device] = answer
            self._changed.notify()

    def _look(self, now: Time) -> None:
        heartbeat = self._spec.limits.heartbeat
        for follower in self._followers:
            if follower.beat_ns and now - follower.beat_ns > to_ns(EARLIER * heartbeat):
                self._end(f"{follower} gave no sign of life for {to_seconds(now - follower.beat_ns):.3g} s")
        with self._changed:
            late = list(self._owing.values()) if now > self._deadline else []
        if late:
            # Where devices exchange, all wait for the one at fault, and it may be this one.
            who = "devices" if len(late) == len(self._followers) else ", ".join(map(str, late))
            self._end(f"{who} did not {self._task} (settings supervisor.ready, supervisor.step)")

    def _end(self, reason: str, exit_code: int = CRASHED) -> NoReturn:
        """End this process, and with it the followers."""
        print(reason + "\n", end="", file=sys.stderr, flush=True)
        os._exit(exit_code)


def _end_of(process: subprocess.Popen[bytes]) -> str:
    try:
        return how_it_ended(process.wait(BLAME_S))
    except subprocess.TimeoutExpired:
        return "closed its socket"


def _say_why(error: Exception) -> None:
    if isinstance(error, RackserveError):
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)


# ------------------------------------------------------------ a follower's side


class _Leader:
    """The leader as a follower sees it: gives `steps`, takes answers. The process ends as soon as it is found to be gone."""

    __slots__ = ("_connection", "_sending", "steps")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self.steps: queue.SimpleQueue[Step] = queue.SimpleQueue()

    def answer(self, answer: Answer) -> None:
        frame = msgspec.msgpack.encode(answer)
        try:
            with self._sending:
                self._connection.send_bytes(frame)
        except OSError:
            os._exit(0)

    def hear(self) -> bytes:
        """The next frame."""
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)

    def listen(self) -> None:
        """Queue steps as they come."""
        decoder = msgspec.msgpack.Decoder(Step)
        while True:
            self.steps.put(decoder.decode(self.hear()))

    def beat(self) -> None:
        """Show that this process lives, however long its steps take."""
        never = threading.Event()
        while not never.wait(BEAT_PERIOD_S):
            self.answer(Alive())


def main() -> None:
    """Be the follower that the first frame on standard input describes. Does not return before the end of the process."""
    end_with_parent()
    leader = _Leader(Connection(0))
    try:
        spec = msgspec.msgpack.decode(leader.hear(), type=FollowerSpec)
        threading.Thread(target=leader.listen, name="leader", daemon=True).start()
        sys.setswitchinterval(1e-3)  # other threads must get their turn while the model computes in Python
        try:
            runner = open_part(spec.rank, spec.device, spec.rendezvous)
        except RackserveError as error:
            leader.answer(Unopened(f"{type(error).__name__}: {error}", error.exit_code))
            os._exit(error.exit_code)
        leader.answer(Opened())
        threading.Thread(target=leader.beat, name="beat", daemon=True).start()
        while True:  # a follower may wait for its next step for ever
            step = leader.steps.get()
            if runner is None:
                leader.answer(Computed(StepResult(step.dp_rank, ())))
            else:
                leader.answer(Computed(runner.run(step), runner.kernel_ns))
    except Exception as error:
        threading.Event().wait(BLAME_S)
        _say_why(error)
        os._exit(CRASHED)


if __name__ == "__main__":
    main()
