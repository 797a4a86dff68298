"""The modelled store: bytes appear at a transfer's one end, half of them if it is cancelled."""

from __future__ import annotations

import pytest

from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.base.messages import Message, TransferFailed, TransferFinished
from rackserve.base.transfer import Copy, Transfer
from rackserve.base.units import Time
from rackserve.sim.host import SimHost
from rackserve.sim.store import LinkCost, SimRegions, SimStore

LAYOUT = KvLayout(1, (KvGroup("k", "full", 4), KvGroup("w", "window", 2)))


class Log:
    def __init__(self, host: SimHost) -> None:
        self.host = host
        self.got: list[tuple[Time, Message]] = []

    def handle(self, message: Message) -> None:
        self.got.append((self.host.now, message))


def store() -> tuple[SimHost, Log, SimStore, SimRegions, memoryview, memoryview]:
    host, regions = SimHost(), SimRegions(LAYOUT, backed=True)
    source, target = regions.create("a", 4, 2), regions.create("b", 3, 2)
    source[:] = bytes(range(len(source)))
    made = SimStore(host, "w", regions, LinkCost(latency_ns=10, bytes_per_s=1e9))
    log = Log(host)
    host.add("w", log)
    return host, log, made, regions, source, target


def push(number: int, source: tuple[int, ...], target: tuple[int, ...]) -> Transfer:
    return Transfer(number, "push", (Copy("a", "b", "full", source, target),))


def test_slots_are_copied_by_number_in_both_groups() -> None:
    host, log, made, _, source, target = store()
    copies = (Copy("a", "b", "full", (3, 0), (1, 2)), Copy("a", "b", "window", (1,), (0,)))
    made.start(Transfer(1, "push", copies))
    host.run()
    assert bytes(target[4:12]) == bytes(source[12:16]) + bytes(source[0:4])
    assert bytes(target[12:14]) == bytes(source[18:20])
    assert bytes(target[:4]) == b"\xee" * 4
    assert log.got == [(10 + 10, TransferFinished(1))]


def test_nothing_has_arrived_before_the_end() -> None:
    host, _, made, _, _, target = store()
    made.start(push(1, (0, 1), (0, 1)))
    host.run(until=17)
    assert bytes(target[:8]) == b"\xee" * 8


def test_transfers_of_a_worker_go_one_after_another() -> None:
    host, log, made, _, _, _ = store()
    made.start(push(1, (0, 1), (0, 1)))
    made.start(push(2, (2,), (2,)))
    host.run()
    assert [now for now, _ in log.got] == [18, 18 + 14]


def test_a_cancelled_transfer_ends_once_and_leaves_half_written_slots() -> None:
    host, log, made, _, source, target = store()
    made.start(push(1, (0, 1), (0, 1)))
    made.start(push(2, (2, 3), (1, 2)))
    made.cancel(1)
    made.cancel(1)
    made.cancel(99)
    host.run()
    assert [message for _, message in log.got] == [TransferFailed(1, "cancelled"), TransferFinished(2)]
    assert bytes(target[:4]) == bytes(source[:4])
    assert bytes(target[4:12]) == bytes(source[8:16])


def test_a_transfer_that_had_not_begun_writes_nothing_when_cancelled() -> None:
    host, _, made, _, _, target = store()
    made.start(push(1, (0,), (0,)))
    made.start(push(2, (2, 3), (1, 2)))
    made.cancel(2)
    host.run()
    assert bytes(target[4:12]) == b"\xee" * 8


@pytest.mark.parametrize("gone", ["a", "b"])
def test_a_region_that_is_gone_fails_the_transfer(gone: str) -> None:
    host, log, made, regions, _, _ = store()
    made.start(push(1, (0,), (0,)))
    regions.remove(gone)
    host.run()
    assert [message for _, message in log.got] == [TransferFailed(1, "region is gone")]


def test_a_dead_worker_moves_nothing() -> None:
    host, log, made, _, _, target = store()
    made.start(push(1, (0,), (0,)))
    host.remove("w")
    host.add("w", log)
    host.run()
    assert log.got == []
    assert bytes(target[:4]) == b"\xee" * 4


def test_regions_without_bytes_only_cost_time() -> None:
    regions = SimRegions(LAYOUT, backed=False)
    assert len(regions.create("a", 1000, 0)) == 0
    transfer = Transfer(1, "push", (Copy("a", "b", "full", (1, 2), (3, 4)), Copy("a", "b", "window", (0,), (0,))))
    assert regions.num_bytes(transfer) == 10
    assert LinkCost(5, 1e9).duration_ns(10) == 15
