"""What earlier validations came to: one JSON line a run, and which figures have moved since they were last found."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rackserve.base.errors import FileFormatError

SAME = 1e-6
"""Relative change below which a figure has not moved."""


class Change(msgspec.Struct, frozen=True):
    """A figure that is not what it was."""

    name: str
    before: float
    now: float


class Drift(msgspec.Struct, frozen=True):
    """Figures that were known before: how many are the same, and those that moved. `since` names the newest earlier line."""

    since: str
    num_same: int
    changes: tuple[Change, ...]


def revision() -> str:
    """The commit this code is from, with `-dirty` if the tree differs from it; empty outside a git checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def figures(value: object, name: str = "") -> dict[str, float]:
    """Every number of a JSON value by its path; items of lists are named by their texts, and by number where those repeat."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {}
    if isinstance(value, int | float):
        return {name: float(value)}
    named = value.items() if isinstance(value, Mapping) else _named(value)  # type: ignore[arg-type]
    found: dict[str, float] = {}
    for key, part in named:
        found |= figures(part, f"{name} / {key}" if name else str(key))
    return found


def _named(items: list[object]) -> list[tuple[str, object]]:
    made: list[tuple[str, object]] = []
    for number, item in enumerate(items):
        texts = [part for part in item.values() if isinstance(part, str)] if isinstance(item, Mapping) else []
        made.append((" ".join(texts) or str(number), item))
    names = [name for name, _ in made]
    return [(name if names.count(name) == 1 else f"{name} {number}", item) for number, (name, item) in enumerate(made)]


def entries(path: Path) -> list[dict[str, object]]:
    """All lines of a history, oldest first; none if it does not exist yet. FileFormatError if it is no history."""
    if not path.exists():
        return []
    try:
        return [msgspec.json.decode(line, type=dict[str, object]) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, msgspec.MsgspecError) as error:
        raise FileFormatError(f"{path}: {error}; give a file of earlier validations, or a new one, to --history") from None


def drift(before: Sequence[Mapping[str, object]], now: Mapping[str, object]) -> Drift:
    """What has moved between `now` and the newest earlier line that has the figure, largest first."""
    old: dict[str, float] = {}
    for line in before:
        old |= figures(line)
    new = figures(now)
    both = [name for name in new if name in old]
    moved = [Change(name, old[name], new[name]) for name in both if abs(new[name] - old[name]) > SAME * abs(old[name])]
    moved.sort(key=lambda change: -abs(change.now - change.before) / (abs(change.before) or 1.0))
    since = " ".join(str(before[-1].get(key, "")) for key in ("date", "revision")).strip() if before else ""
    return Drift(since, len(both) - len(moved), tuple(moved))


def append(path: Path, entry: msgspec.Struct) -> None:
    """Add one line. FileFormatError if the file cannot be written."""
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be written ({error}); give another file to --history") from None
