"""Child processes: how one is started and watched, its last words, its end, and how a child sees to it that it ends in time."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from rackserve.base.errors import ResourceError

log = logging.getLogger("rackserve.live")

TAIL_LINES = 20
LINE_LIMIT = 4096

CRASHED = 70
"""Exit code of a process of ours that failed for a reason nobody foresaw; the text is on its standard error."""

LINGER_S = 5.0
"""How long the end of a process waits for the children it left; the kernel ends them at the same time."""

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, and leave Ctrl-C to the control process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the whole terminal group
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def how_it_ended(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


class RankProcess:
    """A running rank process. `exited` gets its exit code (negative: the signal) once it is reaped and can touch nothing more.

    Nor can its own children: they share its output, and `exited` waits until nobody holds that any more, or for LINGER_S.
    What it prints goes to our standard error, marked with `label`; the last lines are kept for error texts.
    """

    __slots__ = ("_label", "_loop", "_open", "_output", "_partial", "_pidfd", "_popen", "_tail", "exited")

    def __init__(self, loop: asyncio.AbstractEventLoop, command: Sequence[str], line: bytes, label: str) -> None:
        """Start `command` and write `line` to its standard input, which stays open until the process or we end.

        Must be called on the thread that lives as long as the rack: the kernel ends the child with the thread that started it.
        Raises ResourceError if the system has no room for a process.
        """
        self._loop = loop
        self._label = label
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._partial = b""
        self._open = True
        self.exited: asyncio.Future[int] = loop.create_future()
        self._output, child_output = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._output, False)
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=child_output,
                stderr=child_output,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            os.close(self._output)
            raise ResourceError(f"the process of {label} cannot be started: {error.strerror}; command {command[0]}") from error
        finally:
            os.close(child_output)
        try:
            self._pidfd = os.pidfd_open(self._popen.pid)
        except OSError as error:
            self._popen.kill()
            self._popen.wait()
            os.close(self._output)
            raise ResourceError(f"the process of {label} cannot be watched: {error.strerror}") from error
        loop.add_reader(self._output, self._read)
        loop.add_reader(self._pidfd, self._reap)
        self._write(line + b"\n")

    @property
    def pid(self) -> int:
        return self._popen.pid

    def terminate(self) -> None:
        """Ask it to end. Does nothing once it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now. Does nothing once it has ended."""
        self._signal(signal.SIGKILL)

    def tail(self) -> str:
        """Its last lines of output, indented."""
        return "\n".join(f"    {line}" for line in self._tail) or "    (it printed nothing)"

    def _signal(self, number: signal.Signals) -> None:
        if self._popen.returncode is None:
            self._popen.send_signal(number)

    def _write(self, line: bytes) -> None:
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):  # it may have ended already; `exited` tells
            self._popen.stdin.write(line)
            self._popen.stdin.flush()

    def _read(self) -> None:
        """Take what there is to read. After the end of the output nothing comes any more."""
        with suppress(BlockingIOError):
            while chunk := os.read(self._output, 1 << 16):
                *lines, self._partial = (self._partial + chunk).split(b"\n")
                if len(self._partial) > LINE_LIMIT:
                    lines.append(self._partial)
                    self._partial = b""
                for line in lines:
                    self._say(line)
            self._open = False
            self._loop.remove_reader(self._output)
            if self._popen.returncode is not None:
                self._finish()

    def _say(self, line: bytes) -> None:
        text = line[:LINE_LIMIT].decode(errors="replace").rstrip()
        self._tail.append(text)
        print(f"[{self._label}] {text}", file=sys.stderr)

    def _reap(self) -> None:
        self._popen.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._popen.stdin is not None:
            with suppress(BrokenPipeError):
                self._popen.stdin.close()
        if self._open:
            self._loop.call_later(LINGER_S, self._give_up_waiting)
            self._read()
        else:
            self._finish()

    def _give_up_waiting(self) -> None:
        if not self.exited.done():
            log.warning("a device of %s is not gone %g s after its leader", self._label, LINGER_S)
        self._finish()

    def _finish(self) -> None:
        if self.exited.done():
            return
        self._loop.remove_reader(self._output)
        os.close(self._output)
        if self._partial:
            self._say(self._partial)
        self.exited.set_result(self._popen.returncode)
