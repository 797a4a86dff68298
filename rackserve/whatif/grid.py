"""Set-ups by name and value: fixed settings, axes of a grid, and the set-ups they span."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.route.placement import RouterConfig
from rackserve.simulated_rack import SimulatedSetup

DEFAULTS: Mapping[str, Any] = {
    "chip": "vr", "prefill_groups": 2, "concurrency": 400, "decode_ranks": 2, "decode_width": 24,
}  # fmt: skip
"""A sixth of a rack, where a set-up has no default of its own."""

FIELDS = SimulatedSetup.__struct_fields__
CURVE = "concurrency"
"""The axis along which a configuration's curve runs; all others tell configurations apart."""
MAX_POINTS = 10_000


class Variant(msgspec.Struct, frozen=True):
    """One set-up of a grid. `label` names its configuration: the values of all axes but concurrency."""

    label: str
    setup: SimulatedSetup


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a set-up file holds.

    setup   settings of every set-up, over `DEFAULTS`
    grid    axis -> its values; an axis `a+b` has values `x+y`, so that two settings move together
    seeds   how many runs each set-up gets; 0: five to compare several configurations, else one
    """

    name: str = ""
    setup: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    seeds: int = 0

    def __post_init__(self) -> None:
        if self.seeds < 0:
            raise ValueError(f"`seeds` must be at least 0, got {self.seeds}")

    @property
    def num_seeds(self) -> int:
        """Runs of each set-up."""
        several = any(len(values) > 1 for axis, values in self.grid.items() if axis != CURVE)
        return self.seeds or (5 if several else 1)

    def with_settings(self, settings: Iterable[str], axes: Iterable[str]) -> Grid:
        """This grid with NAME=VALUE settings and NAME=VALUE,VALUE axes over its own. ConfigError for an unknown name."""
        setup, grid = dict(self.setup), dict(self.grid)
        for text in settings:
            name, value = _split("--set", text)
            setup[name] = value
            grid.pop(name, None)
        for text in axes:
            name, value = _split("--grid", text)
            values = value.split(",")
            if len(set(values)) < len(values):
                raise ConfigError(f"--grid {text}: a value stands there twice")
            grid[name] = list(values)
            for part in name.split("+"):
                setup.pop(part, None)
        return msgspec.structs.replace(self, setup=setup, grid=grid)

    def variants(self) -> tuple[Variant, ...]:
        """Every set-up of the grid, the last axis fastest. ConfigError naming the setting or combination that cannot be."""
        axes = [[_assign(axis, value) for value in values] for axis, values in self.grid.items()]
        used = [name for axis in self.grid for name in axis.split("+")]
        if len(set(used)) < len(used):
            raise ConfigError(f"grid: a setting is in two axes: {', '.join(used)}")
        found = []
        for chosen in product(*axes):
            moved = {name: value for part in chosen for name, value in part.items()}
            label = " ".join(f"{name}={_text(value)}" for name, value in moved.items() if name != CURVE)
            found.append(Variant(label, setup_of({**DEFAULTS, **self.setup, **moved})))
            if len(found) > MAX_POINTS:
                raise ConfigError(f"the grid has more than {MAX_POINTS:,} points; leave out some values")
        return tuple(found)


def setup_of(settings: Mapping[str, Any]) -> SimulatedSetup:
    """The set-up with these settings; values may be text. ConfigError for an unknown name or a value that cannot be."""
    for name in settings:
        known(name)
    plain = {name: _number(name, value) for name, value in settings.items()}
    try:
        setup = msgspec.convert(plain, SimulatedSetup, strict=False)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise ConfigError(f"{where.rstrip('`') or 'set-up'}: {what}") from error
    RouterConfig(policy=setup.policy)  # refuses a policy there is not, before anything runs
    return setup


def known(name: str) -> str:
    """`name`, if a set-up has such a setting; else ConfigError with the nearest one."""
    if name in FIELDS:
        return name
    near = get_close_matches(name.replace("-", "_"), FIELDS, 1, 0.5)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(FIELDS)}"
    raise ConfigError(f"a set-up has no setting {name[:40]!r}; {hint}")


def read_grid(path: Path | str) -> Grid:
    """A set-up file in TOML, YAML or JSON: see `Grid`. FileFormatError for a file that is none."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
        return msgspec.convert(content, Grid)
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: cannot be read ({error}); give a set-up file") from error
    except (ValueError, yaml.YAMLError) as error:
        raise FileFormatError(f"{path}: {' '.join(str(error).split())}; give a set-up file") from error
    except RecursionError as error:
        raise FileFormatError(f"{path}: nested too deeply; give a set-up file") from error


def is_grid(path: Path | str) -> bool:
    """Whether a file looks like a set-up file rather than like a result."""
    path = Path(path)
    if path.suffix in (".toml", ".yaml", ".yml"):
        return True
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError):
        return False
    return isinstance(content, dict) and ("setup" in content or "grid" in content) and "rackserve_frontier" not in content


def _split(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ConfigError(f"{option} {text[:80]}: expected NAME=VALUE")
    for part in name.split("+"):
        known(part)
    return name, value


def _assign(axis: str, value: Any) -> dict[str, Any]:
    """The settings that one value of an axis makes."""
    names = [known(name) for name in axis.split("+")]
    if len(names) == 1:
        return {axis: value}
    parts = value if isinstance(value, list) else str(value).split("+")
    if len(parts) != len(names):
        raise ConfigError(f"grid {axis}: {value!r} must have {len(names)} values with + between")
    return dict(zip(names, parts, strict=True))


def _number(name: str, value: Any) -> Any:
    """Text such as 1_000 or 2e3 where a whole number is wanted, as that number."""
    if isinstance(value, str) and SimulatedSetup.__annotations__[name] in ("int", "float"):
        text = value.replace("_", "")
        try:
            number = float(text)
        except ValueError:
            raise ConfigError(f"{name} must be a number, got {value[:40]!r}") from None
        return int(number) if number.is_integer() else number
    return value


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
