from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.rig import SHARED, left_behind, note, shared_memory

HOLD = "import sys; file = open(sys.argv[1], 'w'); print(flush=True); sys.stdin.read()"


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own that has made a file, and does not take it away."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as running:
        try:
            assert running.stdout is not None and running.stdin is not None
            running.stdout.readline()
            yield running
        finally:
            running.kill()
            path.unlink()


def test_what_a_command_used_and_left_is_its_own_and_what_others_make_is_not() -> None:
    before = shared_memory()
    with holder(SHARED / f"ours-{os.urandom(4).hex()}") as ours, holder(SHARED / f"other-{os.urandom(4).hex()}"):
        note(ours.pid)
        ours.kill()
        ours.wait()
        assert [name.split("-")[0] for name in left_behind(before)] == ["ours"]
    assert not left_behind(before)
