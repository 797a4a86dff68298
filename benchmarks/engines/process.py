"""Engines in processes of their own: started on so many cores, asked one at a time while all others stand still."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

MIB = 1 << 20


class EngineProcess:
    """A process that speaks as `answer` says. RuntimeError with the end of its output if it ends or cannot start."""

    def __init__(self, name: str, command: Sequence[str], cores: Sequence[int], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        numbers = {"OMP_NUM_THREADS": str(len(cores)), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
        begun = monotonic()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                ["taskset", "-c", ",".join(map(str, cores)), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | numbers | env,
                start_new_session=True,
            )
        self.about: dict[str, object] = self._read()
        self.load_s = monotonic() - begun
        self.pause()

    def ask(self, **command: object) -> float | None:
        """Wake it, have it do something, and let it stand still again."""
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            return self._read()
        finally:
            self.pause()

    def pause(self) -> None:
        """A thread that waits for work by spinning must not take a core from another engine."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGSTOP)

    @property
    def resident_mib(self) -> float:
        """Memory it holds now."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 / MIB for line in lines if line.startswith("VmRSS:"))

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> object:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            tail = self._log.read_text(errors="replace").strip().splitlines()[-8:]
            raise RuntimeError(f"{self.name} ended: " + " | ".join(tail))
        return json.loads(line)


def ending_on_sigterm() -> None:
    """Let SIGTERM end this process as an exception does, so that nothing it started is left."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
