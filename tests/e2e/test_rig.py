from __future__ import annotations

import os
import subprocess
import sys

from tests.e2e.rig import SHARED, left_behind, shared_memory

HOLD = "import sys; file = open(sys.argv[1], 'w'); print(flush=True); sys.stdin.read()"


def test_what_another_process_uses_is_not_left_behind_and_what_nobody_uses_is() -> None:
    before, name = shared_memory(), f"rackserve-test-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(SHARED / name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None and holder.stdin is not None
            holder.stdout.readline()
            assert name in shared_memory() and name not in left_behind(before)
            holder.stdin.close()
            holder.wait(10)
            assert name in left_behind(before)
        finally:
            (SHARED / name).unlink()
    assert name not in left_behind(before)
