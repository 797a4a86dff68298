from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import InvariantError
from rackserve.base.messages import TransferFailed, TransferFinished
from rackserve.base.transfer import Copy, Transfer
from rackserve.base.units import MIB
from rackserve.live import store as store_module
from rackserve.live.host import LiveHost
from rackserve.live.regions import MappedRegion, RegionOwner, RegionShape, map_region
from rackserve.live.store import LARGEST_COPY, SharedStore
from tests.live.processes import Listener, until

SHAPE = RegionShape(16, 4, 24, 8)


class Bench:
    """A store, its node, and two regions filled with different bytes."""

    def __init__(self, shape: RegionShape = SHAPE) -> None:
        self.owner = RegionOwner()
        self.node = Listener()
        self.host = LiveHost(asyncio.get_running_loop(), pytest.fail)
        self.host.add("prefill0", self.node)
        self.store = SharedStore(self.host, "prefill0")
        self.regions: dict[str, MappedRegion] = {}
        for start, name in enumerate(("a", "b")):
            self.regions[name] = map_region(self.owner.create(name, shape))
            memory = self.regions[name].memory
            memory[:] = bytes((start * 101 + index * 7) % 256 for index in range(251)) * (len(memory) // 251) + bytes(
                len(memory) % 251
            )
            memory.release()
        self.store.set_regions(self.owner.table())

    def content(self, name: str) -> bytes:
        return bytes(self.regions[name].memory)

    async def ends(self, count: int) -> list[object]:
        await until(lambda: len(self.node.messages) >= count)
        return list(self.node.messages)

    def close(self) -> None:
        self.store.close()
        for region in self.regions.values():
            region.close()
        self.owner.close()


def trial(test: Callable[[Bench], Awaitable[None]], shape: RegionShape = SHAPE) -> None:
    async def run() -> None:
        bench = Bench(shape)
        try:
            await test(bench)
        finally:
            bench.close()

    asyncio.run(run())


def naive(bench: Bench, copies: tuple[Copy, ...]) -> dict[str, bytes]:
    """What the regions must hold afterwards, slot by slot."""
    content = {name: bytearray(bench.content(name)) for name in bench.regions}
    for copy in copies:
        size, base = (24, 0) if copy.group == "full" else (8, 16 * 24)
        for source, target in zip(copy.source_slots, copy.target_slots, strict=True):
            piece = content[copy.source][base + source * size : base + source * size + size]
            content[copy.target][base + target * size : base + target * size + size] = piece
    return {name: bytes(data) for name, data in content.items()}


@st.composite
def a_copy(draw: st.DrawFn) -> Copy:
    group = draw(st.sampled_from(("full", "window")))
    limit = 16 if group == "full" else 4
    count = draw(st.integers(1, limit))
    consecutive = draw(st.booleans())
    slots = [
        tuple(range(limit - count, limit)) if consecutive else tuple(draw(st.permutations(range(limit)))[:count])
        for _ in range(2)
    ]
    return Copy(*draw(st.sampled_from((("a", "b"), ("b", "a")))), group, *slots)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(a_copy(), min_size=1, max_size=4))
def test_a_transfer_copies_exactly_its_slots(copies: list[Copy]) -> None:
    async def test(bench: Bench) -> None:
        expected = naive(bench, tuple(copies))
        bench.store.start(Transfer(7, "fetch", tuple(copies)))
        assert await bench.ends(1) == [TransferFinished(7)]
        assert {name: bench.content(name) for name in ("a", "b")} == expected

    trial(test)


def test_consecutive_slots_move_as_one_and_long_ones_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    move = store_module.ctypes.memmove
    shape = RegionShape(8, 0, MIB // 2, 0)

    def memmove(target: int, source: int, num_bytes: int) -> None:
        sizes.append(num_bytes)
        move(target, source, num_bytes)

    async def test(bench: Bench) -> None:
        monkeypatch.setattr(store_module.ctypes, "memmove", memmove)
        bench.store.start(Transfer(1, "push", (Copy("a", "b", "full", (0, 1, 2, 3, 7, 6), (4, 5, 6, 7, 0, 1)),)))
        await bench.ends(1)
        a, b = bench.content("a"), bench.content("b")
        assert b[MIB * 2 :] == a[: MIB * 2]
        assert b[: MIB // 2] == a[MIB * 7 // 2 :]
        assert sizes == [LARGEST_COPY, LARGEST_COPY, MIB // 2, MIB // 2]

    trial(test, shape)


@pytest.mark.parametrize(
    ("copy", "reason"),
    [
        (Copy("a", "b", "full", (16,), (0,)), "outside a"),
        (Copy("a", "b", "full", (0,), (-1,)), "outside b"),
        (Copy("a", "b", "window", (0,), (4,)), "outside b"),
        (Copy("a", "b", "full", (0, 1), (0,)), "2 source slots but 1"),
        (Copy("a", "c", "full", (0,), (0,)), "region c is gone"),
    ],
)
def test_a_transfer_that_does_not_fit_fails_and_writes_nothing(copy: Copy, reason: str) -> None:
    async def test(bench: Bench) -> None:
        before = bench.content("b")
        bench.store.start(Transfer(1, "spill", (copy,)))
        (end,) = await bench.ends(1)
        assert isinstance(end, TransferFailed) and reason in end.reason
        assert bench.content("b") == before

    trial(test)


def test_regions_of_another_layout_are_refused() -> None:
    async def test(bench: Bench) -> None:
        bench.owner.create("other", RegionShape(4, 0, 23, 0))
        bench.store.set_regions(bench.owner.table())
        bench.store.start(Transfer(1, "push", (Copy("a", "other", "full", (0,), (0,)),)))
        (end,) = await bench.ends(1)
        assert isinstance(end, TransferFailed) and "size of a full slot" in end.reason

    trial(test)


def gate(monkeypatch: pytest.MonkeyPatch, bench: Bench, at: int, action: Callable[[], None]) -> list[int]:
    """Run `action` in the copier thread when the copy number `at` has been made; the list counts copies."""
    made: list[int] = []
    move = store_module.ctypes.memmove

    def memmove(target: int, source: int, num_bytes: int) -> None:
        move(target, source, num_bytes)
        made.append(num_bytes)
        if len(made) == at:
            action()

    monkeypatch.setattr(store_module.ctypes, "memmove", memmove)
    return made


EVERY_OTHER = Copy("a", "b", "full", tuple(range(0, 16, 2)), tuple(range(0, 16, 2)))


def test_a_cancelled_transfer_ends_once_and_stops_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(bench: Bench) -> None:
        made = gate(monkeypatch, bench, 3, lambda: bench.store.cancel(1))
        bench.store.start(Transfer(1, "fetch", (EVERY_OTHER,)))
        bench.store.start(Transfer(2, "fetch", (EVERY_OTHER,)))
        bench.store.cancel(99)
        assert await bench.ends(2) == [TransferFailed(1, "cancelled"), TransferFinished(2)]
        assert len(made) == 3 + 8
        bench.store.cancel(1)
        bench.store.start(Transfer(1, "fetch", (EVERY_OTHER,)))
        assert (await bench.ends(3))[2] == TransferFinished(1)

    trial(test)


def test_a_number_under_way_cannot_be_used_again() -> None:
    async def test(bench: Bench) -> None:
        bench.store.start(Transfer(1, "fetch", (EVERY_OTHER,)))
        with pytest.raises(InvariantError, match="transfer 1"):
            bench.store.start(Transfer(1, "fetch", (EVERY_OTHER,)))
        await bench.ends(1)

    trial(test)


def test_nothing_is_written_to_a_region_once_it_is_lost() -> None:
    async def test(bench: Bench) -> None:
        bench.store.start(Transfer(1, "push", (EVERY_OTHER,)))
        await bench.ends(1)  # b is mapped now
        bench.store.set_regions(tuple(file for file in bench.owner.table() if file.name != "b"))
        before = bench.content("b")
        bench.store.start(Transfer(2, "push", (Copy("a", "b", "full", (1,), (1,)),)))
        bench.store.start(Transfer(3, "push", (Copy("a", "a", "full", (1,), (2,)),)))
        assert (await bench.ends(3))[1:] == [TransferFailed(2, "region b is gone"), TransferFinished(3)]
        assert bench.content("b") == before

    trial(test)


def test_a_transfer_fails_when_its_region_is_lost_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(bench: Bench) -> None:
        table = tuple(file for file in bench.owner.table() if file.name != "b")
        loop = asyncio.get_running_loop()
        made = gate(monkeypatch, bench, 3, lambda: loop.call_soon_threadsafe(bench.store.set_regions, table) and None)
        slots = tuple(range(0, 16, 2)) * 2000
        bench.store.start(Transfer(1, "push", (Copy("a", "b", "full", slots, slots),)))
        (end,) = await bench.ends(1)
        assert end == TransferFailed(1, "region b is gone")
        assert 3 <= len(made) < len(slots)

    trial(test)
