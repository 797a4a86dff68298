"""Where the system has no room for all threads of a decoder, that is an error, and fewer still serve."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rackserve.base.errors import ResourceError
from rackserve.kernels.cpu import library, v41

MANY = 64

BEGIN = f"""
import resource
from pathlib import Path
from rackserve.base.errors import ResourceError

def refused(make):
    "Make it with stacks for a few threads left."
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    try:
        make({MANY})
    except ResourceError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    print(len(list(Path("/proc/self/task").iterdir())) - before)
    return make(2)
"""

LLAMA = """
import numpy as np
from tests.kernels.cpu.test_decoder import Running, TABLE, TOKENS
from rackserve.kernels.cpu.decoder import Rows
before = len(list(Path("/proc/self/task").iterdir()))
running = refused(lambda threads: Running("portable", threads))
running.decoder.forward(TOKENS[:3], [Rows(TABLE, 0, 3)])
print(np.isfinite(running.decoder.logits([2])).all())
"""

V41 = """
from tests.model.deepseek_v41.golden import Bench, prompt
bench = Bench(kernels="native")
before = len(list(Path("/proc/self/task").iterdir()))
bench = refused(lambda threads: Bench(kernels="native", threads=threads))
print(bool(bench.compute((bench.begin(0), prompt("long")[:3]))[0].isfinite().all()))
"""


def test_what_was_refused_names_the_setting_that_can_be_at_fault() -> None:
    assert isinstance(library.no_room(512, 1), ResourceError)
    assert "lower scheduler.max_tokens" in str(library.no_room(512, 1)) and "threads" not in str(library.no_room(512, 1))
    assert "a step of 512 positions" in str(library.no_room(512, 8)) and "8 threads: lower runner.threads" in str(
        library.no_room(512, 8)
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer ends at such a limit itself")
@pytest.mark.parametrize("script", [LLAMA, V41])
def test_a_thread_that_cannot_be_made_is_an_error_that_leaves_none_behind(script: str) -> None:
    found = library.find()
    if found is None or (script is V41 and not v41.serves(found)) or not (library.BUILT / "kernels-portable.so").exists():
        pytest.skip("no native kernels were built here")
    line = (sys.executable, "-c", BEGIN + script)
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    refused, left, computed = done.stdout.splitlines() or (done.stderr, "", "")
    assert f"no room for {MANY} threads: lower runner.threads" in refused
    assert (left, computed, done.returncode) == ("0", "True", 0)
