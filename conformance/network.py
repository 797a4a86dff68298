"""Running with the loopback interface alone: nothing a suite does reaches anybody, nothing it needs is elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

ALONE = "RACKSERVE_CONFORMANCE_ALONE"
"""Set in the process that runs without a network."""

SCRIPT = 'ip link set lo up && exec "$@"'


def is_alone() -> bool:
    """Whether this process was started by `go_alone`."""
    return ALONE in os.environ


def cannot() -> str:
    """Why no network namespace can be made here, or nothing if one can. Takes no root rights."""
    for program in ("unshare", "ip"):
        if shutil.which(program) is None:
            return f"`{program}` is not here"
    tried = subprocess.run(["unshare", "-rn", "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False)
    return tried.stderr.strip()[:200] if tried.returncode else ""


def go_alone(arguments: Sequence[str]) -> None:
    """Become `python -m conformance ARGUMENTS` in a namespace of its own. Does not return."""
    os.environ[ALONE] = "1"
    command = [sys.executable, "-m", "conformance", *arguments]
    os.execvp("unshare", ["unshare", "-rn", "sh", "-c", SCRIPT, "sh", *command])
