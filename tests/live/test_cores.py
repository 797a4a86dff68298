from __future__ import annotations

import pytest

from rackserve.live.cores import Cores, allowed_cores, share_cores


@pytest.mark.parametrize("threads", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 5])
@pytest.mark.parametrize("allowed", [(0,), (0, 1), (2, 3, 5, 7), tuple(range(16))])
def test_devices_never_share_a_core_they_are_tied_to(threads: int, num_devices: int, allowed: tuple[int, ...]) -> None:
    shares = [share_cores(threads, device, num_devices, allowed) for device in range(num_devices)]
    tied = [core for share in shares for core in share.cores]
    assert len(set(tied)) == len(tied) and set(tied) <= set(allowed)
    assert all(len(share.cores) in (0, share.threads) for share in shares)
    assert {share.threads for share in shares} == {threads or max(1, len(allowed) // num_devices)}


def test_a_lone_thread_and_too_many_threads_are_left_to_the_system() -> None:
    assert share_cores(0, 1, 4, (0, 1)) == Cores(1)
    assert share_cores(4, 0, 1, (0, 1)) == Cores(4)
    assert share_cores(0, 1, 2, (0, 1, 2, 3)) == Cores(2, (2, 3))


def test_this_process_may_use_a_core() -> None:
    assert allowed_cores()
