from __future__ import annotations

import os
from pathlib import Path

import pytest

from rackserve.base.errors import ResourceError
from rackserve.base.units import MIB
from rackserve.digest_model import digest_layout
from rackserve.live.regions import RegionOwner, RegionShape, available_bytes, check_memory, map_region
from tests.e2e.rig import left_behind, shared_memory
from tests.live.processes import open_memfds

SHAPE = RegionShape(4, 2, 32, 16)


def test_a_region_is_as_large_as_its_slots() -> None:
    assert RegionShape.of(digest_layout(4, window=True), 10, 3).num_bytes == 10 * 32 + 3 * 16
    assert RegionShape.of(digest_layout(4), 10, 3).num_bytes == 10 * 32


def test_two_mappings_of_a_region_see_the_same_bytes_and_it_begins_with_zeros() -> None:
    owner = RegionOwner()
    file = owner.create("arena/a", SHAPE)
    first, second = map_region(file), map_region(file)
    assert bytes(second.memory) == bytes(SHAPE.num_bytes)
    first.memory[5:8] = b"abc"
    assert bytes(second.memory[5:8]) == b"abc"
    first.close()
    second.close()
    owner.close()


def test_regions_leave_no_files_descriptors_or_mappings() -> None:
    before = shared_memory()
    owner = RegionOwner()
    mapped = [map_region(owner.create(f"segment/{number}", SHAPE)) for number in range(3)]
    assert not left_behind(before, [str(os.getpid())])
    assert len({name.split()[-2] for name in open_memfds()}) == 3
    owner.close()
    for region in mapped:
        region.close()
    assert open_memfds() == []


def test_a_dropped_region_cannot_be_mapped_even_if_its_descriptor_is_used_again() -> None:
    owner = RegionOwner()
    old = owner.create("segment/0", SHAPE)
    owner.drop("segment/0")
    owner.drop("segment/0")
    with pytest.raises(ResourceError, match="segment/0 is gone"):
        map_region(old)
    new = owner.create("segment/10", SHAPE)
    assert new.fd == old.fd
    with pytest.raises(ResourceError, match="used again"):
        map_region(old)
    assert owner.table() == (new,)
    owner.close()


def test_a_name_is_taken_once() -> None:
    owner = RegionOwner()
    owner.create("segment/0", SHAPE)
    with pytest.raises(ResourceError, match="segment/0 exists"):
        owner.create("segment/0", SHAPE)
    owner.close()


def test_memory_is_not_taken_before_it_is_touched() -> None:
    owner = RegionOwner()
    region = map_region(owner.create("arena/large", RegionShape(256, 0, MIB, 0)))
    blocks = os.stat(f"/proc/self/fd/{owner.table()[0].fd}").st_blocks
    assert blocks == 0
    region.close()
    owner.close()


def test_too_much_memory_is_refused_with_numbers_and_the_setting_to_lower() -> None:
    with pytest.raises(ResourceError, match=r"needs 1,073,741,824 MiB .*only .* MiB .*topology\.prefill_blocks"):
        RegionOwner().create("arena/huge", RegionShape(1 << 30, 0, MIB, 0))


def _machine(root: Path, available_kib: int, cgroup: str) -> tuple[Path, Path]:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999 kB\nMemFree: 1 kB\nMemAvailable:   {available_kib} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    cgroups.mkdir()
    return proc, cgroups


def _group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    proc, cgroups = _machine(tmp_path, 1000, "0::/\n")
    assert available_bytes(proc, cgroups) == 1000 * 1024
    check_memory(1000 * 1024, proc=proc, cgroups=cgroups)
    with pytest.raises(ResourceError):
        check_memory(1000 * 1024 + 1, proc=proc, cgroups=cgroups)


def test_the_tightest_control_group_above_decides_v2(tmp_path: Path) -> None:
    proc, cgroups = _machine(tmp_path, 10_000, "0::/pod/container\n")
    stat = {"memory.stat": "anon 5\ninactive_file 100"}
    _group(cgroups / "pod", stat | {"memory.max": "5000", "memory.current": "1000"})
    _group(cgroups / "pod" / "container", stat | {"memory.max": "max", "memory.current": "900"})
    assert available_bytes(proc, cgroups) == 5000 - 1000 + 100


def test_the_control_group_decides_v1(tmp_path: Path) -> None:
    proc, cgroups = _machine(tmp_path, 10_000, "7:cpu,cpuacct:/x\n4:memory:/job\n0::/\n")
    stat = {"memory.stat": "inactive_file 7\ntotal_inactive_file 50"}
    _group(cgroups / "memory", stat | {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "4000"})
    _group(cgroups / "memory" / "job", stat | {"memory.limit_in_bytes": "3000", "memory.usage_in_bytes": "3500"})
    assert available_bytes(proc, cgroups) == 0
