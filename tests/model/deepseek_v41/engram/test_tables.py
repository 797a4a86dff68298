from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rackserve.base.errors import FileFormatError
from rackserve.model.deepseek_v41.engram.tables import EngramTable, dequantise, open_tables, row_bytes
from tests.model.deepseek_v41.engram.tiny import (
    DIM,
    LAYERS,
    NUM_ROWS,
    golden_location,
    made_up,
    plain_values,
    stored,
    tiny_config,
)

GIB = 1 << 30


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_rows_are_those_of_the_file_in_any_order(tmp_path: Path) -> None:
    tables = made_up(tmp_path)
    ids = np.random.default_rng(0).integers(0, NUM_ROWS, 2000)
    for layer in LAYERS:
        assert np.array_equal(tables[layer].read(ids), stored(layer)[ids])
        assert tables[layer].read(ids[:0]).shape == (0, row_bytes(DIM))


def test_values_are_exact_for_every_code_and_scale() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    # numpy arithmetic in double precision, rounded once: the reference can hold every product exactly
    plain = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    for scale in range(256):
        rows = np.concatenate((codes, np.full((8, 1), scale, np.uint8)), axis=1)
        power = np.nan if scale == 255 else 2.0 ** (scale - 127)
        with np.errstate(over="ignore"):
            expected = (plain * power).astype(np.float32)
            found = dequantise(rows, 32)
        assert np.array_equal(found, expected, equal_nan=True), scale


def test_each_scale_is_for_its_own_32_values() -> None:
    rows = np.concatenate((np.full((700, 256), 0x38, np.uint8), np.tile(np.arange(120, 128, dtype=np.uint8), (700, 1))), axis=1)
    expected = np.repeat(2.0 ** np.arange(-7, 1), 32)
    assert np.array_equal(dequantise(rows, 256), np.tile(expected, (700, 1)))


def test_the_golden_tables_fit_their_config() -> None:
    config = tiny_config()
    tables = open_tables(golden_location, config)
    assert {layer: table.num_rows for layer, table in tables.items()} == {1: 462, 3: 630}
    rows = tables[3].read(np.arange(630))
    assert np.array_equal(dequantise(rows, 32), plain_values(rows))
    with pytest.raises(FileFormatError, match=r"layers\.3\.engram\.embed\.weight has 630 rows.*631.*engram_num_embeddings"):
        open_tables(golden_location, msgspec.structs.replace(config, engram_num_embeddings=(462, 631)))


def test_a_file_that_ends_early_or_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(100))
    with pytest.raises(FileFormatError, match=r"short: ends before byte 164"):
        EngramTable((path, 100, 64), (path, 0, 2), 32)
    with pytest.raises(FileFormatError, match="gone: cannot be read"):
        EngramTable((tmp_path / "gone", 0, 64), (path, 0, 2), 32)


@pytest.mark.parametrize(("values", "scales"), [(65, 2), (64, 3), (0, 0)])
def test_values_and_scales_that_do_not_belong_together_are_refused(tmp_path: Path, values: int, scales: int) -> None:
    path = tmp_path / "table"
    path.write_bytes(bytes(200))
    with pytest.raises(FileFormatError, match="no rows of 32"):
        EngramTable((path, 0, values), (path, 100, scales), 32)


def test_a_table_larger_than_memory_takes_memory_for_what_is_read_only(tmp_path: Path) -> None:
    path, num_rows = tmp_path / "sparse", 384_006_168
    with path.open("wb") as file:
        file.truncate(num_rows * row_bytes(256) + 11)
        file.seek(11 + 256 * (num_rows - 1))
        file.write(b"\x38" * 256)
        file.seek(11 + num_rows * 256 + 8 * (num_rows - 1))
        file.write(b"\x80" * 8)
    table = EngramTable((path, 11, num_rows * 256), (path, 11 + num_rows * 256, num_rows * 8), 256)
    assert num_rows * row_bytes(256) > 90 * GIB
    before = resident_bytes()
    rows = table.read(np.linspace(0, num_rows - 1, 500).astype(np.int64))
    assert not rows[:-1].any()
    assert (dequantise(rows[-1:], 256) == 2).all()
    assert resident_bytes() - before < GIB // 16
