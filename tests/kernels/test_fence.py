"""The tests' own fences are there: what goes past the end of an array ends the process, what goes in front of it is told."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from tests.kernels.fence import Fence

PROBE = """
import ctypes, sys
import numpy as np
from tests.kernels.fence import Fence
given = Fence().copy(np.zeros(3, np.float32), writable=sys.argv[1] != "write")
at = given.ctypes.data
ctypes.string_at(at, 12)
print("reads", flush=True)
if sys.argv[1] == "behind":
    ctypes.string_at(at + 12, 1)
if sys.argv[1] == "write":
    ctypes.memset(at, 0, 1)
"""


@pytest.mark.parametrize(("what", "ends"), [("nothing", False), ("behind", True), ("write", True)])
def test_a_touch_that_is_not_allowed_ends_the_process(what: str, ends: bool) -> None:
    done = subprocess.run((sys.executable, "-c", PROBE, what), capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "reads\n"
    assert (done.returncode != 0) is ends


def test_memory_is_poison_at_first_and_a_write_in_front_of_it_is_found() -> None:
    fence = Fence()
    out = fence.empty((3, 5))
    assert np.isnan(out).all()
    fence.check()
    ctypes.memset(out.ctypes.data - 1, 0, 1)
    with pytest.raises(AssertionError, match="in front"):
        fence.check()
