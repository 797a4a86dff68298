from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from rackserve.base.errors import FileFormatError
from rackserve.validation.silicon import Silicon, compare_silicon, read_rows

CUT = Path(__file__).parent.parent / "data" / "silicon_cut.csv"


@pytest.fixture(scope="module")
def found() -> Silicon:
    return compare_silicon(CUT)


def test_rows_are_grouped_and_those_left_out_are_counted_by_reason(found: Silicon) -> None:
    assert [(group.model, group.chip, group.engine, group.decode.count) for group in found.groups] == [
        ("deepseek-v3", "h200", "trtllm", 6),
        ("qwen3-32b", "gb200", "trtllm", 1),
        ("qwen3-32b", "h100", "vllm", 6),
    ]
    assert found.outcomes == {
        "used": 13,
        "another mode": 1,
        "another model or precision": 1,
        "parallelism that does not add up": 1,
    }


def test_prompts_in_between_only_add_time(found: Silicon) -> None:
    for group in found.groups:
        assert group.mixed.median_signed > group.decode.median_signed
        assert group.mixed.share_low <= group.decode.share_low


def test_an_uncalibrated_model_still_puts_measured_points_into_their_order(found: Silicon) -> None:
    by_model = {group.model: group for group in found.groups if group.mixed.count > 1}
    assert all(group.mixed.tau is not None and group.mixed.tau > 0 for group in by_model.values())
    assert all(group.ttft.count == group.mixed.count for group in found.groups)


def test_a_compressed_table_reads_alike(tmp_path: Path) -> None:
    packed = tmp_path / "cut.csv.gz"
    packed.write_bytes(gzip.compress(CUT.read_bytes()))
    assert read_rows(packed) == read_rows(CUT)


def test_what_is_no_such_table_is_refused_by_name(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(FileFormatError, match="no column model_path"):
        compare_silicon(other)
    with pytest.raises(FileFormatError, match="cannot be read"):
        compare_silicon(tmp_path / "absent.csv")


def test_a_broken_number_is_named_by_its_line(tmp_path: Path) -> None:
    broken = tmp_path / "cut.csv"
    broken.write_text(CUT.read_text().replace(",1024,", ",none,"))
    with pytest.raises(FileFormatError, match=r"cut.csv:\d+: .*none"):
        compare_silicon(broken)
