"""What devices tell each other through mailboxes arrives whole and in its round, whoever is late; who is gone is an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ResourceError
from rackserve.kernels.cpu.library import Floats, Library, find
from rackserve.kernels.cpu.mailbox import Mailbox, make_memory, size_of
from tests.kernels.fence import Fence

FOUND = find()
pytestmark = pytest.mark.skipif(FOUND is None, reason="no native kernels were built here")

FLOATS = 512


def library() -> Library:
    assert FOUND is not None
    return FOUND


def open_all(devices: int, lanes: int, limit_s: float = 30.0) -> list[Mailbox]:
    """The mailboxes of a group inside this process, each over a mapping of its own."""
    fd = make_memory(size_of(library(), devices, lanes, FLOATS))
    boxes = [Mailbox(library(), fd, devices, device, lanes, FLOATS, limit_s) for device in range(devices)]
    os.close(fd)
    return boxes


def told(device: int, number: int, rows: int, width: int) -> Floats:
    """What a device tells in a round: other numbers in every round and place."""
    return np.arange(rows * width, dtype=np.float32).reshape(rows, width) * np.float32(64) + np.float32(
        device * 16 + number % 16
    )


def dawdle(turns: int) -> None:
    for _ in range(turns):
        os.sched_yield()


def lane_rounds(box: Mailbox, lane: int, lanes: int, shapes: list[tuple[int, int]], turns: list[int]) -> list[Floats]:
    """All rounds of one lane, which tells its part of the columns; late by some of `turns`."""
    found = []
    for number, (rows, width) in enumerate(shapes):
        dawdle(turns[(number * 7 + lane * 3 + box.device * 5) % len(turns)])
        columns = slice(width * lane // lanes, width * (lane + 1) // lanes)
        mine = np.full((rows, width), np.nan, np.float32)
        mine[:, columns] = told(box.device, number, rows, width)[:, columns]
        found.append(box.round(mine, lane, columns))
    return found


def together(tasks: list[Callable[[], list[Floats]]]) -> list[Future[list[Floats]]]:
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [pool.submit(task) for task in tasks]


SHAPES = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 64)), min_size=1, max_size=40)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3), SHAPES, st.lists(st.integers(0, 30), min_size=1, max_size=9))
def test_every_lane_reads_what_all_devices_told_in_its_round(
    devices: int, lanes: int, shapes: list[tuple[int, int]], turns: list[int]
) -> None:
    boxes = open_all(devices, lanes)
    results = together(
        [lambda box=box, lane=lane: lane_rounds(box, lane, lanes, shapes, turns) for box in boxes for lane in range(lanes)]  # type: ignore[misc]
    )
    for result in results:
        for number, (found, (rows, width)) in enumerate(zip(result.result(), shapes, strict=True)):
            assert np.array_equal(found, np.stack([told(device, number, rows, width) for device in range(devices)]))


def test_full_rounds_stay_in_their_memory_and_in_what_they_are_read_to() -> None:
    c, fence, columns = library().c, Fence(), FLOATS // 4
    memory = fence.empty(size_of(library(), 3, 2, FLOATS), np.uint8)
    memory[:] = 0
    boxes = [c.rk_mailbox_new(memory.ctypes.data, 3, device, 2, FLOATS, 30.0) for device in range(3)]

    def rounds(device: int, lane: int) -> list[Floats]:
        found = [fence.empty((3, 4, columns)) for _ in range(5)]
        for number, to in enumerate(found):
            mine = fence.copy(told(device, number, 4, columns))
            first, end = columns * lane // 2, columns * (lane + 1) // 2
            c.rk_mailbox_round(boxes[device], lane, mine.ctypes.data, 4, columns, first, end, to.ctypes.data)
        return found

    results = together([partial(rounds, device, lane) for device in range(3) for lane in range(2)])
    for result in results:
        for number, found in enumerate(result.result()):
            assert np.array_equal(found, np.stack([told(device, number, 4, columns) for device in range(3)]))
    for box in boxes:
        c.rk_mailbox_free(box)
    fence.check()


def test_a_thousand_rounds_reuse_two_halves() -> None:
    boxes = open_all(2, 1)
    shapes = [(1 + number % 3, 16) for number in range(1000)]
    results = together([lambda box=box: lane_rounds(box, 0, 1, shapes, [0, 0, 0, 3]) for box in boxes])  # type: ignore[misc]
    for result in results:
        for number, found in enumerate(result.result()):
            assert np.array_equal(found, np.stack([told(device, number, *shapes[number]) for device in range(2)]))


PEER = """
import os, signal, sys
from tests.kernels.cpu.test_mailbox import FLOATS, Mailbox, library, told
box = Mailbox(library(), int(sys.argv[1]), 2, 1, 1, FLOATS, 30.0)
print("ready", flush=True)
for number in range(5):
    box.round(told(1, number, 2, 16))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_peer_is_an_error_in_bounded_time_and_for_ever() -> None:
    fd = make_memory(size_of(library(), 2, 1, FLOATS))
    peer = subprocess.Popen((sys.executable, "-c", PEER, str(fd)), pass_fds=(fd,), stdout=subprocess.PIPE)
    assert peer.stdout is not None and peer.stdout.readline() == b"ready\n"
    box = Mailbox(library(), fd, 2, 0, 1, FLOATS, 2.0)
    os.close(fd)
    for number in range(5):
        found = box.round(told(0, number, 2, 16))
        assert np.array_equal(found, np.stack([told(device, number, 2, 16) for device in range(2)]))
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(ResourceError, match=r"device 0 of 2 did not hear from device 1: .* 2 s"):
            box.round(told(0, 0, 3, 16))
    assert 1.9 < time.monotonic() - began < 20.0  # one wait: who has failed does not wait again
    assert peer.wait(20.0) == -signal.SIGKILL
    peer.stdout.close()


def test_a_peer_that_says_it_is_gone_is_not_waited_for() -> None:
    first, second, third = open_all(3, 1, limit_s=3600.0)
    third.close()
    for result in together([lambda box=box: [box.round(told(0, 0, 1, 16))] for box in (first, second)]):  # type: ignore[misc]
        with pytest.raises(ResourceError, match="did not hear from device"):
            result.result()


def test_devices_in_different_steps_are_an_error_on_both() -> None:
    boxes = open_all(2, 1, limit_s=3600.0)
    for result in together([lambda box=box, rows=rows: [box.round(told(0, 0, rows, 16))] for rows, box in enumerate(boxes, 1)]):  # type: ignore[misc]
        with pytest.raises(ResourceError, match="in another step"):
            result.result()


def test_memory_that_is_too_small_is_refused() -> None:
    fd = make_memory(4096)
    with pytest.raises(ResourceError, match="no memory for mailboxes"):
        Mailbox(library(), fd, 2, 0, 1, FLOATS, 1.0)
    os.close(fd)
