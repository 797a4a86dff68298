"""Runs of set-ups: one process for each at a time, every result kept in a file as soon as it is there."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path

import msgspec

from rackserve import __version__
from rackserve.base.errors import FileFormatError, RackserveError
from rackserve.base.units import NS_PER_S
from rackserve.bench.metrics import tpot_ms
from rackserve.bench.session import Session
from rackserve.reproduction.workload import agent_sessions
from rackserve.simulated_rack import BLOCK_TOKENS, RackRun, SimulatedFigures, SimulatedSetup, run_rack


class Workload(msgspec.Struct, frozen=True):
    """The sessions that set-ups are run with: the first `count` of a trace, or drawn ones, which differ from seed to seed.

    digest   of the trace's content, so that results of another file under its name are not taken for its own
    """

    count: int
    trace: str = ""
    digest: str = ""

    def sessions(self, seed: int) -> tuple[Session, ...]:
        """Those of one seed. FileFormatError for a trace that cannot be read."""
        return agent_sessions(self.count, BLOCK_TOKENS, Path(self.trace) if self.trace else None, seed)

    def describe(self) -> str:
        """In a few words."""
        return f"the first {self.count} sessions of {Path(self.trace).name}" if self.trace else f"{self.count} drawn sessions"


def workload_of(count: int, trace: str | None) -> Workload:
    """The first `count` sessions of a trace file, or as many drawn ones. FileFormatError if the file cannot be read."""
    if not trace:
        return Workload(count)
    try:
        digest = blake2b(Path(trace).read_bytes(), digest_size=8).hexdigest()
    except OSError as error:
        raise FileFormatError(f"{trace}: cannot be read ({error.strerror}); give a trace file") from error
    workload = Workload(count, trace, digest)
    agent_sessions(1, BLOCK_TOKENS, Path(trace))  # a file that is no trace is refused before anything runs
    return workload


class SessionSample(msgspec.Struct, frozen=True, array_like=True):
    """What a session did in the window: requests that ended and their tokens, and waits and speeds of its requests.

    ttft_s   of requests whose first token came in the window; tpot_ms of those that ended in it
    """

    num_requests: int
    cached: int
    uncached: int
    output: int
    ttft_s: tuple[float, ...]
    tpot_ms: tuple[float, ...]


class ResultRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run, a line of the results file.

    waiting   as `RackRun.queued`
    error     why there is no result; else empty
    """

    setup: SimulatedSetup
    workload: Workload
    version: str
    figures: SimulatedFigures | None = None
    waiting: tuple[float, ...] = ()
    sessions: dict[str, SessionSample] = {}
    error: str = ""


def samples_of(run: RackRun) -> dict[str, SessionSample]:
    """The window's requests by session."""
    kept: dict[str, list[SessionSample]] = {}
    for record in run.records:
        done = not record.error and run.begin_ns < record.ended_ns <= run.end_ns
        ttft = ((record.first_ns - record.sent_ns) / NS_PER_S,) if run.begin_ns < record.first_ns <= run.end_ns else ()
        gap = tpot_ms(record) if done else None
        prompt, cached, output = (record.prompt_tokens, record.cached_tokens, record.output_tokens) if done else (0, 0, 0)
        sample = SessionSample(int(done), cached, prompt - cached, output, ttft, () if gap is None else (gap,))
        kept.setdefault(record.session, []).append(sample)
    return {
        name: SessionSample(
            sum(s.num_requests for s in each),
            sum(s.cached for s in each),
            sum(s.uncached for s in each),
            sum(s.output for s in each),
            tuple(value for s in each for value in s.ttft_s),
            tuple(value for s in each for value in s.tpot_ms),
        )
        for name, each in kept.items()
    }


def run_setup(setup: SimulatedSetup, workload: Workload) -> ResultRow:
    """Simulate; a set-up that cannot run gives a row that says why."""
    try:
        run = run_rack(setup, _sessions(workload, setup.seed))
    except RackserveError as error:
        return ResultRow(setup, workload, __version__, error=str(error))
    return ResultRow(setup, workload, __version__, run.figures, run.queued, samples_of(run))


@lru_cache(maxsize=2)
def _sessions(workload: Workload, seed: int) -> tuple[Session, ...]:
    return workload.sessions(seed)


def seeds_of(setup: SimulatedSetup, count: int) -> list[SimulatedSetup]:
    """The set-up under `count` seeds from its own on: equal seeds are equal sessions from equal points, whatever the rack."""
    return [msgspec.structs.replace(setup, seed=setup.seed + number) for number in range(count)]


def read_rows(path: Path) -> list[ResultRow]:
    """Rows of a results file; none if there is no file. A last line that was cut off is left out.

    FileFormatError for any other line that is no row.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror}); choose another folder") from error
    decoder, rows = msgspec.json.Decoder(ResultRow), []
    for number, line in enumerate(lines, 1):
        if line:
            try:
                rows.append(decoder.decode(line))
            except msgspec.MsgspecError as error:
                if number == len(lines):
                    break
                raise FileFormatError(f"{path}:{number}: {error}; move the file away to begin anew") from error
    return rows


def run_all(
    setups: Iterable[SimulatedSetup],
    workload: Workload,
    num_processes: int,
    path: Path | None = None,
    on_done: Callable[[ResultRow, int, int], None] = lambda row, done, total: None,
) -> dict[SimulatedSetup, ResultRow]:
    """A row for every set-up, in their order, whatever the number of processes; those that `path` holds are not run again.

    Each new row is appended to `path`. `on_done` is told the row, how many are there, and of how many. A KeyboardInterrupt
    passes on after what runs has stopped: what was done is in the file.
    """
    wanted = list(dict.fromkeys(setups))
    old = read_rows(path) if path is not None else []
    found = {row.setup: row for row in old if (row.workload, row.version) == (workload, __version__)}
    missing = sorted((setup for setup in wanted if setup not in found), key=lambda setup: setup.seed)
    if path is not None and old:
        _rewrite(path, old)
    total = len(missing)

    def keep(row: ResultRow) -> None:
        found[row.setup] = row
        if path is not None:
            with path.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
        on_done(row, total - sum(setup not in found for setup in missing), total)

    if num_processes == 1 or total == 1:
        for setup in missing:
            keep(run_setup(setup, workload))
    elif missing:
        _run_in_processes(missing, workload, min(num_processes, total), keep)
    return {setup: found[setup] for setup in wanted}


def _run_in_processes(
    setups: Sequence[SimulatedSetup], workload: Workload, num_processes: int, keep: Callable[[ResultRow], None]
) -> None:
    pool = ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"), initializer=_die_quietly)
    waiting: list[Future[ResultRow]] = [pool.submit(run_setup, setup, workload) for setup in setups]
    try:
        for future in as_completed(waiting):
            keep(future.result())
    except BrokenProcessPool as error:
        raise RackserveError("a simulating process died (out of memory?); run fewer with --processes 1") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _die_quietly() -> None:
    """Ctrl-C at a terminal reaches this process too: it ends without a traceback, its parent says what happened."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _rewrite(path: Path, rows: Sequence[ResultRow]) -> None:
    """Leave out a last line that was cut off, so that the next one begins a line."""
    content = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    if path.read_bytes() != content:
        path.write_bytes(content)
