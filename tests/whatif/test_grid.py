from __future__ import annotations

from pathlib import Path

import pytest

from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.whatif.grid import Grid, is_grid, read_grid, setup_of

FILE = """
name = "two"
seeds = 3
[setup]
chip = "gb300"
[grid]
concurrency = [10, 20]
pool = [true, false]
"""


def test_a_grid_spans_every_combination_and_labels_configurations_without_their_concurrency() -> None:
    grid = Grid().with_settings(["settle_s=5"], ["pool=true,false", "concurrency=10,20,30"])
    variants = grid.variants()
    assert [variant.label for variant in variants] == ["pool=true"] * 3 + ["pool=false"] * 3
    assert [variant.setup.concurrency for variant in variants] == [10, 20, 30] * 2
    assert all(variant.setup.settle_s == 5 and variant.setup.pool == (n < 3) for n, variant in enumerate(variants))


def test_settings_of_one_axis_move_together() -> None:
    grid = Grid().with_settings([], ["prefill_groups+decode_ranks=3+2,2+4"])
    assert [(v.setup.prefill_groups, v.setup.decode_ranks) for v in grid.variants()] == [(3, 2), (2, 4)]
    assert grid.variants()[0].label == "prefill_groups=3 decode_ranks=2"
    with pytest.raises(ConfigError, match="must have 2 values with"):
        Grid().with_settings([], ["prefill_groups+decode_ranks=3"]).variants()
    with pytest.raises(ConfigError, match="a setting is in two axes"):
        Grid(grid={"pool": ["true"], "pool+chip": ["true+vr"]}).variants()


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("prefil_groups=3", "no setting 'prefil_groups'; did you mean prefill_groups?"),
        ("decode-ranks=3", "did you mean decode_ranks?"),
        ("zzz=3", "choose one of chip, prefill_groups"),
        ("pool", "expected NAME=VALUE"),
        ("pool=", "expected NAME=VALUE"),
    ],
)
def test_a_setting_that_is_unknown_gets_the_nearest_name(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        Grid().with_settings([setting], [])


def test_values_are_what_the_setting_takes() -> None:
    found = setup_of({"chip": "vr", "prefill_groups": "2", "concurrency": "1_000", "decode_ranks": 1, "decode_width": "2e1",
                      "pool": "false", "rank_cache_bytes": "180e9"})  # fmt: skip
    assert (found.concurrency, found.decode_width, found.pool, found.rank_cache_bytes) == (1_000, 20, False, 180e9)
    for name, value, says in (
        ("pool", "perhaps", "pool: "), ("concurrency", "many", "concurrency must be a number"), ("seed", "1.5", "seed: "),
        ("decode_ranks", "99", "decode_ranks"), ("chip", "h100", "has no rack"),
        ("policy", "fastest", "policy 'fastest' is unknown"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            Grid().with_settings([f"{name}={value}"], []).variants()
    with pytest.raises(ConfigError, match="stands there twice"):
        Grid().with_settings([], ["pool=true,true"])


def test_what_is_set_replaces_the_files_axis_and_the_other_way_round(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(FILE)
    grid = read_grid(tmp_path / "a.toml")
    assert len(grid.variants()) == 4 and grid.variants()[0].setup.chip == "gb300"
    assert len(grid.with_settings(["pool=true"], []).variants()) == 2
    assert len(grid.with_settings([], ["chip=vr,gb300"]).variants()) == 8


def test_configurations_are_compared_over_five_seeds_and_one_alone_runs_once() -> None:
    assert Grid().num_seeds == Grid(grid={"concurrency": [1, 2]}).num_seeds == 1
    assert Grid(grid={"pool": [True, False]}).num_seeds == 5
    assert Grid(grid={"pool": [True, False]}, seeds=2).num_seeds == 2


def test_set_up_files_are_told_from_results_and_bad_ones_are_named(tmp_path: Path) -> None:
    for name, text, looks in (
        ("a.toml", FILE, True),
        ("b.json", '{"setup": {"chip": "vr"}}', True),
        ("c.json", '{"rackserve_frontier": 1, "name": "x", "points": []}', False),
        ("d.json", "not json", False),
    ):
        (tmp_path / name).write_text(text)
        assert is_grid(tmp_path / name) == looks
    assert not is_grid(tmp_path / "nothing.json") and read_grid(tmp_path / "b.json").setup == {"chip": "vr"}
    (tmp_path / "bad.toml").write_text("seeds = -1")
    with pytest.raises(FileFormatError, match=r"bad\.toml: .*seeds"):
        read_grid(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_text("color = 1")
    with pytest.raises(FileFormatError, match="color"):
        read_grid(tmp_path / "bad.toml")
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_grid(tmp_path / "nothing.toml")
    (tmp_path / "deep.json").write_text('{"setup":' + "[" * 20_000)
    with pytest.raises(FileFormatError, match=r"deep\.json: nested too deeply"):
        read_grid(tmp_path / "deep.json")
    assert not is_grid(tmp_path / "deep.json")
