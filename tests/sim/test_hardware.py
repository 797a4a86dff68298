from __future__ import annotations

import msgspec
import pytest

from rackserve.base.errors import ConfigError
from rackserve.sim import hardware
from rackserve.sim.cost.kernels import kernel_sets
from rackserve.sim.hardware import MARKS, Chip, Rack, Value, chips, named, racks, read_values


def values(entry: Chip | Rack) -> list[tuple[str, Value]]:
    fields = ((name, getattr(entry, name)) for name in entry.__struct_fields__)
    return [(name, value) for name, value in fields if isinstance(value, Value)]


def test_every_chip_asked_for_is_there() -> None:
    assert set(chips()) == {"h100", "h200", "b200", "b300", "gb200", "gb300", "vr", "rtx-pro-6000"}


@pytest.mark.parametrize("entry", [*chips().values(), *racks().values()], ids=[*chips(), *racks()])
def test_every_value_has_a_mark_and_a_source_and_is_positive_or_said_to_be_missing(entry: Chip | Rack) -> None:
    for name, value in values(entry):
        assert value.mark in MARKS and value.source, name
        if isinstance(value.number, str):
            assert (value.number == "unknown") == (value.mark == "unknown"), name
        else:
            assert value.number > 0 and value.mark != "unknown", name


def test_chips_and_racks_name_what_exists() -> None:
    assert {chip.kernels for chip in chips().values()} <= set(kernel_sets())
    assert {rack.chip for rack in racks().values()} <= set(chips())


def test_a_rack_of_eighteen_trays_has_72_chips_in_one_link_domain() -> None:
    for name in ("gb200-nvl72", "gb300-nvl72", "vr-nvl72"):
        assert racks()[name].num_chips == 72 == chips()[racks()[name].chip].number("link_domain")


def test_an_unknown_value_is_refused_by_name_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"VR NVL72: l2_bytes is unknown \(not published\)"):
        chips()["vr"].number("l2_bytes")


def test_products_fall_back_to_the_next_wider_format_the_chip_has() -> None:
    h100, gb300 = chips()["h100"], chips()["gb300"]
    assert h100.flops("fp4") == h100.flops("fp8") == 1.98e15
    assert gb300.flops("fp4") == 15e15 > gb300.flops("fp8") > gb300.flops("bf16")


def test_a_name_that_does_not_exist_is_answered_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="chip 'h1000' is unknown; choose one of h100, h200"):
        named("chip", chips(), "h1000")


def test_a_table_like_another_has_its_values_where_it_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair(msgspec.Struct):
        left: Value
        right: Value

    text = b"""
        [sources]
        a = "the source"
        [pairs.one]
        left = [1, "published", "a"]
        right = [2, "assumed", "a"]
        [pairs.two]
        like = "one"
        right = [3, "fitted", "a"]
    """
    monkeypatch.setattr(hardware, "read_data", lambda file: text)
    pairs = read_values("x.toml", "pairs", Pair)
    assert (pairs["two"].left, pairs["two"].right.number) == (pairs["one"].left, 3)
    assert pairs["one"].right == Value(2, "assumed", "the source")
