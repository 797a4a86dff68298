"""Chips and racks as data: every value with its mark and source, and `unknown` where nobody published it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeVar

import msgspec

from rackserve.base.errors import ConfigError, FileFormatError

T = TypeVar("T")

Mark = Literal["measured", "published", "fitted", "assumed", "unknown"]

MARKS: tuple[Mark, ...] = ("measured", "published", "fitted", "assumed", "unknown")
"""How a value is known, the firmest first."""

Math = Literal["fp4", "fp8", "bf16"]

WIDER: dict[Math, Math] = {"fp4": "fp8", "fp8": "bf16"}
"""The number format that products fall back to on a chip without the narrower one."""


class Value(msgspec.Struct, frozen=True, array_like=True):
    """A number and how it is known. `none`: the thing has no such property; `unknown`: nobody published it."""

    number: float | Literal["unknown", "none"]
    mark: Mark
    source: str

    def get(self, name: str) -> float:
        """The number. ConfigError, naming it as `name`, if there is none."""
        if isinstance(self.number, str):
            raise ConfigError(f"{name} is {self.number} ({self.source}); choose hardware for which it is known")
        return self.number


class Chip(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One accelerator. Bandwidths of links count one direction; rates are dense.

    kernels         the set of coefficients that its kernels have by default
    link_domain     chips that reach each other over the fast link
    memory_domains  parts of its memory, each nearer to a part of its cores
    """

    name: str
    kernels: str
    memory_bytes: Value
    memory_bytes_per_s: Value
    fp4_flops: Value
    fp8_flops: Value
    bf16_flops: Value
    link_bytes_per_s: Value
    link_domain: Value
    nic_bytes_per_s: Value
    host_link_bytes_per_s: Value
    num_sms: Value
    shared_bytes_per_sm: Value
    l2_bytes: Value
    memory_domains: Value

    def number(self, field: str) -> float:
        """The number of `field`. ConfigError if it is unknown or the chip has none."""
        value: Value = getattr(self, field)
        return value.get(f"{self.name}: {field}")

    def scaled(self, factors: Mapping[str, float]) -> Chip:
        """The chip with the number of each field times its factor; what is unknown stays so."""
        changed = {}
        for name, factor in factors.items():
            value: Value = getattr(self, name)
            if factor != 1.0 and not isinstance(value.number, str):
                changed[name] = Value(value.number * factor, value.mark, value.source)
        return msgspec.structs.replace(self, **changed) if changed else self

    def flops(self, math: Math) -> float:
        """FLOP/s of products in `math`, or in the narrowest wider format that the chip has."""
        value: Value = getattr(self, f"{math}_flops")
        if value.number == "none" and math in WIDER:
            return self.flops(WIDER[math])
        return self.number(f"{math}_flops")


class Rack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Chips in trays; `host_bytes` and `host_bytes_per_s` are those of one tray's CPUs."""

    chip: str
    num_trays: Value
    chips_per_tray: Value
    host_bytes: Value
    host_bytes_per_s: Value

    @property
    def num_chips(self) -> int:
        return int(self.num_trays.get("num_trays") * self.chips_per_tray.get("chips_per_tray"))


@cache
def chips() -> Mapping[str, Chip]:
    """All chips by name."""
    return read_values("chips.toml", "chips", Chip)


@cache
def racks() -> Mapping[str, Rack]:
    """All racks by name."""
    return read_values("racks.toml", "racks", Rack)


def named(what: str, table: Mapping[str, T], name: str) -> T:
    """The entry of `table`. ConfigError that lists the others if there is none of that name."""
    if name not in table:
        raise ConfigError(f"{what} {name[:40]!r} is unknown; choose one of {', '.join(table)}")
    return table[name]


def read_values(file: str, section: str, kind: type[T]) -> dict[str, T]:
    """The tables of `section` in a data file of this package, each source spelled out.

    A table with `like = "x"` has the values of table x (which stands before it) where it gives none itself.
    """
    content = msgspec.toml.decode(read_data(file))
    sources: dict[str, str] = content["sources"]
    tables: dict[str, dict[str, Any]] = {}
    for name, table in content[section].items():
        tables[name] = tables[table["like"]] | table if "like" in table else table
    spelled = {name: {key: _spell(value, sources) for key, value in table.items()} for name, table in tables.items()}
    try:
        return {
            name: msgspec.convert({key: value for key, value in table.items() if key != "like"}, kind)
            for name, table in spelled.items()
        }
    except msgspec.ValidationError as error:
        raise FileFormatError(f"{file}: {error}; install the package again") from error


def read_data(file: str) -> bytes:
    """A data file of the simulator."""
    return files("rackserve.sim").joinpath("data", file).read_bytes()


def _spell(value: object, sources: Mapping[str, str]) -> object:
    if not isinstance(value, list):
        return value
    number, mark, source = value
    return [number, mark, sources[source]]
