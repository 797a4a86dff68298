"""Devices of a rank find each other's mailboxes, and say so where they cannot."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rackserve.base.errors import ResourceError
from rackserve.base.kv_layout import KvLayout
from rackserve.base.step import Step, StepResult
from rackserve.kernels.cpu.library import find
from rackserve.model.mailboxes import meet
from rackserve.model.parallel import Alone, Collectives, Share
from rackserve.model.thread_group import LIMIT_S, ThreadGroup

FOUND = find()
pytestmark = pytest.mark.skipif(FOUND is None, reason="no native kernels were built here")


class Talker:
    """A device that has nothing but a mailbox."""

    layout: KvLayout

    def __init__(self, collectives: Collectives) -> None:
        assert FOUND is not None
        self.layout = None  # type: ignore[assignment]
        self.box = meet(FOUND, collectives, 1, 64)

    def run(self, step: Step) -> StepResult:
        raise NotImplementedError


def test_devices_that_met_hear_each_other_and_leave_no_descriptor_behind() -> None:
    before = os.listdir("/proc/self/fd")
    group = ThreadGroup(3, Talker)
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 3  # a mapping keeps one of its own
    boxes = [talker.box for talker in group.devices]
    assert [(box.device, box.devices) for box in boxes] == [(0, 3), (1, 3), (2, 3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda box: box.round(np.full((2, 16), box.device, np.float32)), boxes))
    for heard in found:
        assert heard[:, 0, 0].tolist() == [0.0, 1.0, 2.0]
    group.close()


class Late(Alone):
    """The second device of two, whose first is gone."""

    share = Share(1, 2)

    def agree(self, values: list[float]) -> list[float]:
        return [2.0**22 + 1, 3.0]


def test_a_first_device_that_is_gone_is_an_error_that_names_it() -> None:
    with pytest.raises(ResourceError, match=r"device 0 \(pid 4194305\) cannot be opened"):
        Talker(Late())


def test_the_longest_wait_is_that_of_the_group() -> None:
    group = ThreadGroup(2, Talker)
    group.devices[1].box.close()
    with pytest.raises(ResourceError, match=f"silent for more than {LIMIT_S:g} s"):
        group.devices[0].box.round(np.zeros((1, 16), np.float32))
    group.close()
